"""A system that refuses: each allocation in turn, all through a model's life. What cannot be done is a moeflux error,
and what it leaves works on, with the same bits. The life is in `refusing/life.py`, a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import refusing
from moeflux import _core
from support.engine import Folder, folders

ROOT = Path(__file__).resolve().parents[2]
STREAMED = {"expert_slots": 4}  # the fewest: one that is lost is missed at once
RESIDENT = {"threads": 2, "readers": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("refusals"))


@pytest.fixture(scope="module")
def library() -> Path:
    """The module whose system refuses, as the build of the package under test left it."""
    found = refusing.library()
    if found is None and ROOT / "build" in Path(_core.__file__).resolve().parents:
        pytest.fail("tests/refusing is not built: `make setup` turns it on in the editable install")
    if found is None:
        pytest.skip("this install has no _core that refuses: an editable one has")
    return found


def refused(library: Path, folder: Path, options: dict[str, Any], kind: str, stride: int = 1) -> dict[str, int]:
    """How many calls there were to refuse, by stage. The time limit is for what hangs."""
    command = [sys.executable, "-X", "faulthandler", "-m", "refusing.life", library, folder, json.dumps(options), kind]
    done = subprocess.run(
        [*map(str, command), str(stride)], cwd=ROOT / "tests", capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("options", (STREAMED, RESIDENT), ids=("streamed", "resident"))
@pytest.mark.parametrize("name", ("qwen3_5_moe", "qwen3_moe", "deepseek_v3"))
def test_every_allocation(library: Path, folder: Folder, name: str, options: dict[str, Any]) -> None:
    counts = refused(library, folder(name), options, "memory")
    assert counts["fresh: prefill"] > 0


@pytest.mark.parametrize("options", (STREAMED, RESIDENT), ids=("streamed", "resident"))
def test_allocations_of_a_late_device(library: Path, folder: Folder, options: dict[str, Any]) -> None:
    """One in twenty-three: it writes every op down."""
    counts = refused(library, folder("qwen3_5_moe"), options | {"deferred": True}, "memory", 23)
    assert counts["used: step"] > 50
