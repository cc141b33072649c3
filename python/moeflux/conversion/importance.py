"""What an error in each column of a matrix weighs when it is quantised: the mean square of the activations that the
column meets, gathered while a model reads a calibration text.

Gate and up of all experts of a layer read the same activations, so they share those of the layer: what few tokens one
expert was picked for would say less. Columns of down are neurons of one expert and have nothing in common with those of
another, so each expert has its own, drawn to the mean of the layer while it has seen few tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moeflux.errors import StateError

__all__ = ["Calibration", "Importance"]

LEAST = 0.01
"""Of the mean, is added to every column: what a text never used may be used by another."""
ROWS = 16
"""An expert that met so many rows counts half, the mean of its layer the other half."""

Dense = dict[str, tuple[int, np.ndarray]]
Experts = dict[int, list[Any]]


class Importance:
    """Of a model: for each matrix by its name, and for the experts of a layer, rows and sums of squares as
    `_core.ActivationMoments` has them."""

    def __init__(self, dense: Dense, experts: Experts) -> None:
        self._dense = dense
        self._experts = experts

    def of(self, name: str) -> np.ndarray | None:
        """float32 [columns]; None for a matrix that met nothing."""
        rows, squares = self._dense.get(name, (0, np.empty(0)))
        return _weights(squares / rows) if rows else None

    def of_expert(self, layer: int, expert: int) -> tuple[np.ndarray | None, ...]:
        """Of gate, up and down."""
        if layer not in self._experts:
            return None, None, None
        rows, squares, met, inner = self._experts[layer]
        shared = _weights(squares / rows)
        mean = inner.sum() / max(int(met.sum()), 1) / inner.shape[1]
        own = (inner[expert] + ROWS * mean) / (int(met[expert]) + ROWS)
        return shared, shared, _weights(own)


def _weights(squares: np.ndarray) -> np.ndarray:
    """With a mean of about 1."""
    mean = float(squares.mean())
    return (squares / mean + LEAST if mean > 0 else np.ones_like(squares)).astype(np.float32)


class Calibration:
    """An importance that is gathered when it is needed. `label` says of which text and model it is: conversions with
    the same label give the same bytes."""

    def __init__(self, label: str, gather: Callable[[], Importance]) -> None:
        self.label = label
        self._gather = gather
        self._gathered: Importance | None = None

    def prepare(self) -> None:
        if self._gathered is None:
            self._gathered = self._gather()

    @property
    def importance(self) -> Importance:
        if self._gathered is None:
            raise StateError("calibration: expected it to be prepared before weights are made, found it was not")
        return self._gathered
