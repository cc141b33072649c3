"""A disk that others fill, in a mount of the test's own: see support/full_disk_child.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
BYTES = 16 << 20


def unshared() -> list[str]:
    """Starts a program that may mount, and whose mounts nobody else sees."""
    command = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this system gives a test no mounts of its own")
    return command


def test_whoever_writes(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o "size=$1" none "$2" && shift && exec "$2" -m support.full_disk_child "$1"'
    command = [*unshared(), "sh", "-ec", script, "sh", str(BYTES), str(tmp_path), sys.executable]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout)
    assert min(counts["convert"].values()) >= 3, counts
    assert counts["save"]["refused"] >= 2 and counts["save"]["whole"] >= 1, counts
    assert min(counts["disk"].values()) >= 6, counts
