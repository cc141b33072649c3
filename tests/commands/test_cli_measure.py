"""The commands that measure, from their arguments to what they print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeflux.cli import main
from moeflux.routing.trace import Trace
from support.engine import folders
from support.pictures import texts_of

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders(tmp_path_factory.mktemp("stores"))("qwen3_5_moe")


@pytest.fixture(scope="module")
def trace(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "run.trace"
    assert main(["trace", str(store), "-o", str(path), "--tokens", "40", "--seed", "2", "--decode", "5"]) == 0
    return path


def refused(capsys: Output, *argv: object) -> str:
    """The one sentence on stderr."""
    assert main([str(word) for word in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"moeflux {argv[0]}: ")
    assert err.count("\n") == 1
    return err


def test_trace_says_what_it_wrote(store: Path, tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "x.trace"
    ids = tmp_path / "ids"
    ids.write_text("1 2 3\n4, 5")
    options = ["--threads", "1", "--readers", "2", "--expert-slots", "20", "--chunk", "4", "--cache", "lfu"]
    assert main(["trace", str(store), "-o", str(path), "--prompt-ids", str(ids), *options]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{path}: 5 tokens of ")
    assert Trace.load(path).passes.tolist() == [4, 1]


def test_trace_of_random_tokens_depends_on_the_seed(trace: Path, store: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    for path, seed in ((again, "2"), (other, "3")):
        assert main(["trace", str(store), "-o", str(path), "--tokens", "40", "--seed", seed, "--decode", "5"]) == 0
    assert again.read_bytes() == trace.read_bytes() != other.read_bytes()
    assert Trace.load(trace).tokens == 45


def test_trace_refuses(store: Path, tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "x.trace"
    assert "expected a folder to write into" in refused(capsys, "trace", store, "-o", tmp_path / "no" / "x.trace")
    assert "expected a folder, a GGUF file or a repository as owner/name, found nothing" in refused(
        capsys, "trace", tmp_path / "none", "-o", path
    )
    assert "No such file" in refused(capsys, "trace", store, "-o", path, "--prompt-ids", tmp_path / "none")
    assert "expected 1 to 1024, found 5000" in refused(capsys, "trace", store, "-o", path, "--tokens", 5000)
    assert list(tmp_path.iterdir()) == []
    assert main(["trace", str(store)]) == 2
    assert main(["trace", str(store), "-o", str(path), "--decode", "-1"]) == 2
    assert "whole number" in capsys.readouterr().err


def test_replay_prints_table_and_plot(trace: Path, capsys: Output) -> None:
    assert main(["replay", str(trace)]) == 0
    text = capsys.readouterr().out
    assert "decoded one after another" in text
    assert all(word in text for word in ("lru", "lfu", "none", "optimum", "of the experts in memory", " 100.0% "))


def test_replay_draws_where_it_is_told(trace: Path, tmp_path: Path, capsys: Output) -> None:
    picture = tmp_path / "curves.svg"
    assert main(["replay", str(trace), "--slots", "50%,100%", "--policy", "lfu", "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert text.endswith(f"{picture}: the curves\n")
    assert "lru" not in text
    assert "lfu" in texts_of(picture)


def test_replay_as_json(trace: Path, capsys: Output) -> None:
    assert main(["replay", str(trace), "--slots", "25%, 100%", "--policy", "lru,none", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["policy"] for point in points] == ["lru", "lru", "none", "none", "optimum", "optimum"]


def test_replay_refuses(trace: Path, tmp_path: Path, capsys: Output) -> None:
    assert "slots: expected" in refused(capsys, "replay", trace, "--slots", "1%,many")
    assert "policy: expected" in refused(capsys, "replay", trace, "--policy", "fifo")
    assert "found nothing" in refused(capsys, "replay", tmp_path / "none")
    assert "expected a folder" in refused(capsys, "replay", trace, "--plot", tmp_path / "none" / "x.svg")
    bad = tmp_path / "bad"
    bad.write_bytes(trace.read_bytes()[:-1])
    assert str(bad) in refused(capsys, "replay", bad)
