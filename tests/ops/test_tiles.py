"""The tiles of AMX in software (tests/amx), by which the AMX kernels run on machines without: held to a definition of
the instructions in NumPy and, on a machine with AMX, to the processor."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass

import numpy as np
import pytest

import amx
from moeflux.ops import isas

needs_kernels = pytest.mark.skipif(bool(amx.Stand.why_not), reason=amx.Stand.why_not)

SMALLEST = np.float32(2.0**-126)
Array = np.ndarray


@dataclass(frozen=True)
class Shape:
    rows: int = 16
    columns: int = 16  # of sums
    depth: int = 16  # 4 bytes each

    def configuration(self) -> bytes:
        row_bytes = np.zeros(16, np.uint16)
        rows = np.zeros(16, np.uint8)
        row_bytes[:3] = 4 * self.columns, 4 * self.depth, 4 * self.columns
        rows[:3] = self.rows, self.rows, self.depth
        return bytes([1, *[0] * 15]) + row_bytes.tobytes() + rows.tobytes()


SHAPES = [Shape(), Shape(depth=8), Shape(rows=3, columns=5, depth=7), Shape(rows=1, columns=1, depth=1)]


def run(instruction: str, shape: Shape, sums: Array, a: Array, b: Array, by_the_processor: bool = False) -> Array:
    """What of `sums` the instruction leaves; bytes beyond the shape come back as they were."""
    found = np.ascontiguousarray(sums).copy()
    addresses = (ctypes.c_void_p(each.ctypes.data) for each in (found, a, b))
    amx.library().tiles_dot(instruction == "tdpbf16ps", by_the_processor, shape.configuration(), *addresses)
    return found


def whole_numbers(rng: np.random.Generator) -> list[Array]:
    """Bytes of every value, and sums that wrap."""
    sums = rng.integers(0, 1 << 32, (16, 16), np.uint64).astype(np.uint32)
    return [sums, *(rng.integers(0, 256, (16, 64)).astype(np.uint8) for _ in range(2))]


def floats(rng: np.random.Generator) -> list[Array]:
    """Numbers far apart, some too small to be normal, infinities and NaN."""
    sums = (rng.standard_normal((16, 16)) * 2.0 ** rng.integers(-140, 20, (16, 16))).astype(np.float32)
    pair = []
    for _ in range(2):
        numbers = (rng.standard_normal((16, 32)) * 2.0 ** rng.integers(-70, 20, (16, 32))).astype(np.float32)
        bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        bits[rng.random(bits.shape) < 0.02] = 0x0003  # not normal
        pair.append(bits)
    pair[0][2, 5], pair[1][3, 7], sums[1, 1] = 0x7F80, 0x7FC0, np.float32(2.0**-130)
    return [sums, *pair]


def flushed(x: Array) -> Array:
    small = np.abs(x) < SMALLEST
    return np.where(small, np.copysign(np.float32(0), x), x).astype(np.float32)


def defined(instruction: str, shape: Shape, sums: Array, a: Array, b: Array) -> Array:
    """From the manual: what the tile of sums becomes."""
    rows, columns, depth = shape.rows, shape.columns, shape.depth
    if instruction == "tdpbusd":
        left = a[:rows, : 4 * depth].astype(np.int64)
        right = b.view(np.int8)[:depth, : 4 * columns].astype(np.int64).reshape(depth, columns, 4)
        right = right.transpose(0, 2, 1).reshape(4 * depth, columns)
        return (sums[:rows, :columns].astype(np.int64) + left @ right).astype(np.uint32)
    left, right = (flushed((each.astype(np.uint32) << 16).view(np.float32)) for each in (a, b))
    pair = np.zeros((2, rows, columns), np.float32)
    for k in range(depth):
        for i in range(2):
            # A product of two numbers of bf16 is exact in f64, and so is what is added to it but where they are far
            # apart, where it is rounded to odd: the last step is the only rounding.
            product = left[:rows, 2 * k + i, None].astype(np.float64) * right[k, i : 2 * columns : 2]
            pair[i] = flushed(rounded_once(product, pair[i].astype(np.float64)))
    return flushed(flushed(sums[:rows, :columns]) + flushed(pair[0] + pair[1]))


def rounded_once(x: Array, y: Array) -> Array:
    """x + y in f32: in f64 rounded to odd, which f32 rounds as it would the exact sum."""
    total = x + y
    back = total - x
    error = (x - (total - back)) + (y - back)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    towards = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + np.where(inexact, towards, 0)).view(np.float64).astype(np.float32)


CASES = ["tdpbusd", "tdpbf16ps"]


def operands(instruction: str, seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    return floats(rng) if instruction == "tdpbf16ps" else whole_numbers(rng)


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("instruction", CASES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinity times zero
def test_the_software_does_what_the_manual_says(instruction: str, shape: Shape) -> None:
    for seed in range(10):
        sums, a, b = operands(instruction, seed)
        expected = sums.copy()
        expected[: shape.rows, : shape.columns] = defined(instruction, shape, sums, a, b)
        np.testing.assert_array_equal(run(instruction, shape, sums, a, b), expected)


@needs_kernels
def test_the_software_does_what_the_processor_does() -> None:
    if not amx.Stand.processor:
        pytest.skip("no AMX here: the software is held to the manual alone")
    for instruction, shape, seed in itertools.product(CASES, SHAPES, range(10)):
        given = operands(instruction, seed)
        found, own = (run(instruction, shape, *given, by_the_processor) for by_the_processor in (False, True))
        np.testing.assert_array_equal(found, own, err_msg=f"{instruction} {shape}")


@needs_kernels
def test_the_kernels_of_amx_run_here() -> None:
    """The processor's, the best there are; or the stand-in, which is nobody's choice but by its name."""
    assert "amx" in isas() and isas()[-1] == "portable"
    assert (isas()[0] == "amx") == amx.Stand.processor != amx.Stand.software
