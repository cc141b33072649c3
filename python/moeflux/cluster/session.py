"""A session whose state lies on several machines: `moeflux.Session` and the decoder use it as one of the core's.

What it knows of itself (position, tokens, logits, where it can go back to) is here; what its layers remember is there.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from moeflux._core import Cancel
from moeflux.cluster.flight import Flight, Stages
from moeflux.cluster.stage import ALL, LAST, NONE, raised
from moeflux.cluster.stats import FarStats
from moeflux.errors import ArgumentError, Cancelled, Error, PeerError, StateError

__all__ = ["Evaluation", "FarSession"]

Reach = list[tuple[int, list[int]]]
"""By stage: from where on every position can be reached, and what other positions can."""


class Owner(Protocol):
    """The engine that a session is of."""

    @property
    def again(self) -> bool: ...
    @property
    def layers(self) -> tuple[int, int]: ...
    def chain(self) -> Stages: ...
    def new_id(self) -> int: ...
    def evaluate_together(
        self, pieces: Sequence[tuple[FarSession, np.ndarray, np.ndarray | None]], wanted: int
    ) -> list[str]: ...
    def evaluate_chunks(
        self,
        session: FarSession,
        ids: np.ndarray,
        on_progress: Callable[[int, int], object] | None,
        every: np.ndarray | None,
        cancel: Cancel | None,
    ) -> tuple[int, int]: ...
    def go_back(self, chain: Stages, places: Sequence[tuple[FarSession, int]]) -> list[str]: ...
    def state_counts(self, kv_dtype: str) -> list[int]: ...
    def empty_state(self, position: int, kv_dtype: str) -> list[tuple[int, str, np.ndarray]]: ...


class FarSession:
    """It takes one caller at a time. A session that was lost with a machine, or broken by a failure, takes `clear` and
    `restore` alone."""

    def __init__(
        self, engine: Owner, max_context: int, kv_dtype: str, make: Callable[[FarSession], None] | None = None
    ) -> None:
        """`make` has it made on the stages; by default it is empty there."""
        self._engine = engine
        self.max_context, self.kv_dtype = max_context, kv_dtype
        self._max_checkpoints = 4
        self._serials = itertools.count(1)
        self._busy = threading.RLock()
        self._pending: Evaluation | None = None
        self._reset()
        if make is None:
            self._make(engine.chain())
        else:
            make(self)

    def _reset(self) -> None:
        self._position = 0
        self._tokens: list[int] | None = []  # None: not known
        self._logits: np.ndarray | None = None
        self._reach: Reach = []
        self._lost = ""  # why it cannot go on
        self._last = FarStats()
        self._total: FarStats = getattr(self, "_total", FarStats())
        self._serial = next(self._serials)

    def _make(self, chain: Stages) -> None:
        self._chain = chain
        self._id = self._engine.new_id()
        told = self._whole(
            chain, "make", id=self._id, context=self.max_context, kv_dtype=self.kv_dtype,
            checkpoints=self._max_checkpoints,
        )  # fmt: skip
        self._take_reach(told)

    def _whole(self, chain: Stages, op: str, **fields: Any) -> list[Any]:
        """What makes a session on every stage, or on none."""
        try:
            return chain.ask(op, **fields)
        except Error:
            chain.send("close", ids=[fields.get("new", fields["id"])])
            raise

    def __del__(self) -> None:
        chain = getattr(self, "_chain", None)
        if chain is not None:
            chain.forget(self._id)

    # ---- One caller at a time -----------------------------------------------------------------------------------

    @contextmanager
    def used(self) -> Generator[None, None, None]:
        if not self._busy.acquire(blocking=False):
            raise StateError("session: expected one caller at a time, found it in use by another thread")
        try:
            self.settle()
            yield
        finally:
            self._busy.release()

    def settle(self) -> None:
        """Waits for what is evaluated for it. Who asked for that hears of a failure."""
        if self._pending is not None:
            self._pending.settle()

    def _known(self) -> None:
        """Before something is told of it: unless another thread is at it, what is on its way is waited for."""
        if self._busy.acquire(blocking=False):
            try:
                self.settle()
            finally:
                self._busy.release()

    def check(self) -> None:
        """PeerError when it was lost with a machine, StateError when a failure has left it unusable."""
        if self._chain.error is not None:
            raise PeerError(f"session: it was lost: {self._chain.error}; clear it or restore a state")
        if self._lost:
            raise StateError(f"session: {self._lost}; clear it or restore a state")

    def lose(self, reason: str) -> None:
        self._lost = reason

    # ---- What is known ------------------------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[int, int]:
        """All of them."""
        return self._engine.layers

    @property
    def position(self) -> int:
        self._known()
        return self._position

    @property
    def place(self) -> int:
        """The position before what is evaluated now."""
        return self._position

    @property
    def tokens(self) -> list[int]:
        self._known()
        return list(self._tokens or ())

    @property
    def last(self) -> FarStats:
        self._known()
        return self._last

    @property
    def total(self) -> FarStats:
        self._known()
        return self._total

    @property
    def logits_serial(self) -> int:
        self._known()
        return self._serial

    @property
    def exact_from(self) -> int:
        self._known()
        return max((exact for exact, _ in self._reach), default=0)

    @property
    def checkpoints(self) -> list[int]:
        self._known()
        named = {position for _, positions in self._reach for position in positions}
        return sorted(position for position in named if self._reaches(position))

    def _reaches(self, position: int) -> bool:
        if not 0 <= position <= self._position:
            return False
        return position == 0 or all(position >= exact or position in named for exact, named in self._reach)

    def foresees(self, token: int) -> bool:
        return False

    # ---- Logits -------------------------------------------------------------------------------------------------

    @property
    def logits_array(self) -> np.ndarray:
        self._known()
        if self._logits is None:
            raise StateError("logits: expected a session that has evaluated a token, found none since it last moved")
        return self._logits

    def logits(self, out: np.ndarray | None, vocab: int) -> np.ndarray:
        if out is None:
            return self.logits_array.copy()
        out[...] = self.logits_array
        return out

    def argmax(self) -> int:
        return int(self.logits_array.argmax())

    def top_k(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The lower id wins a tie."""
        values = self.logits_array
        best = np.argsort(-values, kind="stable")[:k].astype(np.int32)
        return best, values[best]

    # ---- Evaluating ---------------------------------------------------------------------------------------------

    def prefill(
        self,
        ids: np.ndarray,
        on_progress: Callable[[int, int], object] | None,
        every: np.ndarray | None,
        vocab: int,
        cancel: Cancel | None = None,
    ) -> tuple[int, int]:
        """In chunks, of which as many are on their way as there are stages. Giving up takes as long as those."""
        with self.used():
            self.check()
            if not len(ids):
                return 0, self._serial
            if len(ids) > 1:
                self.make_room(len(ids))
            return self._engine.evaluate_chunks(self, ids, on_progress, every, cancel)

    def step(self, token: int, cancel: Cancel | None = None, serial: int | None = None) -> int:
        with self.used():
            self.check()
            if serial is not None and serial != self._serial:
                raise StateError("step: expected the logits that the token was chosen from, found the session gone on")
            if cancel is not None and cancel.is_set():
                raise Cancelled("step: given up")
            self._engine.evaluate_together([(self, np.array([token], np.int32), None)], LAST)
            return self._serial

    def advance(self, ids: np.ndarray, logits: np.ndarray | None, stats: FarStats, reach: Reach) -> None:
        """All stages have evaluated these."""
        self._position += len(ids)
        if self._tokens is not None:
            self._tokens.extend(ids.tolist())
        self._logits, self._serial = logits, next(self._serials)
        self._last, self._total, self._reach = stats, self._total.plus(stats), reach

    def _take_reach(self, told: Sequence[Any]) -> None:
        self._reach = [(exact, list(named)) for exact, named in told]

    # ---- Going back ---------------------------------------------------------------------------------------------

    def clear(self) -> None:
        with self.used():
            if self._chain.error is not None:
                self._reset()
                self._make(self._engine.chain())
                return
            told = self._chain.ask("clear", id=self._id)
            self._reset()
            self._take_reach(told)

    def fork(self, position: int | None = None) -> FarSession:
        with self.used():
            self.check()
            where = self._position if position is None else self._checked("fork", position)
            if not self._reaches(where):
                raise StateError(self._no_way("fork", where))

            def make(forked: FarSession) -> None:
                forked._id = self._engine.new_id()
                told = self._whole(self._chain, "fork", id=self._id, new=forked._id, position=where)
                forked._chain = self._chain
                forked._position = where
                forked._tokens = None if self._tokens is None else self._tokens[:where]
                forked._logits = self._logits if where == self._position else None
                forked._take_reach(told)

            return FarSession(self._engine, self.max_context, self.kv_dtype, make)

    def checkpoint(self) -> None:
        with self.used():
            self.check()
            self._take_reach(self._chain.ask("checkpoint", id=self._id))

    def set_max_checkpoints(self, count: int) -> None:
        with self.used():
            self.check()
            self._take_reach(self._chain.ask("set_max_checkpoints", id=self._id, count=count))
            self._max_checkpoints = count

    def rewind(self, position: int, exact: bool = True) -> int:
        with self.used():
            self.check()
            self._checked("rewind", position)
            if not self._reaches(position):
                if exact:
                    raise StateError(self._no_way("rewind", position))
                position = self._before(position)
            if position < self._position:
                (failure,) = self._engine.go_back(self._chain, [(self, position)])
                if failure:
                    self.lose(failure)
                    self.check()
            return position

    def went_back(self, position: int, reach: Reach) -> None:
        if position < self._position:
            self._logits, self._serial = None, next(self._serials)
        self._position, self._reach = position, reach
        if self._tokens is not None:
            del self._tokens[position:]

    def _checked(self, what: str, position: int) -> int:
        if not 0 <= position <= self._position:
            raise ArgumentError(f"{what}: expected a position 0 to {self._position}, found {position}")
        return position

    def _before(self, position: int) -> int:
        return max((place for place in self.checkpoints if place <= position), default=0)

    def _no_way(self, what: str, position: int) -> str:
        return (
            f"{what}: expected a position from {self.exact_from} on, a checkpoint or 0, found {position}; the last "
            f"checkpoint before it is at {self._before(max(position, 0))}"
        )

    @property
    def identity(self) -> int:
        """Its number on the stages."""
        return self._id

    @property
    def chain(self) -> Stages:
        return self._chain

    @property
    def engine(self) -> Owner:
        return self._engine

    # ---- States -------------------------------------------------------------------------------------------------

    def make_room(self, tokens: int) -> None:
        """With 0, whether it can go on. A scheduler asks that after a failure, to begin the answer again if it cannot;
        where that is not wanted, a session that was lost with a machine does not say so."""
        with self.used():
            if not tokens and not self._engine.again and self._chain.error is not None:
                return
            self.check()
            if tokens:
                self._chain.ask("room", pieces=[[self._id, tokens]])

    def read_state(self) -> list[tuple[int, str, np.ndarray]]:
        with self.used():
            self.check()
            told, arrays = self._chain.send("read_state", id=self._id).told()
            names = [name for stage in told for name in stage]
            # Arrays lie in messages, which are as large as all that came with them.
            return [(layer, name, array.copy()) for (layer, name), array in zip(names, arrays, strict=True)]

    def restore(self, position: int, tokens: np.ndarray, tensors: Sequence[np.ndarray]) -> None:
        with self.used():
            chain = self._engine.chain()
            if self._chain is not chain:
                self._reset()
                self._make(chain)
            counts = self._engine.state_counts(self.kv_dtype)
            arrays = [np.ascontiguousarray(each) for each in (tokens, *tensors)]
            try:
                told, _ = chain.send("restore", arrays, id=self._id, position=position, counts=counts).told()
            except Error as error:
                self.lose(str(error))  # some stages may have another state than others
                raise
            self._reset()
            self._position = position
            self._tokens = tokens.tolist() if len(tokens) == position else None
            self._take_reach(told)

    def show_state(self, show: Callable[[Any], object]) -> None:
        """There is a copy of the state here meanwhile."""
        show(Pieces(self.read_state()))

    def fill_state(self, position: int, tokens: np.ndarray, fill: Callable[[Any], object]) -> None:
        """Likewise."""
        pieces = Pieces(self._engine.empty_state(position, self.kv_dtype))
        fill(pieces)
        self.restore(position, tokens, pieces.arrays)


