"""Where a new store goes: what may be replaced, whether it fits, what an earlier run left, putting it in place.

A store grows in DEST.partial and gets its name when it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moeflux.conversion.journal import JOURNAL
from moeflux.conversion.packer import Content, Packer, sync
from moeflux.errors import Error, FormatError, IoError, StateError
from moeflux.progress import Progress
from moeflux.sizes import size_text
from moeflux.stores import packed

__all__ = [
    "JSON_ALLOWANCE",
    "check_destination",
    "check_space",
    "discard",
    "free_bytes",
    "kept_when_interrupted",
    "partial_of",
    "replace_store",
    "resumable",
]

JSON_ALLOWANCE = 16 << 20
"""Room for the small files."""


def partial_of(dest: Path) -> Path:
    return dest.with_name(f"{dest.name}.partial")


def check_destination(source: Path | None, dest: Path, force: bool) -> None:
    """Refuses to write into the source, or over anything that is not asked to be replaced."""
    if source and not source.is_dir():
        raise FormatError(f"{source}: expected a folder, found {'a file' if source.exists() else 'nothing'}")
    inner, outer = dest.resolve(), source.resolve() if source else None
    if outer and (inner == outer or outer in inner.parents or inner in outer.parents):
        raise StateError(f"{dest}: expected a folder apart from the source {source}")
    if not dest.exists() or (dest.is_dir() and not any(dest.iterdir())):
        return
    if not force:
        raise StateError(f"{dest}: expected nothing there, found something; use force (--force) to replace a store")
    if not any((dest / name).is_file() for name in (packed.DESCRIPTION, packed.MANIFEST)):
        raise StateError(f"{dest}: expected a packed store to replace, found something else, which is left alone")


def resumable(content: Content, partial: Path, force: bool) -> int:
    """Bytes of this very conversion that `partial` holds. Anything else in it: StateError, unless forced."""
    if not partial.exists() or not any(partial.iterdir()):
        return 0
    try:
        return Packer(content, partial).peek()
    except Error:
        if force and (partial / JOURNAL).exists():
            return 0
        raise


def discard(partial: Path) -> None:
    """Removes an unfinished store of which nothing can be used. Only what is one."""
    if (partial / JOURNAL).exists():
        shutil.rmtree(partial)


@contextmanager
def kept_when_interrupted(partial: Path, progress: Progress) -> Iterator[None]:
    """Ctrl-C within it says what there is to go on from."""
    try:
        yield
    except KeyboardInterrupt:
        if partial.exists():
            progress.note(f"{partial} keeps what is done; the same command goes on from there")
        raise


def check_space(dest: Path, needed: int) -> None:
    free = free_bytes(dest)
    if free < needed:
        raise IoError(
            f"{dest}: expected {needed} bytes free on this disk ({size_text(needed)}), found {free} ({size_text(free)})"
        )


def free_bytes(path: Path) -> int:
    """Free space of the disk where `path` is, or would be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def replace_store(partial: Path, dest: Path) -> None:
    """Puts the finished folder in its place. A store that is already there goes only once the new one is complete."""
    old = dest.with_name(f"{dest.name}.replaced-{os.getpid()}")
    if dest.exists():
        os.rename(dest, old)
    os.rename(partial, dest)
    sync(dest.parent)
    (dest / JOURNAL).unlink(missing_ok=True)
    if old.exists():
        shutil.rmtree(old)
