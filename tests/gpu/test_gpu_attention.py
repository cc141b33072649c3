"""Attention of both GPUs, emulated, against the oracle and against itself."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import oracle
from support.gpu_ops import GpuOps
from support.metal import needs_device
from support.op_checks import cached, check_attention, check_latent_attention

pytestmark = needs_device

Array = np.ndarray


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8"])
@pytest.mark.parametrize(
    ("n", "first", "heads", "kv_heads", "dim"),
    [
        (1, 0, 1, 1, 1),
        (1, 40, 6, 2, 40),
        (5, 30, 6, 2, 33),
        (3, 255, 2, 1, 128),
        (2, 511, 1, 1, 200),
        (33, 0, 3, 3, 16),
        (1, 300, 2, 1, 400),
        (2, 300, 4, 2, 512),
        (2, 9, 1, 1, 200),
    ],
)
def test_attention(run: GpuOps, n: int, first: int, heads: int, kv_heads: int, dim: int, dtype: str) -> None:
    check_attention(run, n, first, heads, kv_heads, dim, dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8"])
@pytest.mark.parametrize(
    ("n", "first", "heads", "rank", "rope"), [(1, 300, 5, 64, 16), (3, 20, 2, 512, 64), (6, 0, 3, 40, 7)]
)
def test_latent_attention(run: GpuOps, n: int, first: int, heads: int, rank: int, rope: int, dtype: str) -> None:
    check_latent_attention(run, n, first, heads, rank, rope, dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8"])
@pytest.mark.parametrize("sinks", [None, -1000.0, 1.0, 40.0])
@pytest.mark.parametrize(
    ("n", "first", "heads", "kv_heads", "dim", "window"),
    [
        (1, 40, 6, 2, 40, 1),
        (5, 250, 6, 2, 33, 7),
        (40, 500, 2, 1, 16, 32),
        (1, 1200, 2, 1, 40, 900),
        (3, 2, 2, 1, 8, 0),
    ],
)
def test_sinks_and_windows(
    run: GpuOps, n: int, first: int, heads: int, kv_heads: int, dim: int, window: int, sinks: float | None, dtype: str
) -> None:
    check_attention(run, n, first, heads, kv_heads, dim, dtype, window=window, sinks=sinks)


def test_nothing_comes_from_rows_before_a_window(run: GpuOps) -> None:
    rng = np.random.default_rng(8)
    q = rng.standard_normal((20, 2, 8), dtype=np.float32)
    k, v = (rng.standard_normal((320, 1, 8), dtype=np.float32) for _ in range(2))
    whole = run.attention(q, k, v, 0.3, None, 9)
    k[304], v[304] = np.nan, np.nan
    spoilt = run.attention(q, k, v, 0.3, None, 9)
    seen = np.zeros(20, bool)
    seen[4:13] = True
    assert np.array_equal(spoilt[~seen], whole[~seen])
    assert np.isnan(spoilt[seen]).all()


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_scores_far_apart(run: GpuOps, scale: float) -> None:
    """One key has all the weight, and may be the last or long past."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for shape in ((2, 2, 16), (600, 1, 16), (600, 1, 16)))
    expected = oracle.ops.attention(*(a.astype(np.float64) for a in (q, k, v)), scale)
    # A score of some thousands is rounded by more than its neighbours are apart.
    assert np.abs(run.attention(q, k, v, scale) - expected).max() < 1e-6 * scale


