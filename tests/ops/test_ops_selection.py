"""The ops by which an index selects rows, of every instruction set, against the oracle and against themselves."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import ArgumentError, FormatError, oracle
from moeflux.ops import Ops, isas
from support.op_checks import normal
from support.selection_checks import (
    check_choices,
    check_gathering,
    check_index_scores,
    check_layer_norm,
    check_sparse_attention,
)

ROWS = ("f32", "bf16", "q8")


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Ops:
    return Ops(isa=request.param, threads=2)


@pytest.mark.parametrize("width", [1, 5, 16, 33, 64, 128, 200])
def test_layer_norm(kernels: Ops, width: int) -> None:
    check_layer_norm(kernels, 3, width)


@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize(("heads", "dim"), [(1, 4), (3, 33), (8, 64), (11, 40), (64, 128)])
def test_index_scores(kernels: Ops, heads: int, dim: int, dtype: str) -> None:
    for n, first in ((1, 0), (3, 62), (2, 255), (5, 300)):
        check_index_scores(kernels, n, first, heads, dim, dtype)
        check_index_scores(kernels, n, first, heads, dim, dtype, unit=4, weighted=False)
    check_index_scores(kernels, 4, 1020, heads, dim, dtype, unit=256)


def test_choices(kernels: Ops) -> None:
    check_choices(kernels)


@pytest.mark.parametrize("dtype", ROWS)
def test_gathering(kernels: Ops, dtype: str) -> None:
    check_gathering(kernels, dtype, (), 36)
    check_gathering(kernels, dtype, (2,), 20)


@pytest.mark.parametrize("dtype", ROWS)
def test_attention_to_what_is_selected(kernels: Ops, dtype: str) -> None:
    check_sparse_attention(kernels, dtype)


def test_threads_and_instruction_sets_select_alike() -> None:
    scores = normal(np.random.default_rng(8), 7, 5000)
    expected = Ops(threads=1).index_select(scores, 2048, first_position=4990)
    for isa in isas():
        assert np.array_equal(Ops(isa=isa, threads=3).index_select(scores, 2048, first_position=4990), expected)


def test_the_definition_by_hand() -> None:
    """Units of two rows; the row at position 6 sees three whole ones and selects two, the one at 4 sees too few."""
    scores = np.array([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0], [1.0, 5.0, 1.0]])
    ids = oracle.index_select(scores, 2, first_position=4, unit=2)
    assert ids.tolist() == [[-1, -1], [0, 2], [0, 1]]
    seen = oracle.selected_rows(ids, 7, first_position=4, unit=2)
    assert [np.flatnonzero(row).tolist() for row in seen] == [[0, 1, 2, 3, 4], [0, 1, 4, 5], [0, 1, 2, 3, 6]]
    rows = np.arange(7.0)[:, None]
    assert oracle.gather_rows(rows, ids[2], position=6, unit=2)[:, 0].tolist() == [0, 1, 2, 3, 6]
    q, keys, weights = np.array([[[1.0], [-1.0]]]), np.array([[2.0], [-3.0]]), np.array([[10.0, 1.0]])
    assert oracle.index_scores(q, keys, weights, 0.5).tolist() == [[10.0, 1.5]]
    assert oracle.index_scores(q, keys, None, 0.5).tolist() == [[1.0, 1.5]]


def test_wrong_arguments_are_named() -> None:
    run, rng = Ops(), np.random.default_rng(2)
    q, keys, weights = normal(rng, 2, 3, 8), normal(rng, 5, 8), normal(rng, 2, 3)
    calls = {
        "keys": lambda: run.index_scores(q, keys, weights, 1.0, first_position=4),
        "weights": lambda: run.index_scores(q, keys, weights[:, :2], 1.0, first_position=0),
        "unit": lambda: run.index_scores(q, keys, weights, 1.0, first_position=0, unit=3),
        "first_position": lambda: run.index_scores(q, keys, weights, 1.0, first_position=-1),
        "scores": lambda: run.index_select(keys, 2, first_position=7),
        "count": lambda: run.index_select(keys, 0, first_position=0),
        "ids": lambda: run.gather_rows(keys, np.array([5], np.int32), position=4),
        "position": lambda: run.gather_rows(keys, np.array([1], np.int32), position=5),
    }
    for name, call in calls.items():
        with pytest.raises((ArgumentError, FormatError), match=f"] {name}: expected"):
            call()
