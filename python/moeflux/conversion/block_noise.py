"""Random matrices in GGUF's types of blocks."""

from __future__ import annotations

import numpy as np

from moeflux.models.variants import QuantFormat

__all__ = ["block_noise"]

SCALES = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}
"""Where the f16 of a block lies, if not at its start."""

MINIMA = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""By what the second f16 of a block, behind the first, is larger, where numbers shall deviate from zero."""

DEVIATIONS = {"Q8_0": 73.2, "Q4_0": 4.65, "Q4_1": 4.59, "Q5_0": 9.2, "Q5_1": 9.3, "Q2_K": 13.8}
DEVIATIONS |= {
    "Q3_K": 43.7,
    "Q4_K": 258.0,
    "Q5_K": 528.0,
    "Q6_K": 1360.0,
    "IQ4_NL": 67.6,
    "IQ4_XS": 1240.0,
    "GGUF_MXFP4": 4.72,
}
"""Of the numbers of random blocks whose scale is 1, or for MXFP4 1 and 2 alike: a root mean square."""


def block_noise(random: np.ndarray, name: str, deviation: float) -> np.ndarray:
    """Turns random bytes uint8 [whole blocks] into blocks whose numbers deviate from zero by `deviation`. Codes
    and the scales of parts of a block stay random bits."""
    format = QuantFormat.blocks(name)
    blocks = random.reshape(-1, format.weight_row_bytes(format.whole_columns)).copy()
    if name == "GGUF_MXFP4":  # each second scale is twice the others
        blocks[:, 0] = round(np.log2(deviation / DEVIATIONS[name])) + 127 + (blocks[:, 0] & 1)
    else:
        at, scale = SCALES.get(name, 0), deviation / DEVIATIONS[name]
        blocks[:, at : at + 2] = np.array([scale], "<f2").view(np.uint8)
        if name in MINIMA:
            blocks[:, at + 2 : at + 4] = np.array([scale * MINIMA[name]], "<f2").view(np.uint8)
    return blocks.reshape(-1)
