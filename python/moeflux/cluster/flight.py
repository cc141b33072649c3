"""What goes through the stages of a model, whether these are on machines or in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from moeflux.cluster.links import Frame
from moeflux.cluster.stage import raised
from moeflux.errors import Error, PeerError

__all__ = ["Flight", "Stages"]


class Flight:
    """A frame on its way through the stages."""

    def __init__(self) -> None:
        self._landed = False
        self._wait = threading.Lock()  # until it has: an Event takes ten times as long to make
        self._wait.acquire()
        self._frame: Frame | None = None
        self._error: Error | None = None

    @property
    def landed(self) -> bool:
        return self._landed

    def land(self, frame: Frame | None, error: Error | None) -> None:
        """Once."""
        self._frame, self._error, self._landed = frame, error, True
        self._wait.release()

    def sleep(self) -> None:
        """Until it has landed."""
        with self._wait:
            pass

    def await_landing(self) -> None:
        """The same, or with a part in it."""
        self.sleep()

    def wait(self) -> Frame:
        """What has come back. PeerError when a machine is lost: then nothing comes any more. Whether the stages did
        what was asked is in the frame."""
        if not self._landed:
            self.await_landing()
        if self._error is not None:
            raise PeerError(str(self._error)) from self._error
        assert self._frame is not None
        return self._frame

    def told(self) -> tuple[list[Any], list[np.ndarray]]:
        """What the stages said, one after the other, and the arrays. The error of the first that could not do it."""
        frame = self.wait()
        if "error" in frame.body:
            raise raised(frame.body["error"])
        return frame.body["told"], frame.arrays


class Stages(Protocol):
    """All stages of a model, as whoever asks sees them."""

    @property
    def count(self) -> int: ...
    @property
    def error(self) -> PeerError | None:
        """Why nothing goes through any more."""

    def send(self, op: str, arrays: Sequence[np.ndarray] = (), **fields: Any) -> Flight:
        """Arrays must stay as they are until the flight has landed."""

    def ask(self, op: str, **fields: Any) -> list[Any]:
        """What the stages say to something that has no arrays."""

    def forget(self, session: int) -> None:
        """Closes it with the next call, or soon. Nothing waits here: Python may drop a session at any moment, also in a
        thread that is sending just now."""
