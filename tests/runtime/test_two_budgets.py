"""A device with memory of its own has a budget of its own: a plan keeps both, an engine holds what the plan says in
each memory, and an error names the one that is too small."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import moeflux
from moeflux import ArgumentError, BudgetError, DeviceError, _core
from moeflux.cli import main
from moeflux.conversion.synth import synth
from moeflux.models.presets import PRESETS
from moeflux.runtime import plan as planning
from moeflux.runtime.plan import plan
from support.apart import apart
from support.engine import tokens
from support.flat import changed

MIB = 1 << 20
SIZES = {"context": 512, "threads": 1, "readers": 2, "chunk": 32}
FEWEST = 16  # slots: twice the experts of a token


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two-budgets") / "a3b"
    shape = PRESETS["Qwen3.6-35B-A3B"].with_layers(4)
    synth(path, changed(shape, vocab_size=512, num_experts=24))
    return path


@pytest.fixture(autouse=True)
def own_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(planning._Planner, "process_parts", lambda self: {"process": 64 * MIB, "text": 0})
    with apart():
        yield
        monkeypatch.undo()  # of what a test has put in place of the device's, before the device goes


def test_the_parts_add_up_in_each_memory(store: Path) -> None:
    found = plan(store, memory="400MB", device_memory="200MB", **SIZES)
    assert found.host_bytes + found.device_bytes == found.total_bytes == sum(found.parts.values())
    assert all(0 <= size <= found.parts[name] for name, size in found.device_parts.items())
    assert found.floor_bytes <= found.host_bytes <= found.budget_bytes == 400_000_000
    assert found.device_floor_bytes <= found.device_bytes <= found.device_budget_bytes == 200_000_000
    assert found.unspent_bytes == 400_000_000 - found.host_bytes
    assert found.device_unspent_bytes == 200_000_000 - found.device_bytes < found.slot_bytes + 100_000
    tabled = found.slots * found.slot_bytes + 4 * 24 * 8  # where each expert lies
    assert tabled <= found.device_parts["expert slots"] == found.parts["expert slots"] < tabled + 4096
    assert found.device_parts["host slots"] == 0
    assert found.parts["host slots"] == found.host_slots * found.slot_bytes
    assert found.device_parts["tables"] == found.device_parts["read buffers"] == 0


def test_more_of_either_is_never_worse(store: Path) -> None:
    least = plan(store, memory="1TB", device_memory="1TB", **SIZES)
    assert (least.slots, least.host_slots) == (least.experts, 0), "all experts have device slots"
    before = 0
    for device in range(least.device_floor_bytes, least.device_floor_bytes + 260_000_000, 29_000_000):
        found = plan(store, memory="1TB", device_memory=device, **SIZES)
        assert found.device_bytes <= device and found.slots >= max(before, FEWEST)
        assert found.host_slots == (0 if found.slots == found.experts else found.experts)
        before = found.slots
    assert before == least.experts
    below = -1
    floor = plan(store, memory="1TB", device_memory=least.device_floor_bytes, **SIZES).floor_bytes
    for host in range(floor, floor + 260_000_000, 29_000_000):
        found = plan(store, memory=host, device_memory=least.device_floor_bytes, **SIZES)
        assert found.host_bytes <= host and found.slots == FEWEST and found.host_slots >= max(0, below)
        below = found.host_slots
    assert below == least.experts


def test_an_error_names_the_memory(store: Path) -> None:
    found = plan(store, memory="1TB", device_memory="1TB", **SIZES)
    there, here = found.device_floor_bytes, found.floor_bytes
    at_both = plan(store, memory=here, device_memory=there, **SIZES)
    assert (at_both.slots, at_both.host_slots) == (FEWEST, 0)
    assert (at_both.host_bytes, at_both.device_bytes) == (here, there)
    with pytest.raises(BudgetError, match=rf"^device_memory: expected at least {there} bytes .* expert slots") as error:
        plan(store, memory="1TB", device_memory=there - 1, **SIZES)
    assert "process" not in str(error.value)
    with pytest.raises(BudgetError, match=rf"^memory: expected at least {here} bytes .* process") as error:
        plan(store, memory=here - 1, device_memory="1TB", **SIZES)
    assert "expert slots" not in str(error.value)
    assert (error.value.needed, error.value.missing) == (here, 1)
    assert plan(store, memory=error.value.floor, device_memory="1TB", threads=1, readers=2).host_bytes > 0


@pytest.mark.parametrize(("host_slots", "look_ahead"), [(None, "on"), (None, "off"), (7, "on")])
def test_each_memory_holds_what_was_planned(store: Path, host_slots: int | None, look_ahead: str) -> None:
    least = plan(store, memory="1TB", device_memory="1TB", **SIZES)
    budgets = {"memory": least.floor_bytes + 40 * MIB, "device_memory": least.device_floor_bytes + 30 * MIB}
    options = {**SIZES, **budgets, "host_slots": host_slots, "look_ahead": look_ahead}
    with moeflux.load(store, **options) as model, moeflux.load(store, memory=None, **SIZES) as whole:
        engine, found = model._engine, model.plan
        assert found.slots < found.experts and found.host_slots == (host_slots or found.host_slots) > 0
        session = model.session()
        logits = session.prefill(tokens(60)).numpy().copy()
        for token in tokens(9, seed=4):
            logits += session.step(token).numpy()
        assert 0 < engine.held_by_device <= found.device_bytes
        assert engine.held - engine.held_by_device <= found.host_bytes - found.parts["process"]
        there = sum(size for name, size in found.device_parts.items() if name != "keys and values")
        rows = engine.memory.rows
        assert engine.held_by_device == there + rows
        beside = whole.session()
        expected = beside.prefill(tokens(60)).numpy().copy()
        for token in tokens(9, seed=4):
            expected += beside.step(token).numpy()
        assert np.array_equal(logits, expected)


def test_sessions_keep_both_limits(store: Path) -> None:
    least = plan(store, memory="1TB", device_memory="1TB", **SIZES)
    budgets = {"memory": "1TB", "device_memory": least.device_floor_bytes + 2 * MIB}
    with moeflux.load(store, **{**SIZES, **budgets}) as model:
        kept = [model.session()]
        with pytest.raises(BudgetError, match=r"of the device's memory, which is left of .* more `device_memory`"):
            kept.extend(model.session() for _ in range(100))
        assert model._engine.held_by_device <= model.plan.device_budget_bytes
    floor = plan(store, memory="1TB", device_memory=least.device_floor_bytes, **SIZES).floor_bytes
    with moeflux.load(store, memory=floor, device_memory="1TB", **{**SIZES, "expert_slots": FEWEST}) as model:
        kept = [model.session(max_context=256)]
        with pytest.raises(BudgetError, match=r"of the host's memory, which is left of .* more `memory`"):
            kept.extend(model.session(max_context=256) for _ in range(100))


def test_the_table_has_a_column_for_each(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [f"--{name}={value}" for name, value in SIZES.items()]
    assert main(["plan", str(store), "--memory", "400MB", "--device-memory", "200MB", *sizes]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\n {20} +host +device\n", text)
    assert re.search(r"\nbudget +400\.00 MB +200\.00 MB +asked for; of the device: asked for\n", text)
    assert re.search(r"\n  expert slots +- +\d+\.?\d* MB ", text) and re.search(
        r"\n  host slots +\d+\.?\d* MB +- ", text
    )
    assert "copied per token" in text
    assert main(["plan", str(store), "--device-memory", "1MB"]) != 0
    assert "device_memory: expected at least" in capsys.readouterr().err


def test_what_is_asked_for_is_taken(store: Path) -> None:
    found = plan(store, memory="1TB", device_memory="200MB", host_slots=5, **SIZES)
    assert found.host_slots == 5
    with pytest.raises(BudgetError, match=r"^memory: .* host slots"):
        plan(store, memory=found.floor_bytes, device_memory="200MB", host_slots=90, **SIZES)
    free = plan(store, memory=None, device_memory=None, **SIZES)
    assert (free.budget_bytes, free.device_budget_bytes, free.slots) == (None, None, free.experts)
    assert (free.session_limit, free.host_session_limit) == (0, 0)


def test_without_a_device_there_is_no_budget_of_one(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "has_own_memory", lambda *_: False)
    for name, value in {"device_memory": "1GB", "host_slots": 4}.items():
        with pytest.raises(ArgumentError, match=f"{name}: expected a device with memory of its own"):
            plan(store, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("cores", "readers"), [(2, 4), (7, 7), (64, 12)])
def test_threads_that_read_beside_a_device(
    store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int, readers: int
) -> None:
    """More than without one, as far as there are cores, unless somebody asks for another number."""
    monkeypatch.setenv("MOEFLUX_CACHE", str(tmp_path))  # where doctor has found nothing
    monkeypatch.setattr(planning, "_cores", lambda: cores)
    sizes = {name: size for name, size in SIZES.items() if name != "readers"}
    free = {"memory": "1TB", "device_memory": "1TB"}
    assert plan(store, **free, **sizes).readers == readers
    assert plan(store, **free, **SIZES).readers == 2
    monkeypatch.setattr(_core, "has_own_memory", lambda *_: False)
    assert plan(store, memory="1TB", **sizes).readers == 4


def test_a_plan_for_a_device_that_is_not_here(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> int:
        raise DeviceError("cuda: found none")

    monkeypatch.setattr(_core, "device_memory", nothing)
    with pytest.raises(DeviceError, match="found none; a plan for one that is not here needs device_memory"):
        plan(store, **SIZES)
    assert plan(store, device_memory="200MB", **SIZES).device_budget_bytes == 200_000_000
