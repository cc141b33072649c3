"""Residual streams and the gate of n-gram embeddings on both GPUs, emulated, against the oracle and by themselves."""

from __future__ import annotations

import pytest

from support.gpu_ops import GpuOps
from support.metal import needs_device
from support.op_checks import check_convolution
from support.stream_checks import SHAPES, check_ngram_gate, check_rows_of_streams_alone, check_streams

pytestmark = needs_device


@pytest.mark.parametrize("shape", SHAPES)
def test_streams(run: GpuOps, shape: tuple[int, int, int]) -> None:
    check_streams(run, *shape)
    check_ngram_gate(run, *shape)


@pytest.mark.parametrize("n", [1, 11])
def test_convolution_of_rows_apart(run: GpuOps, n: int) -> None:
    check_convolution(run, n, 67, 4, dilation=3)


def test_rows_alone_and_together(run: GpuOps) -> None:
    check_rows_of_streams_alone(run)
