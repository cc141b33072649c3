"""`moeflux bench`: its counters against the engine's and the system's, its rows, its refusals. No time decides."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

import pytest

import moeflux
from golden import checkpoints
from moeflux.cli import main
from moeflux.machine.remembered import Probe, remember
from moeflux.measure import bench as module
from moeflux.measure import estimate as estimating
from moeflux.measure.bench import SETTLE, Row, bench, drop_cached, files_of, table
from moeflux.measure.together import bench_together, table_together
from moeflux.progress import Progress
from moeflux.text.sampling import Sampling
from support.apart import apart
from support.engine import Folder, folders, tokens

Output = pytest.CaptureFixture[str]
WAYS = [("decode", "cold"), ("prefill", "cold"), ("prefill", "warm"), ("decode", "warm")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def rows(folder: Folder) -> list[Row]:
    options = {"threads": 1, "expert_slots": 12, "look_ahead": "off"}
    return list(bench(folder("qwen3_5_moe"), prefill=20, decode=6, reps=2, **options))


def test_four_rows_a_repetition(rows: list[Row]) -> None:
    assert [(row.rep, row.phase, row.state) for row in rows] == [(rep, *way) for rep in (0, 1) for way in WAYS]
    for row in rows:
        assert row.tokens == (20 if row.phase == "prefill" else 6)
        assert row.context == (24 if (row.phase, row.state) == ("decode", "warm") else 0)
        assert (row.load_seconds is not None) == (row.state == "cold")
        assert "12 expert slots" in row.settings
        assert row.peak_bytes > 1 << 20
        assert 0 <= row.wait_share <= 1


def test_counters_add_up(rows: list[Row], folder: Folder) -> None:
    with moeflux.open_store(folder("qwen3_5_moe")) as store:
        v, expert_bytes = store.variant, store.directory.experts.bytes
    for row in rows:
        assert row.bytes_read == row.misses * expert_bytes
        asked = row.hits + row.misses
        if row.phase == "decode":
            assert asked == row.tokens * len(v.moe_layers) * v.experts.per_token
        else:
            assert v.experts.per_token * len(v.moe_layers) <= asked <= v.experts.count * len(v.moe_layers)
        assert row.hit_rate == row.hits / asked
        assert row.look_ahead_reads == row.look_ahead_used == 0
        assert row.look_ahead_recall is None


def test_direct_reads_are_what_the_disk_gives(folder: Folder) -> None:
    """By the kernel's own count. A file system without direct reads, or without a count, has nothing to compare."""
    store = folder("qwen3_5_moe")
    with moeflux.open_store(store) as opened:
        direct = moeflux._core.supports_direct(opened.expert_files[0])
    for row in (
        bench(store, prefill=10, decode=4, threads=1, expert_slots=12, reads="direct", look_ahead="off")
        if direct
        else []
    ):
        if row.physical_bytes is None or (row.physical_bytes == 0 and row.bytes_read > 0):
            pytest.skip("the system does not count what this disk gives")
        assert row.bytes_read <= row.physical_bytes <= row.bytes_read + (1 << 20)


def test_decoding_chooses_as_asked(folder: Folder) -> None:
    """The same seed decodes the same text; choosing is a part of the time, and of decoding alone."""
    asked = Sampling(temperature=1.5, top_p=0.9, seed=3)
    first, again = (
        list(bench(folder("qwen3_5_moe"), prefill=6, decode=8, threads=1, look_ahead="off", sampling=asked))
        for _ in range(2)
    )
    for row in first:
        assert (row.choosing_seconds is None) == (row.phase == "prefill")
        assert row.choosing_seconds is None or 0 < row.choosing_seconds < row.seconds
    likeliest = list(bench(folder("qwen3_5_moe"), prefill=6, decode=8, threads=1, look_ahead="off"))
    assert [row.misses for row in first] == [row.misses for row in again] != [row.misses for row in likeliest]


def test_the_same_prompt_when_asked_for(folder: Folder) -> None:
    kept = list(bench(folder("qwen3_5_moe"), prompt=tokens(9), decode=2, threads=1, look_ahead="off"))
    assert [row.tokens for row in kept] == [2, 9, 9, 2]
    warm = kept[2]
    assert (warm.misses, warm.bytes_read) == (0, 0)  # a slot for every expert, and the same experts again


def test_without_decoding_there_is_none(folder: Folder) -> None:
    assert [row.phase for row in bench(folder("qwen3_5_moe"), prefill=4, decode=0, threads=1)] == ["prefill"] * 2


