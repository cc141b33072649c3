"""What is in examples/ works: each program is run as a user would, with warnings as errors."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PARIS = "The capital of France is Paris."


def said(folder: Path, line: str) -> str:
    name, *words = line.split()
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *words]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a server."""
    command = [sys.executable, "-m", "moeflux", "serve", "--port", "0", "--memory", "400MB"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            yield next(found[0] for line in server.stderr if (found := re.search(r"http://[\d.:]+/v1", line)))
        finally:
            server.terminate()


def test_first_text(tmp_path: Path) -> None:
    lines = said(tmp_path, "first_text.py --memory 250MB").splitlines()
    assert lines[0] == PARIS
    assert lines[-3] == "model: 3 plus 4 is 7."


def test_many_users(tmp_path: Path) -> None:
    text = said(tmp_path, "many_users.py --disk states")
    assert f"ann: What is the capital of France?\n  -> {PARIS}" in text
    assert text.count("  -> ") == 5 and "5 ended of 5 (0 refused)" in text


def test_tools(tmp_path: Path, address: str) -> None:
    first, answer = said(tmp_path, f"tools_openai.py --url {address}").split("\n", 1)
    assert re.fullmatch(r"weather\(\{'city': '(Paris|Madrid|Rome)'\}\) -> \{'city': .*, 'degrees': 21\}", first)
    assert answer.strip()


def test_plan_first(tmp_path: Path) -> None:
    lines = said(tmp_path, "plan_first.py --memory 8GB").splitlines()[2:]
    assert [line.split()[0] for line in lines] == [
        "builtin",
        "Qwen3.6-35B-A3B",
        "gpt-oss-120b",
        "GLM-4.5-Air",
        "Kimi-K2",
    ]
    assert "runs with 100% of its experts in memory" in lines[0]
    assert re.search(r"runs with [1-9]\d% of its experts in memory; reads \d+ MB a token", lines[1])
    assert re.fullmatch(r"Kimi-K2 +needs \d+\.\d GB", lines[-1])


def test_snapshots(tmp_path: Path) -> None:
    assert said(tmp_path, "snapshots.py save state.moeflux").startswith("state.moeflux: 28 tokens, ")
    again = [said(tmp_path, "snapshots.py go-on state.moeflux") for _ in range(2)]
    assert again[0] == again[1] and again[0].startswith("28 of 29 tokens were there: ")
    forks = said(tmp_path, "snapshots.py fork state.moeflux")
    assert re.findall(r"^(\d):", forks, re.MULTILINE) == ["0", "1", "2"]


def test_every_example_is_run_and_told_of() -> None:
    here, told = Path(__file__).read_text(), (ROOT / "docs" / "examples.md").read_text()
    for file in EXAMPLES.iterdir():
        assert f'"{file.name} ' in here or f"{file.name} --url" in here, file
        assert f"examples/{file.name}" in told, file
