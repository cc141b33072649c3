"""What experts of gpt_oss and gemma4 need of both GPUs, emulated: MXFP4, biases, clamped SwiGLU, GeGLU."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import QuantFormat
from moeflux.oracle import ops as oracle
from support.gpu_ops import GpuOps
from support.metal import needs_device
from support.op_checks import check_experts
from support.ops import MXFP4, numbers, random_matrix
from support.tolerances import assert_close

pytestmark = needs_device


def test_products(run: GpuOps) -> None:
    """Both ways, of one row and of several; a row alone, and a row among others."""
    rng = np.random.default_rng(1)
    matrix = random_matrix(rng, MXFP4, 13, 320)
    x, y = numbers(rng, 7, 320), numbers(rng, 7, 13)
    found, turned = run.matmul(x, matrix), run.matmul(y, matrix, transposed=True)
    assert_close("matmul", found, oracle.matmul(x.astype(np.float64), matrix.exact), np.abs(x) @ matrix.size.T)
    assert_close("matmul", turned, y.astype(np.float64) @ matrix.exact, np.abs(y) @ matrix.size)
    for rows in (slice(0, 1), slice(6, 7), slice(2, 5)):
        assert np.array_equal(run.matmul(x[rows], matrix), found[rows])


def test_embed(run: GpuOps) -> None:
    rng = np.random.default_rng(5)
    table = random_matrix(rng, MXFP4, 9, 96)
    ids = np.array([8, 0, 3, 3], np.int32)
    assert_close("embed", run.embed(table, ids), oracle.embed(table.exact, list(ids)), table.size[ids])


@pytest.mark.parametrize(("clamped", "geglu"), [(None, False), ((1.702, 1.5), False), (None, True)])
@pytest.mark.parametrize("up_format", [MXFP4, QuantFormat.plain("BF16")], ids=str)
def test_biases_and_activations(
    run: GpuOps, up_format: QuantFormat, clamped: tuple[float, float] | None, geglu: bool
) -> None:
    """In one dispatch for gate and up, and in one for each."""
    rng = np.random.default_rng(12)
    hidden, intermediate, count, k = 64, 32, 3, 2
    formats = (MXFP4, up_format, MXFP4)
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    experts = [tuple(random_matrix(rng, f, *s) for f, s in zip(formats, shapes, strict=True)) for _ in range(count)]
    biases = (numbers(rng, count, intermediate), numbers(rng, count, intermediate), numbers(rng, count, hidden))
    x = numbers(rng, 5, hidden) / 8
    chosen = np.array([rng.permutation(count)[:k] for _ in range(5)])
    jobs = [(e, np.flatnonzero(chosen.reshape(-1) == e).tolist()) for e in rng.permutation(count)]
    found = run.expert_ffn(x, experts, jobs, k, biases, clamped, geglu)
    check_experts(found, x, experts, chosen, False, biases, clamped, geglu)
    assert np.array_equal(run.chosen_expert_ffn(x, experts, chosen.astype(np.int32), biases, clamped, geglu), found)
