"""What tests of ops share: the instruction sets to run, and matrices in every format with their exact numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from moeflux import QuantFormat
from moeflux.ops import Ops, isas
from moeflux.oracle.blocks import TYPES, block_numbers
from moeflux.oracle.stored import float_numbers, mxfp4_numbers, pack_codes
from support.blocks import least_codes, random_blocks


@cache
def ops_of(isa: str, threads: int) -> Ops:
    return Ops(isa=isa, threads=threads)


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run(isa: str) -> Ops:
    """The ops of one instruction set, on two threads."""
    return ops_of(isa, 2)


WITH_INT16 = [isa for isa in isas() if isa != "portable"]
"""The instruction sets that multiply quantised matrices with rows of whole numbers of 16 bits."""

AFFINE = [
    QuantFormat.affine(b, g, s) for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128) for s in ("BF16", "F16", "F32")
]
MXFP4 = QuantFormat.mxfp4()
FLOATS = [QuantFormat.floats(name) for name in QuantFormat.float_types()]
NVFP4 = [format for format in FLOATS if format.bits == 4 and format != MXFP4]
E4M3_CODES = [format for format in FLOATS if format.bits == 8]
"""These are no whole numbers of few bits: products are of f32."""
QUANTISED = [*AFFINE, *FLOATS]
BLOCKS = [QuantFormat.blocks(name) for name in QuantFormat.block_types()]
PLAIN = [QuantFormat.plain(element) for element in ("BF16", "F16", "F32")]


@dataclass(frozen=True)
class StoredMatrix:
    format: QuantFormat
    weight: np.ndarray
    scales: np.ndarray | None
    biases: np.ndarray | None
    exact: np.ndarray  # float64 [rows, columns]
    size: np.ndarray  # |code * scale| + |bias|


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def narrowed(values: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """As stored, and the exact numbers that are stored."""
    if dtype == "BF16":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    stored = values.astype(np.float16) if dtype == "F16" else values
    return stored, stored.astype(np.float64)


def random_matrix(rng: np.random.Generator, format: QuantFormat, rows: int, columns: int) -> StoredMatrix:
    """Codes of every value, scales of both signs."""
    if format.is_mxfp4:
        words = np.ascontiguousarray(pack_codes(rng.integers(0, 16, (rows, columns)), 4))
        scales = rng.integers(120, 127, (rows, columns // 32)).astype(np.uint8)
        exact = mxfp4_numbers(words, scales)
        # Where codes are whole numbers, each is 12 more than twice what it stands for.
        powers = np.repeat(np.exp2(scales.astype(np.float64) - 127), 32, axis=1)
        return StoredMatrix(format, words, scales, None, exact, np.abs(exact) + 12 * powers)
    if format.has_float_codes:
        return random_floats(rng, format, rows, columns)
    if format.is_blocks:
        name, size = str(format), format.weight_row_bytes(format.whole_columns)
        blocks = random_blocks(rng, name, rows * columns // format.whole_columns)
        exact, least = (block_numbers(b, name).astype(np.float64) for b in (blocks, least_codes(blocks, name)))
        # The number of the least code is the bias of codes from 0 on, and the rest of a number is the code's part.
        parts = np.abs(exact) + 2 * np.abs(least)
        weight = blocks.reshape(rows, columns // format.whole_columns * size)
        return StoredMatrix(format, weight, None, None, exact.reshape(rows, -1), parts.reshape(rows, -1))
    if not format.is_affine:
        stored, exact = narrowed(numbers(rng, rows, columns), format.element)
        return StoredMatrix(format, stored, None, None, exact, np.abs(exact))
    groups = columns // format.group_size
    codes = rng.integers(0, 1 << format.bits, (rows, columns))
    scales, exact_scales = narrowed(numbers(rng, rows, groups) / (1 << format.bits), format.scale_type)
    biases, exact_biases = narrowed(numbers(rng, rows, groups), format.scale_type)
    scaled = codes * np.repeat(exact_scales, format.group_size, axis=1)
    offset = np.repeat(exact_biases, format.group_size, axis=1)
    words = np.ascontiguousarray(pack_codes(codes, format.bits))
    return StoredMatrix(format, words, scales, biases, scaled + offset, np.abs(scaled) + np.abs(offset))


def random_floats(rng: np.random.Generator, format: QuantFormat, rows: int, columns: int) -> StoredMatrix:
    """Codes and scales of every value but those that stand for none."""
    codes = rng.integers(0, 1 << format.bits, (rows, columns)).astype(np.uint8)
    groups = (rows, columns // format.group_size)
    if format.bits == 8:
        codes[codes & 127 == 127] = 0
    if format in NVFP4:
        scales = rng.integers(1, 127, groups).astype(np.uint8)
        if str(format) == "NVFP4":
            of_rows = np.abs(numbers(rng, rows, 1)) / np.float32(512)
            scales = np.hstack([of_rows.view(np.uint8), scales])
    elif format.scale_type == "U8":
        scales = rng.integers(108, 119, groups).astype(np.uint8)
    else:
        scales, _ = narrowed(numbers(rng, *groups) / np.float32(256), format.scale_type)
    weight = codes if format.element == "F8_E4M3" else np.ascontiguousarray(pack_codes(codes, format.bits))
    exact = float_numbers(weight, scales, format)
    size = np.abs(exact)
    if format in NVFP4:  # where codes are whole numbers, each is 12 more than twice what it stands for
        sixes = np.full_like(weight, 0x77777777)
        size = size + 2 * np.abs(float_numbers(sixes, scales, format))  # 7 stands for 6
    return StoredMatrix(format, weight, scales, None, exact, size)


def softer(matrix: StoredMatrix) -> StoredMatrix:
    """One of blocks with numbers of about a 64th, so that what experts compute is about as large as x."""
    if not matrix.format.is_blocks:
        return matrix
    name, halves = (
        str(matrix.format),
        {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
    )
    blocks = matrix.weight.reshape(-1, TYPES[name][0]).copy()
    if name == "GGUF_MXFP4":
        blocks[:, 0] -= 6
    else:
        for at in halves.get(name, (0,)):
            half = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2") / np.float16(64)
            blocks[:, at : at + 2] = half.view(np.uint8)
    weight = blocks.reshape(matrix.weight.shape)
    return replace(matrix, weight=weight, exact=block_numbers(weight, name).astype(np.float64), size=matrix.size / 63)
