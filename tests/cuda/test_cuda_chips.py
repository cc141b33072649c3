"""Kernels for chips without copies in bulk, warpgroups and clusters: the bits of those for 9.0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from emulator import cuda_gpu
from emulator.device import ORDERS
from moeflux import QuantFormat
from moeflux.ops import Ops
from support.digit_products import same_bits
from support.metal import needs_device
from support.ops import numbers, random_matrix

pytestmark = [needs_device, pytest.mark.usefixtures("emulated_gpu")]

FORMAT = QuantFormat.affine(4, 64)


def bits_of_both(run: Callable[[Ops], Any]) -> Iterator[Any]:
    for major in (8, 9):
        with cuda_gpu.emulating(order=ORDERS[-1], checked=True, major=major):
            yield run(Ops("cuda"))


@pytest.mark.parametrize(
    ("rows", "columns", "n"), [(19, 384, 1), (19, 4608, 1), (70, 384, 87)], ids=["a row", "a wide row", "many rows"]
)
def test_products(rows: int, columns: int, n: int) -> None:
    """With rows behind the last of a tile, and fragments that are not there."""
    rng = np.random.default_rng(columns)
    matrix, x = random_matrix(rng, FORMAT, rows, columns), numbers(rng, n, columns)
    older, newer = bits_of_both(lambda ops: ops.matmul(x, matrix))
    assert same_bits(older, newer)


def test_experts_of_many_rows() -> None:
    rng = np.random.default_rng(8)
    shapes = ((128, 256), (128, 256), (256, 128))
    experts = [tuple(random_matrix(rng, FORMAT, *shape) for shape in shapes)]
    x = numbers(rng, 41, 256) / 8
    older, newer = bits_of_both(lambda ops: ops.expert_ffn(x, experts, [(0, list(range(41)))], 1))
    assert same_bits(older, newer) and newer.any(axis=1).all()
