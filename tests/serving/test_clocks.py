"""Somebody sets the clock: see support/clocks_child.py and support/jumping_clock.c."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def test_nothing_goes_by_a_clock_that_can_be_set(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux, and a C compiler")
    library, waits = tmp_path / "jumping_clock.so", tmp_path / "waits"
    source = TESTS / "support" / "jumping_clock.c"
    subprocess.run([compiler, "-O1", "-Wall", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    system = os.environ | {"LD_PRELOAD": str(library), "JUMPING_CLOCK_WAITS": str(waits)}
    command = [sys.executable, "-m", "support.clocks_child", str(tmp_path)]
    done = subprocess.run(command, cwd=TESTS, env=system, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout)["jumps"], "the clock was set"
    assert not waits.exists(), waits.read_text()
