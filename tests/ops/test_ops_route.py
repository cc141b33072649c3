"""Routers and top-k of every instruction set: the same choice as the oracle, ties and NaN included."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import oracle
from moeflux.ops import Ops, isas
from support.op_checks import (
    GROUPED_SOFTMAX,
    check_grouped_softmax_routing,
    check_grouped_softmax_routing_by_hand,
    check_softmax_routing,
    check_softmax_routing_by_factors,
    check_softmax_routing_far_apart,
)
from support.tolerances import assert_agrees

Array = np.ndarray


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Ops:
    return Ops(isa=request.param)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def assert_a_choice(ids: Array, count: int) -> None:
    """Whatever the numbers: as many different ids as there are places, all of them in range."""
    for row in np.atleast_2d(ids):
        assert len(set(row.tolist())) == len(row)
        assert row.min() >= 0
        assert row.max() < count


# ---- Softmax ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (2, 1), (5, 5), (17, 3), (64, 8), (512, 10), (513, 513)])
def test_softmax_routing(kernels: Ops, experts: int, k: int, normalize: bool) -> None:
    for n in (1, 2, 3, 17):
        check_softmax_routing(kernels, 3 * normal(n, n, experts), k, normalize)


def test_softmax_routing_gives_ties_to_the_earlier_expert(kernels: Ops) -> None:
    logits = np.array([[1, 5, 2, 5, 0, 5, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0]], np.float32)
    ids, weights = kernels.route_softmax(logits, 5, normalize=True)
    assert ids.tolist() == [[1, 3, 5, 2, 6], [0, 1, 2, 3, 4]]
    assert np.allclose(weights[1], 0.2, rtol=1e-6)


@pytest.mark.parametrize(("experts", "k"), [(1, 1), (5, 5), (128, 8)])
def test_softmax_routing_by_factors(kernels: Ops, experts: int, k: int) -> None:
    check_softmax_routing_by_factors(kernels, experts, k)


def test_softmax_routing_far_apart(kernels: Ops) -> None:
    check_softmax_routing_far_apart(kernels)


@pytest.mark.parametrize(("experts", "groups", "groups_kept", "k"), GROUPED_SOFTMAX)
def test_softmax_routing_among_groups(kernels: Ops, experts: int, groups: int, groups_kept: int, k: int) -> None:
    check_grouped_softmax_routing(kernels, experts, groups, groups_kept, k)


def test_softmax_routing_among_groups_by_hand(kernels: Ops) -> None:
    check_grouped_softmax_routing_by_hand(kernels)


# ---- Grouped ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "groups", "groups_kept", "k"),
    [(256, 8, 4, 8), (8, 2, 1, 2), (8, 8, 3, 3), (12, 4, 4, 12), (6, 1, 1, 3), (40, 5, 2, 7), (64, 64, 64, 9)],
)
def test_grouped_routing(kernels: Ops, experts: int, groups: int, groups_kept: int, k: int) -> None:
    """Groups of one too, whose worth is that one's score."""
    for n in (1, 2, 3, 17):
        logits, bias = normal(n, n, experts), normal(99, experts) / 3
        for normalize, scaling in ((True, 2.5), (False, 1.0)):
            shape = {"groups": groups, "groups_kept": groups_kept, "normalize": normalize, "scaling": scaling}
            expected_ids, expected = oracle.ops.route_grouped(
                *(a.astype(np.float64) for a in (logits, bias)), k, **shape
            )
            ids, weights = kernels.route_grouped(logits, bias, k, **shape)
            assert np.array_equal(ids, expected_ids)
            assert_agrees("route_grouped", weights, expected)


def test_grouped_routing_chooses_with_the_bias_and_weighs_without(kernels: Ops) -> None:
    logits = np.array([[3, -2, 1, -1, -3, 2, 0, 4]], np.float32)
    bias = np.array([0.1, 0.2, -0.3, 0, 0, 0.4, -0.1, 0.05], np.float32)
    ids, weights = kernels.route_grouped(logits, bias, 2, groups=2, groups_kept=1, normalize=True, scaling=2.5)
    sigmoid = 1 / (1 + np.exp(-np.array([2.0, 4.0])))
    assert ids.tolist() == [[5, 7]]
    assert np.allclose(weights[0], 2.5 * sigmoid / sigmoid.sum(), rtol=1e-6)


