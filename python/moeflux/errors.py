"""The errors that moeflux raises. Every message says where, what was expected and what was found."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager

__all__ = [
    "ArgumentError",
    "BadMagic",
    "BadVersion",
    "BudgetError",
    "BufferTooSmall",
    "Cancelled",
    "DeviceError",
    "Error",
    "FormatError",
    "IoError",
    "LenOverflow",
    "NegativeLen",
    "NoInterval",
    "NotFoundError",
    "PeerError",
    "Refused",
    "ShapeMismatch",
    "SnapshotError",
    "StateError",
    "TrailingBytes",
    "Truncated",
    "UnequalLen",
    "found",
    "refusals",
]


class Error(RuntimeError):
    """The base of all errors of moeflux. Raised as itself, and not as one of its kinds, it means damage: an evaluation
    gave values that are not finite."""


class ArgumentError(Error, ValueError):
    """An argument is wrong, whatever the state: it has the wrong value, type or shape. Nothing has been done."""


class FormatError(Error):
    """A file is not what its format says: another kind of file, a damaged one, or a model that is not supported."""


class IoError(Error):
    """The system refused to read or write, or has no memory left. Or a file has fewer bytes than it should, or bytes
    that its checksum does not allow."""


class NotFoundError(IoError, FileNotFoundError):
    """There is nothing at a path that the caller named."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno, self.strerror = errno.ENOENT, os.strerror(errno.ENOENT)

    def __str__(self) -> str:
        return str(self.args[0])


class DeviceError(Error):
    """There is no such accelerator here, or a command on it failed."""


class PeerError(Error):
    """A machine that a model runs on is gone, cannot be reached, or is none that could take part. What was asked of the
    model may be asked again when the machine is back."""


class StateError(Error):
    """The call is right, but not now: the session was closed, another thread uses it, or it does not hold what the call
    continues. The message says what else could be done."""


class Refused(Error):
    """A scheduler takes no more requests now: as many wait as may wait, or it is closing. Nothing has been taken."""

    waiting: int = 0
    """How many requests wait."""

    seconds: float | None = None
    """How long it may take until there is room, judged by those that have ended; None if that is not known."""


class Cancelled(Error):
    """The caller gave the call up, by the Cancel that it had passed in."""


class BudgetError(Error):
    """The memory budget is too small for what was asked. Nothing has been taken."""

    needed: int | None = None
    """How many bytes `memory` would have to be; None if that is not known."""

    floor: int | None = None
    """The smallest `memory`, in bytes, that this model runs with: one session of a short context. None if not known."""

    missing: int | None = None
    """How many bytes the rest of the budget lacks."""


@contextmanager
def refusals(what: str) -> Generator[None, None, None]:
    """Turns a MemoryError of Python's inside the `with`, or a thread that the system refuses, into an IoError that says
    what it was for."""
    try:
        yield
    except MemoryError as error:
        raise IoError(f"{what}: expected memory for it, found too little") from error
    except RuntimeError as error:
        if str(error) != "can't start new thread":
            raise
        raise IoError(f"{what}: expected a thread for it from the system, found none") from error


# ---- Saved sessions in the older engine's formats ---------------------------------------------------------------


class SnapshotError(FormatError):
    """The bytes are no snapshot of this model in one of the older engine's formats. Subclasses say why not."""

    field: str = ""
    """The field of the header, or the piece of a layer, that is wrong."""

    layer: int | None = None
    """The layer that is wrong; None if it is the header."""

    expected: int | None = None
    found: int | None = None


class BadMagic(SnapshotError):
    """The first four bytes are not those that a snapshot begins with."""


class BadVersion(SnapshotError):
    """The snapshot has another version, or one that cannot describe this model."""


class ShapeMismatch(SnapshotError):
    """The snapshot is that of a model of another shape: `field` of the header differs."""


class NoInterval(SnapshotError):
    """The model has no full attention in every n-th layer, which is all that the formats can say."""


class Truncated(SnapshotError):
    """The snapshot ends too early: `expected` bytes should follow, and `found` do."""


class NegativeLen(SnapshotError):
    """A layer says that it has fewer than 0 positions."""


class LenOverflow(SnapshotError):
    """A layer says that it has more positions than any session may have."""


class UnequalLen(SnapshotError):
    """A layer has another number of positions than the layers before it."""


class TrailingBytes(SnapshotError):
    """Bytes follow the last layer, which ends at byte `expected`: there are `found`."""


class BufferTooSmall(ArgumentError):
    """A snapshot does not fit into the memory that it should be written to. Nothing has been written."""

    needed: int = 0
    """Bytes of the snapshot."""

    found: int = 0
    """Bytes of the memory."""


def found(value: object, limit: int = 40) -> str:
    """A value as a message shows it: what Python writes for it, cut to `limit` characters."""
    try:
        return repr(value)[:limit]
    except ValueError:  # a number of thousands of digits
        return "a number too long to be written"
