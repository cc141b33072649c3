"""Stages without Ray: processes are threads of the test, and engines are the real ones or small ones made of NumPy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from moeflux import _core
from moeflux.cluster.host import Host, Joining, version
from moeflux.cluster.machines import Machines, machines_of
from moeflux.cluster.model import ClusterModel, load_over
from moeflux.cluster.plan import width_of
from moeflux.cluster.stats import COUNTED
from moeflux.errors import BudgetError, Error, PeerError, StateError
from moeflux.models.variants import Variant
from moeflux.runtime.options import resolved
from moeflux.runtime.plan_table import ENGINE_PARTS, SESSION_PARTS
from moeflux.stores.store import open_store

OPTIONS: dict[str, Any] = {"memory": None, "context": 64, "threads": 1, "readers": 1, "chunk": 16}


class ToyEngine:
    """Layers of NumPy: each has a state that every token changes. What a row becomes depends on the rows before it in
    its session alone."""

    def __init__(self, variant: Variant, layers: tuple[int, int], forgets: bool) -> None:
        self.layers, self.forgets = layers, forgets
        self.width, self.vocab = width_of(variant), variant.vocab_size
        self.first, self.last = layers[0] == 0, layers[1] == variant.num_layers
        self.sessions: list[ToySession] = []
        self.failures: list[Error] = []  # of the next evaluations
        self.calls: list[list[int]] = []  # tokens of each session, by call
        self.gate: Callable[[], object] = lambda: None
        self.memory = SimpleNamespace(**dict.fromkeys((ENGINE_PARTS | SESSION_PARTS).values(), 1))
        self.held_by_device, self.slots = 0, [("host", 8, 3)]
        numbers = np.random.default_rng(1)
        self.embedding = numbers.standard_normal((self.vocab, self.width)).astype(np.float32)
        self.output = numbers.standard_normal((self.width, self.vocab)).astype(np.float32)

    def session(self, max_context: int = 0, kv_dtype: str = "f32", max_checkpoints: int = 4) -> ToySession:
        return ToySession(self, max_context)

    def evaluate(self, work: Sequence[Any], logits: bool, cancel: _core.Cancel | None = None) -> list[tuple[int, str]]:
        self.gate()
        if self.failures:
            raise self.failures.pop(0)
        self.calls.append([len(tokens) for _, tokens, *_ in work])
        for session, tokens, out, hidden in work:
            assert (hidden is None) == self.first
            rows = self.embedding[tokens] if hidden is None else hidden
            found = np.stack([session.take(row) for row in rows])
            session.ids += tokens.tolist()
            if self.last:
                values = np.stack([row @ self.output for row in found])
                session.values = values[-1]
                found = values
            if out is not None:
                out[...] = found
            session.last = SimpleNamespace(**dict.fromkeys(COUNTED, 1))
        return [(1, "")] * len(work)


class ToySession:
    def __init__(self, engine: ToyEngine, max_context: int) -> None:
        self.engine, self.max_context = engine, max_context
        self.ids: list[int] = []
        self.values: np.ndarray | None = None
        self.states = [{layer: np.zeros(engine.width, np.float32) for layer in range(*engine.layers)}]
        self.kept: set[int] = set()
        self.last: Any = None

    def take(self, row: np.ndarray) -> np.ndarray:
        state = {}
        for layer, before in self.states[-1].items():
            state[layer] = before * np.float32(0.5) + row * np.float32(layer + 1)
            row = row + np.tanh(state[layer])
        self.states.append(state)
        return row

    @property
    def position(self) -> int:
        return len(self.ids)

    @property
    def exact_from(self) -> int:
        return self.position if self.engine.forgets else 0

    @property
    def checkpoints(self) -> list[int]:
        return sorted(self.kept)

    def logits(self, out: np.ndarray | None, vocab: int) -> np.ndarray:
        assert out is not None and self.values is not None
        out[...] = self.values
        return out

    def clear(self) -> None:
        self.kept.clear()
        self._cut(0)

    def fork(self, position: int | None = None) -> ToySession:
        where = self.position if position is None else position
        self._check(where)
        forked = ToySession(self.engine, self.max_context)
        forked.ids, forked.states = self.ids[:where], self.states[: where + 1]
        return forked

    def checkpoint(self) -> None:
        self.kept.add(self.position)

    def set_max_checkpoints(self, count: int) -> None:
        if count > 100:
            raise BudgetError("checkpoints: too many")

    def rewind(self, position: int, exact: bool = True) -> int:
        self._check(position)
        self._cut(position)
        return position

    def _check(self, position: int) -> None:
        if position < self.exact_from and position not in self.kept | {0}:
            raise StateError(f"toy: expected a place, found {position}")

    def _cut(self, position: int) -> None:
        del self.ids[position:], self.states[position + 1 :]
        self.kept = {place for place in self.kept if place <= position}

    def make_room(self, tokens: int) -> None:
        if self.position + tokens > self.max_context:
            raise BudgetError(f"toy: no room for {tokens} more")

    def read_state(self) -> list[Any]:
        return []

    def restore(self, position: int, tokens: np.ndarray, tensors: Sequence[np.ndarray]) -> None:
        raise NotImplementedError


class ToyHost(Host):
    """What a process would have, with layers of NumPy."""

    def __init__(self, name: str, forgets: bool) -> None:
        super().__init__(name)
        self._forgets = forgets

    @property
    def engine(self) -> Any:
        return self._engine

    def open(self, path: str | None, layers: tuple[int, int], asked: Any, neighbours: int) -> dict[str, Any]:
        self.stop()
        assert path is not None
        with open_store(path) as store:
            self._variant, self._layers = store.variant, layers
            self._engine = ToyEngine(store.variant, layers, self._forgets)
            joining = Joining(version(), store.fingerprint, "toy", asked["kv_dtype"], layers)
        return {"joining": joining, "plan": SimpleNamespace(chunk=asked["chunk"]), "described": "toy, of NumPy"}


class ThreadHand:
    """A process that is none. `kill` ends it without a word, as far as anybody can tell from outside."""

    def __init__(self, name: str, host: Host) -> None:
        self.name, self.host, self.alive = name, host, True
        self._lock = threading.Lock()

    def call(self, method: str, *values: Any, seconds: float) -> Any:
        if not self.alive:
            raise PeerError(f"machine {self.name}: expected its process, found it gone")
        with self._lock:
            return getattr(self.host, method)(*values)

    def kill(self) -> None:
        self.alive = False
        self.host.stop()

    def dismiss(self) -> None:
        self.kill()


class ThreadCrew:
    def __init__(self, machines: Machines, make: Callable[[str], Host]) -> None:
        self._machines, self._make = machines.machines, make
        self.hired: list[str] = []
        self.closed = False

    def hire(self, index: int) -> ThreadHand:
        name = self._machines[index].name
        self.hired.append(name)
        return ThreadHand(name, self._make(name))

    def close(self) -> None:
        self.closed = True


def toys(
    folder: Path, machines: object = 2, *, forgets: bool = False, on_loss: str = "again", **options: Any
) -> ClusterModel:
    """A model of toy layers, cut over threads."""
    given = machines_of(machines)
    crew = ThreadCrew(given, lambda name: ToyHost(name, forgets))
    return load_over(folder, given, resolved({**OPTIONS, **options}), on_loss=on_loss, crew=crew)


def real(folder: Path, machines: object = 2, *, on_loss: str = "again", **options: Any) -> ClusterModel:
    """A model of the real engine, cut over threads."""
    given = machines_of(machines)
    return load_over(folder, given, resolved({**OPTIONS, **options}), on_loss=on_loss, crew=ThreadCrew(given, Host))
