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

from moeflux.cluster.flight import Flight
from moeflux.cluster.links import Broken, Frame, Keys, Links, Outlet
from moeflux.errors import Error, PeerError
from moeflux.log import LOG

__all__ = ["Chain"]

WAIT = 0.1


class _Flight(Flight):
    """On its way through the stages of `chain`."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self._chain = chain
        self.came = False  # its frame, or the end of the chain
        self.sleepers = 0  # that wait for another thread to take it
        self.may_take = False  # who waits for it

    def await_landing(self) -> None:
        self._chain.await_landing(self)


class Chain:
    """Of one run. Frames are sent from any thread. Who waits for one takes what comes back, for others too: to be woken
    by another thread would cost as much as half a hop. A thread of its own takes it while nobody does. When a link
    breaks, or a machine gives no sign of life for `patience` seconds, all that is on its way fails, and all that
    follows."""

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
        self._flights: dict[int, _Flight] = {}
        self._forgotten: deque[int] = deque()
        self._error: PeerError | None = None
        self._ending = False
        self._heard = [time.monotonic()] * self.count
        self._taking = threading.Lock()  # of the links' frames
        self._sleepers = 0  # that wait for another thread to take theirs
        self._needed = threading.Event()  # one of these has nobody
        self._served = False  # somebody waited not long ago, and is expected to take the next one as well
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
        flight = _Flight(self)
        with self._sending:
            with self._lock:
                if self._error is not None:
                    flight.came = True
                    flight.land(None, self._error)
                    return flight
                number = next(self._numbers)
                self._flights[number] = flight
            assert self._outlet is not None
            try:
                self._outlet.send({"op": op, "ask": number, "told": [], **fields}, arrays)
            except PeerError as error:
                failed = PeerError(f"machine {self._names[0]}: {error}")
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
            self._sleepers = 0
            for flight in flights:
                flight.came = True
        if not self._ending:
            LOG.warning("%s; %d calls under way fail", error, len(flights))
        for flight in flights:
            flight.land(None, error)
        self._needed.set()
        self._links.stop()
        self._lost()

    def close(self) -> None:
        self._ending = True
        self.fail(PeerError("machines: expected a model that is open, found it closed"))
        if self._thread.ident is not None:
            self._thread.join()
        with self._taking:
            self._links.close()

    def await_landing(self, flight: _Flight) -> None:
        """The main thread never takes what comes: Ctrl-C may end it anywhere, also between two parts of a frame."""
        flight.may_take = threading.current_thread() is not threading.main_thread()
        with self._lock:
            waits = not flight.came
            self._sleepers += waits
            flight.sleepers += waits
        if waits and flight.may_take and self._taking.acquire(blocking=False):
            try:
                with self._lock:
                    if not flight.came:
                        self._sleepers -= 1
                        flight.sleepers -= 1
                while not flight.landed:
                    self._take_next()
            finally:
                self._served = True
                self._taking.release()
                if self._sleepers:
                    self._needed.set()
            return
        if waits and not self._taking.locked():  # who has it looks for sleepers afterwards
            self._needed.set()
        flight.sleep()

    def _receive(self) -> None:
        """Takes what comes while nobody does."""
        while not self._ending and self._error is None:
            served, self._served = self._served, False
            if served and not self._sleepers and not self._needed.wait(WAIT):
                continue
            self._needed.clear()
            with self._taking:
                self._take_next()

    def _take_next(self) -> None:
        """What comes within a moment. Fails when nothing can come any more."""
        try:
            frame = self._links.receive(WAIT)
            if frame is not None:
                self._take(frame)
            self._check_signs(time.monotonic())
            if self._forgotten and not self._sending.locked() and self._outlet is not None and self._outlet.has_room:
                self._close_forgotten()  # who takes frames must not wait: the stages may be waiting for it
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
                flight.came = True
                self._sleepers -= flight.sleepers
        if flight is not None:
            self._served = flight.may_take
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
