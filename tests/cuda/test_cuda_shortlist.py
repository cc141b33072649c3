"""What the CUDA kernels list of logits is what the oracle lists."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux.oracle import sampling as oracle
from support.gpu_ops import GpuOps
from support.metal import needs_device
from text.test_choosing import KINDS
from text.test_choosing_listed import same_list, some_logits

pytestmark = needs_device

cuda = GpuOps("cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_lists(kind: str) -> None:
    """Of several rows at once, each as if it were alone."""
    row = some_logits(np.random.default_rng(1), kind)
    others = np.stack([row, row[::-1], np.roll(row, 7)])
    for found, own in zip(cuda.shortlist(others, 0.7), others, strict=True):
        same_list(found, oracle.shortlist(own, 0.7))


@pytest.mark.parametrize("size", [1, 31, 32, 33, 2048, 2049, 70_000, 248_320])
def test_lists_of_any_length(size: int) -> None:
    row = np.random.default_rng(size).normal(0, 3, size).astype(np.float32)
    same_list(cuda.shortlist(row[None], 1.4)[0], oracle.shortlist(row, 1.4))


def test_what_is_not_finite_is_found() -> None:
    row = np.random.default_rng(2).normal(0, 3, 5000).astype(np.float32)
    for odd in (np.nan, np.inf, -np.inf):
        row[[4711, 4900]] = odd
        assert cuda.shortlist(row[None], 1.0)[0][1] == 4711
    assert cuda.shortlist(np.full((1, 3000), np.nan, np.float32), 1.0)[0][1] == 0
