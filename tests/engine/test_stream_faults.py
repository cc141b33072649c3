"""A read of a short run goes wrong, one or another, in every way there is: the right logits, or an error that names the
file and a session that says what it is worth; never a standstill. And expert files that change under a model."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeflux import IoError, _core
from support.engine import FIRST, SECOND, Folder, evaluate, folders, load_faulty, survive, tokens
from support.mlx_folder import write_mlx_folder

SLOTS = 6
"""Of 16 experts a layer, 4 a token: nearly all are read again and again, and the look-ahead finds two to spare."""

SETTINGS: tuple[dict[str, Any], ...] = (
    {"readers": 1, "reads": "direct", "look_ahead": "on"},
    {"readers": 3, "reads": "buffered", "look_ahead": "on", "deferred": True},
    {"readers": 3, "reads": "direct", "look_ahead": "off", "ring_depth": 1},
    {"readers": 2, "reads": "buffered", "look_ahead": "off", "cache": "none", "apart": True, "threads": 2},
    {"readers": 2, "reads": "direct", "look_ahead": "on", "apart": True, "host_slots": 8},
)
"""In turn, from read to read."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("stream-faults"))


def within(seconds: float, what: str, call: Callable[[], bool]) -> bool:
    """What `call` returns or raises; a failure when it stands still."""
    outcome: list[bool | BaseException] = []

    def work() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        pytest.fail(f"{what}: nothing came within {seconds} seconds")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def sweep(store: Path, kind: str, first: int, step: int, expected: np.ndarray, **options: Any) -> tuple[int, int]:
    """How many reads went wrong, one a run, and how many of these made an error."""
    failed = 0
    for wrong, number in enumerate(itertools.count(first, step)):
        settings = SETTINGS[wrong % len(SETTINGS)]
        fault = _core.FaultPlan(kind, number)
        model = load_faulty(store, expert_slots=SLOTS, fault=fault, **settings | options)
        what = f"read {number}, {kind}, {settings}"
        failed += within(60, what, lambda model=model: survive(model, IoError, expected))  # type: ignore[misc]
        if fault.calls < number:
            return wrong, failed
    raise AssertionError


@pytest.mark.parametrize(
    ("name", "kind", "first"),
    [
        ("qwen3_5_moe", "error", 1),
        ("qwen3_5_moe", "end_of_file", 2),
        ("deepseek_v3", "error", 3),
        ("qwen4_exp_linear", "error", 1),
    ],
)
def test_every_third_read_that_fails(folder: Folder, name: str, kind: str, first: int) -> None:
    expected = evaluate(load_faulty(folder(name)).session())
    wrong, failed = sweep(folder(name), kind, first, 3, expected)
    assert wrong > 20
    assert wrong / 2 < failed  # the others were of guesses that nobody needed


@pytest.mark.parametrize(("kind", "first", "step"), [("interrupt", 1, 3), ("short_read", 2, 3), ("delay", 1, 7)])
def test_reads_that_are_only_odd(folder: Folder, kind: str, first: int, step: int) -> None:
    """Interrupted, short or late: the same bits, and nobody hears of it."""
    expected = evaluate(load_faulty(folder("qwen3_5_moe")).session())
    wrong, failed = sweep(folder("qwen3_5_moe"), kind, first, step, expected)
    assert wrong > 60 / step and failed == 0


def test_reads_that_bring_other_bytes(folder: Folder) -> None:
    """Verification finds wrong bytes. Without it, logits are wrong and nobody knows."""
    store = folder("qwen3_5_moe")
    expected = evaluate(load_faulty(store).session())
    wrong, failed = sweep(store, "wrong_bytes", 3, 3, expected, verify_reads=True)
    assert wrong > 20 and wrong / 2 < failed
    fault = _core.FaultPlan("wrong_bytes", 1)
    assert not np.array_equal(evaluate(load_faulty(store, fault=fault).session()), expected)


@pytest.mark.parametrize("kind", ("error", "end_of_file", "interrupt", "short_read"))
def test_reads_of_a_stock_folder(folder: Folder, tmp_path: Path, kind: str) -> None:
    """Nine reads an expert: one in seven goes wrong, so that every one of the nine does."""
    stock = write_mlx_folder(folder("qwen3_moe"), tmp_path / "mlx")
    expected = evaluate(load_faulty(folder("qwen3_moe")).session())
    wrong, failed = sweep(stock, kind, 1, 7 * 9 + 1, expected)
    assert wrong > 9
    assert failed > 0 if kind in ("error", "end_of_file") else failed == 0


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", ("error", "end_of_file", "wrong_bytes"))
def test_a_disk_that_stays_broken(folder: Folder, kind: str) -> None:
    """From the 30th read on nothing comes: every call is an error, and every call returns."""
    fault = _core.FaultPlan(kind, 30, lasting=True)
    model = load_faulty(folder("qwen3_5_moe"), expert_slots=SLOTS, readers=3, fault=fault, verify_reads=True)
    session = model.session(max_context=256)

    def fails() -> bool:
        for _ in range(3):
            with pytest.raises(IoError, match=r"layer_\d\d\.bin"):
                session.prefill(tokens(40))
            session.clear()
        return True

    assert within(60, kind, fails)


# ---- Files that change ------------------------------------------------------------------------------------------


def replace(path: Path) -> None:
    shutil.copy(path, path.with_name("new"))
    os.replace(path.with_name("new"), path)


def write_to(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 1)
        file.write(b"\xff")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda path: os.truncate(path, path.stat().st_size // 2),
        r"(expected \d+ bytes|changed while in use)",
    ),
    "grown": (lambda path: os.truncate(path, path.stat().st_size + 1), r"changed while in use: expected \d+ bytes"),
    "removed": (Path.unlink, "expected the file that was opened, found none"),
    "replaced": (replace, "changed while in use: .* found another of the same name"),
    "written to": (write_to, "changed while in use: expected no write since it was opened, found one"),
}


@pytest.mark.parametrize("deferred", (False, True))
@pytest.mark.parametrize("change", CHANGES)
def test_a_stock_folder_that_changes(folder: Folder, tmp_path: Path, change: str, deferred: bool) -> None:
    """The step that reads from it afterwards fails and names the file. (Of packed stores: test_engine_faults.)"""
    stock = write_mlx_folder(folder("qwen3_moe"), tmp_path / "mlx")
    model = load_faulty(stock, expert_slots=SLOTS, deferred=deferred, readers=2)
    session = model.session(max_context=64)
    session.prefill(FIRST)
    alter, message = CHANGES[change]
    for path in stock.glob("*.safetensors"):
        alter(path)
    for _ in range(2):
        with pytest.raises(IoError, match=rf"model-0000\d-of-00002\.safetensors: {message}"):
            session.prefill(SECOND)
        assert session.position == len(FIRST)
