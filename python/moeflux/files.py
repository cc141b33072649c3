"""Files from outside, and files of our own: the one way to look at a path, to open what lies there, and to write.

Paths come from users, from folders that somebody else filled and from a cache that others may write to. Anything may
lie there: a pipe without a writer, a device without an end, a sparse file of terabytes. So nothing is opened but
regular files, nothing is read beyond a limit, and what the system says becomes an error of ours that names the path.
No other module of the package touches the file system; tests/test_files.py holds them to it.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeflux import _core
from moeflux.errors import FormatError, IoError

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "JSON_LIMIT",
    "TEXT_LIMIT",
    "disk_of",
    "exists",
    "expanded",
    "expect_folder",
    "free_bytes",
    "is_file",
    "is_folder",
    "is_link",
    "is_same",
    "kind_of",
    "listed",
    "make_folder",
    "open_file",
    "open_to_write",
    "parse_json",
    "path_of",
    "read_bytes",
    "read_json",
    "read_text",
    "remove",
    "remove_folder",
    "rename",
    "resolved",
    "size_and_time",
    "size_of",
    "status_of",
    "stdin_text",
    "sync",
    "system_errors",
    "system_text",
    "tell_system",
    "text_of",
    "write_atomically",
]

StrPath = str | os.PathLike[str]

JSON_LIMIT = 128 << 20
"""Bytes: as the reader of JSON has it, and for whatever lies beside it."""
TEXT_LIMIT = 256 << 20
"""Of a text that a person gives to be read."""
LONGEST_SHOWN = 200


# ---- Paths ------------------------------------------------------------------------------------------------------


def path_of(path: StrPath) -> Path:
    """A path as given, or FormatError when none can be."""
    try:
        found = os.fspath(path)
    except TypeError:
        found = b""
    if not isinstance(found, str):
        raise FormatError(f"path: expected text or a Path, found {type(path).__name__}")
    if not found:
        raise FormatError("path: expected text or a Path, found an empty one")
    if "\0" in found:
        raise FormatError(f"{shown(found)}: a path cannot hold a NUL byte")
    return Path(found)


def shown(path: StrPath) -> str:
    """For a message, which a path of a megabyte would drown."""
    text = str(path).replace("\0", "\\0")
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN // 2]}...{text[-LONGEST_SHOWN // 2 :]}"


@contextmanager
def system_errors(path: StrPath, kept: str = "") -> Iterator[None]:
    """Errors of the system in its `with` are IoErrors that name the path. `kept`: what a full disk leaves."""
    try:
        yield
    except MemoryError as error:
        raise IoError(f"{shown(path)}: expected memory for its content, found too little") from error
    except OSError as error:
        reason = error.strerror or str(error)
        if kept and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason += f"; {kept}"
        raise IoError(f"{shown(error.filename or path)}: {reason}") from error


# ---- Looking ----------------------------------------------------------------------------------------------------


def status_of(path: StrPath, *, follow: bool = True) -> os.stat_result | None:
    """None when there is nothing."""
    path = path_of(path)
    with system_errors(path):
        try:
            return os.stat(path, follow_symlinks=follow)
        except (FileNotFoundError, NotADirectoryError):
            return None


def kind_of(path: StrPath) -> str:
    """ "nothing", "a file", "a directory", or what else is there."""
    status = status_of(path)
    return "nothing" if status is None else _kind(status.st_mode)


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "a file"
    if stat.S_ISDIR(mode):
        return "a directory"
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


def is_link(status: os.stat_result) -> bool:
    return stat.S_ISLNK(status.st_mode)


def is_same(path: StrPath, descriptor: int) -> bool:
    """Whether what lies at a path is what a descriptor is open on."""
    status = status_of(path)
    return status is not None and os.path.samestat(status, os.fstat(descriptor))


def exists(path: StrPath) -> bool:
    return status_of(path) is not None


def is_file(path: StrPath) -> bool:
    return kind_of(path) == "a file"


def is_folder(path: StrPath) -> bool:
    return kind_of(path) == "a directory"


def expect_folder(path: StrPath) -> Path:
    kind = kind_of(path)
    if kind != "a directory":
        raise FormatError(f"{shown(path)}: expected a folder, found {kind}")
    return path_of(path)


def size_of(path: StrPath) -> int:
    """Of a file that is there."""
    return size_and_time(path)[0]


def size_and_time(path: StrPath) -> tuple[int, int]:
    """Of a file that is there: its bytes, and when it was changed, in nanoseconds."""
    with system_errors(path):
        status = os.stat(path_of(path))
    return status.st_size, status.st_mtime_ns


def listed(folder: StrPath, pattern: str = "*") -> list[Path]:
    """What lies in a folder and fits the pattern, in order; with "**" in it, at any depth."""
    folder = path_of(folder)
    with system_errors(folder):
        return sorted(folder.glob(pattern))


def resolved(path: StrPath) -> Path:
    """Absolute, without links."""
    path = path_of(path)
    try:
        with system_errors(path):
            return path.resolve()
    except RuntimeError as error:  # a circle of links, before Python 3.13
        if isinstance(error, IoError):
            raise
        raise IoError(f"{shown(path)}: {os.strerror(errno.ELOOP)}") from error


def expanded(path: StrPath) -> Path:
    """With the user's home folder in place of a leading "~"."""
    path = path_of(path)
    try:
        return path.expanduser()
    except RuntimeError as error:  # nobody of that name, or no home
        raise FormatError(f"{shown(path)}: expected a path, found {error}") from error


