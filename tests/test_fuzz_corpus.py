"""The readers of files, under AddressSanitizer and UndefinedBehaviorSanitizer, over a fixed series of hostile bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).resolve().parent / "fuzz"
TARGETS = sorted(path.stem.removeprefix("fuzz_") for path in FUZZ.glob("fuzz_*.cpp"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, FUZZ / "run.py", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("target", TARGETS)
def test_hostile_input_is_refused_cleanly(target: str) -> None:
    """Every seed, every input that once failed, and mutations of them."""
    result = run("--corpus-only", "--target", target)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no finding" in result.stdout


def test_every_target_has_seeds_and_words() -> None:
    for target in TARGETS:
        assert list((FUZZ / "corpus" / target).iterdir())
        assert (FUZZ / f"{target}.dict").read_text().strip()
