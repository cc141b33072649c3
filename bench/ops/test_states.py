"""Compares bringing a state back from the disk with a bare read of the same file: make bench-ops

The state is that of 32768 tokens in eight layers of Qwen3.6-35B-A3B, 280 MB. Every round drops its file from memory
first. A bare read is one thread with a megabyte of memory, or four, which read a quarter of the file each.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import Snapshot
from moeflux.conversion.synth import synth
from moeflux.measure.bench import drop_cached
from moeflux.models.layers import RoutedExperts
from moeflux.models.presets import preset
from moeflux.runtime.state_file import load_state, save_state

TOKENS = 32768
PART = 1 << 20
ROUNDS = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> moeflux.Model:
    """The state depends on the layers alone, so there are few experts, and they are small."""
    shape = dataclasses.replace(preset("a3b").with_layers(8), vocab_size=2048)
    folder = tmp_path_factory.mktemp("states") / "a3b"
    synth(folder, shape.with_parts(RoutedExperts, count=32, intermediate=128))
    return moeflux.load(folder, memory=None, context=TOKENS)


@pytest.fixture(scope="module")
def file(model: moeflux.Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("states") / "state"
    rng = np.random.default_rng(0)
    pieces = {key: rng.random(shape, np.float32) for key, shape in model.variant.state(TOKENS).items()}
    with model.session() as session:
        session.restore(Snapshot(model.variant, TOKENS, pieces, tuple(range(TOKENS)), model.fingerprint))
        save_state(session._core, model.variant, model.fingerprint, path)
    yield path
    path.unlink()


def bare(path: Path, threads: int) -> None:
    """Reads a file in parts, and keeps none of them."""
    share = -(-path.stat().st_size // threads)

    def read(place: int) -> None:
        room = memoryview(bytearray(PART))
        with path.open("rb", buffering=0) as data:
            data.seek(place * share)
            left = share
            while left > 0 and (count := data.readinto(room[:left])):
                left -= count

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))


@pytest.mark.parametrize("way", ["a bare read, 1 thread", "a bare read, 4 threads", "the state"])
def test_a_state_from_the_disk(benchmark: Any, model: moeflux.Model, file: Path, way: str) -> None:
    benchmark.group = "a state from the disk"
    tokens = np.arange(TOKENS, dtype=np.int32)
    with model.session() as session:
        session._core.make_room(TOKENS)
        ways: dict[str, Callable[[], None]] = {
            "a bare read, 1 thread": lambda: bare(file, 1),
            "a bare read, 4 threads": lambda: bare(file, 4),
            "the state": lambda: load_state(session._core, model.variant, model.fingerprint, file, tokens),
        }

        def before() -> None:
            drop_cached([file])
            if session.position:
                session.clear()
            session._core.make_room(TOKENS)

        benchmark.pedantic(ways[way], setup=before, rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["GB/s"] = os.path.getsize(file) / benchmark.stats.stats.median / 1e9