NAMES = {"<f4": "F32", "<u2": "BF16", "|i1": "I8"}


class Pieces:
    """What `_core.StatePieces` is, of arrays that lie here."""

    def __init__(self, state: Sequence[tuple[int, str, np.ndarray]]) -> None:
        self._state = state
        self.arrays = [array for *_, array in state]
        self._bytes = [memoryview(array.reshape(-1).view(np.uint8)) for array in self.arrays]

    def list(self) -> list[tuple[int, str, str, list[int]]]:
        return [(layer, name, NAMES[array.dtype.str], [*array.shape]) for layer, name, array in self._state]

    def read(self, index: int, begin: int, to: Any) -> None:
        room = memoryview(to).cast("B")
        room[:] = self._bytes[index][begin : begin + len(room)]

    def write(self, index: int, begin: int, data: Any) -> None:
        given = memoryview(data).cast("B")
        self._bytes[index][begin : begin + len(given)] = given


class Evaluation:
    """Tokens of several sessions, on their way through the stages in one frame."""

    def __init__(
        self, chain: Stages, work: Sequence[tuple[FarSession, np.ndarray, int]], offsets: Sequence[int] | None = None
    ) -> None:
        """Sessions, tokens, and of which of them logits are wanted: NONE, LAST or ALL. `offsets`: how many tokens of
        each session are on their way before."""
        self.work = list(work)
        self.chain = chain
        self.every: list[np.ndarray | None] = [None] * len(self.work)  # logits of all tokens, where they are wanted
        self.failures: list[str] = [""] * len(self.work)
        self.error: Error | None = None  # of all
        self._offsets = offsets or [0] * len(self.work)
        self._lock = threading.Lock()
        self._settled = False
        self._began = time.perf_counter()
        pieces = [
            [session.identity, session.place + offset, len(ids), wanted]
            for (session, ids, wanted), offset in zip(self.work, self._offsets, strict=True)
        ]
        tokens = np.concatenate([ids for _, ids, _ in self.work])
        self._flight: Flight = chain.send("evaluate", [tokens], pieces=pieces, failures={})
        self._before = [session._pending for session, *_ in self.work if session._pending is not None]
        for session, *_ in self.work:
            session._pending = self

    def settle(self) -> None:
        """Waits for it, and tells the sessions what has become of them. What failed for all is in `error`; then every
        session that could be is where it was before, but for those with tokens before these on their way."""
        with self._lock:
            if self._settled:
                return
            for each in self._before:
                each.settle()
            self._before.clear()
            try:
                frame = self._flight.wait()
            except PeerError as error:
                self.error = error
                for session, *_ in self.work:
                    session.lose(str(error))
            else:
                self._apply(frame.body, frame.arrays)
            self._settled = True
        for session, *_ in self.work:
            if session._pending is self:
                session._pending = None

    def _apply(self, body: dict[str, Any], arrays: list[np.ndarray]) -> None:
        if "error" in body:
            self.error = raised(body["error"])
            return
        seconds = time.perf_counter() - self._began
        told = body["told"]
        for place, (session, ids, wanted) in enumerate(self.work):
            failure = body["failures"].get(str(place))
            if failure is not None:
                self.failures[place] = failure
                session.lose(failure)
                continue
            found = arrays[place]
            self.every[place] = found if wanted == ALL else None
            logits = None if wanted == NONE else found[-1].copy()
            reach = [(exact, list(named)) for exact, named in (stage["where"][str(place)] for stage in told)]
            session.advance(ids, logits, FarStats.of([stage["stats"] for stage in told], len(ids), seconds), reach)
