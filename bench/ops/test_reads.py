"""Compares the ways to read experts with a bare loop of pread, on one file: make bench-ops

An expert is 1.77 MB, as in Qwen3.6-35B-A3B at 4 bits. Every round reads another sixteen of them at random places.
Direct reads come from the disk. The file was just written, so buffered reads come from memory. In the groups that say
disk, the file is dropped from memory before every round.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeflux import _core
from moeflux.measure.bench import drop_cached

EXPERT, EXPERTS, COUNT = 1_769_472, 256, 16
ROUNDS = 10


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("reads") / "experts.bin"
    block = np.random.default_rng(0).bytes(EXPERT)
    with path.open("wb") as out:
        for _ in range(EXPERTS):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    yield path
    path.unlink()


@pytest.fixture
def places() -> Callable[[], list[int]]:
    rng = np.random.default_rng(1)
    return lambda: [int(expert) * EXPERT for expert in rng.choice(EXPERTS, COUNT, replace=False)]


def pread_loop(path: Path) -> Callable[[list[int]], None]:
    descriptor = os.open(path, os.O_RDONLY)
    room = bytearray(EXPERT)

    def read(offsets: list[int]) -> None:
        for offset in offsets:
            assert os.preadv(descriptor, [room], offset) == EXPERT

    return read


def pool(path: Path, mode: str, threads: int) -> Callable[[list[int]], None]:
    """As the engine reads: a batch for a pool of threads, into memory that starts at a block."""
    reader = _core.FileReader(path, mode)
    readers = _core.ReadPool(threads, 1 << 21 if mode == "direct" else 0)

    def read(offsets: list[int]) -> None:
        batch = _core.ReadBatch()
        for offset in offsets:
            batch.add(reader, offset, EXPERT)
        batch.submit(readers)
        assert batch.wait()

    return read


WAYS: dict[str, Callable[[Path], Callable[[list[int]], None]]] = {
    "bare pread": pread_loop,
    "buffered, 1 reader": lambda path: pool(path, "buffered", 1),
    "buffered, 4 readers": lambda path: pool(path, "buffered", 4),
    "direct, 1 reader": lambda path: pool(path, "direct", 1),
    "direct, 4 readers": lambda path: pool(path, "direct", 4),
}


@pytest.mark.parametrize("way", WAYS)
def test_from_the_disk(benchmark: Any, file: Path, places: Callable[[], list[int]], way: str) -> None:
    measured(benchmark, file, places, way, "16 experts from the disk", dropped=True)


@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith("direct")])
def test_from_the_page_cache(benchmark: Any, file: Path, places: Callable[[], list[int]], way: str) -> None:
    file.read_bytes()
    measured(benchmark, file, places, way, "16 experts from the page cache", dropped=False)


def measured(benchmark: Any, file: Path, places: Callable[[], list[int]], way: str, group: str, dropped: bool) -> None:
    benchmark.group = group
    if "direct" in way and not _core.supports_direct(file):
        pytest.skip("this file system has no direct reads")
    read = WAYS[way](file)

    def before() -> tuple[tuple[list[int]], dict[str, Any]]:
        if dropped:
            drop_cached([file])
        return (places(),), {}

    benchmark.pedantic(read, setup=before, rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["GB/s"] = COUNT * EXPERT / benchmark.stats.stats.median / 1e9
