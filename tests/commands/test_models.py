"""`moeflux models`: what is downloaded, what is known, and whether it runs here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from golden import checkpoints
from moeflux import PRESETS, builtin
from moeflux.cli import main
from moeflux.machine.memory import Available
from moeflux.measure import known

Output = pytest.CaptureFixture[str]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FEW = {name: PRESETS[name] for name in ("Qwen3.6-35B-A3B", "gpt-oss-20b")}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


def snapshot(cache: Path, name: str, kind: str = "models") -> Path:
    folder = cache / f"{kind}--{name.replace('/', '--')}" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


def test_downloads_and_presets(cache: Path, capsys: Output) -> None:
    shutil.copytree(builtin.path(), snapshot(cache, "mine/stories"), dirs_exist_ok=True)
    checkpoints.write("qwen3_moe", snapshot(cache, "their/qwen"))
    checkpoints.write("deepseek_v3", snapshot(cache, "their/deepseek"))
    (snapshot(cache, "their/broken") / "config.json").write_text("{")
    snapshot(cache, "their/text", "datasets")
    assert main(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    here = {model["name"]: model for model in found["downloaded"]}
    assert list(here) == ["mine/stories", "their/broken", "their/deepseek", "their/qwen"]
    assert here["mine/stories"]["why_not"] == here["their/qwen"]["why_not"] == ""
    assert here["their/deepseek"]["why_not"] == "no: convert it first"
    assert "config.json: line 1" in here["their/broken"]["why_not"]
    stories = here["mine/stories"]
    assert stories["folder"] == str(cache / "models--mine--stories" / "snapshots" / COMMIT)
    assert 0 < stories["disk_bytes"] < stories["least_bytes"] < stories["full_bytes"]
    assert [model["name"] for model in found["presets"]] == list(PRESETS)


def test_as_text(cache: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "available", lambda: Available(3 * 10**9, "free"))
    monkeypatch.setattr(known.files, "free_bytes", lambda folder: 10**11)
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("free here: 3.00 GB of memory, 100.00 GB of disk for downloads\n")
    assert "downloaded:\n  none; " in text
    ends = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ")}
    assert ends["Qwen3.6-35B-A3B"].endswith("GB  yes")
    assert ends["gpt-oss-120b"].endswith("no: too little memory is free")
    monkeypatch.setattr(known.files, "free_bytes", lambda folder: 10**10)
    monkeypatch.setattr(known, "PRESETS", FEW)
    assert main(["models"]) == 0
    assert "no: too little of the disk is free" in capsys.readouterr().out


def test_without_a_cache(cache: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "PRESETS", FEW)
    cache.rmdir()
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["downloaded"] == []