def test_random_decoding_follows_its_own_tokens(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    step = moeflux.Session.step

    def spy(session: moeflux.Session, token: int) -> moeflux.Logits:
        seen.append(token)
        return step(session, token)

    monkeypatch.setattr(moeflux.Session, "step", spy)
    runs = []
    for _ in range(2):
        seen.clear()
        list(bench(folder("qwen3_5_moe"), prefill=5, decode=8, random_decode=True, threads=1))
        runs.append(list(seen))
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 10
    assert len(runs[0]) == 8 + 8 + module.SETTLE


def test_the_page_cache_is_dropped_before_a_cold_run(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder("qwen3_5_moe")
    dropped: list[list[str]] = []
    monkeypatch.setattr(module, "drop_cached", lambda files: dropped.append(list(files)))
    list(bench(store, prefill=4, decode=1, threads=1))
    assert dropped == [files_of(store)] * 2
    assert any(file.endswith("model_weights.bin") for file in dropped[0])
    monkeypatch.undo()
    assert drop_cached(files_of(store)) in (True, False)


def test_a_table_has_the_medians(rows: list[Row]) -> None:
    lines = table(rows).splitlines()
    assert lines[0].split() == "phase state tok/s read/token disk/token hits waiting foreseen choosing peak".split()
    assert [tuple(line.split()[:2]) for line in lines[1:]] == module.ORDER
    (only,) = [row for row in rows if (row.rep, row.phase, row.state) == (0, "decode", "cold")]
    told = table([only]).splitlines()[1].split()[2]
    assert float(told) == pytest.approx(only.tokens_per_second, rel=0.006)


def test_the_command(folder: Folder, capsys: Output) -> None:
    store = str(folder("qwen3_5_moe"))
    options = ["--prefill", "6", "--decode", "3", "--threads", "1", "--expert-slots", "12", "--reads", "buffered"]
    assert main(["bench", store, *options]) == 0
    out = capsys.readouterr().out
    assert "12 expert slots" in out
    assert "6 tokens prefill" in out
    assert main(["bench", store, *options, "--json", "--reps", "2", "--temperature", "1", "--seed", "5"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["phase"], line["state"]) for line in lines] == WAYS * 2
    assert all(line["tokens_per_second"] == line["tokens"] / line["seconds"] for line in lines)


def test_the_command_refuses(folder: Folder, tmp_path: Path, capsys: Output) -> None:
    store = str(folder("qwen3_5_moe"))
    (tmp_path / "one").write_text("5")
    for argv, words in [
        ([str(tmp_path / "none")], "a repository as owner/name or a preset, found nothing"),
        ([str(tmp_path)], "expected a model, or its config.json, found neither"),
        ([store, "--expert-slots", "1"], "expert_slots: expected at least"),
        ([store, "--prefill", "2000"], "expected 1 to 1024"),
        ([store, "--top-p", "2"], "top_p: expected more than 0 to 1, found 2"),
        ([store, "--prompt-ids", str(tmp_path / "one")], "expected at least 2 tokens, found 1"),
    ]:
        assert main(["bench", *argv]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert words in err.splitlines()[-1]
    for wrong in (["--decode", "no"], ["--cache", "fifo"], ["--reps", "0"]):
        assert main(["bench", store, *wrong]) == 2


# ---- Several answers at once ------------------------------------------------------------------------------------


def test_answers_that_are_made_together(folder: Folder) -> None:
    options = {"threads": 1, "expert_slots": 12, "look_ahead": "off"}
    store = folder("qwen3_5_moe")
    rows = list(bench_together(store, (1, 3), prefill=9, decode=5, reps=2, sampling=Sampling(1.0, seed=3), **options))
    assert [(row.rep, row.sessions) for row in rows] == [(0, 1), (0, 3), (1, 1), (1, 3)]
    with moeflux.open_store(store) as opened:
        v, expert_bytes = opened.variant, opened.directory.experts.bytes
    for row in rows:
        assert row.tokens == 5 * row.sessions and row.context == 9 + SETTLE - 1 and row.settings == rows[0].settings
        assert row.bytes_read == row.misses * expert_bytes
        assert 0 < row.step_p50 <= row.step_p99 <= row.seconds
        least, most = len(v.moe_layers) * v.experts.per_token * 5, len(v.moe_layers) * v.experts.count * 5
        assert least <= row.hits + row.misses <= min(most, least * row.sessions)
    assert rows[0].hits + rows[0].misses == len(v.moe_layers) * v.experts.per_token * 5
    lines = table_together(rows).splitlines()
    assert [line.split()[0] for line in lines] == ["sessions", "1", "3"] and lines[1].split()[2] == "1.00"


def test_the_command_with_sessions(folder: Folder, capsys: Output) -> None:
    store = str(folder("qwen3_5_moe"))
    options = ["--prefill", "1", "--decode", "2", "--threads", "1", "--sessions", "1, 2"]
    assert main(["bench", store, *options]) == 0
    assert "1 tokens prefill, 2 steps" in capsys.readouterr().out
    assert main(["bench", store, *options, "--json"]) == 0
    assert [json.loads(line)["sessions"] for line in capsys.readouterr().out.splitlines()] == [1, 2]
    for wrong, words in (
        (["--sessions", "1,none"], "expected a whole number, found 'none'"),
        (["--sessions", "2", "--random-decode"], "--random-decode: expected none with --sessions"),
        (["--sessions", "2", "--decode", "0"], "--decode: expected at least 1 with --sessions, found 0"),
    ):
        assert main(["bench", store, *wrong]) == 2
        assert words in capsys.readouterr().err
    assert main(["bench", "a3b", "--sessions", "2"]) == 2
    assert "--sessions: expected a model that is here, found a3b" in capsys.readouterr().err


# ---- A model that is not here -----------------------------------------------------------------------------------


PROBE = Probe(2e9, 2e10, "direct", 2, 1_769_472, datetime(2026, 2, 3, tzinfo=timezone.utc))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A folder of its own, whose disk nobody has measured. Measuring takes no time, and says here that it was quick."""
    measured: list[bool] = []

    def examine(path: Path, quick: bool, progress: Progress) -> None:
        measured.append(quick)
        remember(path, PROBE)

    monkeypatch.setenv("MOEFLUX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(estimating, "examine", examine)
    return measured


def test_a_preset_is_estimated(elsewhere: list[bool], capsys: Output) -> None:
    assert main(["bench", "a3b", "--memory", "8GB"]) == 0
    said = capsys.readouterr().out
    assert "estimate            of a store with every matrix 4-bit g64, which is not here yet" in said
    assert "Nothing was run." in said and "2026-02-03" in said
    found = estimating.estimate("a3b", memory="8GB")
    assert elsewhere == [True], "what is known of a disk is not measured again"
    plan = found.plan
    assert plan.tokens_per_second is not None and f"about {plan.tokens_per_second:.3g} tokens/s" in said
    assert found.bytes_read_per_chunk == (plan.experts - plan.slots) * plan.slot_bytes
    assert f"{found.bytes_read_per_chunk / 2e9:.3g} s; computing comes on top" in said
    assert main(["bench", "a3b", "--memory", "8GB", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["estimate"] is True and values["tokens_per_second"] == plan.tokens_per_second


def test_what_does_not_fit_is_refused_before_anything_is_measured(elsewhere: list[bool], capsys: Output) -> None:
    assert main(["bench", "a3b", "--memory", "1GB"]) == 2
    assert "the floor of Qwen3.6-35B-A3B" in capsys.readouterr().err and elsewhere == []


def test_a_checkpoint_is_estimated(elsewhere: list[bool], tmp_path: Path, capsys: Output) -> None:
    checkpoints.write("deepseek_v2", tmp_path / "hf")
    assert main(["bench", str(tmp_path / "hf")]) == 0
    assert "of the store that `moeflux convert` makes of it" in capsys.readouterr().out


def test_a_disk_that_cannot_be_remembered(
    elsewhere: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setattr(estimating, "examine", lambda *measured, **named: None)
    assert main(["bench", "a3b", "--memory", "8GB"]) == 0
    assert "unknown: what `moeflux doctor` measures could not be remembered" in capsys.readouterr().out


def test_what_was_copied_has_columns(folder: Folder) -> None:
    """Where a device has memory of its own, and nowhere else."""
    with apart():
        options = {"threads": 1, "expert_slots": 9, "host_slots": 200, "look_ahead": "off"}
        rows = list(bench(folder("qwen3_5_moe"), prefill=20, decode=6, **options))
    for row in rows:
        assert 0 <= row.host_hits <= row.misses
        assert row.bytes_copied > 0 or row.misses == 0
    assert sum(row.host_hits for row in rows) > 0
    assert table(rows).splitlines()[0].endswith("peak  host hits  copied/token")
