"""Attention of the Metal kernels, on the emulated device, against the oracle and against itself."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import ArgumentError, oracle
from moeflux.ops import Ops
from support.metal import needs_device
from support.metal_ops import MetalOps, attention_both_ways
from support.op_checks import check_attention, check_latent_attention
from support.tolerances import assert_agrees

pytestmark = needs_device

Array = np.ndarray
metal = MetalOps()


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
        (2, 9, 1, 1, 200),
    ],
)
def test_attention(n: int, first: int, heads: int, kv_heads: int, dim: int, dtype: str) -> None:
    check_attention(metal, n, first, heads, kv_heads, dim, dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8"])
@pytest.mark.parametrize(
    ("n", "first", "heads", "rank", "rope"), [(1, 300, 5, 64, 16), (3, 20, 2, 512, 64), (6, 0, 3, 40, 7)]
)
def test_latent_attention(n: int, first: int, heads: int, rank: int, rope: int, dtype: str) -> None:
    check_latent_attention(metal, n, first, heads, rank, rope, dtype)


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
    n: int, first: int, heads: int, kv_heads: int, dim: int, window: int, sinks: float | None, dtype: str
) -> None:
    check_attention(metal, n, first, heads, kv_heads, dim, dtype, window=window, sinks=sinks)


def test_nothing_comes_from_rows_before_a_window() -> None:
    rng = np.random.default_rng(8)
    q = rng.standard_normal((20, 2, 8), dtype=np.float32)
    k, v = (rng.standard_normal((320, 1, 8), dtype=np.float32) for _ in range(2))
    whole = metal.attention(q, k, v, 0.3, None, 9)
    k[304], v[304] = np.nan, np.nan
    spoilt = metal.attention(q, k, v, 0.3, None, 9)
    seen = np.zeros(20, bool)
    seen[4:13] = True
    assert np.array_equal(spoilt[~seen], whole[~seen])
    assert np.isnan(spoilt[seen]).all()


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_scores_far_apart(scale: float) -> None:
    """One key has all the weight, and may be the last or long past."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for shape in ((2, 2, 16), (600, 1, 16), (600, 1, 16)))
    expected = oracle.ops.attention(*(a.astype(np.float64) for a in (q, k, v)), scale)
    # A score of some thousands is rounded by more than its neighbours are apart.
    assert np.abs(metal.attention(q, k, v, scale) - expected).max() < 1e-6 * scale


