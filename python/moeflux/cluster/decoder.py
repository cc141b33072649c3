"""Requests that are answered side by side over several machines: what `_core.Decoder` is for one.

As many micro-batches are on their way as there are stages, each with its part of the requests: while one is on the
first machine, another is on the second. A step sends what can be sent, waits for the oldest, and chooses the tokens
that follow it. No answer depends on its company, so which requests travel together changes no bit.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moeflux import _core
from moeflux.cluster.engine import FarEngine
from moeflux.cluster.session import Evaluation, FarSession
from moeflux.cluster.stage import LAST, NONE
from moeflux.cluster.stats import FarStats
from moeflux.errors import ArgumentError, BudgetError, Cancelled, Error, PeerError, StateError, found

__all__ = ["FarDecoder", "FarEvent"]

PROMPT_ROWS = 64


@dataclass
class FarEvent:
    """What a step did for one request; see `moeflux.serving.protocols.Event`."""

    id: int
    token: int | None = None
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()
    finish: str = ""
    error: str = ""
    evaluated: int = 0
    stats: FarStats = field(default_factory=FarStats)


@dataclass
class _Running:
    id: int
    session: FarSession
    sampler: _core.Sampler
    tokens: np.ndarray
    stop_tokens: frozenset[int]
    max_tokens: int
    logprobs: int | None
    borders: frozenset[int]
    masked: bool
    serial: int
    read: int = 0
    next: int | None = None  # was chosen, and is not evaluated yet
    chosen: int = 0
    mask: tuple[np.ndarray | None] | None = None
    flies: bool = False
    alone: bool = False  # it failed in company: its next try has none
    over: bool = False
    served: int = 0
    event: FarEvent | None = None
    failure: str = ""  # to be told by the next step

    def tell(self) -> FarEvent:
        self.event = self.event or FarEvent(self.id)
        return self.event

    def fail(self, error: str) -> None:
        """A token that was chosen in this step is told first: it is not lost."""
        told = self.tell()
        if told.token is not None:
            self.failure = error
            return
        told.finish, told.error, self.over = "failed", error, True

    @property
    def reads(self) -> bool:
        return self.read < len(self.tokens)

    @property
    def can_choose(self) -> bool:
        told = self.event is not None and self.event.token is not None
        ready = not (self.over or self.failure or self.flies or self.reads or told) and self.next is None
        return ready and (self.mask is not None or not self.masked)

    @property
    def can_fly(self) -> bool:
        return not (self.over or self.failure or self.flies) and (self.next is not None or self.reads)

    def take(self, rows: int) -> np.ndarray:
        """At most so many tokens: of the prompt, to the next border, or the one that was chosen."""
        if self.next is not None:
            return np.array([self.next], np.int32)
        position = self.session.place
        count = min(
            [rows, len(self.tokens) - self.read, *(each - position for each in self.borders if each > position)]
        )
        return self.tokens[self.read : self.read + count]


class FarDecoder:
    """Of one thread. A request has its session and its sampler to itself until it is over or removed."""

    def __init__(self, engine: FarEngine, rows: int = 0) -> None:
        if rows and rows < 2:
            raise ArgumentError(f"rows: expected 0, or 2 or more, found {rows}")
        self._engine = engine
        self.rows = rows or max(engine.chunk, 2)
        self.prompt_rows = min(self.rows, PROMPT_ROWS)
        self._requests: dict[int, _Running] = {}
        self._flights: deque[tuple[Evaluation, list[_Running]]] = deque()
        self._ids = itertools.count(1)
        self._served = itertools.count(1)

    def add(
        self,
        session: FarSession,
        tokens: np.ndarray,
        sampler: _core.Sampler,
        stop_tokens: Sequence[int],
        max_tokens: int,
        logprobs: int | None = None,
        borders: Sequence[int] = (),
        masked: bool = False,
        stepwise: bool = False,
    ) -> int:
        vocab = self._engine.variant.vocab_size
        if max_tokens < 1:
            raise ArgumentError(f"max_tokens: expected 1 or more, found {max_tokens}")
        if logprobs is not None and not 0 <= logprobs <= vocab:
            raise ArgumentError(f"logprobs: expected 0 to {vocab}, found {logprobs}")
        ids = np.asarray(tokens, np.int32)
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocab):
            raise ArgumentError(f"tokens: expected 0 to {vocab - 1}, found {ids.min()} to {ids.max()}")
        room = session.max_context - session.position
        if len(ids) > room:
            raise ArgumentError(
                f"tokens: expected at most {room} more in a context of {session.max_context}, found {len(ids)}"
            )
        if not len(ids):
            _ = session.logits_array  # it has none: StateError
        for other in self._requests.values():
            if other.session is session or other.sampler is sampler:
                raise ArgumentError(f"expected a session and a sampler of its own, found one of request {other.id}")
        number = next(self._ids)
        self._requests[number] = _Running(
            number, session, sampler, ids, frozenset(stop_tokens), max_tokens, logprobs, frozenset(borders), masked,
            session.logits_serial,
        )  # fmt: skip
        return number

    def set_mask(self, id: int, bits: np.ndarray | None) -> None:
        running = self._requests.get(id)
        if running is None or not running.masked:
            raise ArgumentError(f"mask: expected the id of a masked request, found {id}")
        words = (self._engine.variant.vocab_size + 31) // 32
        if bits is not None and (bits.dtype != np.uint32 or bits.shape != (words,)):
            raise ArgumentError(f"mask: expected {words} words of 32 bits, found {found(bits)}")
        running.mask = (None if bits is None else bits.copy(),)

    def remove(self, id: int) -> bool:
        """Waits until what is evaluated for it has come back; what that was for others is told by the next step."""
        running = self._requests.get(id)
        while running is not None and running.flies:
            self._land()
        self._requests.pop(id, None)
        return True

    def step(self, cancel: _core.Cancel | None = None) -> list[FarEvent]:
        for running in self._requests.values():
            if running.failure and not running.over:
                running.fail(running.failure)
        self._choose()
        while len(self._flights) < len(self._engine.ranges) and self._send(cancel):
            pass
        if self._flights:
            self._land()
            self._choose()
        events = []
        for running in list(self._requests.values()):
            if running.event is not None:
                events.append(running.event)
                running.event = None
            if running.over and not running.flies:
                del self._requests[running.id]
        return events

    def go_ahead(self) -> bool:
        """Micro-batches are on their way between steps as it is."""
        return False

    def end_ahead(self, at_once: bool = False) -> None:
        pass

    @property
    def is_ahead(self) -> bool:
        return False

    # ---- Sending ------------------------------------------------------------------------------------------------

    def _send(self, cancel: _core.Cancel | None) -> bool:
        """One more micro-batch. Returns whether there was anything to send."""
        if cancel is not None and cancel.is_set():
            raise Cancelled("step: given up")
        ready = [each for each in self._requests.values() if each.can_fly]
        if not ready:
            return False
        single = next((each for each in ready if each.alone), None)
        if single is not None:
            return self._fly([(single, single.take(self.rows))])
        active = sum(not each.over for each in self._requests.values())
        share = -(-active // len(self._engine.ranges))
        answering = sorted((each for each in ready if each.next is not None), key=lambda each: each.served)
        reading = [each for each in ready if each.next is None]
        answering = answering[: min(share, self.rows - bool(reading))]
        parts = [(each, each.take(1)) for each in answering]
        left = self.rows - len(parts)
        if any(each.next is not None for each in self._requests.values()):
            left = min(left, self.prompt_rows)
        for each in reading[: max(share - len(parts), 1)]:
            if left <= 0:
                break
            parts.append((each, each.take(left)))
            left -= len(parts[-1][1])
        return bool(parts) and self._fly(parts)

    def _fly(self, parts: list[tuple[_Running, np.ndarray]]) -> bool:
        """Requests whose sessions cannot go on fail, and the others fly."""
        flying = []
        for running, ids in parts:
            try:
                running.session.check()
                self._check_serial(running)
                flying.append((running, ids))
            except Error as error:
                running.fail(str(error))
        chains = {id(running.session.chain): running.session.chain for running, _ in flying}
        for chain in chains.values():
            mine = [(running, ids) for running, ids in flying if running.session.chain is chain]
            try:
                self._engine.take_room([(running.session, len(ids)) for running, ids in mine])
            except Error as error:
                self._refuse([running for running, _ in mine], error)
                continue
            work = []
            for running, ids in mine:
                ends = running.next is not None or running.read + len(ids) == len(running.tokens)
                work.append((running.session, ids, LAST if ends else NONE))
                running.flies = True
            self._flights.append((Evaluation(chain, work), [running for running, _ in mine]))
        return True

    def _check_serial(self, running: _Running) -> None:
        if running.session.logits_serial != running.serial:
            raise StateError(
                f"request {running.id}: expected its session as the last step left it, found it used otherwise"
            )

    # ---- What comes back ----------------------------------------------------------------------------------------

    def _land(self) -> None:
        evaluation, flying = self._flights.popleft()
        starts = [session.place for session, *_ in evaluation.work]
        evaluation.settle()
        for running in flying:
            running.flies = False
            running.served = next(self._served)
        if evaluation.error is not None:
            if not isinstance(evaluation.error, PeerError):
                sessions = [session for session, *_ in evaluation.work]
                self._engine.undo(evaluation.chain, list(zip(sessions, starts, strict=True)))
            self._refuse(flying, evaluation.error)
            return
        for running, (_, ids, _), failure in zip(flying, evaluation.work, evaluation.failures, strict=True):
            running.alone = False
            if failure:
                running.fail(failure)
            else:
                self._evaluated(running, len(ids))

    def _refuse(self, flying: list[_Running], error: Error) -> None:
        """In company, each is tried alone, so that it fails whom it concerns."""
        for running in flying:
            if isinstance(error, PeerError):
                running.fail(str(error))
            elif len(flying) > 1:
                running.alone = True
                running.serial = running.session.logits_serial
            elif isinstance(error, BudgetError):
                running.alone = False
                running.tell().error = "budget"
                running.serial = running.session.logits_serial
            else:
                running.fail(str(error))

    def _evaluated(self, running: _Running, count: int) -> None:
        running.serial = running.session.logits_serial
        if running.event is not None:
            running.event.error = ""  # of a step before
        if running.next is not None:
            running.next = None
            return
        running.read += count
        running.tell().evaluated += count
        if running.session.place in running.borders:
            try:
                running.session.checkpoint()
            except Error as error:
                running.fail(str(error))

    def _choose(self) -> None:
        for running in self._requests.values():
            if not running.can_choose:
                continue
            try:
                self._check_serial(running)
                allowed = running.mask[0] if running.mask is not None else None
                token, logprob, top = running.sampler.choose(running.session.logits_array, allowed, running.logprobs)
            except Error as error:
                running.fail(str(error))
                continue
            running.mask = None
            running.next, running.chosen = token, running.chosen + 1
            told = running.tell()
            told.token, told.logprob, told.top, told.stats = token, logprob, top, running.session.last
            if token in running.stop_tokens:
                told.finish = "end"
            elif running.chosen == running.max_tokens:
                told.finish = "length"
            elif running.session.place == running.session.max_context:
                told.finish = "context"
            running.over = bool(told.finish)
