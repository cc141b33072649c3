"""Where a new store goes. This module decides who may write, what may be replaced, whether the store fits and what an
earlier run left, and it puts the store in place.

A store grows in DEST.partial and gets its name when it is complete. Whoever makes it holds the lock of DEST.lock, which
the system takes from a process that ends, however it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from moeflux import files
from moeflux.conversion.journal import JOURNAL
from moeflux.conversion.packer import Content, Packer
from moeflux.errors import ArgumentError, Error, IoError, StateError
from moeflux.models.gguf import find_gguf
from moeflux.progress import Progress
from moeflux.sizes import size_text
from moeflux.stores import packed

__all__ = [
    "JSON_ALLOWANCE",
    "check_destination",
    "check_space",
    "destination",
    "growing",
    "partial_of",
    "reserved",
    "resumable",
]

JSON_ALLOWANCE = 16 << 20
"""Room for the small files."""
MAX_WORDS = 4096  # bytes of a lock's file


def destination(dest: str | Path) -> Path:
    """Where DEST really is. A link is followed, so that it stays, and "." gets a name."""
    path = files.expanded(dest)
    status = files.status_of(path, follow=False)
    return path if path.name and (status is None or not files.is_link(status)) else files.resolved(path)


def partial_of(dest: Path) -> Path:
    return dest.with_name(f"{dest.name}.partial")


# ---- Whose turn it is -------------------------------------------------------------------------------------------


@contextmanager
def reserved(dest: Path) -> Generator[None, None, None]:
    """Lets only one of all processes and threads make DEST at a time. A StateError tells the others who does."""
    path = dest.with_name(f"{dest.name}.lock")
    files.make_folder(path.parent)
    descriptor = _locked(path, dest)
    try:
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        words = {"pid": os.getpid(), "host": platform.node(), "since": now}
        with files.system_errors(path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(words).encode())
        yield
    finally:
        files.remove(path)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that this process forked may hold the descriptor too
        os.close(descriptor)


def _locked(path: Path, dest: Path) -> int:
    while True:
        descriptor = files.open_to_write(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if files.is_same(path, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise StateError(f"{dest}: expected nobody else to write there, found {_holder(path)}") from None
        except OSError as error:
            os.close(descriptor)
            raise IoError(f"{path}: cannot be locked: {error.strerror}") from error
        os.close(descriptor)  # another process was done, and removed the file before it was locked here


def _holder(path: Path) -> str:
    try:
        words = files.parse_json(files.read_bytes(path, MAX_WORDS), str(path))
        return f"process {words['pid']:d} on {words['host']!s:.100} at it since {words['since']!s:.40}"
    except (Error, ValueError, TypeError, KeyError):  # the other process has not written it yet
        return "another process at it"


# ---- Before -----------------------------------------------------------------------------------------------------


def check_destination(source: Path | None, dest: Path, force: bool) -> None:
    """Refuses to write into the source, or over anything that the caller did not ask to replace."""
    if source:
        if find_gguf(source) is None:
            files.expect_folder(source)
        inner, outer = files.resolved(dest), files.resolved(source)
        if inner == outer or outer in inner.parents or inner in outer.parents:
            raise ArgumentError(f"{dest}: expected a folder apart from the source {source}")
    if not files.exists(dest) or (files.is_folder(dest) and not files.listed(dest)):
        return
    if not force:
        raise StateError(f"{dest}: expected nothing there, found something; use force (--force) to replace a store")
    if not _is_store(dest):
        raise StateError(f"{dest}: expected a packed store to replace, found something else, which is left alone")


STORE = (packed.DESCRIPTION, packed.MANIFEST)
"""Files of which every packed store has one."""


def _is_store(folder: Path) -> bool:
    return any(files.is_file(folder / name) for name in STORE)


def resumable(content: Content, partial: Path, force: bool) -> int:
    """Bytes of this very conversion that `partial` holds. StateError if it holds anything else, unless forced."""
    if not files.exists(partial) or not files.listed(partial):
        return 0
    try:
        return Packer(content, partial).peek()
    except Error:
        if force and files.exists(partial / JOURNAL):
            return 0
        raise


def check_space(dest: Path, needed: int) -> None:
    free = files.free_bytes(dest)
    if free < needed:
        raise IoError(
            f"{dest}: expected {needed} bytes free on this disk ({size_text(needed)}), found {free} ({size_text(free)})"
        )


# ---- Making it --------------------------------------------------------------------------------------------------


@contextmanager
def growing(content: Content, dest: Path, resumed: int, progress: Progress) -> Generator[Packer, None, None]:
    """Gives the packer that fills DEST.partial, and puts the store in its place at the end of the `with`. DEST must be
    reserved."""
    partial = partial_of(dest)
    if not resumed:
        _discard(partial)
    kept = f"{partial} keeps what is done; the same command goes on from there"
    packer = Packer(content, partial)
    try:
        packer.begin()
        yield packer
    except KeyboardInterrupt:
        if files.exists(partial):
            progress.note(kept)
        raise
    except IoError as error:
        if isinstance(error.__cause__, OSError):  # of the system, which may have changed its mind by then
            raise IoError(f"{error}; {kept}") from error
        raise
    finally:
        packer.close()
    _replace_store(partial, dest)


def _discard(partial: Path) -> None:
    """Removes an unfinished store of which nothing can be used, and only if it is one."""
    if files.exists(partial / JOURNAL):
        files.remove_folder(partial, last=[JOURNAL])


def _replace_store(partial: Path, dest: Path) -> None:
    """Puts the finished folder in its place. A store that is already there goes only once the new one is complete."""
    old = dest.with_name(f"{dest.name}.replaced")
    _remove_store(old)  # left by a run that was killed between the two renames
    if files.exists(dest):
        files.rename(dest, old)
    files.rename(partial, dest)
    files.sync(dest.parent)
    files.remove(dest / JOURNAL)
    _remove_store(old)


def _remove_store(folder: Path) -> None:
    if not files.exists(folder):
        return
    if files.listed(folder) and not _is_store(folder):
        raise StateError(f"{folder}: expected a store that was replaced, found something else, which is left alone")
    files.remove_folder(folder, last=STORE)
