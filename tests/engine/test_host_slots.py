"""Slots in the host's memory, below those of a device with memory of its own: no number of either changes a bit, what
is counted is what happened, and whatever fails is an error that leaves everything as it was."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import ArgumentError, DeviceError, _core
from moeflux.stores.store import open_store
from support.engine import Folder, evaluate, folders, load_faulty, steps, survive, tokens

NAME = "qwen3_moe"
ALL = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    yield folders(tmp_path_factory.mktemp("host-slots"))


def load(folder: Folder, slots: int, host_slots: int, name: str = NAME, **options: Any) -> moeflux.Model:
    return load_faulty(folder(name), apart=True, expert_slots=slots, host_slots=host_slots, **options)


def use(model: moeflux.Model) -> list[np.ndarray]:
    """A prompt, steps, a prompt behind them, and two sessions together."""
    first, second = model.session(max_context=64), model.session(max_context=64)
    found = [first.prefill(tokens(20), logits="all"), steps(first, tokens(6, seed=3))]
    second.prefill(tokens(9, seed=2))
    model.evaluate([(first, tokens(3, seed=5)), (second, tokens(1, seed=6))])
    return [*found, steps(first, tokens(3, seed=8)), steps(second, tokens(2, seed=9))]


@pytest.mark.parametrize("look_ahead", ["on", "off"])
@pytest.mark.parametrize("policy", ["lru", "lfu", "none"])
def test_neither_number_changes_a_bit(folder: Folder, policy: str, look_ahead: str) -> None:
    expected = use(load_faulty(folder(NAME)))
    readers = itertools.cycle((1, 3))
    for slots, host_slots in itertools.product((4, 9, 30), (1, 4, 17, ALL)):
        options = {"cache": policy, "look_ahead": look_ahead, "readers": next(readers)}
        model = load(folder, slots, host_slots, **options)
        for found, wanted in zip(use(model), expected, strict=True):
            assert np.array_equal(found, wanted), (slots, host_slots)
        engine = model._engine
        assert engine.held == engine.memory.total


def test_what_is_counted(folder: Folder) -> None:
    """Once all experts are in host slots, nothing is read, and whatever is not in a device slot comes from there."""
    model = load(folder, 9, ALL, look_ahead="off")
    with open_store(folder(NAME)) as store:
        size = store.directory.experts.bytes
        experts = _core.footprint(store.directory).expert_slots // _core.slot_bytes(store.directory)
    session = model.session(max_context=512)
    session.prefill(tokens(200))
    first = session.stats
    assert first.bytes_copied == first.expert_misses * size
    assert first.bytes_read == (first.expert_misses - first.host_hits) * size
    while session.stats.bytes_read:
        session.prefill(tokens(60, seed=session.position))
    session.prefill(tokens(20, seed=4))
    later = session.stats
    assert later.expert_misses > 0 and later.bytes_read == 0
    assert later.host_hits == later.expert_misses and later.bytes_copied == later.expert_misses * size
    assert session.total_stats.bytes_read <= experts * size


def test_without_host_slots_nothing_is_counted_of_them(folder: Folder) -> None:
    session = load(folder, 9, 0).session()
    session.prefill(tokens(20))
    stats = session.stats
    assert stats.expert_misses > 0 and (stats.host_hits, stats.bytes_copied) == (0, 0)


def test_less_is_read_with_them(folder: Folder) -> None:
    """An expert that is in a device slot gives up its host slot first. So the two memories have different experts: as
    many host slots as there are device slots would save next to nothing if both had the last experts asked for."""
    read = []
    for host_slots in (0, 16, 40):
        session = load(folder, 16, host_slots, look_ahead="off").session(max_context=512)
        steps(session, tokens(60))
        before = session.total_stats.bytes_read
        steps(session, tokens(120, seed=3))
        read.append(session.total_stats.bytes_read - before)
    assert read[1] < 0.9 * read[0] and read[2] < 0.8 * read[1]


def test_the_look_ahead_brings_what_is_below(folder: Folder) -> None:
    """To a device slot what is in a host slot, and to a host slot what is in none."""
    model = load(folder, 40, ALL, look_ahead="on")
    session = model.session(max_context=512)
    session.prefill(tokens(16))
    assert session.stats.look_ahead_reads > 0
    while session.stats.bytes_read:
        session.prefill(tokens(60, seed=session.position))
    before = session.total_stats
    steps(session, tokens(40, seed=5))
    after = session.total_stats
    assert after.bytes_read == before.bytes_read
    assert after.look_ahead_used > before.look_ahead_used
    copies = (after.bytes_copied - before.bytes_copied) / _expert_bytes(folder)
    asked = after.expert_misses - before.expert_misses + after.look_ahead_reads - before.look_ahead_reads
    assert copies == asked


def _expert_bytes(folder: Folder) -> int:
    with open_store(folder(NAME)) as store:
        return store.directory.experts.bytes


@pytest.mark.parametrize("look_ahead", ["on", "off"])
def test_a_copy_that_fails(folder: Folder, look_ahead: str) -> None:
    """One in three of them. Whoever asked for the expert hears of it. What was guessed is asked for again."""
    options = {"look_ahead": look_ahead, "readers": 1}
    expected = evaluate(load(folder, 9, ALL, **options).session(max_context=32))
    first = None
    failures = 0
    for number in itertools.count(0, 3):
        try:
            model = load(folder, 9, ALL, fail_at_copy=number, **options)
        except DeviceError:
            continue  # of the weights
        first = number if first is None else first
        failures += survive(model, DeviceError, expected)
        if number - first == 60:
            break
    assert failures > 7


def test_a_store_that_changed_leaves_no_expert_in_either_memory(folder: Folder, tmp_path: Path) -> None:
    path = tmp_path / "store"
    shutil.copytree(folder(NAME), path)
    model = load_faulty(path, apart=True, expert_slots=9, host_slots=20, look_ahead="off")
    session = model.session(max_context=64)
    session.prefill(tokens(8))
    for file in path.rglob("*"):
        os.utime(file, ns=(1, 1))
    with pytest.raises(moeflux.IoError, match="changed"):
        for seed in range(2, 40):
            session.prefill(tokens(8, seed=seed))


def test_a_device_that_shares_memory_has_none(folder: Folder) -> None:
    with pytest.raises(ArgumentError, match="host_slots: expected none on cpu"):
        load_faulty(folder(NAME), backend="cpu", expert_slots=9, host_slots=4)
    with open_store(folder(NAME)) as store, pytest.raises(ArgumentError, match="host_slots: expected none on cpu"):
        _core.footprint(store.directory, backend="cpu", expert_slots=9, host_slots=4)


def test_where_every_expert_has_a_device_slot_there_are_none(folder: Folder) -> None:
    engine = load(folder, ALL, 8)._engine
    assert engine.memory.host_slots == 0 and "host slots" not in engine.describe()
    assert "8 host slots" in load(folder, 9, 8)._engine.describe()
