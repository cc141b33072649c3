"""Doctor: what it reads and leaves behind, what it recommends, and who listens to it. No figure decides a test."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import moeflux
from moeflux import FormatError, IoError, _core
from moeflux.cli import main
from moeflux.machine import remembered as memory_of_doctor
from moeflux.machine.memory import Available, available
from moeflux.machine.remembered import Probe, remember, remembered
from moeflux.measure import doctor
from moeflux.measure.doctor import DEFAULT_EXPERT, QUICK, Diagnosis, ReadRate, examine, recommend
from moeflux.progress import Silent
from support.engine import Folder, folders

Output = pytest.CaptureFixture[str]
SMALL = replace(QUICK, seconds=0.01, file_bytes=20 * DEFAULT_EXPERT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("stores"))


@pytest.fixture(autouse=True)
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFLUX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "QUICK", SMALL)
    monkeypatch.setattr(doctor, "FULL", replace(SMALL, turns=2))
    # A part of it is read to measure memory.
    monkeypatch.setattr(doctor, "available", lambda *root: replace(available(*root), bytes=32 << 20))
    (tmp_path / "disk").mkdir()


# ---- The probe --------------------------------------------------------------------------------------------------


def test_each_piece_is_read_once_at_most(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(10 * 4096 + 100))
    for mode in ("direct", "buffered"):
        for readers in (1, 3, 8):
            reads, size, seconds = _core.probe_file_reads(file, 4096, mode, readers, 60.0, 1)
            assert (reads, size) == (10, 10 * 4096)
            assert 0 < seconds < 60
    assert _core.probe_file_reads(file, 4096, "buffered", 1, 0.0, 1)[:2] == (1, 4096)  # one at least
    assert _core.probe_file_reads(file, 1 << 20, "buffered", 1, 1.0, 1)[0] == 0


def test_all_experts_of_a_store_can_be_read(folder: Folder) -> None:
    with moeflux.open_store(folder("qwen3_5_moe")) as store:
        experts = len(store.variant.moe_layers) * store.variant.experts.count
        for rooms in (0, 1, 5, 1000):
            reads, size, _ = _core.probe_expert_reads(store.directory, "buffered", 2, 60.0, 1, rooms)
            assert (reads, size) == (experts, experts * store.directory.experts.bytes)
        with pytest.raises(ValueError, match="rooms"):
            _core.probe_expert_reads(store.directory, "buffered", 2, 60.0, 1, -1)


def test_reads_that_fail_are_an_error(tmp_path: Path, folder: Folder) -> None:
    with pytest.raises(IoError, match="none"):
        _core.probe_file_reads(tmp_path / "none", 4096, "buffered", 1, 1.0, 1)
    copy = tmp_path / "copy"
    shutil.copytree(folder("qwen3_5_moe"), copy)
    with moeflux.open_store(copy) as store:
        os.truncate(store.expert_files[0], 4096)
        with pytest.raises(IoError, match="layer_00"):
            _core.probe_expert_reads(store.directory, "buffered", 2, 1.0, 1)


def test_odd_calls(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(8192))
    for arguments in ((file, 100, "direct", 1), (file, 4096, "mmap", 1), (file, 4096, "direct", 0)):
        with pytest.raises(ValueError, match="expected"):
            _core.probe_file_reads(*arguments, 0.1, 1)
    for arguments in ((0, 1280), (2, 100)):
        with pytest.raises(ValueError, match="expected"):
            _core.ReadBandwidth(*arguments)
    assert _core.ReadBandwidth(2, 1 << 20).measure(2) > 0


# ---- A diagnosis ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False])
def test_a_folder_is_left_as_it_was(tmp_path: Path, quick: bool) -> None:
    disk = tmp_path / "disk"
    (disk / "mine").write_text("kept")
    found = examine(disk, quick)
    assert [entry.name for entry in disk.iterdir()] == ["mine"]
    ways = {(rate.reads, rate.readers) for rate in found.disk}
    modes = {"buffered"} if found.direct else {"direct", "buffered"}
    assert ways == {(reads, readers) for reads in modes for readers in (1, 2, 4, 8)}
    assert all(rate.count > 0 and rate.bytes == rate.count * DEFAULT_EXPERT for rate in found.disk)
    assert {rate.threads for rate in found.memory} >= {1, os.cpu_count()}
    assert remembered(disk) == remembered(tmp_path) == found.probe
    assert found.probe.reads in modes
    assert any(rate.bytes_per_second == found.probe.disk_bytes_per_second for rate in found.disk)


def test_a_store_is_read_and_not_written(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder("qwen3_5_moe")
    before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in store.rglob("*")}
    monkeypatch.setattr(doctor, "written_file", lambda *_: pytest.fail("nothing is to be written"))
    found = examine(store, quick=True)
    assert {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in store.rglob("*")} == before
    with moeflux.open_store(store) as opened:
        assert found.probe.read_bytes == opened.directory.experts.bytes
    assert "the experts of" in found.what


def test_a_damaged_store_is_named(folder: Folder, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder("qwen3_5_moe"), copy)
    (copy / "model_weights.json").write_text("{")
    with pytest.raises(FormatError, match="model_weights"):
        examine(copy)


def test_without_direct_reads_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = _core.probe_file_reads

    def refuse(path: Path, size: int, mode: str, *rest: Any) -> Any:
        if mode == "direct":
            raise IoError("no direct reads today")
        return read(path, size, mode, *rest)

    monkeypatch.setattr(_core, "probe_file_reads", refuse)
    found = examine(tmp_path / "disk", quick=True)
    assert {rate.reads for rate in found.disk} == {"buffered"} == {found.probe.reads}
    assert "no direct reads today" in found.reason
    assert found.to_dict()["direct"] is False
    assert " - " in str(found)


def test_little_memory_is_not_all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a control group with a limit, a large buffer would end the process."""
    taken: list[int] = []

    class Spy:
        def __init__(self, threads: int, part: int) -> None:
            taken.append(threads * part)

        def measure(self, threads: int) -> float:
            return 1e9 * threads

    monkeypatch.setattr(_core, "ReadBandwidth", Spy)
    monkeypatch.setattr(doctor, "available", lambda *_: Available(40_000_000, "free below a limit"))
    doctor.memory_rates(SMALL, Silent())
    assert taken[0] <= max(10_000_000, (os.cpu_count() or 1) << 20)
    limits = doctor.limits_here()
    assert (limits.available_bytes, limits.available_source) == (40_000_000, "free below a limit")
    assert ("  to be had", "40.00 MB, free below a limit") in limits.rows()


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 90, 10_000_000))
    with pytest.raises(IoError, match=r"expected 135\.39 MB free for a file to read, found 10\.00 MB; name a folder"):
        examine(tmp_path / "disk")
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(doctor, "fill", full)
    with pytest.raises(IoError, match="No space left"):
        examine(tmp_path / "disk")
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(doctor.tempfile, "NamedTemporaryFile", refuse)
    with pytest.raises(IoError, match=r"disk: no file can be written here: Read-only file system"):
        examine(tmp_path / "disk")


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blocked").write_text("in the way")
    monkeypatch.setenv("MOEFLUX_CACHE", str(tmp_path / "blocked" / "cache"))
    found = examine(tmp_path / "disk", quick=True)
    assert found.kept.startswith("not remembered: ")
    assert remembered(tmp_path) is None


