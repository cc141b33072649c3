"""Sessions that fork, go back, go on and close as hypothesis likes. Each has the bits of a session of its own, whatever
the others do with the blocks that they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moeflux
from moeflux import BudgetError, _core
from moeflux.runtime.snapshot import Snapshot
from moeflux.stores.store import open_store
from support.engine import Folder, folders, load_faulty, tokens

NAMES = ("qwen3_5_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")
DEVICES: dict[str, dict[str, Any]] = {
    "prompt": {"chunk": 5},
    "deferred": {"deferred": True, "expert_slots": 9},
    "apart": {"apart": True, "expert_slots": 6, "backend": "cpu"},  # a mode of the CPU
}
BASES = (257, 510)
"""Where sessions begin: so many tokens of TEXT, shortly behind a border of blocks, or before one."""
TEXT = tokens(510)
CONTEXT = 600  # three blocks

Bases = Callable[[str], list[Snapshot]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("histories"))


@pytest.fixture(scope="module")
def bases(folder: Folder) -> Bases:
    known: dict[str, list[Snapshot]] = {}

    def of(name: str) -> list[Snapshot]:
        if name not in known:
            session = load_faulty(folder(name), backend="cpu", chunk=128).session()
            known[name] = []
            for count in BASES:
                session.prefill(TEXT[session.position : count])
                known[name].append(session.snapshot())
        return known[name]

    return of


@dataclass(frozen=True)
class History:
    """The tokens of a session. So many at the beginning came with a base, and were evaluated on the CPU."""

    tokens: tuple[int, ...]
    given: int

    def until(self, count: int) -> History:
        return History(self.tokens[:count], min(self.given, count))

    def then(self, ids: list[int]) -> History:
        return History((*self.tokens, *ids), self.given)


class Reference:
    """The logits of the last token of any history, of a model that nobody else uses."""

    def __init__(self, model: moeflux.Model, bases: list[Snapshot]) -> None:
        self.session = model.session(max_context=CONTEXT)
        self.bases = bases
        self.known: dict[History, np.ndarray] = {}

    def logits(self, history: History) -> np.ndarray:
        if history not in self.known:
            if history.given == 0:
                self.session.clear()
            else:
                self.session.restore(next(base for base in self.bases if base.position >= history.given))
                self.session.rewind(history.given)
            self.known[history] = self.session.prefill(history.tokens[self.session.position :]).numpy()
        return self.known[history]


class Family:
    """Sessions of one model, with what each should have."""

    def __init__(self, model: moeflux.Model, reference: Reference) -> None:
        self.model, self.reference = model, reference
        self.sessions: list[moeflux.Session] = []
        self.histories: list[History] = []
        self.begun = 0  # streams of tokens that nobody else has

    def make(self, base: int) -> None:
        session = self.model.session(max_context=CONTEXT)
        try:
            session.restore(self.reference.bases[base])
        except BudgetError:
            session.close()
            raise
        self.add(session, History(tuple(TEXT[: BASES[base]]), BASES[base]))

    def add(self, session: moeflux.Session, history: History) -> None:
        self.sessions.append(session)
        self.histories.append(history)

    def go(self, at: int, amount: int) -> None:
        self.begun += 1
        ids = tokens(min(amount + 1, 8), seed=2 + self.begun)
        logits = self.sessions[at].prefill(ids)
        self.histories[at] = self.histories[at].then(ids)
        assert np.array_equal(logits.numpy(), self.reference.logits(self.histories[at]))

    def fork(self, at: int, back: int) -> None:
        session = self.sessions[at]
        wanted = max(0, session.position - back)
        if wanted < session.exact_from:
            wanted = max((p for p in session.checkpoints if p <= wanted), default=0)
        self.add(session.fork(wanted), self.histories[at].until(wanted))

    def rewind(self, at: int, back: int) -> None:
        reached = self.sessions[at].rewind(max(0, self.sessions[at].position - back), exact=False)
        self.histories[at] = self.histories[at].until(reached)

    def checkpoint(self, at: int, _: int) -> None:
        self.sessions[at].checkpoint()

    def close(self, at: int, _: int) -> None:
        self.sessions.pop(at).close()
        self.histories.pop(at)

    def play(self, call: str, at: int, amount: int) -> None:
        """A call that finds no memory changes nothing."""
        try:
            if call == "make" or not self.sessions:
                self.make(amount % len(BASES))
            else:
                getattr(self, call)(at % len(self.sessions), amount)
        except BudgetError:
            assert call in ("make", "go", "fork")
        assert self.model._engine.sessions == len(self.sessions)
        for session, history in zip(self.sessions, self.histories, strict=True):
            assert session.tokens == list(history.tokens)

    def end(self) -> None:
        """All go on from what they have, and so does each before it gives all of it back."""
        for at in range(len(self.sessions)):
            self.play("go", at, 1)
        while self.sessions:
            try:
                self.go(0, 2)
            except BudgetError:
                assert len(self.sessions) > 1, "one alone has room"
            self.close(0, 0)
        assert self.model._engine.memory.sessions == 0


BEGIN = (("make", 0, 1), ("checkpoint", 0, 0), ("go", 0, 6), ("fork", 0, 0), ("fork", 0, 0))
CALLS = st.sampled_from(("make", "go", "go", "fork", "fork", "rewind", "checkpoint", "close"))
HISTORIES = st.lists(
    st.tuples(CALLS, st.integers(0, 5), st.sampled_from((1, 2, 6, 7, 0, 260))), min_size=4, max_size=20
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_what_others_do_changes_no_bit(folder: Folder, bases: Bases, on_metal: bool, name: str, device: str) -> None:
    with open_store(folder(name)) as store:
        faults = _core.testing.Faults(apart=device == "apart")
        parts = _core.testing.footprint(faults, store.directory, max_context=CONTEXT)
    # Five sessions, with blocks for two whole ones.
    limit = 5 * (parts.sessions - parts.rows) + 2 * parts.rows
    model = load_faulty(folder(name), session_bytes=limit, **DEVICES[device])
    backend = DEVICES[device].get("backend", "auto")
    reference = Reference(load_faulty(folder(name), backend=backend, chunk=128, threads=2), bases(name))

    @settings(max_examples=2 if on_metal else 10, database=None)
    @given(HISTORIES)
    def holds(history: list[tuple[str, int, int]]) -> None:
        family = Family(model, reference)
        try:
            for call in (*BEGIN, *history):
                family.play(*call)
            family.end()
        finally:
            for session in family.sessions:
                session.close()

    holds()