def test_a_row_depends_on_what_it_sees_alone() -> None:
    """However the rows are cut into calls, and whatever comes after them in the cache."""
    rng = np.random.default_rng(5)
    n, first, end = 9, 250, 259
    q, q_pe = (rng.standard_normal((n, 3, 8), dtype=np.float32) for _ in range(2))
    k, v = (rng.standard_normal((end, 1, 8), dtype=np.float32) for _ in range(2))
    k_pe = rng.standard_normal((end, 8), dtype=np.float32)
    sinks = rng.standard_normal(3, dtype=np.float32)
    whole = metal.attention(q, k, v, 0.3)
    windowed = metal.attention(q, k, v, 0.3, sinks, 5)
    latent = metal.mla_attention(q, q_pe, np.ascontiguousarray(k[:, 0]), k_pe, 0.3)
    for begin, stop in ((0, 1), (1, 4), (5, 7)):
        seen, rows = first + stop, slice(begin, stop)
        assert np.array_equal(metal.attention(q[rows], k[:seen], v[:seen], 0.3), whole[rows])
        assert np.array_equal(metal.attention(q[rows], k[:seen], v[:seen], 0.3, sinks, 5), windowed[rows])
        keys = np.ascontiguousarray(k[:seen, 0])
        assert np.array_equal(metal.mla_attention(q[rows], q_pe[rows], keys, k_pe[:seen], 0.3), latent[rows])
    k[-1], v[-1] = np.nan, np.nan
    assert np.array_equal(metal.attention(q, k, v, 0.3)[:-1], whole[:-1])


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "length"), [(4, 2, 64, 300), (3, 3, 33, 1), (2, 1, 256, 40)])
def test_one_step_at_a_time(heads: int, kv_heads: int, dim: int, length: int) -> None:
    """Scores, softmax, values, gate: each an op, each held to its definition."""
    rng, metal = np.random.default_rng(6), MetalOps()
    q, gate = (rng.standard_normal((heads, dim), dtype=np.float32) for _ in range(2))
    k, v = (rng.standard_normal((length, kv_heads, dim), dtype=np.float32) for _ in range(2))
    wide_k, wide_v = (np.repeat(a.astype(np.float64), heads // kv_heads, axis=1) for a in (k, v))
    scores = metal.attention_scores(q, k, dim**-0.5)
    assert_agrees("attention", scores[0], np.einsum("hd,thd->ht", q.astype(np.float64), wide_k) * dim**-0.5)
    weights = metal.attention_softmax(scores)
    powers = np.exp(scores[0].astype(np.float64) - scores[0].max(axis=1, keepdims=True))
    assert_agrees("attention", weights[0], powers / powers.sum(axis=1, keepdims=True))
    values = metal.attention_values(weights, v)
    assert_agrees("attention", values, np.einsum("ht,thd->hd", weights[0].astype(np.float64), wide_v))
    whole = oracle.ops.attention(*(a.astype(np.float64) for a in (q[None], k, v)), dim**-0.5)
    assert_agrees("attention", values, whole[0])
    gated = metal.sigmoid_gate(values[None], gate[None])
    assert_agrees("attention", gated, whole / (1 + np.exp(-gate.astype(np.float64))))


@pytest.mark.parametrize(
    ("op", "shapes", "message"),
    [
        ("attention_scores", [(0, 8), (3, 2, 8)], r"q: expected at least 1 in every dimension, found \(0, 8\)"),
        ("attention_scores", [(4, 0), (3, 2, 0)], r"q: expected at least 1 in every dimension, found \(4, 0\)"),
        ("attention_scores", [(4, 8), (0, 2, 8)], r"k: expected at least 1 in every dimension, found \(0, 2, 8\)"),
        ("attention_scores", [(4, 8), (3, 0, 8)], r"k: expected heads that divide 4, found 0"),
        ("attention_scores", [(4, 8), (3, 3, 8)], r"k: expected heads that divide 4, found 3"),
        ("attention_scores", [(4, 8), (3, 2, 7)], r"k: expected float32 \(\*, \*, 8\) contiguous"),
        ("attention_softmax", [(1, 0, 3)], r"scores: expected at least 1 in every dimension, found \(1, 0, 3\)"),
        ("attention_softmax", [(1, 4, 0)], r"scores: expected at least 1 in every dimension, found \(1, 4, 0\)"),
        ("attention_softmax", [(2, 4, 3)], r"scores: expected float32 \(1, \*, \*\) contiguous"),
        ("attention_values", [(1, 4, 0), (0, 2, 8)], r"scores: expected at least 1 in every dimension"),
        ("attention_values", [(1, 0, 3), (3, 2, 8)], r"scores: expected at least 1 in every dimension"),
        ("attention_values", [(1, 4, 3), (3, 2, 0)], r"v: expected at least 1 in every dimension, found \(3, 2, 0\)"),
        ("attention_values", [(1, 4, 3), (3, 0, 8)], r"v: expected heads that divide 4, found 0"),
        ("attention_values", [(1, 4, 3), (3, 3, 8)], r"v: expected heads that divide 4, found 3"),
        ("attention_values", [(1, 4, 3), (2, 2, 8)], r"v: expected float32 \(3, \*, \*\) contiguous"),
    ],
)
def test_steps_refuse_empty_and_inconsistent_shapes(op: str, shapes: list[tuple[int, ...]], message: str) -> None:
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    scale = [0.5] if op == "attention_scores" else []
    with pytest.raises(ArgumentError, match=rf"^\[{op}\] {message}"):
        getattr(MetalOps(), op)(*arrays, *scale)


def test_steps_are_of_metal_alone() -> None:
    with pytest.raises(ArgumentError, match=r"\[attention_softmax\] backend: expected metal, found another"):
        Ops("cpu").attention_softmax(np.zeros((1, 2, 3), np.float32))


@pytest.mark.parametrize(
    ("n", "length", "heads", "kv_heads", "dim"),
    [
        (1, 41, 6, 2, 40),
        (3, 258, 2, 1, 128),
        (2, 513, 1, 1, 200),
        (1, 2100, 8, 2, 64),  # more spans than there is room for at a time: two rounds of seven
        (3, 1600, 2, 1, 200),  # three
        (17, 300, 2, 2, 60),  # of too many rows: one by one
    ],
)
def test_spans_side_by_side_are_spans_one_by_one(n: int, length: int, heads: int, kv_heads: int, dim: int) -> None:
    rng = np.random.default_rng(7)
    q = rng.standard_normal((n, heads, dim), dtype=np.float32)
    k, v = (rng.standard_normal((length, kv_heads, dim), dtype=np.float32) for _ in range(2))
    sinks = rng.standard_normal(heads, dtype=np.float32)
    for beside in ((None, 0), (sinks, 290)):
        found = metal.attention(q, k, v, dim**-0.5, *beside)
        for way in attention_both_ways(q, k, v, dim**-0.5, *beside):
            assert np.array_equal(way, found)
