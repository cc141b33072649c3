"""The readers of files over a fixed series of hostile bytes: those in C++ under AddressSanitizer and
UndefinedBehaviorSanitizer, those in Python within limits on memory and time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.children import search_path

FUZZ = Path(__file__).resolve().parents[1] / "fuzz"
COMPILED = sorted(path.stem.removeprefix("fuzz_") for path in FUZZ.glob("fuzz_*.cpp"))
PYTHON = sorted(path.stem for path in (FUZZ / "python_targets").glob("*.py"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, FUZZ / "run.py", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("target", COMPILED + PYTHON)
def test_hostile_input_is_refused_cleanly(target: str) -> None:
    """Every seed, every input that once failed, and mutations of them."""
    result = run("--corpus-only", "--target", target)
    assert result.returncode == 0, result.stdout + result.stderr
    driver = "C++, driver.cpp" if target in COMPILED else "Python, python_driver.py"
    assert f"no finding   ({driver})" in result.stdout


def test_every_target_has_seeds_and_words() -> None:
    for target in COMPILED:
        assert list((FUZZ / "corpus" / target).iterdir())
    for target in COMPILED + PYTHON:
        assert (FUZZ / f"{target}.dict").read_text().strip()


@pytest.mark.parametrize(
    "fault",
    [
        "assert not data",
        "raise ValueError",
        "while True: pass",
        "os.abort()",
        "held.append(b'x' * (64 << 20))",
        "raise Error from MemoryError()",
    ],
)
def test_what_a_python_target_finds(tmp_path: Path, fault: str) -> None:
    (tmp_path / "python_targets").mkdir()
    lines = ["import os", "from moeflux.errors import Error", "SECONDS, MEMORY, held = 0.5, 32 << 20, []"]
    lines += ["def seeds(): return [b'seed']", "def one(data):", "    if data == b'seed': raise Error", f"    {fault}"]
    (tmp_path / "python_targets" / "faulty.py").write_text("\n".join(lines))
    command = [sys.executable, FUZZ / "python_driver.py", "faulty", "--runs", "20", "--current", tmp_path / "current"]
    found = subprocess.run(command, env={**os.environ, "PYTHONPATH": search_path(tmp_path)}, capture_output=True)
    assert found.returncode != 0
    executions, size = (int.from_bytes((tmp_path / "current").read_bytes()[at : at + 8], "little") for at in (0, 8))
    assert 1 <= executions < 20
    assert size
