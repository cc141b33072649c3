"""Decides whether the logits of the engine are those of a reference."""

from __future__ import annotations

import numpy as np

LEAST_COSINE = 0.99999
LARGEST_ERROR = 1e-3
"""Of the range of the logits: what the engine may differ by from a peer, which computes in its own float32."""
LARGEST_ORACLE_ERROR = 1e-5
"""The same against the oracle, which has the very weights. Measured: up to 2.6e-6."""
LARGEST_INT16_ERROR = 4e-3
"""And with activations of 16 bits. Measured: up to 1.4e-3, mostly 1e-4 to 4e-4."""


def assert_meets(found: np.ndarray, expected: np.ndarray, largest: float = LARGEST_ERROR) -> None:
    assert found.shape == expected.shape
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((found * expected).sum(axis=1) / lengths).min() >= LEAST_COSINE
    assert np.abs(found - expected).max() <= largest * np.ptp(expected)
    if largest <= LARGEST_ERROR:
        assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()
