"""The threads that read: everything arrives, errors wait for the rest, demand goes first, and nothing hangs."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moeflux import DeviceError, IoError, StateError, _core
from moeflux._core import FarPlace, FaultPlan, FileReader, ReadBatch, ReadPool

SIZE = 1000
COUNT = 64
HALF = 1 << 20  # of the room of a thread that reads
CONTENT = np.random.default_rng(6).bytes(SIZE * COUNT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "layer_00.bin"
    file.write_bytes(CONTENT)
    return file


def batch_of(reader: FileReader, *indices: int) -> ReadBatch:
    batch = ReadBatch()
    for index in indices:
        batch.add(reader, index * SIZE, SIZE)
    return batch


def piece(index: int) -> bytes:
    return CONTENT[index * SIZE : (index + 1) * SIZE]


def wait_for_a_call(plan: FaultPlan) -> None:
    while not plan.calls:
        time.sleep(0)


class Held:
    """A pool of one thread that stands still in a first read until it is let go."""

    def __init__(self, path: Path) -> None:
        self.plan = FaultPlan("hold", 1)
        self.pool = ReadPool(1)
        self.first = batch_of(FileReader(path, fault=self.plan), 0)
        self.first.submit(self.pool)
        wait_for_a_call(self.plan)

    def let_go(self) -> None:
        self.plan.release()


@pytest.fixture
def held(path: Path) -> Iterator[Held]:
    held = Held(path)
    yield held
    held.let_go()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_everything_arrives(path: Path, threads: int) -> None:
    pool, reader = ReadPool(threads), FileReader(path)
    batches = [batch_of(reader, *range(i, COUNT, 7)) for i in range(7)]
    for i, batch in enumerate(batches):
        batch.submit(pool, "demand" if i % 2 else "look_ahead")
    for i, batch in enumerate(batches):
        assert batch.wait()
        for place, index in enumerate(range(i, COUNT, 7)):
            assert batch.data(place) == piece(index)
    stats = pool.stats
    assert stats["demand_reads"] + stats["look_ahead_reads"] == COUNT
    assert stats["demand_bytes"] + stats["look_ahead_bytes"] == len(CONTENT)
    assert stats["busy_seconds"] > 0


def test_a_batch_is_used_again(path: Path) -> None:
    pool, reader, batch = ReadPool(2), FileReader(path), ReadBatch()
    assert batch.wait(), "of nothing"
    for i in range(20):
        batch.add(reader, i * SIZE, SIZE)
        batch.submit(pool)
        assert batch.wait()
        assert batch.data(i) == piece(i)


def test_a_submitted_batch_is_not_touched(held: Held, path: Path) -> None:
    with pytest.raises(StateError, match="submitted"):
        held.first.add(FileReader(path), 0, SIZE)
    with pytest.raises(StateError, match="submitted"):
        held.first.submit(held.pool)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_error_and_then_all_is_well(path: Path, threads: int) -> None:
    pool = ReadPool(threads)
    bad, good = FileReader(path, fault=FaultPlan("error", 1, lasting=True)), FileReader(path)
    batch = ReadBatch()
    batch.add(good, 0, SIZE)
    for index in range(1, 12):
        batch.add(bad, index * SIZE, SIZE)
    batch.submit(pool)
    with pytest.raises(IoError, match=rf"layer_00\.bin: reading {SIZE} bytes at byte {SIZE} failed"):
        batch.wait()
    again = batch_of(good, 3)
    again.submit(pool)
    assert again.wait()
    assert again.data(0) == piece(3)


def test_an_error_waits_for_the_rest(path: Path) -> None:
    """While one read of a batch is under way the batch is not done, though another has failed."""
    pool, plan = ReadPool(2), FaultPlan("hold", 1)
    failing = FaultPlan("error", 1)
    batch = ReadBatch()
    batch.add(FileReader(path, fault=plan), 0, SIZE)
    batch.add(FileReader(path, fault=failing), SIZE, SIZE)
    batch.submit(pool)
    wait_for_a_call(failing)
    other = batch_of(FileReader(path), 5)
    other.submit(pool)
    assert other.wait(), "the thread that met the error goes on"
    assert not batch.done
    plan.release()
    with pytest.raises(IoError, match=f"at byte {SIZE} failed"):
        batch.wait()


def who_was_first(first: ReadBatch, second: ReadBatch) -> str:
    """Both read through a plan that fails its first call."""
    outcomes = []
    for batch in (first, second):
        try:
            batch.wait()
            outcomes.append("read")
        except IoError:
            outcomes.append("failed")
    assert sorted(outcomes) == ["failed", "read"]
    return "first" if outcomes[0] == "failed" else "second"


@pytest.mark.parametrize(
    ("priorities", "promoted", "expected"),
    [
        (("look_ahead", "demand"), False, "second"),
        (("demand", "look_ahead"), False, "first"),
        (("demand", "demand"), False, "first"),
        (("look_ahead", "look_ahead"), False, "first"),
        (("look_ahead", "look_ahead"), True, "second"),
    ],
)
def test_demand_goes_first(held: Held, path: Path, priorities: tuple[str, str], promoted: bool, expected: str) -> None:
    reader = FileReader(path, fault=FaultPlan("error", 1))
    batches = [batch_of(reader, 1), batch_of(reader, 2)]
    for batch, priority in zip(batches, priorities, strict=True):
        batch.submit(held.pool, priority)
    if promoted:
        batches[1].promote()
    held.let_go()
    assert who_was_first(*batches) == expected


def test_what_has_not_begun_can_be_cancelled(held: Held, path: Path) -> None:
    reader = FileReader(path)
    queued = batch_of(reader, 1, 2, 3)
    queued.submit(held.pool, "look_ahead")
    assert not queued.done
    queued.cancel()
    assert queued.done
    assert not queued.wait()
    assert [queued.data(i) for i in range(3)] == [bytes(SIZE)] * 3
    held.first.cancel()  # too late
    assert not held.first.done
    held.let_go()
    assert held.first.wait()
    assert held.first.data(0) == piece(0)
    assert reader.counts == (0, 0)


def test_the_batch_goes_first(held: Held, path: Path) -> None:
    queued = batch_of(FileReader(path), 1)
    queued.submit(held.pool)
    del queued
    held.let_go()
    assert held.first.wait()


def test_the_pool_goes_first(path: Path) -> None:
    for _ in range(20):
        pool, reader = ReadPool(2), FileReader(path)
        demanded, guessed = batch_of(reader, *range(30)), batch_of(reader, *range(30, 60))
        demanded.submit(pool)
        guessed.submit(pool, "look_ahead")
        del pool
        gc.collect()
        assert demanded.done and guessed.done
        assert demanded.wait()
        assert [demanded.data(i) for i in range(30)] == [piece(i) for i in range(30)]
        if guessed.wait():
            assert guessed.data(29) == piece(59)


# ---- Bytes that are carried on --------------------------------------------------------------------------------------


class Carrying:
    """A pool of one thread whose bytes are carried to a place when a test says so."""

    def __init__(self, path: Path) -> None:
        self.reader = FileReader(path)
        self.place = FarPlace(1, 4 * HALF)
        self.pool = ReadPool(1, place=self.place)

    def read(self, offset: int, size: int, place: int) -> ReadBatch:
        batch = ReadBatch()
        batch.add_carried(self.reader, offset, size, place)
        batch.submit(self.pool)
        return batch

    def wait_for_copies(self, count: int) -> None:
        begun = time.monotonic()
        while self.place.begun < count:
            assert time.monotonic() - begun < 60, "the thread that reads waits for a copy that it need not wait for"
            time.sleep(0)


@pytest.fixture
def carrying(path: Path) -> Iterator[Carrying]:
    carrying = Carrying(path)
    yield carrying
    carrying.place.end_all()


@pytest.fixture
def large(tmp_path: Path) -> Path:
    file = tmp_path / "layer_01.bin"
    file.write_bytes(np.random.default_rng(7).bytes(4 * HALF))
    return file


def test_a_thread_reads_on_while_bytes_are_carried(carrying: Carrying) -> None:
    first, second = carrying.read(0, SIZE, 0), carrying.read(SIZE, SIZE, HALF)
    carrying.wait_for_copies(2)
    assert not first.done
    carrying.place.end(1)
    assert second.wait()
    assert carrying.place.data(HALF, SIZE) == piece(1)
    assert not first.done
    carrying.place.end(0)
    assert first.done
    assert first.wait()
    assert carrying.place.data(0, SIZE) == piece(0)


def test_nothing_is_read_over_bytes_that_are_carried(carrying: Carrying) -> None:
    """A third batch takes the half of the room that the first one's bytes leave. It must wait for them."""
    batches = [carrying.read(i * SIZE, SIZE, i * SIZE) for i in range(3)]
    carrying.wait_for_copies(2)
    for i, batch in enumerate(batches):
        carrying.wait_for_copies(i + 1)
        carrying.place.end(i)
        assert batch.wait()
    assert carrying.place.data(0, 3 * SIZE) == CONTENT[: 3 * SIZE]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_copy_that_fails_is_its_batchs_error(large: Path, failing: int) -> None:
    """Of three pieces, two are on their way when the last has been read. The next batch, which takes the same room, has
    no part in it."""
    carrying = Carrying(large)
    first = carrying.read(0, 3 * HALF, 0)
    copies = 2 if failing == 0 else 3  # the room of the first is read into again, and its failure is seen there
    for i in range(copies):
        carrying.wait_for_copies(i + 1)
        carrying.place.end(i, well=i != failing)
    with pytest.raises(DeviceError, match="the copy failed"):
        first.wait()
    second = carrying.read(HALF, HALF, 3 * HALF)
    carrying.wait_for_copies(copies + 1)
    carrying.place.end(copies)
    assert second.wait()
    assert carrying.place.data(3 * HALF, HALF) == large.read_bytes()[HALF : 2 * HALF]


def test_a_batch_goes_when_its_bytes_have_arrived(carrying: Carrying) -> None:
    batch = carrying.read(0, SIZE, 0)
    carrying.wait_for_copies(1)
    carrying.place.end(0)
    del batch
    assert carrying.place.data(0, SIZE) == piece(0)


FORKED = """
import os, sys
sys.path.insert(0, sys.argv[2])  # the module itself: importing moeflux may wait for a rebuild
from _core import FileReader, ReadBatch, ReadPool
from moeflux.errors import StateError
pool, reader = ReadPool(2), FileReader(sys.argv[1])
def batch():
    batch = ReadBatch()
    batch.add(reader, 0, 8)
    return batch
before = batch()
before.submit(pool)
child = os.fork()
if not child:
    status = 1
    try:
        batch().submit(pool)
    except StateError as error:
        status = 0 if "fork" in str(error) else 2
    del before, pool
    os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert before.wait()
after = batch()
after.submit(pool)
assert after.wait()
"""


def test_a_fork_has_no_reading_threads(path: Path) -> None:
    """It is told so, and can go away; the parent reads on."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(path), str(Path(_core.__file__).parent)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
