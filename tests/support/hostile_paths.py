"""What may lie in place of a file, what can be no path, and a watch over tests that must not hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def impatience() -> Iterator[None]:
    """Ends a test that hangs: it would hang for ever, because no test here waits for anything."""

    def give_up(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_pipe(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def make_device(path: Path) -> Path:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")
    return path


def make_huge(path: Path) -> Path:
    """Larger than any limit, and no byte of it on the disk."""
    with path.open("ab") as file:
        file.truncate(1 << 42)
    return path


def make_directory(path: Path) -> Path:
    path.unlink(missing_ok=True)
    path.mkdir()
    return path


HOSTILE = {
    "a pipe": (make_pipe, "found a pipe|found nothing|found something else"),
    "a device": (make_device, "found a device"),
    "huge": (make_huge, r"expected at most \d+ bytes|found 4398046511104"),
    "a directory": (make_directory, "found a directory"),
}
NO_PATHS = {
    "NUL": "a\0b",
    "a name too long": "n" * 300,
    "a path too long": "n/" * 4000,
    "not Unicode": "\udcff",
    "nothing": "",
}
ANSWERS = ("nothing", False, None)
