"""How far an op may be from the oracle: the one table, and the two ways to measure.

A tolerance is what float32 rounding costs at the sizes that the tests have, times two to five. It is relative to the
largest number expected (`assert_agrees`). Or it is relative, element by element, to the size of the terms that add up
to the element, because float32 rounds those (`assert_close`). bf16 caches and codes cost nothing more: the oracle gets
the rounded rows.
"""

from __future__ import annotations

import numpy as np

LARGEST_ERROR = {
    # op: {type of what is stored: largest error}
    "attention": {"f32": 4e-6, "bf16": 4e-6, "q8": 4e-6},
    "mla_attention": {"f32": 4e-6, "bf16": 4e-6, "q8": 4e-6},
    "index_scores": {"f32": 2e-6},  # element by element: two products, one inside the other
    "conv1d": {"f32": 1e-6},
    "delta_gates": {"f32": 2e-7},
    "gated_delta": {"f32": 4e-6},
    "route_softmax": {"f32": 2e-6},
    "route_grouped": {"f32": 2e-6},
    # Element by element. One rounding is 6e-8.
    "matmul": {"f32": 1e-6},  # of the weight once or twice, then one chain of multiply-adds a lane
    "expert_ffn": {"f32": 4e-6},  # two products, one inside the other, and silu between them
    "embed": {"f32": 2.5e-7},  # code * scale + bias: two roundings without a fused multiply-add
    "rms_norm": {"f32": 1e-6},  # the sum of squares, a root, a division, two products
    "rms_norm_heads": {"f32": 1e-6},
    "layer_norm": {"f32": 2e-6},  # and a mean, beside which a number may be small
    "gated_rms_norm": {"f32": 2e-6},  # and silu
    "swiglu": {"f32": 1e-6},  # exp to two units of the last place, a sum, a division, a product
    "geglu": {"f32": 1e-6},  # of both factors: near nothing, a polynomial in the exponent
    "sigmoid_gate": {"f32": 1e-6},
    "residual_add": {"f32": 6e-8},
    "bias_add": {"f32": 6e-8},
    "scale": {"f32": 6e-8},
    "soft_cap": {"f32": 3e-7},  # of the cap: a sigmoid, and a difference of numbers up to 1
    "silu": {"f32": 1e-6},
    "hyper_norm": {"f32": 1e-6},  # as rms_norm
    "hyper_mix": {"f32": 1e-6},  # of the streams' sizes: a sigmoid, a chain over the streams, a product
    "hyper_add": {"f32": 1e-6},  # a division, a sigmoid, a fused product
    "ngram_gate": {"f32": 1e-6},  # a sum of products under a root under a sigmoid, and a product
    "combine": {"f32": 1e-6},  # a chain over the experts, two sums, a sigmoid
    "rope": {"f32": 2e-7},  # two products and a sum
}

# What each number of a group may lose where a product takes it as two digits (kernels/cpu/int16.h), as a part of the
# group's largest: half a unit, of which there are 127 * 256 + 127. A product may be off by this for each of its
# weights, beside the roundings of float32.
INT16_ROUNDING = 0.501 / (127 * 256 + 127)

# And what products of normal numbers are off by, root mean square over root mean square: a rounding's is its unit over
# the root of 12, the largest of 32, 64 or 128 normal numbers is about 2.2, 2.5 or 2.8. A hundredth of bf16's 1.7e-3.
INT16_ERROR = 3e-5

# What a number may lose, as a part of itself, where attention over bf16 rows takes queries and weights as two digits of
# bf16 (kernels/cpu/attention_tiles.inl): half a unit of the last of 8 bits, of half a unit of the last of 8 bits.
TILE_ROUNDING = 2.0**-18

# What each number may lose, as a part of the largest of those that share its unit, where attention over codes takes
# queries and weights as whole numbers (kernels/cpu/attention_codes.inl): half a unit.
CODE_ROUNDING = 0.501 / 32767

# And what attention by normal numbers is then off by, root mean square over root mean square. Codes themselves lose a
# hundred times as much.
CODE_ERROR = 7e-5

BF16_ROUNDING = 2.0**-8  # of a number: half a unit of the last of eight bits


def assert_agrees(
    op: str, found: np.ndarray, expected: np.ndarray, stored: str = "f32", rounding: np.ndarray | float = 0.0
) -> None:
    """`rounding` is what an element may be off by beside float32's roundings."""
    assert found.shape == expected.shape, f"{op}: expected shape {expected.shape}, found {found.shape}"
    scale = np.abs(expected).max(initial=0.0)
    error = (np.abs(found.astype(np.float64) - expected) - rounding).max(initial=0.0)
    limit = LARGEST_ERROR[op][stored]
    assert error <= limit * scale, (
        f"{op}: error {error / scale:.2e} of the largest number, expected at most {limit:.2e}"
    )


def assert_close(
    op: str,
    found: np.ndarray,
    expected: np.ndarray,
    size: np.ndarray | float | None = None,
    rounding: np.ndarray | float = 0.0,
) -> None:
    """`size` is the size of what was added up, by default the element's own. `rounding` is what the element may be off
    by beside float32's roundings."""
    assert found.dtype == np.float32
    assert found.shape == expected.shape, f"{op}: expected shape {expected.shape}, found {found.shape}"
    size = np.abs(expected) if size is None else size
    error = np.abs(found.astype(np.float64) - expected)
    # Below float32's normal numbers an error is a fixed step, not a fraction. NaN is never close.
    allowed = np.broadcast_to(LARGEST_ERROR[op]["f32"] * size + rounding + 1e-37, error.shape)
    bad = np.argwhere(~(error <= allowed))
    if len(bad):
        at = tuple(bad[0].tolist())
        raise AssertionError(
            f"{op}: {len(bad)} of {error.size}, first at {at}: expected {expected[at]:.9g}, found {found[at]:.9g}, "
            f"error {error[at]:.2e}, allowed {allowed[at]:.2e}"
        )
