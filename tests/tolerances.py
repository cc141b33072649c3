"""How far an op may be from the oracle: the one table, and the one way to measure.

The error is relative to the largest number expected. It is what float32 rounding costs at the sizes that the tests
have, times two to five. bf16 caches cost nothing more: the oracle gets the rounded rows.
"""

from __future__ import annotations

import numpy as np

LARGEST_ERROR = {
    # op: {type of what is stored: largest error}
    "attention": {"f32": 4e-6, "bf16": 4e-6},
    "mla_attention": {"f32": 4e-6, "bf16": 4e-6},
    "conv1d": {"f32": 1e-6},
    "delta_gates": {"f32": 2e-7},
    "gated_delta": {"f32": 4e-6},
    "route_softmax": {"f32": 2e-6},
    "route_grouped": {"f32": 2e-6},
}


def assert_agrees(op: str, found: np.ndarray, expected: np.ndarray, stored: str = "f32") -> None:
    assert found.shape == expected.shape, f"{op}: expected shape {expected.shape}, found {found.shape}"
    scale = np.abs(expected).max(initial=0.0)
    error = np.abs(found.astype(np.float64) - expected).max(initial=0.0)
    limit = LARGEST_ERROR[op][stored]
    assert error <= limit * scale, (
        f"{op}: error {error / scale:.2e} of the largest number, expected at most {limit:.2e}"
    )
