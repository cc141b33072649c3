"""The one way to look at a path, to open what lies there, and to write.

Paths come from users, from folders that somebody else filled and from a cache that others may write to. Anything may
lie there: a pipe without a writer, a device without an end, a sparse file of terabytes. So only regular files are
opened, nothing is read beyond a limit, and system errors become errors of ours that name the path. No other module of
the package touches the file system; tests/formats/test_files.py holds them to it.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeflux import _core
from moeflux.errors import ArgumentError, Error, FormatError, IoError, NotFoundError

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
    "io_error",
    "is_file",
    "is_folder",
    "is_link",
    "is_partial",
    "is_same",
    "kind_of",
    "listed",
    "make_folder",
    "make_private_folder",
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
    "sweep",
    "sync",
    "system_errors",
    "system_text",
    "tell_system",
    "text_of",
    "touch",
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
    """The path as given, or ArgumentError when it can be no path."""
    found: object
    try:
        found = os.fspath(path)
    except TypeError:
        found = None
    if not isinstance(found, str):
        raise ArgumentError(f"path: expected text or a Path, found {type(path).__name__}")
    if not found:
        raise ArgumentError("path: expected text or a Path, found an empty one")
    if "\0" in found:
        raise ArgumentError(f"{shown(found)}: a path cannot hold a NUL byte")
    return Path(found)


def shown(path: StrPath) -> str:
    """The path as a message shows it. A path of a megabyte would drown the message."""
    text = str(path).replace("\0", "\\0")
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN // 2]}...{text[-LONGEST_SHOWN // 2 :]}"


@contextmanager
def system_errors(path: StrPath, kept: str = "") -> Generator[None, None, None]:
    """Turns system errors inside the `with` into IoErrors that name the path. `kept`: what a full disk leaves."""
    try:
        yield
    except Error:  # of which one is of the system too
        raise
    except MemoryError as error:
        raise IoError(f"{shown(path)}: expected memory for its content, found too little") from error
    except OSError as error:
        reason = error.strerror or str(error)
        if kept and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason += f"; {kept}"
        raise io_error(error, f"{shown(error.filename or path)}: {reason}") from error


def io_error(error: OSError, message: str) -> IoError:
    return NotFoundError(message) if error.errno == errno.ENOENT else IoError(message)


# ---- Looking ----------------------------------------------------------------------------------------------------


def status_of(path: StrPath, *, follow: bool = True) -> os.stat_result | None:
    """The status of what lies there; None when there is nothing."""
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
    if kind == "nothing":
        raise NotFoundError(f"{shown(path)}: expected a folder, found nothing")
    if kind != "a directory":
        raise FormatError(f"{shown(path)}: expected a folder, found {kind}")
    return path_of(path)


def size_of(path: StrPath) -> int:
    """The bytes of a file that exists."""
    return size_and_time(path)[0]


def size_and_time(path: StrPath) -> tuple[int, int]:
    """The bytes of a file that exists, and the time of its last change in nanoseconds."""
    with system_errors(path):
        status = os.stat(path_of(path))
    return status.st_size, status.st_mtime_ns


def listed(folder: StrPath, pattern: str = "*") -> list[Path]:
    """The paths in a folder that fit the pattern, sorted; with "**" in the pattern, at any depth."""
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
    """The path with the user's home folder in place of a leading "~"."""
    path = path_of(path)
    try:
        return path.expanduser()
    except RuntimeError as error:  # no user of that name, or no home folder
        raise ArgumentError(f"{shown(path)}: expected a path, found {error}") from error


def free_bytes(path: StrPath) -> int:
    """Free space of the disk where `path` is, or would be."""
    path = resolved(path)
    while not exists(path):
        path = path.parent
    with system_errors(path):
        return shutil.disk_usage(path).free


def disk_of(path: StrPath) -> tuple[int, int]:
    """The number of the path's file system (0 if it has none) and that of its device."""
    with system_errors(path):
        return os.statvfs(path).f_fsid, os.stat(path).st_dev


# ---- Reading ----------------------------------------------------------------------------------------------------


def open_file(path: StrPath) -> io.FileIO:
    """Opens a regular file for reading, unbuffered. Links are followed."""
    path = path_of(path)
    try:
        # Without O_NONBLOCK, opening a pipe waits for its writer. A terminal must not become that of this process.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise io_error(error, f"{shown(path)}: cannot be opened: {error.strerror}") from error
    return io.FileIO(_regular(path, descriptor))


