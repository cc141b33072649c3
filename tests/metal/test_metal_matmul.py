"""Products, embeddings and experts of the Metal kernels, on the emulated device, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import QuantFormat
from moeflux.oracle import ops as oracle
from support.metal import needs_device
from support.metal_ops import MetalOps, product
from support.op_checks import check_experts
from support.ops import AFFINE, PLAIN, StoredMatrix, numbers, random_matrix
from support.tolerances import assert_close

pytestmark = needs_device

metal = MetalOps()
FORMATS = [*AFFINE, *PLAIN]


def width(format: QuantFormat, groups: int) -> int:
    return groups * format.group_size if format.is_affine else groups * 32 - 27


def check_product(rng: np.random.Generator, matrix: StoredMatrix, n: int) -> None:
    x = numbers(rng, n, matrix.exact.shape[1])
    found = metal.matmul(x, matrix)
    assert_close("matmul", found, oracle.matmul(x.astype(np.float64), matrix.exact), np.abs(x) @ matrix.size.T)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_products(format: QuantFormat) -> None:
    rng = np.random.default_rng(1)
    for rows, groups, n in [(1, 1, 1), (13, 3, 5)]:
        check_product(rng, random_matrix(rng, format, rows, width(format, groups)), n)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_transposed_products(format: QuantFormat) -> None:
    rng = np.random.default_rng(2)
    matrix = random_matrix(rng, format, 11, width(format, 3))
    x = numbers(rng, 3, 11)
    found = metal.matmul(x, matrix, transposed=True)
    assert_close("matmul", found, x.astype(np.float64) @ matrix.exact, np.abs(x) @ matrix.size)


@pytest.mark.parametrize("columns", [4224, 7168])
def test_wide_rows(columns: int) -> None:
    """Wider than what the older engine could take."""
    rng = np.random.default_rng(3)
    for format in (QuantFormat.affine(4, 128), QuantFormat.affine(3, 64, "F16"), QuantFormat.plain("BF16")):
        for n in (1, 3):
            check_product(rng, random_matrix(rng, format, 5, columns), n)


def test_products_of_a_batch() -> None:
    """One product for each head of a stack."""
    rng = np.random.default_rng(4)
    matrix = random_matrix(rng, QuantFormat.affine(4, 32), 3 * 10, 96)
    x, y = numbers(rng, 3, 2, 96), numbers(rng, 3, 2, 10)
    found, turned = product("matmul", x, matrix), product("matmul_transposed", y, matrix)
    for i in range(3):
        own = slice(10 * i, 10 * i + 10)
        stored = (array[own].copy() for array in (matrix.weight, matrix.scales, matrix.biases))
        part = StoredMatrix(matrix.format, *stored, matrix.exact, matrix.size)
        assert np.array_equal(found[i], metal.matmul(x[i], part))
        assert np.array_equal(turned[i], metal.matmul(y[i], part, transposed=True))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_embed(format: QuantFormat) -> None:
    rng = np.random.default_rng(5)
    table = random_matrix(rng, format, 9, width(format, 3))
    ids = np.array([8, 0, 3, 3], np.int32)
    assert_close("embed", metal.embed(table, ids), oracle.embed(table.exact, list(ids)), table.size[ids])


@pytest.mark.parametrize("format", [QuantFormat.affine(b, 64) for b in (2, 3, 4, 5, 6, 8)] + PLAIN, ids=str)
def test_neighbours_change_no_bit(format: QuantFormat) -> None:
    """A row alone, by the kernel for one row or by the other, and a row among others."""
    rng = np.random.default_rng(6)
    matrix = random_matrix(rng, format, 9, 320 if format.is_affine else 301)
    x = numbers(rng, 7, matrix.exact.shape[1])
    whole = metal.matmul(x, matrix)
    for i in (0, 3, 6):
        assert np.array_equal(product("matvec", x[None, i : i + 1], matrix)[0], whole[i : i + 1])
        assert np.array_equal(product("matmul", x[None, i : i + 1], matrix)[0], whole[i : i + 1])
    assert np.array_equal(metal.matmul(x[2:5], matrix), whole[2:5])


# ---- Experts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [QuantFormat.affine(b, 32) for b in (2, 3, 4, 5, 6, 8)] + PLAIN, ids=str)
def test_experts(format: QuantFormat) -> None:
    """One token, then a prefill: as many dispatches, and the same bits for a token whoever is beside it."""
    rng = np.random.default_rng(7)
    hidden, intermediate, count, k = 64, 32, 3, 2
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    experts = [tuple(random_matrix(rng, format, *shape) for shape in shapes) for _ in range(count)]
    x = numbers(rng, 5, hidden) / 8
    chosen = np.array([rng.permutation(count)[:k] for _ in range(5)])
    jobs = [(e, np.flatnonzero(chosen.reshape(-1) == e).tolist()) for e in rng.permutation(count)]
    found = metal.expert_ffn(x, experts, jobs, k)
    check_experts(found, x, experts, chosen)
    assert np.array_equal(metal.chosen_expert_ffn(x, experts, chosen.astype(np.int32)), found)
    alone = metal.expert_ffn(x[:1], experts, [(e, [place]) for place, e in enumerate(chosen[0])], k)
    assert np.array_equal(alone, found[:k])
    one_by_one = [(e, [pair]) for e, pairs in jobs[::-1] for pair in pairs]
    assert np.array_equal(metal.expert_ffn(x, experts, one_by_one, k), found)


def test_gate_and_up_of_different_formats() -> None:
    """Each by itself, where others take one dispatch for both."""
    rng = np.random.default_rng(10)
    hidden, intermediate, k = 64, 32, 2
    formats = (QuantFormat.affine(4, 32), QuantFormat.affine(6, 64), QuantFormat.plain("F16"))
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    experts = [tuple(random_matrix(rng, f, *s) for f, s in zip(formats, shapes, strict=True)) for _ in range(3)]
    x = numbers(rng, 3, hidden) / 8
    jobs = [(0, [0, 2, 5]), (2, [1, 3]), (1, [4])]
    found = metal.expert_ffn(x, experts, jobs, k)
    chosen = np.zeros((3, k), int)
    for expert, pairs in jobs:
        chosen.reshape(-1)[pairs] = expert
    check_experts(found, x, experts, chosen)


def test_pairs_of_no_job_are_left_alone() -> None:
    rng = np.random.default_rng(8)
    experts = [tuple(random_matrix(rng, QuantFormat.affine(4, 32), 32, 32) for _ in range(3))]
    found = metal.expert_ffn(numbers(rng, 2, 32), experts, [(0, [3])], 2)
    assert found[3].any() and not found[:3].any()
