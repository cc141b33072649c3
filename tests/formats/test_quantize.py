"""Affine quantisation in C++ against MLX's own results, and what it refuses."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from moeflux import _core
from moeflux.errors import ArgumentError, FormatError
from moeflux.models.variants import QuantFormat
from moeflux.oracle.blocks import block_numbers

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


# ---- Weighted errors --------------------------------------------------------------------------------------------


def weighted_error(found: np.ndarray, matrix: np.ndarray, importance: np.ndarray) -> np.ndarray:
    return ((found.astype(np.float64) - matrix) ** 2 * importance).sum(axis=1)


@pytest.mark.parametrize("scale_type", TYPES)
@pytest.mark.parametrize("bits", BITS)
def test_scales_of_least_weighted_error_beat_those_of_mlx(bits: int, scale_type: str) -> None:
    """In every row, and those that count all columns alike."""
    rng = np.random.default_rng(5)
    matrix = rng.standard_normal((40, 256), np.float32)
    importance = rng.gamma(0.4, size=256).astype(np.float32)
    quant = QuantFormat.affine(bits, 64, scale_type)
    errors = []
    for given in (importance, np.ones(256, np.float32), None):
        found = _core.dequantize(*_core.quantize(matrix, quant, 1, given), quant, 256)
        errors.append(weighted_error(found, matrix, importance))
    assert (errors[0] < errors[2]).all() and (errors[0] < errors[1]).mean() > 0.9
    assert errors[0].sum() < {2: 0.7, 3: 0.8}.get(bits, 0.9) * errors[2].sum()


def test_the_line_is_nearly_the_best_that_there_is() -> None:
    """Against every line of a fine grid: 2 bits, where most is to be gained."""
    rng = np.random.default_rng(6)
    matrix = rng.standard_normal((12, 32), np.float32)
    importance = rng.gamma(0.5, size=32).astype(np.float32)
    quant = QuantFormat.affine(2, 32, "F32")
    found = _core.dequantize(*_core.quantize(matrix, quant, 1, importance), quant, 32)
    least = np.full(12, np.inf)
    for scale in np.linspace(0.05, 2, 200):
        biases = np.linspace(-4, 1, 250)[:, None, None]
        codes = np.clip(np.rint((matrix - biases) / scale), 0, 3)
        least = np.minimum(least, (importance * (codes * scale + biases - matrix) ** 2).sum(axis=2).min(axis=0))
    assert weighted_error(found, matrix, importance).sum() < 1.05 * least.sum()


def test_weights_that_are_all_zero_count_alike() -> None:
    """A column that nothing ever met: within its group no column is better known than another."""
    matrix = np.random.default_rng(7).standard_normal((4, 128), np.float32)
    quant = QuantFormat.affine(3, 64)
    ones = np.ones(128, np.float32)
    half = np.concatenate([np.zeros(64, np.float32), ones[64:]])
    for part, expected in zip(
        _core.quantize(matrix, quant, 1, half), _core.quantize(matrix, quant, 1, ones), strict=True
    ):
        same_bytes(part, expected)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q8_0", None])
def test_weighted_rounding_is_the_same_in_any_number_of_threads(name: str | None) -> None:
    rng = np.random.default_rng(8)
    matrix, importance = rng.standard_normal((611, 512), np.float32), rng.random(512, np.float32)
    quant = QuantFormat.blocks(name) if name else QuantFormat.affine(4, 64)
    alone = _core.quantize(matrix, quant, 1, importance)
    for part, expected in zip(_core.quantize(matrix, quant, 3, importance), alone, strict=True):
        same_bytes(part, expected)


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        (np.ones(63, np.float32), "expected shape (64,), found (63,)"),
        (np.ones((1, 64), np.float32), "expected shape (64,), found (1, 64)"),
        (np.full(64, -1, np.float32), "expected finite numbers of 0 or more, found -1 for column 0"),
        (np.full(64, np.nan, np.float32), "found nan for column 0"),
    ],
)
def test_weights_of_another_kind_are_refused(importance: np.ndarray, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        _core.quantize(np.zeros((2, 64), np.float32), QuantFormat.affine(4, 64), 1, importance)


# ---- Blocks of GGUF ---------------------------------------------------------------------------------------------

MADE = {"Q8_0": 32, "Q4_0": 32, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256}


def rows_for(name: str) -> np.ndarray:
    """Ordinary rows, rows with outliers, constant ones, zeros, tiny and large numbers."""
    rng = np.random.default_rng(9)
    matrix = rng.standard_normal((24, 512)).astype(np.float32)
    matrix[1, ::37] *= 20
    matrix[2] = 0
    matrix[3] = 0.25
    matrix[4] = -0.25
    matrix[5] = np.abs(matrix[5])
    matrix[6] = -np.abs(matrix[6])
    matrix[7, :300] = 0
    matrix[8] *= 1e-2
    matrix[9] *= 1e4
    matrix[10, 256:] = 1e-30
    return matrix


@pytest.mark.parametrize("name", MADE)
def test_blocks_are_near_to_the_numbers(name: str) -> None:
    """As gguf reads them. No part of a block is off by more than the steps between its codes allow."""
    matrix = rows_for(name)
    (blocks,) = _core.quantize(matrix, QuantFormat.blocks(name), 1)
    found = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    assert np.array_equal(found, block_numbers(blocks, name))
    off = np.sqrt(((found - matrix) ** 2).mean(axis=1)) / np.maximum(np.abs(matrix).max(axis=1), 1e-30)
    bound = {"Q8_0": 0.003, "Q6_K": 0.01, "Q5_K": 0.016, "Q4_K": 0.032, "Q4_0": 0.04}[name]
    assert (off < bound).all(), off
    assert not found[2].any()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_blocks_are_at_least_as_near_as_those_of_gguf(name: str) -> None:
    """Those of 8 bits have its bytes."""
    matrix = rows_for(name)
    (blocks,) = _core.quantize(matrix, QuantFormat.blocks(name), 1)
    kind = gguf.GGMLQuantizationType[name]
    theirs = gguf.quants.quantize(matrix, kind)
    if name == "Q8_0":
        return same_bytes(blocks, theirs)
    of_ours, of_theirs = (((gguf.quants.dequantize(each, kind) - matrix) ** 2).sum(axis=1) for each in (blocks, theirs))
    assert (of_ours <= of_theirs * 1.0001).all() and of_ours[11:].sum() < 0.95 * of_theirs[11:].sum()


@pytest.mark.parametrize(("name", "bound"), [("Q4_K", 0.0713), ("Q5_K", 0.0352), ("Q6_K", 0.0175), ("Q4_0", 0.083)])
def test_blocks_of_normal_numbers_are_off_by_so_much(name: str, bound: float) -> None:
    """In deviations. llama.cpp's own encoder is off by 0.0713, 0.0361, 0.0177 and 0.0860."""
    matrix = np.random.default_rng(0).standard_normal((64, 2048)).astype(np.float32)
    (blocks,) = _core.quantize(matrix, QuantFormat.blocks(name), 1)
    assert np.sqrt(((block_numbers(blocks, name) - matrix) ** 2).mean()) < bound


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "Q4_0"])
def test_blocks_weigh_columns(name: str) -> None:
    rng = np.random.default_rng(10)
    matrix = rng.standard_normal((32, 512)).astype(np.float32)
    importance = rng.gamma(0.4, size=512).astype(np.float32)
    errors = [
        weighted_error(
            block_numbers(_core.quantize(matrix, QuantFormat.blocks(name), 1, given)[0], name), matrix, importance
        )
        for given in (importance, None)
    ]
    assert errors[0].sum() < 0.93 * errors[1].sum()


def test_blocks_of_other_types_are_not_made() -> None:
    with pytest.raises(ArgumentError, match="Q3_K does not fit"):
        _core.quantize(np.zeros((2, 256), np.float32), QuantFormat.blocks("Q3_K"))
    with pytest.raises(ArgumentError, match=r"Q4_K does not fit an array of shape \(2, 128\)"):
        _core.quantize(np.zeros((2, 128), np.float32), QuantFormat.blocks("Q4_K"))


@pytest.mark.parametrize("name", MADE)
def test_numbers_that_f16_has_no_scale_for_are_named(name: str) -> None:
    matrix = np.ones((2, 512), np.float32)
    matrix[1, 300] = 3e38
    with pytest.raises(FormatError, match=r"row 1, columns (256 to 511|288 to 319): expected numbers that F16 has"):
        _core.quantize(matrix, QuantFormat.blocks(name))
    matrix[1, 300] = np.inf
    with pytest.raises(FormatError, match=r"row 1, .*found inf in column 300"):
        _core.quantize(matrix, QuantFormat.blocks(name))
