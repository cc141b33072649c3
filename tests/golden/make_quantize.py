"""Makes quantize.npz: awkward numbers, and what MLX's quantiser turns them into at every type, bit count and group.

Run with a Python that has mlx: PYTHON tests/golden/make_quantize.py
Names in the file: "TYPE/input" is [row, 128], bf16 as raw uint16. "TYPE/BITS/GROUP/words", ".../scales" and
".../biases" are what mx.quantize gives, bf16 and f16 scales as raw uint16. ".../float32_sha256" hashes the float32
bytes of mx.dequantize after its scales and biases were widened to float32: exact, where MLX itself would round each
product and each sum to the narrow type.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import mlx.core as mx
import numpy as np

COLUMNS = 128
TYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


def awkward_rows(largest: float, smallest: float) -> np.ndarray:
    """[row, COLUMNS] float32. `largest` spans nearly the whole type, `smallest` is its least positive number."""
    random = np.random.default_rng(7)
    normal = random.standard_normal((6, COLUMNS)).astype(np.float32)
    column = np.arange(COLUMNS)
    rows = [
        normal[0],
        normal[1] * 0.02,
        np.zeros(COLUMNS),
        np.full(COLUMNS, -0.0),
        np.full(COLUMNS, 3.25),
        np.full(COLUMNS, -2.7),
        -np.abs(normal[2]),  # the edge is the minimum
        np.abs(normal[2]),
        np.where(column % 2, 1.0, -1.0),  # minimum and maximum of equal magnitude
        np.where(column % 37 == 5, 1000.0, normal[3] * 0.01),  # outliers
        2.0 + np.abs(normal[3]) * 1e-3,  # far from zero: zero's code lies outside of the range
        normal[4] * 1e-7,  # around the least step
        normal[4] * 3e-8,
        normal[5] / np.abs(normal[5]).max() * largest,  # the widest range whose difference is still finite
        np.where(column % 3 == 0, smallest * column, 0.0),  # denormals
        column / 127.0 * 15.0 - 7.5,  # many ties when rounding
    ]
    return np.stack(rows).astype(np.float32)


def raw(array: mx.array) -> np.ndarray:
    return np.array(array if array.dtype in (mx.float32, mx.uint32) else array.view(mx.uint16))


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    limits = {"BF16": (1.5e38, 2.0**-133), "F16": (3e4, 2.0**-24), "F32": (1.6e38, 2.0**-149)}
    for name, dtype in TYPES.items():
        matrix = mx.array(awkward_rows(*limits[name])).astype(dtype)
        arrays[f"{name}/input"] = raw(matrix)
        for bits in (2, 3, 4, 5, 6, 8):
            for group in (32, 64, 128):
                words, scales, biases = mx.quantize(matrix, group_size=group, bits=bits)
                wide = (part.astype(mx.float32) for part in (scales, biases))
                numbers = np.array(mx.dequantize(words, *wide, group_size=group, bits=bits))
                assert numbers.dtype == np.float32 and np.isfinite(numbers).all()
                case = f"{name}/{bits}/{group}"
                arrays[f"{case}/words"] = raw(words)
                arrays[f"{case}/scales"] = raw(scales)
                arrays[f"{case}/biases"] = raw(biases)
                digest = hashlib.sha256(numbers.tobytes()).digest()
                arrays[f"{case}/float32_sha256"] = np.frombuffer(digest, np.uint8)
    np.savez_compressed(Path(__file__).with_name("quantize.npz"), **arrays)


if __name__ == "__main__":
    main()
