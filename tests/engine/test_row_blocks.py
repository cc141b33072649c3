"""Keys, values and latents lie in blocks of 256 positions. A session takes them as it grows, gives them back, and
shares them with its forks. None of it changes a bit."""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import ArgumentError, BudgetError, DeviceError, StateError, _core
from moeflux.runtime.snapshot import Snapshot
from moeflux.stores.store import open_store
from support.engine import Folder, folders, load_faulty, steps, tokens
from support.metal import needs_device

NAMES = ("qwen3_5_moe", "qwen3_moe", "deepseek_v3")
BLOCK = 256
TEXT = tokens(700)
TAIL, OTHER = tokens(3, seed=11), tokens(3, seed=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("blocks"))


class Alone:
    """What sessions of their own yield, on the CPU. Each prompt is evaluated once."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.snapshots: dict[tuple[str, int], Snapshot] = {}

    def snapshot(self, name: str, count: int) -> Snapshot:
        """Behind so many tokens of TEXT."""
        if (name, count) not in self.snapshots:
            session = load_faulty(self.folder(name), backend="cpu", chunk=128).session(max_context=1024)
            session.prefill(TEXT[:count])
            self.snapshots[name, count] = session.snapshot()
        return self.snapshots[name, count]

    def steps(self, model: moeflux.Model, name: str, count: int, ids: list[int]) -> np.ndarray:
        """Of `ids` behind so many tokens of TEXT."""
        session = model.session(max_context=1024)
        session.restore(self.snapshot(name, count))
        return steps(session, ids)


@pytest.fixture(scope="module")
def alone(folder: Folder) -> Alone:
    return Alone(folder)


devices = pytest.mark.parametrize(
    ("backend", "apart"),
    (("cpu", False), ("cpu", True), pytest.param("metal", False, marks=needs_device)),
    indirect=["backend"],
    scope="module",
)
"""Where memory is taken by the block, and two where a few buffers have all blocks."""


def block_bytes(folder: Folder, name: str, kv_dtype: str = "f32") -> int:
    with open_store(folder(name)) as store:
        return _core.footprint(store.directory, max_context=1, kv_dtype=kv_dtype).rows


@pytest.mark.parametrize("apart", (False, True))
@pytest.mark.parametrize("kv_dtype", ("f32", "bf16", "q8"))
@pytest.mark.parametrize("name", NAMES)
def test_borders_of_blocks_change_no_bit(folder: Folder, name: str, kv_dtype: str, apart: bool) -> None:
    whole = load_faulty(folder(name), chunk=512, threads=2).session(kv_dtype=kv_dtype)
    expected = whole.prefill(TEXT[:530], logits="all")
    cut = load_faulty(folder(name), chunk=100, apart=apart).session(kv_dtype=kv_dtype)
    found = [cut.prefill(TEXT[:255], logits="all"), steps(cut, TEXT[255:258]), cut.prefill(TEXT[258:530], logits="all")]
    assert np.array_equal(np.concatenate(found), expected)
    again = cut.model.session(max_context=600, kv_dtype=kv_dtype)
    again.restore(whole.snapshot())
    assert np.array_equal(steps(again, TAIL), steps(whole, TAIL))
    for ours, theirs in zip(again.snapshot().tensors.values(), whole.snapshot().tensors.values(), strict=True):
        assert np.array_equal(ours, theirs)


def test_memory_is_taken_as_positions_are_used(folder: Folder, by_the_block: dict[str, Any]) -> None:
    model = load_faulty(folder("qwen3_moe"), chunk=128, **by_the_block)
    engine, bytes = model._engine, block_bytes(folder, "qwen3_moe")
    session = model.session()
    assert engine.memory.rows == 0
    for count in (0, 1, 255, 1, 300):
        session.prefill(TEXT[:count])
        assert engine.memory.rows == -(-session.position // BLOCK) * bytes
    assert session.position == 557
    session.prefill(TEXT[:300], lambda done, total: False)
    assert (session.position, engine.memory.rows) == (557 + 128, 3 * bytes)
    for kv_dtype in ("bf16", "q8"):
        narrow = model.session(kv_dtype=kv_dtype)
        narrow.prefill(TEXT[:300])
        assert engine.memory.rows == 3 * bytes + 2 * block_bytes(folder, "qwen3_moe", kv_dtype)
        narrow.close()
    narrow.close()
    for position, blocks in ((512, 2), (257, 2), (256, 1), (1, 1), (0, 0)):
        session.rewind(position)
        assert engine.memory.rows == blocks * bytes
    session.prefill(TEXT[:300])
    session.clear()
    assert engine.memory.rows == 0 and engine.held == engine.memory.total


@pytest.mark.parametrize("name", NAMES)
def test_a_session_that_finds_no_block_loses_nothing(folder: Folder, by_the_block: dict[str, Any], name: str) -> None:
    model = load_faulty(folder(name), **by_the_block)
    whole = model.session(max_context=600)
    whole.prefill(TEXT[:200])
    with open_store(folder(name)) as store:
        parts = _core.footprint(store.directory, backend="cpu", max_context=600)
    limit = 3 * parts.sessions - 2 * parts.rows  # of three sessions, with three blocks for all
    model = load_faulty(folder(name), session_bytes=limit, chunk=100, **by_the_block)
    first, second, third = (model.session(max_context=600) for _ in range(3))
    first.prefill(TEXT[:200])
    second.prefill(TEXT[:300])
    kept = first._logits().numpy().tobytes(), first.snapshot().tensors
    for evaluate in (
        lambda: first.prefill(TEXT[200:300]),
        lambda: third.step(1),
        lambda: third.restore(first.snapshot()),
    ):
        with pytest.raises(BudgetError, match="close a session, ask for less") as error:
            evaluate()
        assert error.value.missing == parts.rows // 3
        assert (first.position, third.position) == (200, 0) and model._engine.memory.sessions == limit
        assert first._logits().numpy().tobytes() == kept[0]
    assert all(np.array_equal(kept[1][key], tensor) for key, tensor in first.snapshot().tensors.items())
    second.close()
    for session in (first, whole):
        session.prefill(TEXT[200:300])
    assert np.array_equal(steps(first, TAIL), steps(whole, TAIL))


def test_a_session_that_could_never_be_filled_is_refused(folder: Folder) -> None:
    with open_store(folder("qwen3_moe")) as store:
        parts = _core.footprint(store.directory, max_context=512)
        engine = _core.Engine(store.directory, session_bytes=parts.sessions)
    with pytest.raises(BudgetError, match="session of 513 tokens"):
        engine.session(513, "f32")
    assert (engine.sessions, engine.memory.sessions) == (0, 0)
    assert engine.session(512, "f32").position == 0


@devices
@pytest.mark.parametrize("count", (1, 2, 5))
def test_sessions_that_were_planned_can_be_filled(
    folder: Folder, alone: Alone, backend: str, apart: bool, count: int
) -> None:
    """Block by block, one after the other or by turns, however many buffers the blocks may lie in."""
    with open_store(folder("qwen3_5_moe")) as store:
        faults = _core.testing.Faults(apart=apart)
        parts = _core.testing.footprint(faults, store.directory, max_context=600)
    model = load_faulty(folder("qwen3_5_moe"), session_bytes=count * parts.sessions, apart=apart)
    filled = [alone.snapshot("qwen3_5_moe", position) for position in (200, 400, 600)]
    for by_turns in (False, True):
        sessions: list[moeflux.Session] = []
        calls = [(session, block) for session in range(count) for block in range(3)]
        for at, block in sorted(calls, key=lambda call: call[::-1]) if by_turns else calls:
            if at == len(sessions):
                sessions.append(model.session(max_context=600))
            sessions[at].restore(filled[block])
        assert [session.position for session in sessions] == [600] * count
        assert model._engine.memory.sessions <= count * parts.sessions
        for session in sessions:
            session.close()
        assert model._engine.memory.sessions == 0


def test_a_restore_that_fails_gives_back_what_it_took(
    folder: Folder, alone: Alone, by_the_block: dict[str, Any]
) -> None:
    model = load_faulty(folder("qwen3_moe"), **by_the_block)
    snapshot = alone.snapshot("qwen3_moe", 300)
    tensors = [tensor for _, tensor in sorted(snapshot.tensors.items())]
    for before in (3, 520):
        session = model.session(max_context=1024)
        session.restore(alone.snapshot("qwen3_moe", before))
        with pytest.raises(ArgumentError, match="expected a tensor for layer"):
            session._core.restore(300, np.asarray(snapshot.tokens, np.int32), tensors[:1])
        assert model._engine.memory.rows == 0
        with pytest.raises(StateError, match="a restore failed half-way; clear it or restore a state"):
            session.step(1)
        session.restore(snapshot)
        assert np.array_equal(steps(session, TAIL), alone.steps(model, "qwen3_moe", 300, TAIL))
        session.close()


# ---- Forks ------------------------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("position", (255, 256, 300))
@pytest.mark.parametrize("name", NAMES)
def test_a_fork_is_a_session_of_its_own(
    folder: Folder, alone: Alone, backend: str, apart: bool, name: str, position: int
) -> None:
    model = load_faulty(folder(name), apart=apart)
    engine = model._engine
    expected = [alone.steps(model, name, position, ids) for ids in (TAIL, OTHER)]
    session = model.session(max_context=1024)
    session.restore(alone.snapshot(name, position))
    fork = session.fork()
    assert (fork.position, fork.tokens, fork.checkpoints, fork.max_context) == (position, TEXT[:position], [], 1024)
    # Turn by turn, in blocks that each has for itself.
    found = [[forked.step(ids[i]).numpy() for forked, ids in ((fork, OTHER), (session, TAIL))] for i in range(3)]
    assert np.array_equal(np.stack([each[1] for each in found]), expected[0])
    assert np.array_equal(np.stack([each[0] for each in found]), expected[1])
    again = fork.fork()
    fork.close()
    session.close()
    assert again.tokens == TEXT[:position] + OTHER
    one, two = again.fork(), again.fork()
    again.close()
    assert np.array_equal(steps(one, TAIL), steps(two, TAIL))
    del session, fork, again, one, two
    gc.collect()
    assert (engine.sessions, engine.memory.sessions, engine.held) == (0, 0, engine.memory.engine)


def test_a_fork_takes_memory_for_the_last_block(folder: Folder, alone: Alone, by_the_block: dict[str, Any]) -> None:
    model = load_faulty(folder("qwen3_moe"), **by_the_block)
    block = block_bytes(folder, "qwen3_moe")
    session = model.session(max_context=1024)
    for position, more in ((3, 1), (255, 1), (256, 0), (300, 1)):
        session.restore(alone.snapshot("qwen3_moe", position))
        with session.fork() as fork:
            assert model._engine.memory.rows == (-(-position // BLOCK) + more) * block
            fork.rewind(2)
            fork.step(1)  # in a copy of the first block, if that is shared
            assert model._engine.memory.rows == (-(-position // BLOCK) + 1) * block


@devices
@pytest.mark.parametrize("name", ("qwen3_moe", "deepseek_v3"))
def test_a_rewind_into_what_is_shared(folder: Folder, alone: Alone, backend: str, apart: bool, name: str) -> None:
    """What is written there is written to a block of its own."""
    model = load_faulty(folder(name), apart=apart)
    expected = [alone.steps(model, name, position, ids) for position, ids in ((520, TAIL), (300, OTHER), (256, TAIL))]
    session = model.session(max_context=1024)
    session.restore(alone.snapshot(name, 520))
    forks = [session.fork(), session.fork()]
    for fork, position, ids, wanted in zip(forks, (300, 256), (OTHER, TAIL), expected[1:], strict=True):
        assert fork.rewind(position) == position
        assert np.array_equal(steps(fork, ids), wanted)
    assert np.array_equal(steps(session, TAIL), expected[0])
    assert np.array_equal(np.asarray(session.snapshot().tokens), TEXT[:520] + TAIL)
    for fork in forks:
        fork.restore(alone.snapshot(name, 300))
        assert np.array_equal(steps(fork, OTHER), expected[1])
    session.rewind(520)
    assert np.array_equal(steps(session, TAIL), expected[0])


@devices
def test_a_fork_has_the_logits(folder: Folder, backend: str, apart: bool) -> None:
    model = load_faulty(folder("qwen3_5_moe"), apart=apart)
    session = model.session(max_context=64)
    empty = session.fork()
    assert empty.position == 0
    with pytest.raises(StateError, match="expected a token evaluated"):
        empty._logits().argmax()
    logits = session.prefill(TEXT[:6]).numpy()
    fork = session.fork()
    session.step(1)
    assert np.array_equal(fork._logits().numpy(), logits) and fork._logits().argmax() == int(logits.argmax())
    assert np.array_equal(fork._logits().top_k(3)[0], np.argsort(-logits, kind="stable")[:3])
    assert fork.rewind(2, exact=False) == 0
    assert np.array_equal(fork.prefill(TEXT[:6]).numpy(), logits)


@devices
@pytest.mark.parametrize("name", NAMES)
def test_a_fork_of_an_earlier_position(folder: Folder, alone: Alone, backend: str, apart: bool, name: str) -> None:
    """At every checkpoint it is a session that was evaluated no further, and the session does not notice."""
    model = load_faulty(folder(name), apart=apart)

    def evaluated(position: int) -> moeflux.Session:
        session = model.session(max_context=1024)
        session.restore(alone.snapshot(name, min(position, 254)))
        session.prefill(TEXT[session.position : position])
        return session

    session = evaluated(254)
    session.checkpoint()
    for count in (1, 1, 1, 5):  # 255, 256, 257, 262
        session.prefill(TEXT[session.position : session.position + count])
        session.checkpoint()
    kept = session.prefill(TEXT[262:263]).numpy()
    places = [0, *session.checkpoints]
    assert places == [0, 255, 256, 257, 262], "the oldest has gone"
    anywhere = [] if name == "qwen3_5_moe" else [1, 254, 260]
    for position in (0, 256, 263) if backend == "metal" else (*places, *anywhere, 263):
        expected = steps(evaluated(position), TAIL)
        with session.fork(position) as fork:
            assert (fork.position, fork.tokens, fork.checkpoints) == (position, TEXT[:position], [])
            if position < 263:
                with pytest.raises(StateError, match="expected a token evaluated"):
                    fork._logits().argmax()
            else:
                assert np.array_equal(fork._logits().numpy(), kept)
            assert np.array_equal(steps(fork, TAIL), expected)
        if position in places:
            with session.fork(position) as fork, fork.fork(position) as again:
                assert np.array_equal(steps(again, TAIL), expected)
    assert (session.position, session.checkpoints) == (263, places[1:])
    assert np.array_equal(session._logits().numpy(), kept)
    assert np.array_equal(steps(session, OTHER), steps(evaluated(263), OTHER))


def test_forks_of_positions_that_cannot_be(folder: Folder) -> None:
    hybrid = load_faulty(folder("qwen3_5_moe")).session(max_context=64)
    hybrid.prefill(TEXT[:3])
    hybrid.checkpoint()
    hybrid.prefill(TEXT[3:6])
    for position, newest in ((2, 0), (5, 3)):
        message = rf"^fork: expected a checkpoint at position {position} .* the newest before it at {newest}$"
        with pytest.raises(StateError, match=message):
            hybrid.fork(position)
    for session in (hybrid, load_faulty(folder("qwen3_moe")).session(max_context=64)):
        for position in (-1, session.position + 1, 1 << 62):
            message = f"^fork: expected a position 0 to {session.position}, found {position}$"
            with pytest.raises(ArgumentError, match=message):
                session.fork(position)
        with pytest.raises(ArgumentError, match="position: expected a whole number of 64 bits"):
            session.fork(1 << 63)
        assert session.model._engine.sessions == 1


def test_a_checkpoint_that_forks_begin_at_is_used(folder: Folder) -> None:
    session = load_faulty(folder("qwen3_5_moe")).session(max_context=64)
    for token in TEXT[:4]:
        session.step(token)
        session.checkpoint()
    session.fork(1)
    session.step(TEXT[4])
    session.checkpoint()
    assert session.checkpoints == [1, 3, 4, 5]


def test_forks_that_cannot_be(folder: Folder) -> None:
    model = load_faulty(folder("qwen3_5_moe"), expert_slots=6, fail_at_op=400)
    session = model.session(max_context=64)
    with pytest.raises(DeviceError):
        while True:
            session.step(1)
    with pytest.raises(StateError, match=r"an evaluation failed half-way.*; clear it or restore a state"):
        session.fork()
    session.clear()
    assert session.fork().position == 0
    fork = session.fork()
    session.close()
    with pytest.raises(StateError, match="expected one that is open, found it closed"):
        session.fork()
    model.close()
    assert fork.closed


def test_a_fork_that_finds_no_memory(folder: Folder, by_the_block: dict[str, Any]) -> None:
    with open_store(folder("qwen3_5_moe")) as store:
        parts = _core.footprint(store.directory, backend="cpu", max_context=600)
    model = load_faulty(folder("qwen3_5_moe"), session_bytes=2 * parts.sessions - parts.rows, chunk=128, **by_the_block)
    session = model.session(max_context=600)
    session.prefill(TEXT[:520])
    held = model._engine.held
    with pytest.raises(BudgetError, match=r"^fork: "):
        session.fork()
    assert (model._engine.held, model._engine.sessions) == (held, 1)
    session.clear()
    session.prefill(TEXT[:512])
    fork = session.fork()
    step = session.step(1).numpy()
    with pytest.raises(BudgetError, match="rows of a session"):
        fork.step(1)
    session.close()
    assert np.array_equal(fork.step(1).numpy(), step)


def first_copy_behind(prepare: Callable[[int], moeflux.Session]) -> int:
    """The number of the first copy after what `prepare` does, which is given the number of one that fails."""

    def is_behind(number: int) -> bool:
        try:
            prepare(number)
        except DeviceError as error:
            assert f"copy {number} was told to fail" in str(error)
            return False
        return True

    return bisect.bisect_left(range(1 << 12), True, key=is_behind)


COPYING: dict[str, Any] = {"backend": "cpu", "apart": True, "expert_slots": 63, "look_ahead": "off"}
"""As in test_apart.py, one slot is missing."""


def test_a_fork_whose_copy_fails(folder: Folder) -> None:
    """The session is as it was, and nothing is left of the fork."""
    alone = load_faulty(folder("qwen3_5_moe"), backend="cpu").session(max_context=64)
    alone.prefill(TEXT[:6])
    expected = steps(alone, TAIL)

    def prepared(number: int) -> moeflux.Session:
        session = load_faulty(folder("qwen3_5_moe"), fail_at_copy=number, **COPYING).session(max_context=64)
        session.prefill(TEXT[:6])
        return session

    first = first_copy_behind(prepared)
    for number in range(first, first + 3):  # of the recurrent state, of rows, of logits
        session = prepared(number)
        with pytest.raises(DeviceError, match=f"copy {number} was told to fail"):
            session.fork()
        assert session.model._engine.sessions == 1
        assert np.array_equal(steps(session, TAIL), expected)


def test_a_shared_block_whose_copy_fails(folder: Folder, alone: Alone) -> None:
    """Both sessions are as they were, and go on."""

    def prepared(number: int) -> moeflux.Session:
        session = load_faulty(folder("qwen3_moe"), fail_at_copy=number, **COPYING).session(max_context=1024)
        session.prefill(TEXT[:BLOCK])
        fork = session.fork()
        fork.rewind(100)
        forks.append(fork)
        return session

    forks: list[moeflux.Session] = []
    number = first_copy_behind(prepared)
    session, fork = prepared(number), forks[-1]
    with pytest.raises(DeviceError, match=f"copy {number} was told to fail"):
        fork.step(TAIL[0])
    assert (session.position, fork.position, fork.tokens) == (BLOCK, 100, TEXT[:100])
    assert np.array_equal(steps(fork, TAIL), alone.steps(fork.model, "qwen3_moe", 100, TAIL))
    assert np.array_equal(steps(session, OTHER), alone.steps(fork.model, "qwen3_moe", BLOCK, OTHER))
