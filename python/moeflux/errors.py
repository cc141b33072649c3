"""The errors that moeflux raises. Every message says where, what was expected and what was found."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "ArgumentError",
    "BudgetError",
    "Cancelled",
    "DeviceError",
    "Error",
    "FormatError",
    "IoError",
    "NotFoundError",
    "StateError",
    "found",
    "memory_errors",
]


class Error(RuntimeError):
    """Whatever moeflux refuses or fails to do. One raised as it is, and not as one of its kinds, means damage: numbers
    that are none came out of an evaluation."""


class ArgumentError(Error, ValueError):
    """An argument is wrong, whatever state things are in: another value, type or shape is asked for. Nothing has been
    done."""


class FormatError(Error):
    """A file is not what its format says: another kind of file, a damaged one, or a model that is not supported."""


class IoError(Error):
    """The system refused to read or write, has no memory left, or a file has fewer bytes than it should; or what was
    read is not what its checksum says."""


class NotFoundError(IoError, FileNotFoundError):
    """There is nothing at a path that the caller named."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno, self.strerror = errno.ENOENT, os.strerror(errno.ENOENT)

    def __str__(self) -> str:
        return str(self.args[0])


class DeviceError(Error):
    """There is no such accelerator here, or a command on it failed."""


class StateError(Error):
    """The call is right, but not now: the session was closed, is used by another thread, or holds something else than
    the call goes on from. What else could be done stands in the message."""


class Cancelled(Error):
    """The caller gave the call up, by a Cancel that it had handed in."""


class BudgetError(Error):
    """The memory budget is too small for what was asked. Nothing has been taken."""

    needed: int | None = None
    """Bytes that `memory` would have to be for it; None where that is not known."""

    floor: int | None = None
    """Bytes, the least `memory` that this model runs with: one session of a short context. None where not known."""

    missing: int | None = None
    """Bytes by which what is left of the budget is too small."""


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Where Python finds no memory in its `with`, that is an IoError that says for what."""
    try:
        yield
    except MemoryError as error:
        raise IoError(f"{what}: expected memory for it, found too little") from error


def found(value: object, most: int = 40) -> str:
    """A value as a message shows it: what Python writes for it, cut to `most` characters."""
    try:
        return repr(value)[:most]
    except ValueError:  # a number of thousands of digits
        return "a number too long to be written"
