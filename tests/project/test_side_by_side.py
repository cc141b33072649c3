"""tools/test.sh, by which `make test` runs several processes: what each says is told, and any fails the whole."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "test.sh"

pytestmark = pytest.mark.skipif(not SCRIPT.exists() or not shutil.which("make"), reason="this is no source tree")


NAMES = ("first", "second", "third")


@pytest.mark.parametrize("bad", [None, *NAMES])
def test_all_are_told_and_count(tmp_path: Path, bad: str | None) -> None:
    for name in NAMES:
        (tmp_path / name).write_text(f"echo said by {name}\nexit 1\n" if name == bad else "")
    # It finds no package to import, and its tests are scripts: python -m pytest -q FILE
    (tmp_path / "python").write_text('#!/bin/sh\n[ "$1" = -c ] || exec sh "$4"\n')
    (tmp_path / "python").chmod(0o755)
    command = ["bash", SCRIPT, tmp_path / "python", *(tmp_path / name for name in NAMES)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (bad is None)
    for name in NAMES:
        assert (f"said by {name}" in done.stdout) == (name == bad)
        assert (f"failed: {tmp_path}/{name}\n" in done.stdout) == (name == bad)


def test_every_room_is_in_one_of_them() -> None:
    made = subprocess.run(["make", "-n", "test", "ARGS="], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [line] = [line for line in made.splitlines() if line.startswith("bash tools/test.sh")]
    lists = line.split('"')[1::2]
    rooms = sorted({f"tests/{file.parent.name}" for file in ROOT.glob("tests/*/test_*.py")})
    assert sorted(name for part in lists for name in part.split() if name.startswith("tests/")) == rooms
