"""The end of the links that asks: what it sends goes through all stages in order, and what they say comes back here."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from moeflux.cluster.links import Broken, Frame, Keys, Links, Outlet
from moeflux.cluster.stage import raised
from moeflux.errors import Error, PeerError
from moeflux.log import LOG

__all__ = ["Chain", "Flight"]

WAIT = 0.1


class Flight:
    """A frame on its way."""

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

    def wait(self) -> Frame:
        """What has come back. PeerError when a machine is lost: then nothing comes any more. Whether the stages did
        what was asked is in the frame."""
        with self._wait:
            pass
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


class Chain:
    """Of one run. Frames are sent from any thread; a thread of its own takes what comes back. When a link breaks, or a
    machine gives no sign of life for `patience` seconds, all that is on its way fails, and all that follows."""

    def __init__(
        self,
        run: bytes,
        keys: Keys,
        address: str,
        machines: Sequence[tuple[str, bytes]],
        *,
        patience: float,
        lost: Callable[[], object],
    ) -> None:
        """`machines` are names and keys of the stages. `lost` is called, in some thread, when the chain fails."""
        self.count = len(machines)
        self._names = [name for name, _ in machines]
        self._links = Links(run, self.count, keys, address=address, allowed=[key for _, key in machines])
        self.port = self._links.port
        self._patience, self._lost = patience, lost
        self._outlet: Outlet | None = None
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()  # of the outlet. Who has it may wait for long, and so needs no other
        self._lock = threading.Lock()  # of the flights
        self._flights: dict[int, Flight] = {}
        self._forgotten: deque[int] = deque()
        self._error: PeerError | None = None
        self._ending = False
        self._heard = [time.monotonic()] * self.count
        self._thread = threading.Thread(target=self._receive, name="moeflux-chain", daemon=True)

    def begin(self, host: str, port: int, key: bytes) -> None:
        """Frames go to that stage from now on."""
        self._outlet = self._links.connect(host, port, key)
        self._heard = [time.monotonic()] * self.count
        self._thread.start()

    @property
    def error(self) -> PeerError | None:
        """Why nothing goes through any more."""
        return self._error

    def send(self, op: str, arrays: Sequence[np.ndarray] = (), **fields: Any) -> Flight:
        """Arrays must stay as they are until the flight has landed."""
        self._close_forgotten()
        return self._send(op, arrays, **fields)

    def forget(self, session: int) -> None:
        """Closes it with the next call, or soon. Nothing waits here: Python may drop a session at any moment, also in a
        thread that is sending just now and has the lock."""
        self._forgotten.append(session)

    def _close_forgotten(self) -> None:
        sessions = list[int]()
        with suppress(IndexError):  # another thread may take the last one
            while True:
                sessions.append(self._forgotten.popleft())
        if sessions:
            self._send("close", ids=sessions)

    def _send(self, op: str, arrays: Sequence[np.ndarray] = (), **fields: Any) -> Flight:
        flight = Flight()
        with self._sending:
            with self._lock:
                if self._error is not None:
                    flight.land(None, self._error)
                    return flight
                number = next(self._numbers)
                self._flights[number] = flight
            assert self._outlet is not None
            try:
                self._outlet.send({"op": op, "ask": number, "told": [], **fields}, arrays)
            except PeerError as error:
                failed = error
            else:
                return flight
        self.fail(failed)
        return flight

    def ask(self, op: str, **fields: Any) -> list[Any]:
        """What the stages say to something that has no arrays."""
        return self.send(op, **fields).told()[0]

    def fail(self, error: PeerError) -> None:
        """Nothing comes any more."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            flights, self._flights = list(self._flights.values()), {}
        if not self._ending:
            LOG.warning("%s; %d calls under way fail", error, len(flights))
        for flight in flights:
            flight.land(None, error)
        self._links.stop()
        self._lost()

    def close(self) -> None:
        self._ending = True
        self.fail(PeerError("machines: expected a model that is open, found it closed"))
        if self._thread.ident is not None:
            self._thread.join()
        self._links.close()

    def _receive(self) -> None:
        try:
            while not self._ending and self._error is None:
                frame = self._links.receive(WAIT)
                if frame is not None:
                    self._take(frame)
                self._check_signs(time.monotonic())
                self._close_forgotten()
        except Broken as error:
            self.fail(PeerError(f"machine {self._names[error.index]}: {error}"))
        except Error as error:
            self.fail(PeerError(str(error)))

    def _take(self, frame: Frame) -> None:
        beat = frame.body.get("beat")
        if beat is not None:
            self._heard[beat] = time.monotonic()
            if frame.body["broken"]:
                raise PeerError(self._why(beat, frame.body["side"], frame.body["broken"]))
            return
        with self._lock:
            flight = self._flights.pop(frame.body["ask"], None)
        if flight is not None:
            flight.land(frame, None)

    def _why(self, machine: int, side: int, broken: str) -> str:
        """Why its run has ended. A machine that is lost is told of by those beside it, often before it is missed."""
        names, lost = self._names, machine + side
        if side == 0 or not 0 <= lost < self.count:
            return f"machine {names[machine]}: {broken}"
        return f"machine {names[lost]}: lost by machine {names[machine]}: {broken}"

    def _check_signs(self, now: float) -> None:
        for name, heard in zip(self._names, self._heard, strict=True):
            if now - heard > self._patience:
                raise PeerError(
                    f"machine {name}: expected a sign of life within {self._patience:g} s, found none: it is gone, "
                    "or cannot reach this machine"
                )
