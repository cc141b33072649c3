"""The delta-net of both GPUs, emulated, against the oracle and against itself."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import oracle
from support.gpu_ops import GpuOps
from support.metal import needs_device
from support.op_checks import check_convolution, check_convolution_row_by_row, delta_arguments, wide
from support.tolerances import assert_agrees

pytestmark = needs_device

Array = np.ndarray


@pytest.mark.parametrize("taps", [2, 4, 9])
@pytest.mark.parametrize("channels", [1, 67, 300])
def test_convolution(run: GpuOps, channels: int, taps: int) -> None:
    """Also with fewer rows than the state has: some of the old state stays."""
    for n in (1, 3, 11):
        check_convolution(run, n, channels, taps)


def test_gates_of_any_size(run: GpuOps) -> None:
    alpha = np.array([-1e30, -1e4, -200, -90, -20, -3, -1e-6, 0, 1, 20, 25, 31, 88.5, 90, 1e4, 1e30], np.float32)
    a_log = np.array([-20, -3, 0, 2.5, 80], np.float32)
    alpha = np.repeat(alpha[:, None], len(a_log), axis=1)
    dt_bias = np.array([0, 1, -1, 0.5, 0], np.float32)
    with np.errstate(over="ignore", under="ignore"):
        expected_decay, expected_beta = oracle.ops.delta_net_gates(*wide(alpha, alpha, a_log, dt_bias))
    decay, beta = run.delta_gates(alpha, alpha.copy(), a_log, dt_bias)
    assert np.isfinite(decay).all() and np.isfinite(beta).all()
    assert_agrees("delta_gates", decay, expected_decay)
    assert_agrees("delta_gates", beta, expected_beta)


@pytest.mark.parametrize("n", [1, 5, 19])
@pytest.mark.parametrize(
    ("key_heads", "value_heads", "dk", "dv"), [(2, 6, 32, 10), (1, 2, 128, 33), (1, 1, 7, 5), (2, 2, 256, 4)]
)
def test_recurrence(run: GpuOps, key_heads: int, value_heads: int, dk: int, dv: int, n: int) -> None:
    arguments = delta_arguments(n, key_heads, value_heads, dk, dv)
    expected, expected_state = oracle.ops.gated_delta(*wide(*arguments))
    found, found_state = run.gated_delta(*arguments)
    assert_agrees("gated_delta", found, expected)
    assert_agrees("gated_delta", found_state, expected_state)


@pytest.mark.parametrize(("n", "dk", "dv"), [(18, 64, 9), (17, 128, 32), (53, 128, 64)])
def test_rows_together_and_one_by_one_give_the_same_bits(run: GpuOps, n: int, dk: int, dv: int) -> None:
    *rows, state = delta_arguments(n, 2, 4, dk, dv)
    whole, end = run.gated_delta(*rows, state)
    for i in range(n):
        row, state = run.gated_delta(*(array[i : i + 1] for array in rows), state)
        assert np.array_equal(row[0], whole[i])
    assert np.array_equal(state, end)


def test_rows_of_a_convolution_together_and_one_by_one_give_the_same_bits(run: GpuOps) -> None:
    check_convolution_row_by_row(run, np.random.default_rng(1), 6, 40)
