"""Programs of tests/support that a test runs in a process of their own, and what they find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "child", "environment", "search_path"]

ROOT = Path(__file__).resolve().parents[2]
HEAD_SECONDS = "5"
"""After which Ray gives up a cluster whose head is gone; by itself it waits for a minute."""


def search_path(*folders: Path | str) -> str:
    """PYTHONPATH of a child that finds modules in these folders, and compiles nothing anew: built/sitecustomize.py."""
    return os.pathsep.join(map(str, (ROOT / "tests" / "support" / "built", *folders)))


def child(program: str, *words: object) -> dict[str, Any]:
    """What it prints last, as JSON."""
    command = [sys.executable, str(ROOT / "tests/support" / program), *map(str, words)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, env=environment(), cwd=ROOT)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": search_path(ROOT / "tests", ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": HEAD_SECONDS,
    }
