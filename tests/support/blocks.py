"""Random blocks of GGUF's types."""

from __future__ import annotations

import numpy as np

from moeflux import QuantFormat

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
HALVES |= {"Q6_K": (208,), "GGUF_MXFP4": ()}
"""Where a block has f16 numbers, if not one at its start."""

CODES = {"Q8_0": (2, 34), "Q4_0": (2, 18), "Q4_1": (4, 20), "Q5_0": (2, 22), "Q5_1": (4, 24), "Q2_K": (16, 80)}
CODES |= {"Q3_K": (0, 96), "Q4_K": (16, 144), "Q5_K": (16, 176), "Q6_K": (0, 192), "IQ4_NL": (2, 18)}
CODES |= {"IQ4_XS": (8, 136), "GGUF_MXFP4": (1, 17)}
"""The bytes of a block that hold codes."""


def random_blocks(rng: np.random.Generator, name: str, count: int, *, every_scale: bool = False) -> np.ndarray:
    """Codes and scales of parts are random bits: uint8 [count, bytes]. f16 numbers are of a normal distribution, or any
    finite ones: zeros of both signs and subnormal ones too. So are the powers of MXFP4."""
    format = QuantFormat.blocks(name)
    blocks = rng.integers(0, 256, (count, format.weight_row_bytes(format.whole_columns))).astype(np.uint8)
    for at in HALVES.get(name, (0,)):
        halves = rng.standard_normal(count).astype("<f2")
        if every_scale:
            bits = rng.integers(0, 0x7C00, count) | rng.integers(0, 2, count) << 15
            halves = np.where(np.arange(count) % 8 == 7, bits & 0x83FF, bits).astype("<u2")
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    if name == "GGUF_MXFP4":
        blocks[:, 0] = np.arange(count) % 252 if every_scale else rng.integers(120, 127, count)
    return blocks


def least_codes(blocks: np.ndarray, name: str) -> np.ndarray:
    """The blocks with the least code everywhere."""
    first, last = CODES[name]
    changed = blocks.copy()
    changed[:, first:last] = {"Q8_0": 0x80, "GGUF_MXFP4": 0xFF}.get(name, 0)
    return changed
