"""Recording, or counting, which experts a router picks, while a model is used.

with model.trace() as trace:
    session.prefill(prompt)
trace.save("run.trace")
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock

import numpy as np

from moeflux import _core
from moeflux.errors import StateError
from moeflux.models.variants import Variant
from moeflux.routing.trace import Trace

__all__ = ["Counting", "Recording"]


class Recording:
    """What `model.trace()` returns. In its `with`, every token that any session of the model evaluates is recorded."""

    def __init__(
        self, engine: _core.Engine, one_at_a_time: Lock, variant: Variant, fingerprint: str, expert_bytes: int
    ) -> None:
        self._engine = engine
        self._one_at_a_time = one_at_a_time
        self._variant = variant
        self._fingerprint = fingerprint
        self._expert_bytes = expert_bytes
        self._core = _core.RoutingTrace(engine)

    def __enter__(self) -> Recording:
        if not self._one_at_a_time.acquire(blocking=False):
            raise StateError("trace: expected a model that is not recorded yet, found another recording under way")
        try:
            self._core = _core.RoutingTrace(self._engine)
            _core.record_routing(self._engine, self._core)
        except BaseException:
            self._one_at_a_time.release()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            _core.record_routing(self._engine, None)
        finally:
            self._one_at_a_time.release()

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


class Counting:
    """What `model.count_experts()` returns. In its `with`, it is counted how often the router of each layer picks each
    expert, for all sessions of the model. What was counted before is kept."""

    def __init__(self, engine: _core.Engine, one_at_a_time: Lock) -> None:
        self._engine = engine
        self._one_at_a_time = one_at_a_time
        self._core = _core.RoutingCounts(engine)

    def __enter__(self) -> Counting:
        if not self._one_at_a_time.acquire(blocking=False):
            raise StateError("counting: expected a model that is not recorded yet, found another recording under way")
        try:
            _core.count_routing(self._engine, self._core)
        except BaseException:
            self._one_at_a_time.release()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            _core.count_routing(self._engine, None)
        finally:
            self._one_at_a_time.release()

    @property
    def layers(self) -> list[int]:
        """The layers of the model that have experts."""
        return self._core.layers

    def counts(self) -> np.ndarray:
        """So far: int64 [layers, experts]."""
        return self._core.counts()
