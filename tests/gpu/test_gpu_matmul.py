"""Products, embeddings and experts of both GPUs, emulated, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import QuantFormat
from moeflux.oracle import ops as oracle
from support.gpu_ops import GpuOps
from support.metal import needs_device
from support.op_checks import check_experts
from support.ops import AFFINE, PLAIN, StoredMatrix, numbers, random_matrix
from support.tolerances import assert_close

pytestmark = needs_device

FORMATS = [*AFFINE, *PLAIN]


def width(format: QuantFormat, groups: int) -> int:
    return groups * format.group_size if format.is_affine else groups * 32 - 27


def check_product(run: GpuOps, rng: np.random.Generator, matrix: StoredMatrix, n: int) -> None:
    x = numbers(rng, n, matrix.exact.shape[1])
    found = run.matmul(x, matrix)
    assert_close("matmul", found, oracle.matmul(x.astype(np.float64), matrix.exact), np.abs(x) @ matrix.size.T)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_products(run: GpuOps, format: QuantFormat) -> None:
    rng = np.random.default_rng(1)
    for rows, groups, n in [(1, 1, 1), (13, 3, 5)]:
        check_product(run, rng, random_matrix(rng, format, rows, width(format, groups)), n)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_transposed_products(run: GpuOps, format: QuantFormat) -> None:
    rng = np.random.default_rng(2)
    matrix = random_matrix(rng, format, 11, width(format, 3))
    x = numbers(rng, 3, 11)
    found = run.matmul(x, matrix, transposed=True)
    assert_close("matmul", found, x.astype(np.float64) @ matrix.exact, np.abs(x) @ matrix.size)


@pytest.mark.parametrize("columns", [4224, 7168])
def test_wide_rows(run: GpuOps, columns: int) -> None:
    """Wider than what the older engine could take."""
    rng = np.random.default_rng(3)
    for format in (QuantFormat.affine(4, 128), QuantFormat.affine(3, 64, "F16"), QuantFormat.plain("BF16")):
        for n in (1, 3):
            check_product(run, rng, random_matrix(rng, format, 5, columns), n)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_embed(run: GpuOps, format: QuantFormat) -> None:
    rng = np.random.default_rng(5)
    table = random_matrix(rng, format, 9, width(format, 3))
    ids = np.array([8, 0, 3, 3], np.int32)
    assert_close("embed", run.embed(table, ids), oracle.embed(table.exact, list(ids)), table.size[ids])


@pytest.mark.parametrize("format", [QuantFormat.affine(b, 64) for b in (2, 3, 4, 5, 6, 8)] + PLAIN, ids=str)
def test_neighbours_change_no_bit(run: GpuOps, format: QuantFormat) -> None:
    """A row alone, among a few others, and among many."""
    rng = np.random.default_rng(6)
    matrix = random_matrix(rng, format, 9, 320 if format.is_affine else 301)
    x = numbers(rng, 18, matrix.exact.shape[1])
    whole = run.matmul(x, matrix)
    for rows in (slice(0, 1), slice(17, 18), slice(2, 5)):
        assert np.array_equal(run.matmul(x[rows], matrix), whole[rows])


# ---- Experts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [QuantFormat.affine(b, 32) for b in (2, 3, 4, 5, 6, 8)] + PLAIN, ids=str)
def test_experts(run: GpuOps, format: QuantFormat) -> None:
    """One token, then a prefill: as many dispatches, and the same bits for a token whoever is beside it."""
    rng = np.random.default_rng(7)
    hidden, intermediate, count, k = 64, 32, 3, 2
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    experts = [tuple(random_matrix(rng, format, *shape) for shape in shapes) for _ in range(count)]
    x = numbers(rng, 5, hidden) / 8
    chosen = np.array([rng.permutation(count)[:k] for _ in range(5)])
    jobs = [(e, np.flatnonzero(chosen.reshape(-1) == e).tolist()) for e in rng.permutation(count)]
    found = run.expert_ffn(x, experts, jobs, k)
    check_experts(found, x, experts, chosen)
    assert np.array_equal(run.chosen_expert_ffn(x, experts, chosen.astype(np.int32)), found)
    alone = run.expert_ffn(x[:1], experts, [(e, [place]) for place, e in enumerate(chosen[0])], k)
    assert np.array_equal(alone, found[:k])
    one_by_one = [(e, [pair]) for e, pairs in jobs[::-1] for pair in pairs]
    assert np.array_equal(run.expert_ffn(x, experts, one_by_one, k), found)


def test_gate_and_up_of_different_formats(run: GpuOps) -> None:
    """Each by itself, where others take one dispatch for both."""
    rng = np.random.default_rng(10)
    hidden, intermediate, k = 64, 32, 2
    formats = (QuantFormat.affine(4, 32), QuantFormat.affine(6, 64), QuantFormat.plain("F16"))
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    experts = [tuple(random_matrix(rng, f, *s) for f, s in zip(formats, shapes, strict=True)) for _ in range(3)]
    x = numbers(rng, 3, hidden) / 8
    jobs = [(0, [0, 2, 5]), (2, [1, 3]), (1, [4])]
    found = run.expert_ffn(x, experts, jobs, k)
    chosen = np.zeros((3, k), int)
    for expert, pairs in jobs:
        chosen.reshape(-1)[pairs] = expert
    check_experts(found, x, experts, chosen)


def test_pairs_of_no_job_are_left_alone(run: GpuOps) -> None:
    rng = np.random.default_rng(8)
    experts = [tuple(random_matrix(rng, QuantFormat.affine(4, 32), 32, 32) for _ in range(3))]
    found = run.expert_ffn(numbers(rng, 2, 32), experts, [(0, [3])], 2)
    assert found[3].any() and not found[:3].any()
