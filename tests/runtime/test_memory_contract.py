"""A process with a memory budget stays below it: measured from outside, by its peak and by a control group's limit."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import moeflux
from golden.checkpoints import CHECKPOINTS
from moeflux import BudgetError, builtin
from moeflux.conversion.convert import ConvertFormat
from moeflux.conversion.synth import synth
from moeflux.machine.sandbox import encoding
from moeflux.models.presets import PRESETS
from moeflux.runtime.plan import plan
from support.engine import Folder, folders
from support.flat import changed
from support.memory_group import MemoryGroup, memory_group

CHILD = Path(__file__).parents[1] / "support" / "contract_child.py"
A3B = "A3B of 4 layers"  # with few and narrow experts: a test reads each many times

linux = pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made = folders(tmp_path_factory.mktemp("contract"))
    large = tmp_path_factory.mktemp("contract") / "a3b"

    def of(name: str) -> Path:
        if name != A3B:
            return made(name)
        if not large.exists():
            shape = PRESETS["Qwen3.6-35B-A3B"].with_layers(4)
            shape = changed(shape, vocab_size=2048, num_experts=32, moe_intermediate=128)
            synth(large, shape, format=ConvertFormat.asked(4, 64))
        return large

    return of


@dataclass
class Ran:
    result: dict[str, Any]
    peak: int  # of its resident memory


class Child:
    """A process that works with one model after another. What an earlier one has left counts as the process's own."""

    def __init__(self, group: MemoryGroup | None = None) -> None:
        self.group = group
        argv = [sys.executable, str(CHILD)]
        argv = group.command(argv) if group else argv
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self, said: str) -> str:
        """What it answers; empty when it has ended."""
        self.process.stdin.write(said + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def run(self, path: Path, budget: str, tokens: int = 20, excess: int = 0, **options: Any) -> Ran:
        case = {"path": str(path), "budget": budget, "tokens": tokens, "excess": excess, "options": options}
        total = self.line(json.dumps(case))
        if total and self.group:
            self.group.limit(int(total) + 64_000_000)
        elif total:
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")  # its peak is what it has now
        line = self.line("") if total else ""
        if not line:
            raise ChildProcessError(f"it ended with {self.process.wait()}")
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return Ran(json.loads(line), 1024 * int(re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[1]))

    def close(self) -> None:
        try:
            self.process.communicate(timeout=60)
        except BaseException:
            self.process.kill()
            raise
        finally:
            self.process.wait()


def run(path: Path, budget: str, tokens: int = 20, group: MemoryGroup | None = None, **options: Any) -> Ran:
    """In a process of its own."""
    with contextlib.closing(Child(group)) as child:
        return child.run(path, budget, tokens, **options)


@pytest.fixture(scope="module")
def shared() -> Iterator[Callable[..., Ran]]:
    """As `run`, in a process of all tiny models: as long as it lives, another need not import everything again."""
    children: list[Child] = []

    def run_in_it(*arguments: Any, **options: Any) -> Ran:
        if not children or children[-1].process.poll() is not None:
            children.append(Child())
        return children[-1].run(*arguments, **options)

    yield run_in_it
    for child in children:
        child.close()


# ---- The peak ---------------------------------------------------------------------------------------------------


# Each family at the floor, where least is left over, and with all slots, where a slot that is planned too small counts
# most. A third differs from the floor by the number of slots alone, so some have it.
SHARES = [(name, budget) for name in CHECKPOINTS for budget in ("floor", "all")]
SHARES += [(name, "third") for name in list(CHECKPOINTS)[::4]]


def check_peak(found: Ran, budget: str) -> None:
    result = found.result
    assert found.peak <= result["total"] <= result["budget"]
    share = result["slots"] / result["experts"]
    assert {"floor": share < 0.5, "third": 0.1 < share < 0.6, "all": share == 1}[budget]


@linux
@pytest.mark.parametrize(("name", "budget"), SHARES)
def test_the_peak_is_within_the_plan(folder: Folder, shared: Callable[..., Ran], name: str, budget: str) -> None:
    check_peak(shared(folder(name), budget, context=200, reads="direct" if budget != "all" else "auto"), budget)


@linux
@pytest.mark.parametrize("name", ["qwen3_5_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    "options",
    [
        {"sessions": 3, "kv_dtype": "bf16", "context": 100, "reads": "direct"},
        {"sessions": 2, "kv_dtype": "q8", "context": 300, "reads": "direct"},
        {"cache": "lfu", "verify_reads": True, "readers": 16, "context": 100, "reads": "direct"},
        {"reads": "buffered", "threads": 1, "chunk": 60, "context": 150},
    ],
    ids=str,
)
def test_whatever_the_options(folder: Folder, shared: Callable[..., Ran], name: str, options: dict[str, Any]) -> None:
    check_peak(shared(folder(name), "third", 5, **options), "third")


# Each half of a prompt is longer than a chunk, so that all scratch is touched.
@linux
@pytest.mark.parametrize(
    ("budget", "options"),
    [
        ("floor", {"reads": "direct"}),
        ("all", {"chunk": 32}),
        ("third", {"sessions": 2, "kv_dtype": "bf16", "cache": "lfu", "verify_reads": True, "readers": 16}),
        ("third", {"sessions": 2, "kv_dtype": "q8", "reads": "buffered", "threads": 1, "chunk": 36}),
    ],
    ids=str,
)
def test_a_large_model(folder: Folder, budget: str, options: dict[str, Any]) -> None:
    """Its weights, scratch and sessions are far larger than what a plan rounds up."""
    check_peak(run(folder(A3B), budget, 5, context=72, **options), budget)


@linux
def test_a_tokenizer_and_a_chat_template_are_in_the_plan() -> None:
    found = run(builtin.path(), "floor", context=150, reads="direct")
    assert 0 < found.result["renderer"] <= found.result["planned renderer"]
    assert found.peak + found.result["planned renderer"] <= found.result["total"]


@linux
def test_an_unusual_tokenizer_is_in_the_plan(tmp_path: Path) -> None:
    """One that removes the spaces before a text makes its tokens in a process of its own."""
    path = shutil.copytree(builtin.path(), tmp_path / "model")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    strip = {"type": "Strip", "strip_left": True, "strip_right": False}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": strip}))
    found = run(path, "floor", context=150, reads="direct")
    size = (path / "tokenizer.json").stat().st_size
    assert found.result["planned encoder"] == encoding(size).max_resident > 40 * size
    assert 0 < found.result["encoder"] <= found.result["planned encoder"]
    beside = found.result["planned encoder"] + found.result["planned renderer"]
    assert found.peak + beside <= found.result["total"]


@linux
def test_one_that_takes_more_would_be_seen(folder: Folder) -> None:
    found = run(folder("qwen3_5_moe"), "floor", 2, excess=200_000_000)
    assert found.peak > found.result["total"]


# ---- In a control group -----------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with memory_group() as made:
        if isinstance(made, str):
            pytest.skip(made)
        yield made


@pytest.mark.parametrize("budget", ["floor", "third"])
def test_it_survives_in_a_control_group(folder: Folder, group: MemoryGroup, budget: str) -> None:
    """The limit is the plan and 64 MB: reads, page tables and the page cache of the weights must fit into that. At the
    floor, each token reads a good part of 64 MB, and all together many times that."""
    run(folder(A3B), budget, 30, group, context=80)
    assert group.killed() == 0


def test_one_that_takes_more_is_killed(folder: Folder, group: MemoryGroup) -> None:
    with pytest.raises(ChildProcessError):
        run(folder("qwen3_5_moe"), "floor", 2, group, excess=400_000_000)


# ---- The floor --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5_moe", "deepseek_v3"])
def test_just_below_the_floor(folder: Folder, name: str) -> None:
    path = folder(name)
    options = {"context": 300, "kv_dtype": "bf16"}

    def at_the_floor() -> moeflux.Model:
        return moeflux.load(path, memory=plan(path, memory="1TB", **options).floor_bytes, **options)

    try:
        model = at_the_floor()
    except BudgetError:  # this process has grown over the border of a step in between; not twice
        model = at_the_floor()
    floor = model.plan.floor_bytes
    assert model.plan.total_bytes == floor
    model.session().prefill([1, 2, 3])
    del model
    with pytest.raises(BudgetError, match=rf"memory: expected at least \d+ bytes .* found {floor - 1} bytes"):
        moeflux.load(path, memory=floor - 1, **options)
