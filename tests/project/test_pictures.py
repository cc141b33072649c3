"""The pictures of the documents say what the tables of docs/performance.md say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.pictures import texts_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import pictures
    finally:
        sys.path.pop(0)
    return pictures


@pytest.fixture(scope="module")
def text() -> str:
    return (ROOT / "docs" / "performance.md").read_text()


def test_the_bars_are_the_speeds_of_the_tables(pictures: ModuleType, text: str) -> None:
    speeds = pictures.speeds(text)
    assert len(speeds) == 3
    written = texts_of(ROOT / "docs" / "streaming.svg")
    assert {f" {speed:g}" for pair in speeds.values() for speed in pair} <= written
    changed = text.replace("| 29.4 | 6.4 |", "| 30.1 | 6.4 |")
    assert pictures.speeds(changed) != speeds


def test_the_points_are_where_the_text_says(pictures: ModuleType, text: str) -> None:
    """With two threads, experts get 79% of the bandwidth, long matrices 89 to 95% and those of 8 bits 62%; in a
    prefill, experts reach 9% of what AMX can multiply, and long matrices 19%."""
    points, limits = pictures.points(text), pictures.LIMITS
    read = {name: decode[1] / decode[0] / limits["read"] for name, (decode, _) in points.items()}
    multiplied = {name: prefill[1] / limits["multiplied"] for name, (_, prefill) in points.items()}
    long = ("2048 -> 12352", "4096 -> 2048", "2048 -> 9216")
    assert read["experts"] == pytest.approx(0.79, abs=0.01) and read["8 bits"] == pytest.approx(0.62, abs=0.01)
    assert all(0.88 < read[name] < 0.96 for name in long)
    assert multiplied["experts"] == pytest.approx(0.09, abs=0.005)
    assert all(multiplied[name] == pytest.approx(0.19, abs=0.006) for name in long)


def test_the_terminal_is_what_was_printed(pictures: ModuleType) -> None:
    words = " ".join(texts_of(ROOT / "docs" / "terminal.svg")).replace("\xa0", " ")
    assert all(command.split(" --")[0] in words for command in pictures.COMMANDS)
    assert "The capital of France is Paris." in words and "not every expert has a slot" in words
    assert "@font-face" not in (ROOT / "docs" / "terminal.svg").read_text()
