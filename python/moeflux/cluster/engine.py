"""An engine whose layers are on several machines: `moeflux.Model` and the decoder use it as the core's."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from moeflux._core import Cancel
from moeflux.cluster.flight import Stages
from moeflux.cluster.plan import width_of
from moeflux.cluster.session import Evaluation, FarSession
from moeflux.cluster.stage import ALL, LAST, NONE
from moeflux.errors import ArgumentError, Cancelled, Error
from moeflux.models.variants import Variant
from moeflux.runtime.plan import CONTEXT_STEP, DEFAULT_CONTEXT
from moeflux.runtime.plan_table import ENGINE_PARTS, SESSION_PARTS
from moeflux.runtime.snapshot import FIXED, TYPES, pieces_of

__all__ = ["FarEngine", "Source"]


class Source(Protocol):
    """Where the chain is from: it changes when a machine was lost."""

    def chain(self) -> Stages:
        """The one that works now. Waits while machines are started again; PeerError when that takes too long."""


class FarEngine:
    of = "machines"  # what the layers are on, for people

    def __init__(
        self,
        source: Source,
        variant: Variant,
        ranges: Sequence[tuple[int, int]],
        chunk: int,
        described: str,
        again: bool,
    ) -> None:
        """`ranges`: the layers of each stage. `again`: a scheduler makes answers again that a lost machine had."""
        self._source = source
        self.variant, self.ranges, self.chunk, self.again = variant, list(ranges), chunk, again
        self.layers, self.width = (0, variant.num_layers), width_of(variant)
        self._described = described
        self._ids = itertools.count(1)

    def chain(self) -> Stages:
        return self._source.chain()

    def new_id(self) -> int:
        return next(self._ids)

    def describe(self) -> str:
        return f"{self._described}, {len(self.ranges)} {self.of}"

    @property
    def memory(self) -> Any:
        """As `_core.Footprint`, of all machines together."""
        told = self.chain().ask("memory")
        names = (ENGINE_PARTS | SESSION_PARTS).values()
        return SimpleNamespace(**{name: sum(stage[name] for stage in told) for name in names})

    @property
    def held_by_device(self) -> int:
        return sum(stage["held_by_device"] for stage in self.chain().ask("memory"))

    @property
    def slots(self) -> list[tuple[str, int, int]]:
        """As those of `_core.Engine`, of all machines together."""
        sums: dict[str, tuple[int, int]] = {}
        for stage in self.chain().ask("memory"):
            for where, count, filled in stage["slots"]:
                before = sums.get(where, (0, 0))
                sums[where] = (before[0] + count, before[1] + filled)
        return [(where, *numbers) for where, numbers in sums.items()]

    def session(self, max_context: int = 0, kv_dtype: str = "f32") -> FarSession:
        return FarSession(self, max_context or min(self.variant.max_context, DEFAULT_CONTEXT), kv_dtype)

    # ---- Evaluating ---------------------------------------------------------------------------------------------

    def evaluate(
        self,
        work: Sequence[tuple[FarSession, np.ndarray, np.ndarray | None, None]],
        logits: bool,
        cancel: Cancel | None = None,
    ) -> list[tuple[int, str]]:
        """As that of `_core.Engine`. It is given up before it begins, or not at all."""
        pieces = [(session, np.asarray(ids, np.int32), every) for session, ids, every, _ in work]
        if len({id(session) for session, *_ in pieces}) < len(pieces):
            raise ArgumentError("evaluate: expected each session once, found one twice")
        for place, (session, ids, _) in enumerate(pieces):
            if session.engine is not self:
                raise ArgumentError(f"work[{place}]: expected a session of this model, found one of another")
            if not len(ids):
                raise ArgumentError(f"work[{place}]: tokens: expected one or more, found none")
        if cancel is not None and cancel.is_set():
            raise Cancelled("evaluate: given up")
        if not pieces:
            return []
        failures = self.evaluate_together(pieces, LAST if logits else NONE)
        return [(session.logits_serial, failure) for (session, *_), failure in zip(pieces, failures, strict=True)]

    def evaluate_together(
        self, pieces: Sequence[tuple[FarSession, np.ndarray, np.ndarray | None]], wanted: int
    ) -> list[str]:
        """All of them or, with an error, none. Returns which sessions have failed by themselves."""
        for session, *_ in pieces:
            session.settle()
            session.check()
        chain = pieces[0][0].chain
        starts = [session.place for session, *_ in pieces]
        self.take_room([(session, len(ids)) for session, ids, _ in pieces])
        flights = []
        for work, offsets, rooms in self._frames(pieces, wanted):
            flights.append((Evaluation(chain, work, offsets), rooms))
        failures = [""] * len(pieces)
        places = {id(session): place for place, (session, *_) in enumerate(pieces)}
        error: Error | None = None
        for flight, rooms in flights:
            flight.settle()
            error = error or flight.error
            found = zip(flight.work, flight.every, rooms, flight.failures, strict=True)
            for (session, *_), every, room, failure in found:
                failures[places[id(session)]] = failures[places[id(session)]] or failure
                if room is not None and every is not None:
                    room[...] = every
        if error is not None:
            self.undo(chain, [(session, start) for (session, *_), start in zip(pieces, starts, strict=True)])
            raise error
        return failures

    def _frames(self, pieces: Sequence[Any], wanted: int) -> list[Any]:
        """Cuts work into frames of at most a chunk: (session, tokens, wanted) of each, how many tokens of a session are
        in frames before, and where logits of all tokens go."""
        frames: list[Any] = []
        left = 0
        for session, ids, every in pieces:
            begin = 0
            while begin < len(ids):
                if not left:
                    frames.append(([], [], []))
                    left = self.chunk
                end = min(len(ids), begin + left)
                kind = ALL if every is not None else wanted if end == len(ids) else NONE
                for column, value in zip(
                    frames[-1],
                    ((session, ids[begin:end], kind), begin, None if every is None else every[begin:end]),
                    strict=True,
                ):
                    column.append(value)
                left -= end - begin
                begin = end
        return frames

    def evaluate_chunks(
        self,
        session: FarSession,
        ids: np.ndarray,
        on_progress: Callable[[int, int], object] | None,
        every: np.ndarray | None,
        cancel: Cancel | None,
    ) -> tuple[int, int]:
        """As `_core.Session.prefill`: how many tokens, and the serial of their logits."""
        total, chain, start = len(ids), session.chain, session.place
        flights: deque[tuple[int, Evaluation]] = deque()
        sent = done = 0
        stopped = False
        error: Error | None = None
        while flights or (sent < total and not stopped):
            if cancel is not None and cancel.is_set():
                stopped = True
            while sent < total and not stopped and len(flights) <= chain.count:
                end = min(total, sent + self.chunk)
                wanted = ALL if every is not None else LAST
                flights.append((end, Evaluation(chain, [(session, ids[sent:end], wanted)], [sent - done])))
                sent = end
            if not flights:
                break
            end, flight = flights.popleft()
            flight.settle()
            error = error or flight.error or (Error(flight.failures[0]) if flight.failures[0] else None)
            if error is not None:
                stopped = True
                continue
            if every is not None:
                every[done:end] = flight.every[0]
            done = end
            if on_progress is not None and on_progress(done, total) is False:
                stopped = True
        if error is not None:
            self.undo(chain, [(session, start + done)])
            raise error
        if done < total and cancel is not None and cancel.is_set():
            raise Cancelled(f"prefill: given up after {done} of {total} tokens")
        return done, session.logits_serial

    def take_room(self, wanted: Sequence[tuple[FarSession, int]]) -> None:
        """Where a session cannot always go back, all stages take memory before any of them evaluates. BudgetError when
        one has none."""
        if not self.variant.forgets:
            return
        pieces = [
            [session.identity, count]
            for session, count in wanted
            if session.place % CONTEXT_STEP == 0
            or session.place // CONTEXT_STEP != (session.place + count - 1) // CONTEXT_STEP
        ]
        if pieces:
            wanted[0][0].chain.ask("room", pieces=pieces)

    def undo(self, chain: Stages, places: Sequence[tuple[FarSession, int]]) -> None:
        """Brings sessions back to where they were, on all stages. Those that cannot go there are lost."""
        if chain.error is not None:
            return
        for (session, _), failure in zip(places, self.go_back(chain, places), strict=True):
            if failure:
                session.lose(failure)

    def go_back(self, chain: Stages, places: Sequence[tuple[FarSession, int]]) -> list[str]:
        """Why each cannot; empty for those that have."""
        told = chain.ask("rewind", pieces=[[session.identity, position] for session, position in places])
        failures = []
        for place, (session, position) in enumerate(places):
            found = [stage[place] for stage in told]
            failures.append(next((each for each in found if isinstance(each, str)), ""))
            if not failures[-1]:
                session.went_back(position, [(exact, list(named)) for exact, named in found])
        return failures

    # ---- States -------------------------------------------------------------------------------------------------

    def state_counts(self, kv_dtype: str) -> list[int]:
        """How many arrays the state of each stage has."""
        pieces = pieces_of(self.variant, 0, kv_dtype == "q8")
        return [sum(first <= layer < end for layer, _ in pieces) for first, end in self.ranges]

    def empty_state(self, position: int, kv_dtype: str) -> list[tuple[int, str, np.ndarray]]:
        """Arrays for all pieces of a state."""
        rows = next(kind for kind, name in TYPES.items() if name == kv_dtype)

        def kind(name: str) -> type:
            return np.float32 if name in FIXED else np.uint16 if name.endswith("_scale") else rows

        shapes = pieces_of(self.variant, position, kv_dtype == "q8")
        return [(layer, name, np.zeros(shape, kind(name))) for (layer, name), shape in shapes.items()]
