"""tools/test.sh, by which `make test` runs two processes: what both say is told, and either fails the whole."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "test.sh"

pytestmark = pytest.mark.skipif(not SCRIPT.exists() or not shutil.which("make"), reason="this is no source tree")


@pytest.mark.parametrize(("first", "second"), [(True, True), (False, True), (True, False)])
def test_both_are_told_and_count(tmp_path: Path, first: bool, second: bool) -> None:
    for name, good in (("first", first), ("second", second)):
        (tmp_path / f"test_{name}.py").write_text(f"def test_it():\n    assert {good}, 'said by {name}'\n")
    # An interpreter that finds no package to import, and the settings of no project.
    (tmp_path / "python").write_text(
        f'#!/bin/sh\n[ "$1" = -c ] || exec "{sys.executable}" -m pytest -p no:cacheprovider -c /dev/null "$4"\n'
    )
    (tmp_path / "python").chmod(0o755)
    command = ["bash", SCRIPT, tmp_path / "python", tmp_path / "test_first.py", tmp_path / "test_second.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (first and second)
    for name, good in (("first", first), ("second", second)):
        assert (f"said by {name}" in done.stdout) != good
        assert (f"failed: {tmp_path}/test_{name}.py\n" in done.stdout) != good


def test_every_room_is_in_one_of_them() -> None:
    made = subprocess.run(["make", "-n", "test", "ARGS="], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [line] = [line for line in made.splitlines() if line.startswith("bash tools/test.sh")]
    _, first, _, second, _ = line.split('"')
    rooms = sorted({f"tests/{file.parent.name}" for file in ROOT.glob("tests/*/test_*.py")})
    assert sorted(name for name in [*first.split(), *second.split()] if name.startswith("tests/")) == rooms
