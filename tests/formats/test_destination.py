"""Two at one destination: the second is told who the first is, and no store is damaged. With real processes."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from moeflux import PRESETS, IoError, StateError, files
from moeflux.conversion.convert import ConvertFormat, convert
from moeflux.conversion.destination import destination, reserved
from moeflux.conversion.synth import synth
from moeflux.conversion.verify import verify
from moeflux.stores.packed import read_description
from moeflux.stores.store import is_store
from support.flat import changed

HERE = Path(__file__).parent
MOEFLUX = [sys.executable, "-m", "moeflux"]
SMALL = changed(
    PRESETS["Qwen3.6-35B-A3B"].with_layers(2),
    hidden_size=128, vocab_size=512, moe_intermediate=64, shared_intermediate=64, num_experts=8, experts_per_token=2,
)  # fmt: skip

# Makes a store and stands still in the midst of it until a line comes.
SLOW = """
import sys
from pathlib import Path
sys.path[:0] = {tests!r}
from moeflux.progress import Silent
from moeflux.conversion.synth import synth
from test_destination import SMALL

class Slow(Silent):
    told = False
    def advance(self, done):
        if done and not self.told:
            self.told = True
            print("begun", flush=True)
            sys.stdin.readline()

synth({dest!r}, SMALL, progress=Slow(), force=True)
print("done")
"""

Begun = Callable[[Path], subprocess.Popen[str]]


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Begun]:
    """Starts a process that makes a store, and returns once it is in the midst of it."""
    processes = []

    def start(dest: Path) -> subprocess.Popen[str]:
        code = SLOW.format(tests=[str(HERE), str(HERE.parent)], dest=str(dest))
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def refused_by(process: subprocess.Popen[str], words: str) -> None:
    found = re.search(r"found process (\d+) on (.*) at it since (\S+ \S+)", " ".join(words.split()))
    assert found, words
    assert (int(found[1]), found[2]) == (process.pid, platform.node())
    assert datetime.fromisoformat(found[3]) <= datetime.now().astimezone()


@pytest.mark.parametrize("command", ["synth", "convert"])
def test_the_second_is_told_who_the_first_is(command: str, begun: Begun, tmp_path: Path) -> None:
    """Forced, which is the only way in which it could do harm: it would discard what the first has done."""
    dest = tmp_path / "store"
    first = begun(dest)
    argv = {
        "synth": ["synth", str(dest), "--variant", "a3b", "--layers", "4", "--experts", "8", "--vocab", "512"],
        "convert": ["convert", str(source(tmp_path)), str(dest)],
    }[command]
    second = subprocess.run([*MOEFLUX, *argv, "--force"], capture_output=True, text=True, check=False)
    assert second.returncode == 2 and second.stderr.count("\n") == 1
    refused_by(first, second.stderr)
    assert first.communicate("\n") == ("done\n", None)
    assert verify(dest).ok
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.startswith("store")) == ["store"]


def source(tmp_path: Path) -> Path:
    from golden import checkpoints

    return checkpoints.write("qwen3_moe", tmp_path / "hf")


def test_by_whatever_name(begun: Begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "last").symlink_to("folder/store")
    first = begun(tmp_path / "folder" / "store")
    monkeypatch.chdir(tmp_path / "folder")
    for name in ("store", "./store", "../folder/store", "../link/store", "../last"):
        with pytest.raises(StateError, match="expected nobody else to write there") as caught:
            synth(name, SMALL, force=True)
        refused_by(first, str(caught.value))


def test_a_killed_one_holds_nothing(begun: Begun, tmp_path: Path) -> None:
    dest = tmp_path / "store"
    first = begun(dest)
    first.kill()
    assert first.wait() == -signal.SIGKILL
    assert (tmp_path / "store.lock").exists()
    report = synth(dest, SMALL)
    assert verify(dest).ok and report.path == dest
    assert [each.name for each in tmp_path.iterdir()] == ["store"]


def test_threads_of_one_process(tmp_path: Path) -> None:
    dest, start = tmp_path / "store", threading.Barrier(3)
    outcomes: list[str] = []

    def make() -> None:
        start.wait()
        try:
            synth(dest, SMALL, force=True)
            outcomes.append("made")
        except StateError as error:
            assert f"found process {os.getpid()} on" in str(error) or "another process" in str(error)
            outcomes.append("refused")

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "made" in outcomes and len(outcomes) == 3
    assert verify(dest).ok


def test_the_lock_of_a_file_that_lost_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder took the file away between the opening and the locking here: such a lock would keep nobody out."""
    opened, lost = files.open_to_write, []

    def loses_its_name(path: Path) -> int:
        descriptor = opened(path)
        if not lost:
            lost.append(path)
            path.unlink()
        return descriptor

    monkeypatch.setattr(files, "open_to_write", loses_its_name)
    with reserved(tmp_path / "store"):
        with pytest.raises(StateError, match="expected nobody else"), reserved(tmp_path / "store"):
            pass
        assert lost
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file system without any, that is the reason, and not somebody else."""
    import fcntl

    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with (
        pytest.raises(IoError, match=r"store\.lock: cannot be locked: No locks available"),
        reserved(tmp_path / "store"),
    ):
        pass


# ---- Where it is ------------------------------------------------------------------------------------------------


def test_the_folder_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert destination(".") == tmp_path / "here"
    synth(".", SMALL)
    assert is_store(tmp_path / "here")
    assert [each.name for each in tmp_path.iterdir()] == ["here"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to("disk/real")
    for seed in (1, 2):
        synth(tmp_path / "store", SMALL, seed=seed, force=True)
        assert (tmp_path / "store").is_symlink() and is_store(tmp_path / "disk" / "real")
    assert [each.name for each in (tmp_path / "disk").iterdir()] == ["real"]


# ---- What an earlier run left -----------------------------------------------------------------------------------


def test_killed_between_the_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old store is out of the way and the new one not yet in its place: the next run puts it there."""
    dest = tmp_path / "store"
    synth(dest, SMALL, seed=1)
    rename = os.rename

    def stops(source: Path, to: Path) -> None:
        if Path(source).name == "store.partial":
            raise KeyboardInterrupt
        rename(source, to)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", stops)
        synth(dest, SMALL, seed=2, force=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["store.partial", "store.replaced"]
    synth(dest, SMALL, seed=2)
    assert [each.name for each in tmp_path.iterdir()] == ["store"]
    assert read_description(dest).source["path"] == "seed 2"


def test_what_is_no_replaced_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "store.replaced").mkdir()
    (tmp_path / "store.replaced" / "mine").touch()
    with pytest.raises(StateError, match=r"store\.replaced: expected a store that was replaced"):
        synth(tmp_path / "store", SMALL)
    assert (tmp_path / "store.replaced" / "mine").exists()


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        '{"tensors":{"nobody":"00"}}',
        '{"tensors":3}',
        '{"layer":0,"first":0,"sha256":"text"}',
        '{"layer":0,"first":99,"sha256":[]}',
        '{"layer":99,"first":0,"sha256":[]}',
        '{"layer":0,"first":true,"sha256":["x"]}',
        '{"layer":0,"first":' + "9" * 5000 + ',"sha256":[]}',
        "[" * 5000,
    ],
)
def test_a_journal_that_says_what_cannot_be(line: str, tmp_path: Path) -> None:
    from golden import checkpoints

    hf = checkpoints.write("qwen3_moe", tmp_path / "hf")
    whole = convert(hf, tmp_path / "store", format=ConvertFormat.asked("bf16"), check="none")
    assert whole.written
    (tmp_path / "store").rename(tmp_path / "store.partial")
    journal = tmp_path / "store.partial" / "journal.jsonl"
    binding = _binding(hf)
    journal.write_text(binding + line + "\n")
    with pytest.raises(Exception, match=r"journal\.jsonl: (line 2|expected pieces of this model).*use force") as caught:
        convert(hf, tmp_path / "store", format=ConvertFormat.asked("bf16"), check="none")
    assert type(caught.value).__module__.startswith("moeflux")
    convert(hf, tmp_path / "store", format=ConvertFormat.asked("bf16"), check="none", force=True)


def _binding(hf: Path) -> str:
    import json

    from moeflux.conversion.convert import content_of

    content = content_of(hf, ConvertFormat.asked("bf16"))
    content.close()
    return json.dumps(content.binding, separators=(",", ":")) + "\n"