def test_grouped_routing_gives_ties_to_the_earlier(kernels: Ops) -> None:
    zeros = np.zeros((1, 12), np.float32)
    ids, _ = kernels.route_grouped(zeros, zeros[0], 5, groups=4, groups_kept=2, normalize=True, scaling=1.0)
    assert ids.tolist() == [[0, 1, 2, 3, 4]]


def test_grouped_routing_keeps_to_its_groups_when_every_score_is_negative(kernels: Ops) -> None:
    logits, bias = normal(4, 3, 12), np.full(12, -9, np.float32)
    bias[[3, 4]] = -8  # the second group
    ids, _ = kernels.route_grouped(logits, bias, 3, groups=4, groups_kept=1, normalize=True, scaling=1.0)
    assert np.array_equal(np.sort(ids), np.broadcast_to([3, 4, 5], (3, 3)))


# ---- NaN --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.9, 1.0])
def test_routers_choose_among_nan(kernels: Ops, share: float) -> None:
    """A NaN is worse than any number; the weights of its row are NaN, so that nobody takes them for an answer."""
    logits = normal(7, 9, 24)
    logits[np.random.default_rng(8).random(logits.shape) < share] = np.nan
    logits[:, 5] = np.nan
    ids, weights = kernels.route_softmax(logits, 6, normalize=True)
    assert_a_choice(ids, 24)
    for row, chosen in zip(logits, ids, strict=True):
        numbers = np.flatnonzero(~np.isnan(row))
        assert set(chosen[: len(numbers)].tolist()) <= set(numbers.tolist())
    assert np.isnan(weights).all()
    ids, _ = kernels.route_grouped(logits, normal(9, 24), 6, groups=8, groups_kept=2, normalize=True, scaling=1.0)
    assert_a_choice(ids, 24)
    assert all(len(set((row // 3).tolist())) == 2 for row in ids)


@pytest.mark.parametrize("k", [1, 7, 1024])
def test_top_k_puts_nan_last(kernels: Ops, k: int) -> None:
    logits = normal(3, 40_000)
    logits[1000:] = np.nan
    logits[30_000] = -np.inf
    ids, _ = kernels.top_k(logits, k)
    numbers = np.where(np.isnan(logits), np.finfo(np.float64).min, np.maximum(logits.astype(np.float64), -1e300))
    assert np.array_equal(ids, oracle.ops.top_k(numbers[None], k)[0])


def test_top_k_of_nothing_but_nan(kernels: Ops) -> None:
    ids, values = kernels.top_k(np.full(20_000, np.nan, np.float32), 9)
    assert ids.tolist() == list(range(9))
    assert np.isnan(values).all()


# ---- Top-k ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 100, 16_384, 16_385, 50_001, 248_320])
@pytest.mark.parametrize("k", [1, 2, 40, 1024])
def test_top_k(kernels: Ops, count: int, k: int) -> None:
    k = min(k, count)
    for logits in (normal(count, count), np.round(normal(count, count) * 4)):  # without ties, and full of them
        ids, values = kernels.top_k(logits, k)
        assert np.array_equal(ids, oracle.ops.top_k(logits[None], k)[0])
        assert np.array_equal(values, logits[ids])


def test_top_k_of_everything(kernels: Ops) -> None:
    logits = np.round(normal(5, 40_000) * 100)
    ids, _ = kernels.top_k(logits, len(logits))
    assert np.array_equal(ids, oracle.ops.top_k(logits[None], len(logits))[0])


@pytest.mark.parametrize("order", [1, -1])
def test_top_k_of_sorted_logits(kernels: Ops, order: int) -> None:
    logits = np.arange(40_000, dtype=np.float32)[::order].copy()
    ids, _ = kernels.top_k(logits, 1024)
    assert np.array_equal(ids, np.argsort(-logits, kind="stable")[:1024])


def test_any_number_of_threads_gives_the_same_bits() -> None:
    logits, rows, bias = normal(1, 100_000), normal(2, 33, 64), normal(3, 64)
    for isa in isas():
        results = set()
        for threads in (1, 2, 3, 2):
            kernels = Ops(isa=isa, threads=threads)
            found = [
                *kernels.top_k(logits, 40),
                *kernels.route_softmax(rows, 8, normalize=True),
                *kernels.route_grouped(rows, bias, 6, groups=8, groups_kept=3, normalize=True, scaling=2.5),
            ]
            results.add(b"".join(array.tobytes() for array in found))
        assert len(results) == 1, isa
