"""Products of quantised matrices and rows of whole numbers: the same bits on every instruction set that has them."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import QuantFormat
from moeflux.ops import Ops
from moeflux.oracle import ops as oracle
from support.op_checks import rounding_of_int16
from support.ops import (
    AFFINE,
    BLOCKS,
    E4M3_CODES,
    FLOATS,
    MXFP4,
    QUANTISED,
    WITH_INT16,
    isa,
    numbers,
    ops_of,
    random_matrix,
    run,
)
from support.tolerances import assert_close

__all__ = ["isa", "run"]


@pytest.mark.skipif(len(WITH_INT16) < 2, reason="fewer than two instruction sets here multiply whole numbers")
@pytest.mark.parametrize("format", [format for format in QUANTISED if format not in E4M3_CODES], ids=str)
def test_whole_numbers_give_the_same_bits_whatever_multiplies_them(format: QuantFormat) -> None:
    rng = np.random.default_rng(16)
    for rows, groups, n in [(1, 1, 3), (15, 3, 16), (33, 9, 17), (70, 41, 5), (530, 2, 64), (16, 16, 131)]:
        matrix = random_matrix(rng, format, rows, groups * format.whole_columns)
        x = numbers(rng, n, groups * format.whole_columns)
        first, *others = (ops_of(isa, 2).matmul(x, matrix) for isa in WITH_INT16)
        for other in others:
            assert np.array_equal(first, other)


@pytest.mark.parametrize("isa", WITH_INT16)
def test_exact_products_are_those_of_float32_numbers(isa: str) -> None:
    rng = np.random.default_rng(18)
    exact = Ops(isa=isa, threads=2, exact=True)
    without_vnni = "avx512" if isa in ("amx", "avx512vnni") else isa
    assert exact.isa == without_vnni
    other = Ops(isa=without_vnni, threads=2, exact=True)
    for format in (QuantFormat.affine(4, 64), QuantFormat.affine(8, 64), MXFP4):
        matrix = random_matrix(rng, format, 40, 192)
        for n in (1, 20):
            x = numbers(rng, n, 192)
            found = exact.matmul(x, matrix)
            assert np.array_equal(found, other.matmul(x, matrix))
            assert not np.array_equal(found, ops_of(isa, 2).matmul(x, matrix))
            expected = oracle.matmul(x.astype(np.float64), matrix.exact)
            assert_close("matmul", found, expected, np.abs(x).astype(np.float64) @ matrix.size.T)


@pytest.mark.parametrize("format", [*(f for f in AFFINE if f.scale_type == "BF16"), *FLOATS, *BLOCKS], ids=str)
def test_numbers_that_are_all_the_largest(run: Ops, format: QuantFormat) -> None:
    """Every digit is as large as it can be, and so are sums of products: an instruction that saturates would do so."""
    rng = np.random.default_rng(20)
    columns = 3 * format.whole_columns
    matrix = random_matrix(rng, format, 40, columns)
    signs = np.where(rng.integers(0, 2, columns) == 0, np.float32(-1), np.float32(1))
    rows = np.stack([np.ones(columns, np.float32), np.full(columns, np.float32(-3)), signs])
    for x in (rows[:1], np.concatenate([rows, rows, rows])):
        sizes = np.abs(x.astype(np.float64))
        rounding = rounding_of_int16(sizes, matrix) if run.isa in WITH_INT16 else 0.0
        expected = oracle.matmul(x.astype(np.float64), matrix.exact)
        assert_close("matmul", run.matmul(x, matrix), expected, sizes @ matrix.size.T, rounding)