def _regular(path: Path, descriptor: int) -> int:
    """Returns the descriptor of a regular file. Closes any other and raises."""
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
    in `without` are large. They are checked, and their values are None."""
    return _core.parse_json(text, where, without)


def stdin_text(limit: int = TEXT_LIMIT) -> str:
    """The text on stdin, to its end, which must be UTF-8."""
    with system_errors("stdin"):
        data = sys.stdin.buffer.read(limit + 1)
    if len(data) > limit:
        raise FormatError(f"stdin: expected at most {limit} bytes, found more")
    return text_of(data, "stdin")


def system_text(path: Path) -> str:
    """The text of a file in /proc or /sys. OSError when the kernel gives none; every caller can do without it."""
    return path.read_text()


def tell_system(path: Path, text: str) -> None:
    """Writes to a file in /proc. OSError when the kernel refuses."""
    path.write_text(text)


# ---- Writing ----------------------------------------------------------------------------------------------------


PARTIAL = re.compile(r"\.moeflux-[0-9a-f]{16}\.partial")
_swept: set[Path] = set()


def is_partial(path: Path) -> bool:
    """Whether this is the name of a file that is being written, or was when its process was killed."""
    return PARTIAL.fullmatch(path.name) is not None


def sweep(folder: StrPath) -> None:
    """Removes the files that processes were writing here when they were killed. Whoever still writes one has it
    locked."""
    folder = path_of(folder)
    _swept.add(folder)
    for path in filter(is_partial, listed(folder)):
        with suppress(OSError):  # it is locked, or gone
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(descriptor)


def _new_partial(folder: Path, mode: int) -> tuple[Path, int]:
    """A file of a name of its own, locked. Without the lock where the file system has none."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        path = folder / f".moeflux-{secrets.token_hex(8)}.partial"
        descriptor = os.open(path, flags, mode)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if is_same(path, descriptor):
            return path, descriptor
        os.close(descriptor)  # somebody swept before it was locked


def write_atomically(
    path: StrPath, chunks: Iterable[bytes | np.ndarray], *, private: bool = False, first: bool = False
) -> None:
    """Writes the whole file or nothing, whoever else writes there. The file is written and synced under a name of its
    own, and then replaces what was there. `private`: only its owner may read it. `first`: a file that is there stays,
    also if somebody else has made it meanwhile. What a process that was killed left goes when another one writes to
    the folder for the first time."""
    path = path_of(path)
    kind = kind_of(path)
    if kind not in ("nothing", "a file"):
        raise FormatError(f"{shown(path)}: expected a file to replace, or nothing, found {kind}")
    kept = "nothing was written" if kind == "nothing" else "the file that was there is kept"
    if path.parent not in _swept:
        sweep(path.parent)
    with system_errors(path, kept):
        try:
            partial, descriptor = _new_partial(path.parent, 0o600 if private else 0o666)
            try:
                with open(descriptor, "wb") as file:
                    for chunk in chunks:
                        file.write(chunk if isinstance(chunk, bytes) else _bytes_of(chunk))
                    file.flush()
                    os.fsync(file.fileno())
                    if not first:
                        os.replace(partial, path)
                    else:
                        with suppress(FileExistsError):
                            os.link(partial, path)
            finally:
                with suppress(OSError):
                    os.unlink(partial)
        except OSError as error:  # name the caller's path, not the temporary one
            raise OSError(error.errno, error.strerror) from error
    sync(path.parent)


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view("u1"))


def open_to_write(path: StrPath, *, append: bool = False) -> int:
    """A descriptor of a regular file, which is made if there is none. No link is followed, so the text stays here."""
    path = path_of(path)
    status = status_of(path, follow=False)
    if status is not None and (kind := _kind(status.st_mode)) != "a file":
        raise FormatError(f"{shown(path)}: expected a regular file, found {kind}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    with system_errors(path):
        return _regular(path, os.open(path, flags | (os.O_APPEND if append else 0), 0o666))


def sync(path: StrPath) -> None:
    """Syncs a file, or the names in a folder, to the disk."""
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


def make_private_folder(path: StrPath) -> Path:
    """A folder that its owner alone may use, made or made so."""
    path = path_of(path)
    with system_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    expect_folder(path)
    with system_errors(path):
        os.chmod(path, 0o700)
    return path


def touch(path: StrPath) -> None:
    """Sets the time of a file's last change to now."""
    with system_errors(path):
        os.utime(path)


def rename(path: StrPath, to: StrPath) -> None:
    with system_errors(path):
        os.rename(path, to)


def remove(path: StrPath) -> None:
    """Removes a file, if it exists."""
    with system_errors(path), suppress(FileNotFoundError):
        os.unlink(path)


def remove_folder(path: StrPath, last: Collection[str]) -> None:
    """Removes a folder with all that is in it, and no link to one. The files named `last` tell what the folder is, and
    go behind all others, so that what a kill leaves can still be told."""
    with system_errors(path):
        for inner in () if os.path.islink(path) else path_of(path).iterdir():
            if inner.name in last:
                continue
            if inner.is_dir() and not inner.is_symlink():
                shutil.rmtree(inner)
            else:
                inner.unlink()
        shutil.rmtree(path)
