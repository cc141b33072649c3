"""Affine quantisation in C++ against MLX's own results, and what it refuses."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from moeflux import _core
from moeflux.errors import ArgumentError, FormatError
from moeflux.models.variants import QuantFormat

GOLDEN = Path(__file__).parents[1] / "golden" / "quantize.npz"
TYPES = ("BF16", "F16", "F32")
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        return {name: file[name] for name in file.files}


def elements(raw: np.ndarray, element: str) -> np.ndarray:
    """The input as `quantize` takes it: f16 is NumPy's own, bf16 stays raw."""
    return raw.view(np.float16) if element == "F16" else raw


def widened(raw: np.ndarray, scale_type: str) -> np.ndarray:
    if scale_type == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float16).astype(np.float32) if scale_type == "F16" else raw


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of a little-endian bit stream, written independently of the C++ one."""
    stream = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return stream.reshape(len(words), -1, bits) @ (1 << np.arange(bits))


def same_bytes(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("element", TYPES)
def test_quantize_gives_the_bytes_of_mlx(golden: dict[str, np.ndarray], element: str, bits: int, group: int) -> None:
    matrix = elements(golden[f"{element}/input"], element)
    parts = _core.quantize(matrix, QuantFormat.affine(bits, group, element), threads=1)
    for part, name in zip(parts, ("words", "scales", "biases"), strict=True):
        same_bytes(part, golden[f"{element}/{bits}/{group}/{name}"])


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("element", TYPES)
def test_dequantize_gives_the_float32_bytes_of_mlx(
    golden: dict[str, np.ndarray], element: str, bits: int, group: int
) -> None:
    words, scales, biases = (golden[f"{element}/{bits}/{group}/{name}"] for name in ("words", "scales", "biases"))
    columns = golden[f"{element}/input"].shape[1]
    found = _core.dequantize(words, scales, biases, QuantFormat.affine(bits, group, element), columns)

    scale, bias = (np.repeat(widened(part, element), group, axis=1) for part in (scales, biases))
    same_bytes(found, unpacked(words, bits).astype(np.float32) * scale + bias)
    expected = golden[f"{element}/{bits}/{group}/float32_sha256"].tobytes()
    assert hashlib.sha256(found.tobytes()).digest() == expected


def test_scale_type_may_differ_from_the_type_of_the_input(golden: dict[str, np.ndarray]) -> None:
    """bf16 numbers that come as float32 give the bytes of the bf16 input."""
    wide = widened(golden["BF16/input"], "BF16")
    for part, name in zip(_core.quantize(wide, QuantFormat.affine(4, 64)), ("words", "scales", "biases"), strict=True):
        same_bytes(part, golden[f"BF16/4/64/{name}"])


@pytest.mark.parametrize("bits", BITS)
def test_threads_change_no_bit(bits: int) -> None:
    matrix = np.random.default_rng(3).standard_normal((611, 1024), np.float32)
    quant = QuantFormat.affine(bits, 64)
    alone = _core.quantize(matrix, quant, threads=1)
    back = _core.dequantize(*alone, quant, 1024, threads=1)
    for threads in (0, 2, 7):
        for part, expected in zip(_core.quantize(matrix, quant, threads=threads), alone, strict=True):
            same_bytes(part, expected)
        same_bytes(_core.dequantize(*alone, quant, 1024, threads=threads), back)


def test_no_rows_give_no_bytes() -> None:
    quant = QuantFormat.affine(3, 32)
    words, scales, biases = _core.quantize(np.zeros((0, 64), np.float32), quant)
    assert (words.shape, scales.shape, biases.shape) == ((0, 6), (0, 2), (0, 2))
    assert _core.dequantize(words, scales, biases, quant, 64).shape == (0, 64)


@pytest.mark.parametrize("element", TYPES)
@pytest.mark.parametrize(("bad", "shown"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
# Two bad rows, each in another thread's half: the first is named, whether its thread finds it first or last.
@pytest.mark.parametrize(("first", "second"), [(7990, 8001), (13, 15991)])
def test_a_number_that_is_not_finite_is_named_by_place(
    element: str, bad: float, shown: str, first: int, second: int
) -> None:
    matrix = np.ones((16000, 256), np.float32)
    matrix[[first, second], 77] = bad
    if element == "BF16":
        matrix = (matrix.view(np.uint32) >> 16).astype(np.uint16)
    elif element == "F16":
        matrix = matrix.astype(np.float16)
    message = f"row {first}, columns 64 to 127: expected finite numbers, found {shown} in column 77"
    for threads in (1, 2):
        with pytest.raises(FormatError, match=message):
            _core.quantize(matrix, QuantFormat.affine(4, 64, element), threads=threads)


@pytest.mark.parametrize(
    ("edge", "scale_type"),
    [
        (3.3e38, "F32"),  # the difference of maximum and minimum overflows
        (3.3e38, "BF16"),
        (1e5, "F16"),  # the bias is beyond f16
    ],
)
def test_a_range_beyond_the_scale_type_is_refused(edge: float, scale_type: str) -> None:
    matrix = np.ones((2, 64), np.float32)
    matrix[1, 40:42] = edge, -edge
    with pytest.raises(FormatError, match=rf"row 1, columns 32 to 63: .*within {scale_type}"):
        _core.quantize(matrix, QuantFormat.affine(2, 32, scale_type))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(64, np.float32), "two dimensions"),
        (np.zeros((64, 2), np.float32).T, "contiguous"),
        (np.zeros((2, 96), np.float32), "4-bit g64 does not fit an array of shape (2, 96)"),
        (np.zeros((2, 0), np.float32), "does not fit"),
        (np.zeros((2, 64), np.float64), "found float64"),
        (np.zeros((2, 64), ">f4"), "found >f4"),
    ],
)
def test_quantize_refuses_arrays_of_another_kind(array: np.ndarray, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        _core.quantize(array, QuantFormat.affine(4, 64))


def test_other_bad_arguments_are_refused() -> None:
    matrix = np.zeros((2, 64), np.float32)
    with pytest.raises(ArgumentError, match="BF16 does not fit"):
        _core.quantize(matrix, QuantFormat.plain("BF16"))
    with pytest.raises(FormatError, match="threads: expected 0 or more, found -1"):
        _core.quantize(matrix, QuantFormat.affine(4, 64), threads=-1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words": np.zeros((2, 7), np.uint32)}, "words: expected uint32 (2, 8) contiguous, found uint32 (2, 7)"),
        ({"words": np.zeros((2, 8), np.int32)}, "found int32 (2, 8)"),
        ({"words": np.zeros(16, np.uint32)}, "words: expected two dimensions"),
        ({"scales": np.zeros((2, 2), np.uint16)}, "scales: expected uint16 (2, 1)"),
        ({"scales": np.zeros((1, 1), np.uint16)}, "scales: expected uint16 (2, 1)"),
        ({"biases": np.zeros((2, 1), np.float32)}, "biases: expected uint16 (2, 1)"),
        ({"columns": 128}, "words: expected uint32 (2, 16)"),
        ({"columns": 63}, "does not fit 63 columns"),
        ({"columns": 0}, "does not fit 0 columns"),
        ({"columns": -64}, "does not fit -64 columns"),
    ],
)
def test_dequantize_refuses_parts_that_do_not_fit(change: dict[str, object], message: str) -> None:
    words, scales, biases = _core.quantize(np.zeros((2, 64), np.float32), QuantFormat.affine(4, 64))
    arguments = {"words": words, "scales": scales, "biases": biases, "columns": 64, "format": QuantFormat.affine(4, 64)}
    with pytest.raises(ArgumentError, match=re.escape(message)):
        _core.dequantize(**{**arguments, **change})
