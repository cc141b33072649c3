"""track.py of bench/gate: what it calls worse, what it writes down; that both are what the numbers say. Nothing is
measured."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.pictures import texts_of

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def track() -> ModuleType:
    if not BENCH.is_dir():
        pytest.skip("the sources are not here")
    sys.path[:0] = [str(BENCH / "gate"), str(BENCH / "peers")]
    import track

    return track


@pytest.fixture
def numbers(track: ModuleType) -> list:
    return [
        track.Number("everywhere", "calls", 0, "count"),
        track.Number("GCC 12, amx", "a step", 1000, "instructions"),
        track.Number("a processor", "share", 0.8, "ratio"),
        track.Number("a processor", "speed", 20, "time"),
    ]


def with_value(numbers: list, name: str, value: float) -> list:
    return [dataclasses.replace(each, value=value) if each.name == name else each for each in numbers]


def test_what_is_found_is_as_expected(track: ModuleType, numbers: list) -> None:
    assert track.compare(numbers, track.updated(numbers, {})) == []


@pytest.mark.parametrize(
    ("name", "good", "bad", "words"),
    [
        ("calls", 0, 1, "everywhere: calls: expected exactly 0, found 1"),
        ("a step", 1019, 1021, "GCC 12, amx: a step: expected at most 1.02 x 1000, +2.1%, found 1021"),
        ("share", 0.57, 0.55, "a processor: share: expected at least 0.7 x 0.80, found 0.550"),
        ("speed", 1, None, ""),
    ],
)
def test_what_is_worse(track: ModuleType, numbers: list, name: str, good: float, bad: float | None, words: str) -> None:
    expected = track.updated(numbers, {})
    assert track.compare(with_value(numbers, name, good), expected) == []
    if bad is not None:
        assert track.compare(with_value(numbers, name, bad), expected) == [words]


def test_what_was_left_out_is_a_fault_where_it_gates(track: ModuleType, numbers: list) -> None:
    more = [*numbers, track.Number("everywhere", "allocations", 0, "count")]
    assert track.compare(numbers, track.updated(more, {})) == ["everywhere: allocations: was not measured"]


def test_nothing_is_expected_of_another_machine(track: ModuleType, numbers: list) -> None:
    """And an update leaves what this machine did not measure."""
    other = {"GCC 13, avx2": {"a step": 1.0}}
    assert track.compare(numbers, other) == []
    assert track.updated(numbers, other)["GCC 13, avx2"] == {"a step": 1.0}


@pytest.mark.parametrize("kind", ["count", "instructions", "ratio"])
def test_a_kind_of_which_nothing_was_compared_is_a_fault(track: ModuleType, numbers: list, kind: str) -> None:
    """Whether nothing is expected of this machine or nothing could be measured."""
    kinds = ("count", "instructions", "ratio")
    expected = track.updated(numbers, {})
    assert track.not_compared(numbers, expected, kinds) == []
    group = next(number.group for number in numbers if number.kind == kind)
    [fault] = track.not_compared(numbers, {name: of for name, of in expected.items() if name != group}, kinds)
    assert fault.startswith(f"{kind}: nothing was compared: nothing is expected of {group}; ")
    [fault] = track.not_compared([number for number in numbers if number.kind != kind], expected, kinds)
    assert fault.startswith(f"{kind}: nothing was compared: it cannot be measured here; ")
    assert track.not_compared(numbers, {}, set(kinds) - {kind})  # what is impossible excuses itself alone


def test_a_run_that_compares_nothing_fails(
    track: ModuleType,
    numbers: list,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And --impossible names what may be missing."""
    monkeypatch.setattr(track, "measure", lambda bench, only: numbers)
    monkeypatch.setattr(track, "EXPECTED", tmp_path / "expected.json")
    track.EXPECTED.write_text(json.dumps(track.updated([each for each in numbers if each.kind == "count"], {})))
    words = ["--harness", "none", "--impossible", "instructions"]
    assert track.main(words) == 1
    assert "worse: ratio: nothing was compared" in capsys.readouterr().err
    assert track.main([*words, "--impossible", "ratio"]) == 0
    assert track.main(["--harness", "none", "--only", "counts"]) == 0


