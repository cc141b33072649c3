"""One stage: it takes frames, does what they say with its own layers, and sends them on to the next stage.

All that concerns sessions comes this way, in the order in which it was sent: so a fork that is asked for after an
evaluation stands behind that on every stage, whatever is on its way. The last stage sends to who asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moeflux import _core
from moeflux.cluster.links import Frame, Links, Outlet
from moeflux.cluster.protocols import StageEngine, StageSession, StageWork
from moeflux.cluster.stats import COUNTED
from moeflux.errors import BudgetError, Error, StateError
from moeflux.log import LOG
from moeflux.runtime.plan_table import ENGINE_PARTS, SESSION_PARTS

__all__ = ["ALL", "LAST", "NONE", "Stage", "raised"]

NONE, LAST, ALL = 0, 1, 2
"""Of which of its tokens a piece wants logits."""

WAIT = 0.1
Arrays = list[np.ndarray]


class Stage:
    """What a process does with the layers that it has. `name` is that of its machine, in messages."""

    def __init__(self, name: str, engine: StageEngine, *, first: bool, last: bool, width: int, vocab: int) -> None:
        self._name, self._engine = name, engine
        self._first, self._last, self._width, self._vocab = first, last, width, vocab
        self._sessions: dict[int, StageSession] = {}
        self._cancel = _core.Cancel()
        self.heard = False  # anything of this run

    def run(self, links: Links, outlet: Outlet, goes_on: Callable[[], bool]) -> None:
        """Until it is told to end, or a link is broken."""
        while goes_on():
            frame = links.receive(WAIT)
            if frame is not None:
                self.heard = True
                outlet.send(*self.handle(frame))

    def cancel(self) -> None:
        """Gives up what is evaluated now, if that can be."""
        self._cancel.set()

    def handle(self, frame: Frame) -> tuple[dict[str, Any], Arrays]:
        """What becomes of a frame here. One that has failed on its way is only passed on."""
        body, arrays = frame.body, frame.arrays
        if "error" in body:
            return body, []
        try:
            operation = getattr(self, f"_do_{body['op']}", None)
            if operation is None:
                raise StateError(f"expected something that a stage does, found {body['op']!r:.40}")
            told, arrays = operation(body, arrays)
        except (Error, MemoryError) as error:
            body["error"] = {
                "stage": len(body["told"]),
                "kind": type(error).__name__,
                "text": f"machine {self._name}: {error}",
                "missing": getattr(error, "missing", None),
            }
            return body, []
        body["told"].append(told)
        return body, arrays

    # ---- Sessions -----------------------------------------------------------------------------------------------

    def _session(self, number: int) -> StageSession:
        if number not in self._sessions:
            raise StateError(f"expected a session of this run, found number {number}")
        return self._sessions[number]

    def _where(self, session: StageSession) -> list[Any]:
        """From where on it can go back to every position, and where else it can."""
        return [session.exact_from, session.checkpoints]

    def _do_hello(self, body: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
        return self._name, arrays

    def _do_make(self, body: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
        session = self._engine.session(body["context"], body["kv_dtype"], body["checkpoints"])
        self._sessions[body["id"]] = session
        return self._where(session), arrays

    def _do_close(self, body: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
        for number in body["ids"]:
            self._sessions.pop(number, None)
        return None, arrays

    def _do_fork(self, body: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
        forked = self._session(body["id"]).fork(body["position"])
        self._sessions[body["new"]] = forked
        return self._where(forked), arrays

    def _do_clear(self, body: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
        session = self._session(body["id"])
        session.clear()
        return self._where(session), arrays

    def _do_rewind(self, body: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
        """Each of these sessions to a position. Those that cannot go there are told of, and stay."""
        told: list[Any] = []
        for number, position in body["pieces"]:
            session = self._session(number)
            try:
                if session.position != position:
                    session.rewind(position)
                else:
                    session.make_room(0)  # a failure may have left it unusable
                told.append(self._where(session))
            except Error as error:
                told.append(str(error))
        return told, arrays

    def _do_checkpoint(self, body: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
        session = self._session(body["id"])
        session.checkpoint()
        return self._where(session), arrays

    def _do_set_max_checkpoints(self, body: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
        session = self._session(body["id"])
        session.set_max_checkpoints(body["count"])
        return self._where(session), arrays

    def _do_room(self, body: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
        for number, tokens in body["pieces"]:
            self._session(number).make_room(tokens)
        return None, arrays

    def _do_memory(self, body: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
        held = self._engine.memory
        parts = {field: getattr(held, field) for field in (ENGINE_PARTS | SESSION_PARTS).values()}
        slots = [list(each) for each in self._engine.slots]
        return {**parts, "held_by_device": self._engine.held_by_device, "slots": slots}, arrays

    # ---- States -------------------------------------------------------------------------------------------------

    def _do_read_state(self, body: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
        """The pieces of the layers here, behind those of the layers before."""
        pieces = self._session(body["id"]).read_state()
        return [[layer, name] for layer, name, _ in pieces], [*arrays, *(array for *_, array in pieces)]

    def _do_restore(self, body: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
        """The first array has the tokens; of the others, those of the layers here come first."""
        session, tokens = self._session(body["id"]), arrays[0]
        count = body["counts"][len(body["told"])]
        session.restore(body["position"], tokens, arrays[1 : 1 + count])
        return self._where(session), [tokens, *arrays[1 + count :]]

    # ---- Evaluating ---------------------------------------------------------------------------------------------

    def _do_evaluate(self, body: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
        """Pieces are [session, its position before, tokens, NONE, LAST or ALL]. The arrays are all tokens, and all rows
        of them unless this is the first stage. Pieces of sessions that have failed here or before are left out."""
        pieces, failures = body["pieces"], body["failures"]
        tokens, rows = arrays[0], None if self._first else arrays[1]
        out = None if self._last else np.empty((len(tokens), self._width), np.float32)
        work: list[StageWork] = []
        found: Arrays = []  # of the last stage: logits by piece
        taken: list[int] = []
        begin = 0
        for place, (number, position, count, wanted) in enumerate(pieces):
            here = slice(begin, begin + count)
            begin += count
            if self._last:
                shape = (count if wanted == ALL else wanted, self._vocab)
                found.append(np.empty(shape, np.float32))
            if str(place) in failures:
                continue
            session = self._session(number)
            if session.position != position:
                raise StateError(f"expected session {number} at {position}, found it at {session.position}")
            room = out[here] if out is not None else found[place] if wanted == ALL else None
            work.append((session, tokens[here], room, None if rows is None else rows[here]))
            taken.append(place)
        if not work:
            return {"stats": {}, "where": {}}, [tokens, out] if out is not None else found
        done = self._engine.evaluate(work, any(wanted for *_, wanted in pieces), self._cancel)
        where: dict[int, Any] = {}
        for place, (session, *_), (_, failure) in zip(taken, work, done, strict=True):
            if failure:
                failures[str(place)] = f"machine {self._name}: {failure}"
                continue
            where[place] = self._where(session)
            if self._last and pieces[place][3] == LAST:
                session.logits(found[place][0], self._vocab)
        last = work[0][0].last
        stats = {name: getattr(last, name) for name in COUNTED}
        return {"stats": stats, "where": where}, [tokens, out] if out is not None else found


def raised(error: dict[str, Any]) -> Error:
    """The error that a stage has told of."""
    kind = next((each for each in _kinds(Error) if each.__name__ == error["kind"]), Error)
    made = kind(error["text"])
    if isinstance(made, BudgetError):
        made.missing = error["missing"]
    LOG.debug("a stage has failed: %s", error["text"])
    return made


def _kinds(kind: type[Error]) -> list[type[Error]]:
    return [kind, *(each for child in kind.__subclasses__() for each in _kinds(child))]
