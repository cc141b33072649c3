"""Recording, or counting, which experts a router picks, or what matrices are multiplied with, while a model is used.

with model.trace() as trace:
    session.prefill(prompt)
trace.save("run.trace")
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from moeflux import _core
from moeflux.errors import StateError
from moeflux.models.variants import Variant
from moeflux.routing.trace import Trace
from moeflux.stores.store import open_store

__all__ = ["Activations", "Counting", "Recording"]


_Self = TypeVar("_Self", bound="_Observing")


class _Observing:
    """In its `with`, it is told what happens in a model. A model tells one at a time."""

    _word: str  # of the refusal

    def __init__(self, engine: _core.Engine, one_at_a_time: Lock) -> None:
        self._engine = engine
        self._one_at_a_time = one_at_a_time

    def _begin(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def __enter__(self: _Self) -> _Self:
        if not self._one_at_a_time.acquire(blocking=False):
            raise StateError(
                f"{self._word}: expected a model that is not recorded yet, found another recording under way"
            )
        try:
            self._begin()
        except BaseException:
            self._one_at_a_time.release()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._end()
        finally:
            self._one_at_a_time.release()


class Recording(_Observing):
    """What `model.trace()` returns. In its `with`, every token that any session of the model evaluates is recorded."""

    _word = "trace"

    def __init__(
        self, engine: _core.Engine, one_at_a_time: Lock, variant: Variant, fingerprint: str, expert_bytes: int
    ) -> None:
        super().__init__(engine, one_at_a_time)
        self._variant = variant
        self._fingerprint = fingerprint
        self._expert_bytes = expert_bytes
        self._core = _core.RoutingTrace(engine)

    def _begin(self) -> None:
        self._core = _core.RoutingTrace(self._engine)
        _core.record_routing(self._engine, self._core)

    def _end(self) -> None:
        _core.record_routing(self._engine, None)

    @property
    def tokens(self) -> int:
        """How many tokens are recorded so far."""
        return self._core.tokens

    def trace(self) -> Trace:
        """A copy of what is recorded so far."""
        experts, passes = self._core.content()
        return Trace(
            self._variant.name,
            self._fingerprint,
            self._variant.experts.count,
            self._expert_bytes,
            tuple(self._core.layers),
            experts,
            passes,
        )

    def save(self, path: str | Path) -> None:
        self.trace().save(path)


class Counting(_Observing):
    """What `model.count_experts()` returns. In its `with`, it is counted how often the router of each layer picks each
    expert, for all sessions of the model. What was counted before is kept."""

    _word = "counting"

    def __init__(self, engine: _core.Engine, one_at_a_time: Lock) -> None:
        super().__init__(engine, one_at_a_time)
        self._core = _core.RoutingCounts(engine)

    def _begin(self) -> None:
        _core.count_routing(self._engine, self._core)

    def _end(self) -> None:
        _core.count_routing(self._engine, None)

    @property
    def layers(self) -> list[int]:
        """The layers of the model that have experts."""
        return self._core.layers

    def counts(self) -> np.ndarray:
        """So far: int64 [layers, experts]."""
        return self._core.counts()


class Activations(_Observing):
    """What `model.observe_activations()` returns. In its `with`, the squares of what every matrix is multiplied with
    are added up, a column each, for all sessions of the model. What was added before is kept."""

    _word = "activations"

    def __init__(self, engine: _core.Engine, one_at_a_time: Lock, path: Path) -> None:
        super().__init__(engine, one_at_a_time)
        self._path = path
        self._core = _core.ActivationMoments(engine)

    def _begin(self) -> None:
        with open_store(self._path) as store:
            _core.observe_activations(self._engine, store.directory, self._core)

    def _end(self) -> None:
        with open_store(self._path) as store:
            _core.observe_activations(self._engine, store.directory, None)

    def dense(self) -> dict[str, tuple[int, np.ndarray]]:
        """For each matrix by its name: how many rows it met, and float64 [columns]."""
        return self._core.dense()

    def experts(self) -> dict[int, list[Any]]:
        """For each layer with experts: rows and float64 [hidden] of gate and up of all, and of down, of each expert,
        rows int64 [experts] and float64 [experts, intermediate]."""
        return {layer: each for layer, *each in self._core.experts()}
