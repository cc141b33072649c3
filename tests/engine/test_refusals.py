"""A system that refuses allocations, mappings and threads, one at a time, all through a model's life. What cannot be
done is a moeflux error, and what it leaves works on, with the same bits. The life is in `refusing/life.py`, a process
of its own. Some calls of each stage are refused here, and every one in `make refusals`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import refusing
from support.engine import Folder, folders

ROOT = Path(__file__).resolve().parents[2]
STREAMED = {"expert_slots": 4}  # the fewest: one that is lost is missed at once
RESIDENT = {"threads": 2, "readers": 2}

Refused = Callable[..., dict[str, int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("refusals"))


@pytest.fixture(scope="module")
def library() -> Path:
    return refusing.needed_library()


@pytest.fixture
def refused(library: Path, request: pytest.FixtureRequest) -> Refused:
    """Goes through the life of a model in a folder, and returns how many calls of a kind each stage made. Some of them
    are refused, or all with --every-refusal; then it prints how many those were."""
    every = request.config.getoption("--every-refusal")

    def of(folder: Path, options: dict[str, Any], kind: str, refused: int = 7) -> dict[str, int]:
        begin = random.Random(request.node.name).random()  # each test refuses others
        life = [library, folder, json.dumps(options), kind, 0 if every else refused, begin]
        command = [sys.executable, "-X", "faulthandler", "-m", "refusing.life", *map(str, life)]
        done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        counts = json.loads(done.stdout)
        print(*(f"{stage}: {made} calls, {tried} refused" for stage, (made, tried) in counts.items()), sep="\n")
        return {stage: made for stage, (made, _) in counts.items()}

    return of


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("qwen3_5_moe", STREAMED, id="qwen3_5_moe-streamed"),
        pytest.param("qwen3_5_moe", RESIDENT, id="qwen3_5_moe-resident"),
        pytest.param("qwen3_moe", STREAMED, id="qwen3_moe-streamed"),
        pytest.param("deepseek_v3", RESIDENT, id="deepseek_v3-resident"),
    ],
)
def test_allocations(refused: Refused, folder: Folder, name: str, options: dict[str, Any]) -> None:
    made = refused(folder(name), options, "memory")
    assert all(
        made[stage] > 0 for stage in ("open", "load", "session", "fork", "snapshot", "restore", "fresh: prefill")
    )
    assert made["fresh: step"] == made["used: step"] == 0
    assert made["fresh: together"] == made["used: together"] <= 12  # lists of the binding, and none of the engine


@pytest.mark.parametrize("options", (STREAMED, RESIDENT), ids=("streamed", "resident"))
@pytest.mark.parametrize("kind", ("mappings", "threads"))
def test_mappings_and_threads(refused: Refused, folder: Folder, options: dict[str, Any], kind: str) -> None:
    made = refused(folder("qwen3_5_moe"), options | {"threads": 3, "readers": 3}, kind)
    assert made["load"] > 0
    assert made["session" if kind == "mappings" else "ThreadPool"] > 0


OBJECTS = """
import _testcapi, sys
import moeflux
from support.engine import load_faulty

model = load_faulty(sys.argv[1])
calls = {
    "Cancel": moeflux.Cancel,
    "session": lambda: model._engine.session(64, "f32"),
    "memory": lambda: model._engine.memory,
    "ThreadPool": lambda: moeflux._core.ThreadPool(1),
}
for name, call in calls.items():
    refused = 0
    for at in range(100):
        _testcapi.set_nomemory(at, at + 1)
        try:
            made = call()
        except (MemoryError, moeflux.Error):
            refused += 1
        finally:
            _testcapi.remove_mem_hooks()
    assert 0 < refused < 100, (name, refused)
assert model.session(max_context=64).step(1).argmax() >= 0
"""


def test_objects_of_python(folder: Folder) -> None:
    """Each that is an object of ours in Python, as Python's own allocator refuses it."""
    pytest.importorskip("_testcapi")
    command = [sys.executable, "-X", "faulthandler", "-c", OBJECTS, str(folder("qwen3_moe"))]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("options", (STREAMED, RESIDENT), ids=("streamed", "resident"))
def test_allocations_of_a_late_device(refused: Refused, folder: Folder, options: dict[str, Any]) -> None:
    """It writes every op down."""
    assert refused(folder("qwen3_5_moe"), options | {"deferred": True}, "memory")["used: step"] > 50