def free_bytes(path: StrPath) -> int:
    """Free space of the disk where `path` is, or would be."""
    path = resolved(path)
    while not exists(path):
        path = path.parent
    with system_errors(path):
        return shutil.disk_usage(path).free


def disk_of(path: StrPath) -> tuple[int, int]:
    """The numbers of its file system (0 where it has none) and of its device."""
    with system_errors(path):
        return os.statvfs(path).f_fsid, os.stat(path).st_dev


# ---- Reading ----------------------------------------------------------------------------------------------------


def open_file(path: StrPath) -> io.FileIO:
    """A regular file for reading, unbuffered; links are followed."""
    path = path_of(path)
    try:
        # Without O_NONBLOCK the opening of a pipe waits for its writer; a terminal must not become the process's own.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise IoError(f"{shown(path)}: cannot be opened: {error.strerror}") from error
    return io.FileIO(_regular(path, descriptor))


def _regular(path: Path, descriptor: int) -> int:
    """The descriptor, closed when it is of anything but a regular file."""
    kind = _kind(os.fstat(descriptor).st_mode)
    if kind != "a file":
        os.close(descriptor)
        raise FormatError(f"{shown(path)}: expected a regular file, found {kind}")
    return descriptor


def read_bytes(path: StrPath, limit: int = JSON_LIMIT) -> bytes:
    """The whole file. FormatError when it is longer than `limit`, before anything is read."""
    path = path_of(path)
    with io.BufferedReader(open_file(path)) as file, system_errors(path):
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise FormatError(f"{shown(path)}: expected at most {limit} bytes, found {size}")
        return file.read(size)


def read_text(path: StrPath, limit: int = TEXT_LIMIT) -> str:
    """The whole file, which is UTF-8."""
    return text_of(read_bytes(path, limit), shown(path))


def text_of(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: expected UTF-8, found byte {error.start} to be none") from error


def read_json(path: StrPath) -> Any:
    """The value of a JSON file, read strictly."""
    return _core.read_json(path_of(path))


def parse_json(text: str | bytes, where: str, without: frozenset[str] = frozenset()) -> Any:
    """The value of a JSON text, read strictly: neither its depth nor the digits of a number can do harm. Members named
    in `without` are checked and then None, for they are large."""
    return _core.parse_json(text, where, without)


def stdin_text(limit: int = TEXT_LIMIT) -> str:
    """What comes on stdin, to its end. UTF-8."""
    with system_errors("stdin"):
        data = sys.stdin.buffer.read(limit + 1)
    if len(data) > limit:
        raise FormatError(f"stdin: expected at most {limit} bytes, found more")
    return text_of(data, "stdin")


def system_text(path: Path) -> str:
    """What the kernel says in a file of /proc or /sys. OSError when it says nothing, to which every caller has an
    answer."""
    return path.read_text()


def tell_system(path: Path, text: str) -> None:
    """To a file of /proc. OSError when it will not listen."""
    path.write_text(text)


# ---- Writing ----------------------------------------------------------------------------------------------------


def write_atomically(path: StrPath, chunks: Iterable[bytes | np.ndarray], *, private: bool = False) -> None:
    """The whole file or none of it, whoever else writes there: under a name of its own first, on the disk before it
    takes the place of what was there. `private`: for its owner's eyes only."""
    path = path_of(path)
    kind = kind_of(path)
    if kind not in ("nothing", "a file"):
        raise FormatError(f"{shown(path)}: expected a file to replace, or nothing, found {kind}")
    kept = "nothing was written" if kind == "nothing" else "the file that was there is kept"
    partial = path.parent / f".moeflux-{secrets.token_hex(8)}.partial"
    try:
        with system_errors(path, kept):
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with open(os.open(partial, flags, 0o600 if private else 0o666), "wb") as file:
                    for chunk in chunks:
                        file.write(chunk if isinstance(chunk, bytes) else _bytes_of(chunk))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, path)
            except OSError as error:  # the name that is the caller's, not this one
                raise OSError(error.errno, error.strerror) from error
        sync(path.parent)
    finally:
        with suppress(OSError):
            os.unlink(partial)


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view("u1"))


def open_to_write(path: StrPath, *, append: bool = False) -> int:
    """A descriptor of a regular file, made where there is none. No link is followed: what is written lies here."""
    path = path_of(path)
    status = status_of(path, follow=False)
    if status is not None and (kind := _kind(status.st_mode)) != "a file":
        raise FormatError(f"{shown(path)}: expected a regular file, found {kind}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    with system_errors(path):
        return _regular(path, os.open(path, flags | (os.O_APPEND if append else 0), 0o666))


def sync(path: StrPath) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    with system_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that cannot do it for folders
                raise
        finally:
            os.close(descriptor)


def make_folder(path: StrPath) -> None:
    path = path_of(path)
    with system_errors(path):
        path.mkdir(parents=True, exist_ok=True)


def rename(path: StrPath, to: StrPath) -> None:
    with system_errors(path):
        os.rename(path, to)


def remove(path: StrPath) -> None:
    """A file, if it is there."""
    with system_errors(path), suppress(FileNotFoundError):
        os.unlink(path)


def remove_folder(path: StrPath) -> None:
    """With all that is in it; a link itself, and not what it leads to."""
    with system_errors(path):
        shutil.rmtree(path)
