"""What doctor found is found again by machine and disk, and a file that is not right is as good as none."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from moeflux import IoError
from moeflux.machine import remembered as module
from moeflux.machine.remembered import Probe, cache_folder, identity, remember, remembered
from moeflux.measure import doctor

PROBE = Probe(1.75e9, 2.5e10, "direct", 2, 1769472, datetime(2026, 2, 3, 4, 5, 6, tzinfo=timezone.utc))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOEFLUX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "warned", set())
    return tmp_path / "cache"


def test_what_was_never_asked_is_none(tmp_path: Path, cache: Path) -> None:
    assert doctor.remembered(tmp_path) is None
    assert not cache.exists()


def test_it_is_found_again_for_anything_on_the_disk(tmp_path: Path, cache: Path) -> None:
    file = remember(tmp_path, PROBE)
    assert file.parent == cache
    for path in (tmp_path, str(tmp_path), tmp_path / "not" / "there", file):
        assert doctor.remembered(path) == PROBE
    assert [entry.name for entry in cache.iterdir()] == [file.name]


def test_the_newest_replaces_what_was_known(tmp_path: Path) -> None:
    remember(tmp_path, PROBE)
    newer = replace(PROBE, reads="buffered", readers=8)
    remember(tmp_path, newer)
    assert remembered(tmp_path) == newer


def test_other_disks_and_machines_know_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(tmp_path, PROBE)
    here = identity(tmp_path)
    for key in here:
        monkeypatch.setattr(module, "identity", lambda path, key=key: {**here, key: "another"})
        assert remembered(tmp_path) is None


def test_a_disk_without_a_number_goes_by_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nameless:
        f_fsid = 0

    assert identity(tmp_path)["disk"].startswith("filesystem ")
    monkeypatch.setattr(os, "statvfs", lambda path: Nameless)
    assert identity(tmp_path)["disk"] == f"device {tmp_path.stat().st_dev:x}"


def without(name: str) -> Any:
    return lambda values: {key: value for key, value in values.items() if key != name}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda values: {**values, "version": 2}, "version: expected 1, found 2"),
        (lambda values: {**values, "machine": "1 x other"}, "machine: expected"),
        (lambda values: {**values, "disk": 7}, "disk: expected"),
        (lambda values: {**values, "reads": "mmap"}, 'reads: expected "direct" or "buffered"'),
        (lambda values: {**values, "readers": 0}, "readers: expected a whole number from 1 to 256, found 0"),
        (lambda values: {**values, "readers": 2.0}, "readers: expected a whole number"),
        (lambda values: {**values, "readers": True}, "readers: expected a whole number"),
        (lambda values: {**values, "disk_bytes_per_second": float("nan")}, "expected a value"),
        (lambda values: {**values, "disk_bytes_per_second": 1e16}, "disk_bytes_per_second: expected"),
        (lambda values: {**values, "memory_bytes_per_second": "fast"}, "memory_bytes_per_second: expected"),
        (lambda values: {**values, "when": "yesterday"}, "yesterday"),
        (lambda values: {**values, "when": 7}, "not used"),
        (without("readers"), "no 'readers'"),
        (lambda values: [values], "not used"),
        (lambda values: None, "not used"),
    ],
)
def test_a_foreign_file_is_ignored_with_one_warning(tmp_path: Path, change: Any, reason: str) -> None:
    file = remember(tmp_path, PROBE)
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.warns(RuntimeWarning, match="not used") as caught:
        assert remembered(tmp_path) is None
        assert remembered(tmp_path) is None
    (warning,) = caught
    assert reason in str(warning.message)
    assert str(file) in str(warning.message)


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"\0" * 4096])
def test_a_damaged_file_is_ignored_and_replaced(tmp_path: Path, damage: bytes) -> None:
    written_file = remember(tmp_path, PROBE)
    written_file.write_bytes(damage)
    with pytest.warns(RuntimeWarning, match="not used"):
        assert remembered(tmp_path) is None
    remember(tmp_path, PROBE)
    assert remembered(tmp_path) == PROBE


def test_every_cut_of_the_file_is_refused(tmp_path: Path) -> None:
    file = remember(tmp_path, PROBE)
    content = file.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in range(len(content)):
            file.write_bytes(content[:length])
            assert remembered(tmp_path) is None


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path, cache: Path, monkeypatch: Any) -> None:
    remember(tmp_path, PROBE)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(IoError, match="No space left on device; the file that was there is kept"):
        remember(tmp_path, replace(PROBE, readers=3))
    assert len(list(cache.iterdir())) == 1
    assert remembered(tmp_path) == PROBE


def test_a_cache_that_is_no_folder_is_none(tmp_path: Path, cache: Path) -> None:
    cache.write_text("in the way")
    assert remembered(tmp_path) is None


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    own, xdg, relative = {"MOEFLUX_CACHE": "/x"}, {"XDG_CACHE_HOME": "/c"}, {"XDG_CACHE_HOME": "c"}
    assert cache_folder(own | xdg, "linux") == Path("/x")
    assert cache_folder(xdg, "linux") == Path("/c/moeflux")
    for nothing in (relative, {}, {"MOEFLUX_CACHE": ""}):
        assert cache_folder(nothing, "linux") == Path("/home/ada/.cache/moeflux")
    assert cache_folder({}, "darwin") == Path("/home/ada/Library/Caches/moeflux")


def test_without_a_home_nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MOEFLUX_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert remembered(tmp_path) is None
