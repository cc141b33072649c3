"""Random matrices in GGUF's types of blocks."""

from __future__ import annotations

from functools import cache

import numpy as np

from moeflux.oracle.blocks import TYPES, block_numbers

__all__ = ["block_noise"]

SCALES = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}
"""Where the f16 of a block lies, if not at its start."""

MINIMA = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""By what the second f16 of a block, behind the first, is larger, where numbers shall deviate from zero."""


def block_noise(random: np.ndarray, name: str, deviation: float) -> np.ndarray:
    """Turns random bytes uint8 [whole blocks] into blocks whose numbers are about zero and deviate by `deviation`. Codes
    and the scales of parts of a block stay random bits."""
    blocks = random.reshape(-1, TYPES[name][0]).copy()
    if name == "GGUF_MXFP4":  # each second scale is twice the others
        blocks[:, 0] = round(np.log2(deviation / _deviation(name))) + 127 + (blocks[:, 0] & 1)
    else:
        _set_scales(blocks, name, deviation / _deviation(name))
    return blocks.reshape(-1)


def _set_scales(blocks: np.ndarray, name: str, scale: float) -> None:
    at = SCALES.get(name, 0)
    blocks[:, at : at + 2] = np.array([scale], "<f2").view(np.uint8)
    if name in MINIMA:
        blocks[:, at + 2 : at + 4] = np.array([scale * MINIMA[name]], "<f2").view(np.uint8)


@cache
def _deviation(name: str) -> float:
    """Of the numbers of random blocks whose scale is 1."""
    random = np.random.SFC64(0).random_raw(256 * TYPES[name][0] // 8).view(np.uint8).reshape(256, -1).copy()
    if name == "GGUF_MXFP4":
        random[:, 0] = 127 + (random[:, 0] & 1)
    else:
        _set_scales(random, name, 1.0)
    return float(np.sqrt(np.mean(block_numbers(random, name).astype(np.float64) ** 2)))