def test_the_workflow_compares_what_is_expected(track: ModuleType) -> None:
    """Of its compiler, instructions op by op."""
    workflow = (BENCH.parent / ".github" / "workflows" / "track.yml").read_text()
    [version] = re.findall(r"CXX: g\+\+-(\d+)", workflow)
    expected = json.loads(track.EXPECTED.read_text())
    assert f"GCC {version}, avx2" in expected
    assert "--impossible ratio" in workflow and workflow.count("--impossible") == 1


def test_the_committed_numbers_gate(track: ModuleType) -> None:
    expected = json.loads(track.EXPECTED.read_text())
    everywhere = expected.pop("everywhere")
    for ending in ("system calls a token of decode", "allocations a step"):
        assert [value for name, value in everywhere.items() if name.endswith(ending)] == [0] * (
            2 if "calls" in ending else 4
        )
    [by_callgrind] = [names for group, names in expected.items() if group.endswith("avx2")]
    for profile in track.PROFILES:
        if profile.isa == "avx2":
            ops = [
                name for name in by_callgrind if name.startswith(profile.model + ":") and name.endswith(profile.what)
            ]
            assert len(ops) > 4


def test_what_a_planted_loss_must_show_in(track: ModuleType) -> None:
    """Every prefill and step as a whole, and attention behind a long context; no choice, which multiplies nothing."""
    import trip

    names = trip.slower_numbers(json.loads(track.EXPECTED.read_text()))
    for profile in track.PROFILES:
        assert f"GCC 12, {profile.isa}: {profile.model}: instructions of {profile.what}" in names
    assert "GCC 12, avx2: smallest latent: instructions of mla_attention in a step behind 1024" in names
    assert "GCC 12, avx512vnni: smallest: instructions of a choice and a step" in names
    assert not [name for name in names if "matmul" in name or "everything" in name]


def test_ops_are_found_in_what_callgrind_prints(track: ModuleType) -> None:
    text = """
55,573,589 (100.0%)  /a/csrc/engine/session.cpp:moeflux::EngineSession::step(int) [/a/moeflux-bench]
95,573,589 (100.0%)  /a/csrc/engine/session.cpp:moeflux::EngineSession::prefill(std::span<int const>, bool) [/a/b]
28,192,554 (50.73%)  /a/csrc/backend/cpu_products.cpp:moeflux::CpuCommands::matmul(std::span<moeflux::Product>)
   387,666 ( 0.70%)  /a/b/../csrc/backend/cpu_commands.cpp:moeflux::CpuCommands::gated_delta(moeflux::DeltaArgs const&)
 8,206,002 (14.77%)  => /a/csrc/backend/cpu_products.cpp:moeflux::CpuCommands::conv1d(std::span<moeflux::Product>)
"""
    found = [match[2] or match[3] for line in text.splitlines() if (match := track.OPS.match(line))]
    assert found == ["step", "prefill", "matmul", "gated_delta"]


def test_history_and_its_picture(track: ModuleType, numbers: list, tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    for value in (20, 25):
        track.record(with_value(numbers, "speed", value), history)
    lines = history.read_text().splitlines()
    assert [json.loads(line)["numbers"][3]["value"] for line in lines] == [20, 25]
    track.history_plot.plot(lines, tmp_path / "history.svg")
    words = texts_of(tmp_path / "history.svg")
    assert {"calls", "a step", "share", "speed", " 25"} <= words, words


def test_the_order_of_a_round_is_turned_around(track: ModuleType) -> None:
    from turns import take_turns

    runs = {name: lambda name=name: name for name in "AB"}
    assert "".join(name for name, _ in take_turns(runs, 3)) == "ABBAAB"