def test_a_row_depends_on_what_it_sees_alone(run: GpuOps) -> None:
    """However the rows are cut into calls, and whatever comes after them in the cache."""
    rng = np.random.default_rng(5)
    n, first, end = 9, 250, 259
    q, q_pe = (rng.standard_normal((n, 3, 8), dtype=np.float32) for _ in range(2))
    k, v = (rng.standard_normal((end, 1, 8), dtype=np.float32) for _ in range(2))
    k_pe = rng.standard_normal((end, 8), dtype=np.float32)
    sinks = rng.standard_normal(3, dtype=np.float32)
    whole = run.attention(q, k, v, 0.3)
    windowed = run.attention(q, k, v, 0.3, sinks, 5)
    latent = run.mla_attention(q, q_pe, np.ascontiguousarray(k[:, 0]), k_pe, 0.3)
    for begin, stop in ((0, 1), (1, 4), (5, 7)):
        seen, rows = first + stop, slice(begin, stop)
        assert np.array_equal(run.attention(q[rows], k[:seen], v[:seen], 0.3), whole[rows])
        assert np.array_equal(run.attention(q[rows], k[:seen], v[:seen], 0.3, sinks, 5), windowed[rows])
        keys = np.ascontiguousarray(k[:seen, 0])
        assert np.array_equal(run.mla_attention(q[rows], q_pe[rows], keys, k_pe[:seen], 0.3), latent[rows])
    k[-1], v[-1] = np.nan, np.nan
    assert np.array_equal(run.attention(q, k, v, 0.3)[:-1], whole[:-1])


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8"])
@pytest.mark.parametrize(("first", "window", "dim"), [(0, 0, 256), (250, 0, 128), (500, 300, 128), (31, 40, 256)])
def test_many_rows_are_what_each_is_by_itself(run: GpuOps, first: int, window: int, dim: int, dtype: str) -> None:
    """A GPU takes many rows by other kernels, for these widths by some that nothing else uses."""
    n, heads, kv_heads = 21, 8, 2
    check_attention(run, n, first, heads, kv_heads, dim, dtype, window=window, sinks=1.0)
    rng = np.random.default_rng(dim + first)
    q = rng.standard_normal((n, heads, dim), dtype=np.float32)
    k, v = (cached(rng, (first + n, kv_heads, dim), dtype)[0] for _ in range(2))
    sinks = rng.standard_normal(heads, dtype=np.float32)
    whole = run.attention(q, k, v, 0.1, sinks, window)
    for row in (0, 1, 7, 8, 19, 20):
        seen = first + row + 1
        by = run if row == 20 else run.once
        alone = by.attention(q[row : row + 1], k[:seen], v[:seen], 0.1, sinks, window)
        assert np.array_equal(alone[0], whole[row])


@pytest.mark.parametrize(("dtype", "window", "dim"), [("f32", 0, 256), ("bf16", 0, 128), ("q8", 3000, 128)])
def test_a_row_by_itself_sees_a_long_context_as_among_others(run: GpuOps, dtype: str, window: int, dim: int) -> None:
    """CUDA has other kernels for one row than for a few, and others than for a short context. Metal has not."""
    n, first, heads, kv_heads = 2, 600 if run.backend == "metal" else 4190, 6, 1
    check_attention(run, 1, first, heads, kv_heads, dim, dtype, window=window, sinks=1.0)
    rng = np.random.default_rng(dim)
    q = rng.standard_normal((n, heads, dim), dtype=np.float32)
    k, v = (cached(rng, (first + n, kv_heads, dim), dtype)[0] for _ in range(2))
    whole = run.attention(q, k, v, 0.1, None, window)
    for row in range(n):
        seen = first + row + 1
        alone = run.once.attention(q[row : row + 1], k[:seen], v[:seen], 0.1, None, window)
        assert np.array_equal(alone[0], whole[row])


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8"])
@pytest.mark.parametrize(("first", "heads"), [(0, 3), (299, 40)])
def test_a_row_of_latents_by_itself_is_what_it_is_among_others(run: GpuOps, first: int, heads: int, dtype: str) -> None:
    """CUDA has a kernel for one row of this width, which takes many heads together. Metal has not."""
    heads = min(heads, 3) if run.backend == "metal" else heads
    check_latent_attention(run, 1, first, heads, 512, 64, dtype)
    rng = np.random.default_rng(first)
    q, q_pe = (rng.standard_normal((2, heads, width), dtype=np.float32) for width in (512, 64))
    latent, k_pe = (cached(rng, (first + 2, width), dtype)[0] for width in (512, 64))
    whole = run.mla_attention(q, q_pe, latent, k_pe, 0.1)
    for row in range(2):
        seen = first + row + 1
        rows = slice(row, row + 1)
        alone = run.once.mla_attention(q[rows], q_pe[rows], latent[:seen], k_pe[:seen], 0.1)
        assert np.array_equal(alone[0], whole[row])
