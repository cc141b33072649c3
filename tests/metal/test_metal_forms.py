"""Kernels of Metal that do one op in several ways, and ops that only Metal has, on the emulated device."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import ArgumentError, QuantFormat, oracle
from moeflux.ops import Ops
from support.gpu_ops import GpuOps
from support.metal import needs_device
from support.metal_ops import attention_both_ways, product, rms_norm_in_place
from support.ops import PLAIN, StoredMatrix, numbers, random_matrix
from support.tolerances import assert_agrees

pytestmark = needs_device

metal = GpuOps("metal")


@pytest.mark.parametrize("width", [1, 31, 300, 2050])
def test_norms_in_place(width: int) -> None:
    rng = np.random.default_rng(1)
    x, weight = numbers(rng, 3, width) * 5, numbers(rng, width)
    assert np.array_equal(rms_norm_in_place(x, weight, 1e-6), metal.rms_norm(x, weight, 1e-6))


# ---- Products -------------------------------------------------------------------------------------------------------


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


# ---- Attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "length"), [(4, 2, 64, 300), (3, 3, 33, 1), (2, 1, 256, 40)])
def test_one_step_at_a_time(heads: int, kv_heads: int, dim: int, length: int) -> None:
    """Scores, softmax, values, gate: each an op, each held to its definition."""
    rng = np.random.default_rng(6)
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
        getattr(metal, op)(*arrays, *scale)


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
