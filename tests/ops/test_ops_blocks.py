"""GGUF's blocks: what they stand for, as the package `gguf` has it, and products with matrices of them."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest

from moeflux import ArgumentError, QuantFormat
from moeflux.conversion.block_noise import block_noise
from moeflux.ops import Ops
from moeflux.oracle import ops as oracle
from moeflux.oracle.blocks import TYPES, block_numbers
from moeflux.oracle.stored import widen
from support.blocks import CODES, random_blocks
from support.op_checks import check_experts, rounding_of_int16
from support.ops import BLOCKS, WITH_INT16, StoredMatrix, isa, numbers, ops_of, random_matrix, run, softer
from support.tolerances import INT16_ERROR, assert_close

__all__ = ["isa", "run"]

NAMES = QuantFormat.block_types()


def bits_of(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def stored_rows(blocks: np.ndarray, name: str, rows: int) -> StoredMatrix:
    weight = blocks.reshape(rows, -1)
    exact = block_numbers(weight, name).astype(np.float64)
    return StoredMatrix(QuantFormat.blocks(name), weight, None, None, exact, np.abs(exact))


def of_gguf(blocks: np.ndarray, name: str) -> np.ndarray:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name.removeprefix("GGUF_")])


# ---- Numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_gguf_to_the_last_bit(name: str) -> None:
    blocks = random_blocks(np.random.default_rng(1), name, 2016, every_scale=True)
    for fill in (0, 255):
        first, last = CODES[name]
        blocks[fill // 255, first:last] = fill
    assert np.array_equal(bits_of(block_numbers(blocks, name)), bits_of(of_gguf(blocks, name)))


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_those_of_gguf(name: str) -> None:
    number = gguf.GGMLQuantizationType[name.removeprefix("GGUF_")]
    columns, size = gguf.GGML_QUANT_SIZES[number]
    format = QuantFormat.blocks(name)
    assert (format.whole_columns, format.weight_row_bytes(columns), TYPES[name][0]) == (columns, size, size)
    assert format.row_bytes(3 * columns) == 3 * size and format.columns_of(3 * size) == 3 * columns
    assert format.fits(2 * columns) and not format.fits(columns // 2) and not format.fits(0)
    assert str(format) == name and format.is_blocks and not format.has_scales and not format.is_affine


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_their_numbers_to_the_last_bit(isa: str, name: str) -> None:
    """With every instruction set, whatever the scale."""
    matrix = stored_rows(random_blocks(np.random.default_rng(2), name, 252, every_scale=True), name, 28)
    found = ops_of(isa, 1).embed(matrix, np.arange(28, dtype=np.int32))
    assert np.array_equal(bits_of(found), bits_of(matrix.exact))
    assert np.array_equal(widen(matrix), matrix.exact)


def test_noise_has_the_deviation_that_was_asked_for() -> None:
    random = np.random.default_rng(3)
    for name in NAMES:
        bits = random.integers(0, 256, 300 * TYPES[name][0]).astype(np.uint8)
        values = block_numbers(block_noise(bits, name, 0.02), name)
        assert 0.013 < values.std() < 0.027 and abs(values.mean()) < 0.004, name


# ---- Products -------------------------------------------------------------------------------------------------------


def check_product(run: Ops, rng: np.random.Generator, matrix: StoredMatrix, n: int) -> None:
    x = numbers(rng, n, matrix.exact.shape[1])
    exact = oracle.matmul(x.astype(np.float64), matrix.exact)
    found = run.matmul(x, matrix)
    sizes = np.abs(x.astype(np.float64))
    rounding = rounding_of_int16(sizes, matrix) if run.isa in WITH_INT16 else 0.0
    assert_close("matmul", found, exact, sizes @ matrix.size.T, rounding)
    y = numbers(rng, n, matrix.exact.shape[0])
    found = run.matmul(y, matrix, transposed=True)
    assert_close("matmul", found, y.astype(np.float64) @ matrix.exact, np.abs(y) @ matrix.size)


@pytest.mark.parametrize("format", BLOCKS, ids=str)
def test_products(run: Ops, format: QuantFormat) -> None:
    """More rows than a unit of work, more columns than a panel, parts of every tile."""
    rng = np.random.default_rng(4)
    for rows, count, n in [(1, 1, 1), (31, 1, 3), (33, 3, 1), (6, 5, 2), (7, 9, 64), (40, 2, 17), (70, 3, 65)]:
        check_product(run, rng, random_matrix(rng, format, rows, count * format.whole_columns), n)


@pytest.mark.parametrize("format", BLOCKS, ids=str)
def test_threads_and_neighbours_change_no_bit(isa: str, format: QuantFormat) -> None:
    rng = np.random.default_rng(5)
    matrix = random_matrix(rng, format, 75, 768 if format.whole_columns == 256 else 736)
    x = numbers(rng, 67, matrix.exact.shape[1])
    y = numbers(rng, 67, matrix.exact.shape[0])
    whole = ops_of(isa, 1).matmul(x, matrix)
    turned = ops_of(isa, 1).matmul(y, matrix, transposed=True)
    for threads in (2, 3):
        run = ops_of(isa, threads)
        for part in (slice(0, 67), slice(0, 1), slice(66, 67), slice(8, 15)):
            assert np.array_equal(run.matmul(x[part], matrix), whole[part])
            assert np.array_equal(run.matmul(y[part], matrix, transposed=True), turned[part])


@pytest.mark.skipif(len(WITH_INT16) < 2, reason="fewer than two instruction sets here multiply whole numbers")
@pytest.mark.parametrize("format", BLOCKS, ids=str)
def test_whole_numbers_give_the_same_bits_whatever_multiplies_them(format: QuantFormat) -> None:
    rng = np.random.default_rng(6)
    matrix = random_matrix(rng, format, 70, 3 * format.whole_columns)
    x = numbers(rng, 33, matrix.exact.shape[1])
    first, *others = (ops_of(isa, 2).matmul(x, matrix) for isa in WITH_INT16)
    assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize("format", BLOCKS, ids=str)
def test_two_digits_are_a_hundred_times_finer_than_bf16(run: Ops, format: QuantFormat) -> None:
    """And products of float32 numbers as fine as those. Minima that are large beside the numbers make both coarser."""
    rng = np.random.default_rng(7)
    matrix = random_matrix(rng, format, 64, 12 * format.whole_columns)
    for n in (1, 24):
        x = numbers(rng, n, 12 * format.whole_columns)
        exact = x.astype(np.float64) @ matrix.exact.T
        error = np.sqrt(np.mean((run.matmul(x, matrix) - exact) ** 2) / np.mean(exact**2))
        assert error < (3 * INT16_ERROR if run.isa in WITH_INT16 else 1e-6)


def test_products_of_the_same_rows(run: Ops) -> None:
    """Types with groups of 16 and of 32 and other formats take turns over one x."""
    rng = np.random.default_rng(8)
    x = numbers(rng, 9, 512)
    formats = [*BLOCKS, QuantFormat.affine(4, 64), QuantFormat.plain("BF16")]
    matrices = [random_matrix(rng, format, 20 + 3 * i, 512) for i, format in enumerate(formats)]
    for found, matrix in zip(run.matmuls([(x, matrix, False) for matrix in matrices]), matrices, strict=True):
        assert np.array_equal(found, run.matmul(x, matrix))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K", "GGUF_MXFP4"])
def test_a_row_that_is_not_finite_spoils_itself_alone(run: Ops, name: str) -> None:
    rng = np.random.default_rng(9)
    matrix = random_matrix(rng, QuantFormat.blocks(name), 50, 512)
    for n in (1, 18):
        x = numbers(rng, n, 512)
        before = run.matmul(x, matrix)
        spoilt = x.copy()
        spoilt[n // 2, 100] = np.nan
        found = run.matmul(spoilt, matrix)
        assert not np.isfinite(found[n // 2]).any()
        assert np.array_equal(np.delete(found, n // 2, axis=0), np.delete(before, n // 2, axis=0))


@pytest.mark.parametrize(("n", "k", "count"), [(1, 3, 4), (70, 2, 4)])
def test_expert_ffn(isa: str, n: int, k: int, count: int) -> None:
    """Experts as files have them: down in more bits than gate and up."""
    rng = np.random.default_rng(10)
    hidden, intermediate = 256, 512
    pairs = [("Q4_K", "Q6_K"), ("Q2_K", "Q3_K"), ("IQ4_XS", "Q5_K"), ("GGUF_MXFP4", "Q8_0")]
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    experts = [
        tuple(random_matrix(rng, QuantFormat.blocks(t), *s) for t, s in zip((of, of, down), shapes, strict=True))
        for of, down in pairs[:count]
    ]
    experts = [tuple(softer(matrix) for matrix in expert) for expert in experts]
    x = numbers(rng, n, hidden)
    chosen = np.array([rng.permutation(count)[:k] for _ in range(n)])
    jobs = [(e, np.flatnonzero(chosen.reshape(-1) == e).tolist()) for e in rng.permutation(count)]
    found = ops_of(isa, 1).expert_ffn(x, experts, jobs, k)
    check_experts(found, x, experts, chosen, int16=isa in WITH_INT16)
    assert np.array_equal(ops_of(isa, 3).expert_ffn(x, experts, jobs[::-1], k), found)
    alone = [(e, [i]) for i, e in enumerate(chosen[0])]
    assert np.array_equal(ops_of(isa, 2).expert_ffn(x[:1], experts, alone, k), found[:k])


# ---- At the edge ----------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match=r"type of blocks: expected one of Q8_0, .*, found \"Q4_J\""):
        QuantFormat.blocks("Q4_J")
    run, rng = ops_of("portable", 1), np.random.default_rng(11)
    matrix = random_matrix(rng, QuantFormat.blocks("Q4_K"), 3, 512)
    x = numbers(rng, 1, 512)
    for weight in (matrix.weight[:, :-1].copy(), matrix.weight[:, :0].copy()):
        with pytest.raises(ArgumentError, match=r"\[matmul\] matrix: expected rows of whole groups of Q4_K, found"):
            run.matmul(x, replace(matrix, weight=weight))
    with pytest.raises(ArgumentError, match=r"\[matmul\] matrix.weight: expected uint8"):
        run.matmul(x, replace(matrix, weight=matrix.weight.view(np.uint32)))
    with pytest.raises(ArgumentError, match=r"\[matmul\] x: expected float32 \(\*, 512\)"):
        run.matmul(x[:, :256].copy(), matrix)
