"""Checks of every backend's ops by which an index selects rows, against the oracle and against themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeflux import oracle
from support.op_checks import cached, normal, wide
from support.tolerances import assert_close

Array = np.ndarray


def check_layer_norm(run: Any, n: int, width: int) -> None:
    rng = np.random.default_rng([n, width])
    x, weight, bias = 3 * normal(rng, n, width) + 5, normal(rng, width), normal(rng, width)
    expected = oracle.layer_norm(*wide(x, weight, bias), 1e-6)
    spread = np.abs(x).max(axis=1, keepdims=True) / np.sqrt(x.astype(np.float64).var(axis=1, keepdims=True) + 1e-6)
    found = run.layer_norm(x, weight, bias, 1e-6)
    assert_close("layer_norm", found, expected, spread * np.abs(weight) + np.abs(bias))
    assert np.array_equal(run.layer_norm(x[-1:], weight, bias, 1e-6)[0], found[-1])


def check_index_scores(
    run: Any, n: int, first: int, heads: int, dim: int, dtype: str, unit: int = 1, weighted: bool = True
) -> None:
    rng = np.random.default_rng([n, first, heads, dim, unit])
    q, weights = normal(rng, n, heads, dim), normal(rng, n, heads) if weighted else None
    keys, numbers = cached(rng, ((first + n) // unit + 2, dim), dtype)
    scale = dim**-0.5
    expected = oracle.index_scores(wide(q)[0], numbers, None if weights is None else wide(weights)[0], scale)
    size = oracle.index_scores(
        *wide(np.abs(q)), np.abs(numbers), np.ones((n, heads)) if weights is None else np.abs(wide(weights)[0]), scale
    )
    found = run.index_scores(q, keys, weights, scale, first_position=first, unit=unit)
    seen = np.arange(len(keys)) < ((first + np.arange(n) + 1) // unit)[:, None]
    assert np.isneginf(found[~seen]).all()
    assert_close("index_scores", found[seen], expected[seen], size[seen])
    # A row's scores depend on nothing beside it.
    for i in {0, n // 2, n - 1}:
        own = None if weights is None else weights[i : i + 1]
        alone = run.index_scores(q[i : i + 1], keys, own, scale, first_position=first + i, unit=unit)
        assert np.array_equal(alone[0], found[i])


def check_index_select(run: Any, scores: Array, count: int, first: int, unit: int = 1) -> None:
    expected = oracle.index_select(scores.astype(np.float64), count, first_position=first, unit=unit)
    assert np.array_equal(run.index_select(scores, count, first_position=first, unit=unit), expected)


def check_choices(run: Any) -> None:
    """Ties, both zeros, what is no number, infinities, and numbers that differ in their last bit."""
    rng = np.random.default_rng(3)
    check_index_select(run, normal(rng, 5, 700), 100, first=600)
    check_index_select(run, normal(rng, 9, 40), 7, first=3)  # the first rows see too few
    check_index_select(run, normal(rng, 9, 40), 7, first=90, unit=4)
    check_index_select(run, np.round(normal(rng, 3, 900)), 400, first=890)
    few = rng.choice(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0], np.float32), (6, 300))
    for count in (1, 60, 150, 299):
        check_index_select(run, few, count, first=294)
    steps = (np.float32(1.0).view(np.uint32) + rng.permutation(500).astype(np.uint32)).view(np.float32)
    check_index_select(run, np.stack([steps, -steps]), 130, first=498)
    assert run.index_select(np.zeros((1, 9), np.float32), 4, first_position=8).tolist() == [[0, 1, 2, 3]]


def check_gathering(run: Any, dtype: str, heads: tuple[int, ...], dim: int) -> None:
    rng = np.random.default_rng(dim)
    for unit, position, count in ((1, 9, 3), (1, 700, 512), (4, 514, 100), (64, 700, 3), (256, 1030, 4)):
        rows, _ = cached(rng, (position + 3, *heads, dim), dtype)
        ids = np.sort(rng.permutation((position + 1) // unit)[:count]).astype(np.int32)
        found = run.gather_rows(rows, ids, position=position, unit=unit)
        assert np.array_equal(found, oracle.gather_rows(rows, ids, position=position, unit=unit))


def check_sparse_attention(run: Any, dtype: str) -> None:
    """What the ops do together is attention to what is selected."""
    rng = np.random.default_rng(17)
    position, heads, dim, count = 600, 6, 32, 290
    q, scores = normal(rng, 1, heads, dim), normal(rng, 1, position + 1)
    k, k_numbers = cached(rng, (position + 1, 2, dim), dtype)
    v, v_numbers = cached(rng, (position + 1, 2, dim), dtype)
    ids = run.index_select(scores, count, first_position=position)
    seen = oracle.selected_rows(ids, position + 1, first_position=position)
    expected = oracle.attention(wide(q)[0], k_numbers, v_numbers, dim**-0.5, seen=seen)
    k, v = (run.gather_rows(rows, ids[0], position=position) for rows in (k, v))
    assert len(k) == count
    assert np.abs(run.attention(q, k, v, dim**-0.5) - expected).max() < 1e-4
