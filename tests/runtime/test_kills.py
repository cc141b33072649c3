"""Processes that are killed while they write: a few here, a thousand of each kind in `make kills`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = Path(__file__).resolve().parents[1] / "support" / "kills.py"


@pytest.mark.parametrize("kind", ("convert", "save", "disk"))
def test_what_they_leave(kind: str, tmp_path: Path) -> None:
    """A seed of its own, so that other places are met than in the long run."""
    kills(tmp_path, kind, 4, "--seed", "2")


@pytest.mark.parametrize(("kind", "count"), [("convert", 16), ("save", 16)])
def test_at_each_call_in_turn(kind: str, count: int, tmp_path: Path) -> None:
    """Before and after it is done."""
    kills(tmp_path, kind, count, "--in-turn")


def kills(folder: Path, kind: str, count: int, *more: str) -> None:
    command = [sys.executable, str(KILLS), str(folder / "kills"), "--kind", kind, "--kills", str(count), *more]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith(f"{kind}: {count} processes killed")
