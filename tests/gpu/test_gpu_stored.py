"""Products, rows and experts in GGUF's blocks, NVFP4, FP8 and MXFP8 on both GPUs, emulated, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import QuantFormat
from moeflux.oracle import ops as oracle
from moeflux.oracle.blocks import block_numbers
from moeflux.oracle.stored import float_numbers
from support.blocks import random_blocks
from support.gpu_ops import GpuOps
from support.metal import needs_device
from support.op_checks import check_experts
from support.ops import BLOCKS, FLOATS, MXFP4, StoredMatrix, numbers, random_matrix, softer
from support.tolerances import assert_close

pytestmark = needs_device

FORMATS = [*BLOCKS, *(format for format in FLOATS if format != MXFP4)]


def wide(format: QuantFormat, columns: int) -> int:
    """So many columns, or the next that are whole."""
    return -(-columns // format.whole_columns) * format.whole_columns


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_products(run: GpuOps, format: QuantFormat) -> None:
    """Both ways, of one row and of several. A row has the same bits alone and among others."""
    rng = np.random.default_rng(1)
    matrix = random_matrix(rng, format, 13, wide(format, 288))
    x, y = numbers(rng, 6, matrix.exact.shape[1]), numbers(rng, 3, 13)
    found, turned = run.matmul(x, matrix), run.matmul(y, matrix, transposed=True)
    assert_close("matmul", found, oracle.matmul(x.astype(np.float64), matrix.exact), np.abs(x) @ matrix.size.T)
    assert_close("matmul", turned, y.astype(np.float64) @ matrix.exact, np.abs(y) @ matrix.size)
    for rows in (slice(0, 1), slice(5, 6), slice(2, 5)):
        assert np.array_equal(run.matmul(x[rows], matrix), found[rows])
    least = random_matrix(rng, format, 1, format.whole_columns)
    x = numbers(rng, 1, format.whole_columns)
    assert_close("matmul", run.matmul(x, least), x.astype(np.float64) @ least.exact.T, np.abs(x) @ least.size.T)


@pytest.mark.parametrize("format", BLOCKS, ids=str)
def test_rows_of_blocks_are_their_numbers(run: GpuOps, format: QuantFormat) -> None:
    """To the last bit, whatever the scale. -0 counts as 0."""
    blocks = random_blocks(np.random.default_rng(2), str(format), 252, every_scale=True)
    weight = blocks.reshape(84, -1)
    exact = block_numbers(weight, str(format)).astype(np.float64)
    table = StoredMatrix(format, weight, None, None, exact, np.abs(exact))
    ids = np.arange(83, -1, -1, dtype=np.int32)
    assert np.array_equal(run.embed(table, ids), exact[ids].astype(np.float32))


@pytest.mark.parametrize("format", [format for format in FORMATS if not format.is_blocks], ids=str)
def test_rows_of_floats_are_their_numbers(run: GpuOps, format: QuantFormat) -> None:
    """Every code, and every scale that there is for eight bits."""
    rng = np.random.default_rng(3)
    table = random_matrix(rng, format, 127, wide(format, 256))
    codes = np.tile(np.arange(256, dtype=np.uint8), (127, table.weight.nbytes // 127 // 256 or 1))
    weight = np.ascontiguousarray(codes[:, : table.weight.nbytes // 127]).view(table.weight.dtype)
    scales = table.scales
    assert scales is not None
    if scales.dtype == np.uint8:
        scales = scales.copy()
        scales[:, -1] = np.arange(127)
    exact = float_numbers(weight, scales, format)
    table = StoredMatrix(format, weight, scales, None, exact, np.abs(exact))
    ids = np.arange(126, -1, -1, dtype=np.int32)
    assert np.array_equal(run.embed(table, ids), exact[ids].astype(np.float32))


PAIRS = [("Q4_K", "Q6_K"), ("Q8_0", "Q8_0"), ("IQ4_XS", "Q5_K"), ("GGUF_MXFP4", "Q5_1"), ("NVFP4", "NVFP4"),
         ("MXFP8", "MLX_NVFP4"), ("FP8", "FP8_F32")]  # fmt: skip


def named(name: str) -> QuantFormat:
    return QuantFormat.blocks(name) if name in QuantFormat.block_types() else QuantFormat.floats(name)


@pytest.mark.parametrize(("name", "of_down"), PAIRS)
def test_experts(run: GpuOps, name: str, of_down: str) -> None:
    """One token, then a prefill: the same bits for a token whoever is beside it, and whoever makes the lists."""
    rng = np.random.default_rng(7)
    format, down = named(name), named(of_down)
    hidden, intermediate, k = wide(format, 64), wide(down, 64), 2
    shapes = ((format, intermediate, hidden), (format, intermediate, hidden), (down, hidden, intermediate))
    experts = [tuple(softer(random_matrix(rng, *shape)) for shape in shapes) for _ in range(3)]
    x = numbers(rng, 5, hidden) / 8
    chosen = np.array([rng.permutation(3)[:k] for _ in range(5)])
    jobs = [(e, np.flatnonzero(chosen.reshape(-1) == e).tolist()) for e in rng.permutation(3)]
    found = run.expert_ffn(x, experts, jobs, k)
    check_experts(found, x, experts, chosen)
    assert np.array_equal(run.chosen_expert_ffn(x, experts, chosen.astype(np.int32)), found)
    alone = run.expert_ffn(x[:1], experts, [(e, [place]) for place, e in enumerate(chosen[0])], k)
    assert np.array_equal(alone, found[:k])


def test_gate_and_up_of_different_formats(run: GpuOps) -> None:
    """Each by itself, where others take one dispatch for both."""
    rng = np.random.default_rng(10)
    formats = (named("Q5_0"), named("IQ4_NL"), QuantFormat.affine(4, 32))
    shapes = ((64, 32), (64, 32), (32, 64))
    experts = [tuple(softer(random_matrix(rng, f, *s)) for f, s in zip(formats, shapes, strict=True)) for _ in range(2)]
    x = numbers(rng, 3, 32) / 8
    found = run.expert_ffn(x, experts, [(0, [0, 2]), (1, [1])], 1)
    check_experts(found, x, experts, np.array([[0], [1], [0]]))