@pytest.mark.parametrize("nameless", [True, False])
def test_ctrl_c_takes_the_file_away(tmp_path: Path, nameless: bool) -> None:
    """A file without a name is gone even when the program is killed."""
    disk = tmp_path / "disk"
    if nameless and not doctor.NAMELESS.is_dir():
        pytest.skip("there is no /proc")
    program = "import sys; from pathlib import Path; from moeflux import cli; from moeflux.measure import doctor; "
    program += "" if nameless else f"doctor.NAMELESS = Path({str(tmp_path / 'none')!r}); "
    program += "sys.exit(cli.main())"
    with subprocess.Popen(
        [sys.executable, "-c", program, "doctor", "--quick", str(disk)], stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if "direct, 1 at a time" in line or "buffered, 1 at a time" in line:
                break
        assert nameless == (list(disk.iterdir()) == [])
        run.send_signal(signal.SIGINT)
        rest = run.stderr.read()
    assert run.returncode == 130
    assert "moeflux doctor: interrupted\n" in rest
    assert list(disk.iterdir()) == []
    assert remembered(disk) is None


# ---- What follows from it ---------------------------------------------------------------------------------------


def rates(*speeds: tuple[str, int, float]) -> tuple[ReadRate, ...]:
    return tuple(ReadRate(reads, readers, 10, round(speed * 1e6), 1.0) for reads, readers, speed in speeds)


@pytest.mark.parametrize(
    ("speeds", "reads", "readers", "words"),
    [
        ([("direct", 1, 1000), ("direct", 2, 2000), ("buffered", 4, 900)], "direct", 2, "nothing was faster"),
        ([("direct", 1, 1960), ("direct", 8, 2000), ("buffered", 4, 900)], "direct", 1, "with fewer threads"),
        ([("direct", 4, 1910), ("buffered", 1, 2000)], "direct", 4, "the memory is left to the slots"),
        ([("direct", 1, 1000), ("direct", 4, 1890), ("buffered", 8, 2000)], "buffered", 8, "best otherwise: direct"),
        ([("buffered", 1, 500), ("buffered", 2, 490)], "buffered", 1, "nothing was faster"),
    ],
)
def test_recommendations(speeds: Any, reads: str, readers: int, words: str) -> None:
    best, reason = recommend(rates(*speeds))
    assert (best.reads, best.readers) == (reads, readers)
    assert words in reason


PROBE = Probe(1e9, 2e10, "direct", 3, DEFAULT_EXPERT, memory_of_doctor.datetime(2026, 1, 2, 3, 4, 5))


def test_a_model_is_opened_with_what_was_found(folder: Folder) -> None:
    store = folder("qwen3_5_moe")
    assert " 4 readers" in repr(moeflux.load(store, expert_slots=16))
    remember(store, PROBE)
    assert " 3 readers, direct" in repr(moeflux.load(store, expert_slots=16))
    assert " 5 readers" in repr(moeflux.load(store, expert_slots=16, readers=5))
    remember(store, replace(PROBE, reads="buffered"))
    assert " 3 readers, buffered" in repr(moeflux.load(store, expert_slots=16))
    assert " 3 readers, direct" in repr(moeflux.load(store, expert_slots=16, reads="direct"))


def test_with_a_slot_for_every_expert_reads_stay_buffered(folder: Folder) -> None:
    store = folder("qwen3_5_moe")
    plain = repr(moeflux.load(store))
    remember(store, PROBE)
    assert repr(moeflux.load(store)) == plain.replace("4 readers", "3 readers")


# ---- The command ------------------------------------------------------------------------------------------------


def test_the_command_prints_and_remembers(tmp_path: Path, capsys: Output) -> None:
    assert main(["doctor", "--quick", str(tmp_path / "disk")]) == 0
    out, err = capsys.readouterr()
    for word in (
        "recommended",
        "because",
        "direct",
        "buffered",
        "open files",
        "page size",
        "memory, 1 thread ",
        "MB a read",
    ):
        assert word in out
    assert "writing" in err
    probe = remembered(tmp_path)
    assert probe is not None
    assert f"reads={probe.reads!r}, readers={probe.readers}" in out


def test_the_command_as_json(folder: Folder, capsys: Output) -> None:
    assert main(["doctor", "--quick", "--json", str(folder("qwen3_5_moe"))]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["recommended"]["readers"] in (1, 2, 4, 8)
    assert Path(values["kept"]).is_file()
    for rate in values["disk"]:
        assert rate["bytes_per_second"] == rate["bytes"] / rate["seconds"]


def test_the_limits_as_json_are_numbers_by_plain_names() -> None:
    limits = asdict(doctor.limits_here())
    assert all(re.fullmatch("[a-z_]+", name) for name in limits)
    assert limits.keys() - {"huge_pages", "available_source"} == {
        name for name, value in limits.items() if value is None or isinstance(value, int)
    }


@pytest.mark.parametrize("place", ["none", "file"])
def test_the_command_refuses(tmp_path: Path, place: str, capsys: Output) -> None:
    (tmp_path / "file").write_text("")
    assert main(["doctor", str(tmp_path / place)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"moeflux doctor: {tmp_path / place}: expected a folder" in err


def test_it_is_bounded_in_time(tmp_path: Path) -> None:
    """A slow disk's file stays short: the clock is advanced by hand."""
    clock = iter(range(1000))
    written: list[int] = []

    class File:
        def write(self, data: bytes) -> int:
            written.append(len(data))
            return len(data)

        def fileno(self) -> int:
            return descriptor

    with (tmp_path / "x").open("wb") as real, pytest.MonkeyPatch.context() as patch:
        descriptor = real.fileno()
        patch.setattr(time, "monotonic", lambda: next(clock))
        doctor.fill(File(), replace(SMALL, file_bytes=10**10, write_seconds=5))
    assert 100 * DEFAULT_EXPERT <= sum(written) <= 100 * DEFAULT_EXPERT + 2 * (1 << 24)


def test_a_diagnosis_is_a_value(tmp_path: Path) -> None:
    found = examine(tmp_path / "disk", quick=True)
    assert isinstance(found, Diagnosis)
    assert str(found).count("\n") > 12
    assert json.dumps(found.to_dict())
