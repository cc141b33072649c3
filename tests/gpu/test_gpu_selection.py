"""The ops by which an index selects rows, of both GPUs, emulated, against the oracle and against themselves."""

from __future__ import annotations

import pytest

from support.gpu_ops import GpuOps
from support.metal import needs_device
from support.selection_checks import (
    check_choices,
    check_gathering,
    check_index_scores,
    check_layer_norm,
    check_sparse_attention,
)

pytestmark = needs_device

ROWS = ("f32", "bf16", "q8")


@pytest.mark.parametrize("width", [1, 33, 128])
def test_layer_norm(run: GpuOps, width: int) -> None:
    check_layer_norm(run, 3, width)


@pytest.mark.parametrize("dtype", ROWS)
def test_index_scores(run: GpuOps, dtype: str) -> None:
    check_index_scores(run, 3, 30, 3, 33, dtype)
    check_index_scores(run, 2, 255, 8, 16, dtype)
    check_index_scores(run, 3, 600, 5, 8, dtype, unit=4, weighted=False)


def test_choices(run: GpuOps) -> None:
    check_choices(run)


@pytest.mark.parametrize("dtype", ROWS)
def test_gathering(run: GpuOps, dtype: str) -> None:
    check_gathering(run, dtype, (), 12)
    check_gathering(run, dtype, (2,), 4)


@pytest.mark.parametrize("dtype", ROWS)
def test_attention_to_what_is_selected(run: GpuOps, dtype: str) -> None:
    check_sparse_attention(run, dtype)
