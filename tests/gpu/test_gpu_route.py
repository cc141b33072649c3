"""Routers and top-k of both GPUs, emulated: the oracle's choice, ties and NaN included."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import oracle
from support.gpu_ops import GpuOps
from support.metal import needs_device
from support.op_checks import (
    GROUPED_SOFTMAX,
    check_grouped_softmax_routing,
    check_grouped_softmax_routing_by_hand,
    check_softmax_routing,
    check_softmax_routing_by_factors,
    check_softmax_routing_far_apart,
)
from support.tolerances import assert_agrees

pytestmark = needs_device


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (5, 5), (64, 8), (512, 10), (1000, 33)])
def test_softmax_routing(run: GpuOps, experts: int, k: int, normalize: bool) -> None:
    check_softmax_routing(run, 3 * normal(experts, 3, experts), k, normalize)


def test_softmax_routing_gives_ties_to_the_earlier_expert(run: GpuOps) -> None:
    logits = np.array([[1, 5, 2, 5, 0, 5, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0]], np.float32)
    ids, weights = run.route_softmax(logits, 5, normalize=True)
    assert ids.tolist() == [[1, 3, 5, 2, 6], [0, 1, 2, 3, 4]]
    assert np.allclose(weights[1], 0.2, rtol=1e-6)
    # Of more experts than a warp has lanes.
    few = np.arange(70, dtype=np.float32)[None] % 3
    ids, _ = run.route_softmax(few, 30, normalize=True)
    assert ids.tolist() == [[*range(2, 70, 3), *range(1, 22, 3)]]


@pytest.mark.parametrize("k", [1, 7, 8, 9])
@pytest.mark.parametrize("experts", [33, 70, 128, 250, 256])
def test_softmax_routing_among_few(run: GpuOps, experts: int, k: int) -> None:
    """By ranks up to eight: the same logits in one warp and in several, with numbers that are not one and infinities
    among them, in rows of which each has more of them."""
    rng = np.random.default_rng(experts + k)
    logits = rng.integers(0, 40, (6, experts)).astype(np.float32)
    logits[1] = rng.integers(0, 3, experts)
    logits[2] = 7
    logits[3, rng.permutation(experts)[: experts - k // 2]] = np.nan
    logits[4] = -np.inf
    logits[4, -k:] = np.arange(k)
    logits[5, ::2] = -0.0
    logits[5, 1::2] = 0.0
    ids, weights = run.route_softmax(logits, k, normalize=True)
    expected = [sorted(range(experts), key=lambda i: (np.isnan(row[i]), -row[i], i))[:k] for row in logits]
    assert ids.tolist() == expected
    wide = logits[[0, 1, 2, 5]].astype(np.float64)
    assert_agrees("route_softmax", weights[[0, 1, 2, 5]], oracle.ops.route_softmax(wide, k, normalize=True)[1])


@pytest.mark.parametrize("experts", [40, 256])
def test_softmax_routing_of_any_number_has_the_same_bits(run: GpuOps, experts: int) -> None:
    """Eight are found in another way than nine."""
    logits = 3 * normal(experts, 7, experts)
    eight = run.route_softmax(logits, 8, normalize=False)
    nine = run.route_softmax(logits, 9, normalize=False)
    for few, more in zip(eight, nine, strict=True):
        assert np.array_equal(few, more[:, :8])


@pytest.mark.parametrize(("experts", "k"), [(1, 1), (5, 5), (128, 8)])
def test_softmax_routing_by_factors(run: GpuOps, experts: int, k: int) -> None:
    check_softmax_routing_by_factors(run, experts, k)


def test_softmax_routing_far_apart(run: GpuOps) -> None:
    check_softmax_routing_far_apart(run)


@pytest.mark.parametrize(("experts", "groups", "groups_kept", "k"), GROUPED_SOFTMAX)
def test_softmax_routing_among_groups(run: GpuOps, experts: int, groups: int, groups_kept: int, k: int) -> None:
    check_grouped_softmax_routing(run, experts, groups, groups_kept, k)


def test_softmax_routing_among_groups_by_hand(run: GpuOps) -> None:
    check_grouped_softmax_routing_by_hand(run)


@pytest.mark.parametrize(
    ("experts", "groups", "groups_kept", "k"),
    [(256, 8, 4, 8), (8, 8, 3, 3), (12, 4, 4, 12), (6, 1, 1, 3), (40, 5, 2, 7), (64, 64, 64, 9)],
)
def test_grouped_routing(run: GpuOps, experts: int, groups: int, groups_kept: int, k: int) -> None:
    logits, bias = normal(experts, 3, experts), normal(99, experts) / 3
    for normalize, scaling in ((True, 2.5), (False, 1.0)):
        shape = {"groups": groups, "groups_kept": groups_kept, "normalize": normalize, "scaling": scaling}
        wide = (logits.astype(np.float64), bias.astype(np.float64))
        expected_ids, expected = oracle.ops.route_grouped(*wide, k, **shape)
        ids, weights = run.route_grouped(logits, bias, k, **shape)
        assert np.array_equal(ids, expected_ids)
        assert_agrees("route_grouped", weights, expected)


def test_grouped_routing_keeps_to_its_groups(run: GpuOps) -> None:
    """With ties everywhere, and when every score is negative."""
    zeros = np.zeros((1, 12), np.float32)
    ids, _ = run.route_grouped(zeros, zeros[0], 5, groups=4, groups_kept=2, normalize=True, scaling=1.0)
    assert ids.tolist() == [[0, 1, 2, 3, 4]]
    logits, bias = normal(4, 3, 12), np.full(12, -9, np.float32)
    bias[[3, 4]] = -8  # the second group
    ids, _ = run.route_grouped(logits, bias, 3, groups=4, groups_kept=1, normalize=True, scaling=1.0)
    assert np.array_equal(np.sort(ids), np.broadcast_to([3, 4, 5], (3, 3)))


@pytest.mark.parametrize("share", [0.1, 0.9, 1.0])
def test_routers_choose_among_nan(run: GpuOps, share: float) -> None:
    logits = normal(7, 9, 24)
    logits[np.random.default_rng(8).random(logits.shape) < share] = np.nan
    logits[:, 5] = np.nan
    ids, weights = run.route_softmax(logits, 6, normalize=True)
    for row, chosen in zip(logits, ids, strict=True):
        finite = np.flatnonzero(~np.isnan(row))
        assert len(set(chosen.tolist())) == 6 and chosen.min() >= 0 and chosen.max() < 24
        assert set(chosen[: len(finite)].tolist()) <= set(finite.tolist())
    assert np.isnan(weights).all()
    ids, _ = run.route_grouped(logits, normal(9, 24), 6, groups=8, groups_kept=2, normalize=True, scaling=1.0)
    assert all(len(set(row.tolist())) == 6 and len(set((row // 3).tolist())) == 2 for row in ids)


@pytest.mark.parametrize("count", [1, 100, 2048, 2049, 9000])
@pytest.mark.parametrize("k", [1, 40, 1024])
def test_top_k(run: GpuOps, count: int, k: int) -> None:
    k = min(k, count)
    for logits in (normal(count, count), np.round(normal(count, count) * 4)):  # without ties, and full of them
        ids, values = run.top_k(logits, k)
        assert np.array_equal(ids, oracle.ops.top_k(logits[None], k)[0])
        assert np.array_equal(values, logits[ids])


def test_top_k_puts_nan_last(run: GpuOps) -> None:
    logits = normal(3, 5000)
    logits[100:] = np.nan
    logits[3000] = -np.inf
    ids, _ = run.top_k(logits, 200)
    best = np.argsort(-logits[:100], kind="stable").tolist()
    nan = np.flatnonzero(np.isnan(logits)).tolist()
    assert ids.tolist() == [*best, 3000, *nan[:99]]
