"""The delta-net of every instruction set, against the oracle and against itself."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import oracle
from moeflux.ops import Ops, isas
from support.op_checks import check_convolution, check_convolution_row_by_row, delta_arguments, normal, wide
from support.tolerances import assert_agrees

Array = np.ndarray


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Ops:
    return Ops(isa=request.param)


# ---- Convolution ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("channels", [1, 5, 16, 67, 300, 512])
def test_convolution(kernels: Ops, channels: int, taps: int) -> None:
    """Also with fewer rows than the state has: some of the old state stays."""
    for n in (1, 2, 3, 4, 17):
        check_convolution(kernels, n, channels, taps)


def test_convolution_row_by_row_is_the_convolution(kernels: Ops) -> None:
    check_convolution_row_by_row(kernels, np.random.default_rng(3), 9, 67)


# ---- Gates ------------------------------------------------------------------------------------------------------


def test_gates_of_any_size(kernels: Ops) -> None:
    """softplus neither overflows nor loses small numbers."""
    alpha = np.array([-1e30, -1e4, -200, -90, -20, -3, -1e-6, 0, 1, 20, 25, 31, 88.5, 90, 1e4, 1e30], np.float32)
    a_log = np.array([-20, -3, 0, 2.5, 80], np.float32)
    alpha, b = np.repeat(alpha[:, None], len(a_log), axis=1), np.repeat(alpha[:, None], len(a_log), axis=1)
    dt_bias = np.array([0, 1, -1, 0.5, 0], np.float32)
    with np.errstate(over="ignore", under="ignore"):
        expected_decay, expected_beta = oracle.ops.delta_net_gates(*wide(alpha, b, a_log, dt_bias))
    decay, beta = kernels.delta_gates(alpha, b, a_log, dt_bias)
    assert np.isfinite(decay).all()
    assert np.isfinite(beta).all()
    assert_agrees("delta_gates", decay, expected_decay)
    assert_agrees("delta_gates", beta, expected_beta)


@pytest.mark.parametrize(("n", "heads"), [(1, 1), (3, 5), (17, 32), (64, 33)])
def test_gates(kernels: Ops, n: int, heads: int) -> None:
    rng = np.random.default_rng([n, heads])
    arguments = normal(rng, n, heads), normal(rng, n, heads), normal(rng, heads), normal(rng, heads)
    for found, expected in zip(
        kernels.delta_gates(*arguments), oracle.ops.delta_net_gates(*wide(*arguments)), strict=True
    ):
        assert_agrees("delta_gates", found, expected)


# ---- Recurrence -------------------------------------------------------------------------------------------------


def check_delta(kernels: Ops, arguments: tuple[Array, ...], tiled: bool = False) -> None:
    expected, expected_state = oracle.ops.gated_delta(*wide(*arguments), tiled=tiled)
    found, found_state = kernels.gated_delta(*arguments, tiled=tiled)
    assert_agrees("gated_delta", found, expected)
    assert_agrees("gated_delta", found_state, expected_state)


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64])
@pytest.mark.parametrize(("dk", "dv"), [(32, 32), (64, 96), (96, 64), (128, 128), (40, 20), (4, 1), (7, 67)])
def test_recurrence(kernels: Ops, dk: int, dv: int, n: int) -> None:
    check_delta(kernels, delta_arguments(n, 2, 6, dk, dv))


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 1), (3, 3), (1, 4), (2, 4), (3, 6)])
def test_heads_that_share_keys(kernels: Ops, key_heads: int, value_heads: int, tiled: bool) -> None:
    check_delta(kernels, delta_arguments(5, key_heads, value_heads, 32, 32), tiled)


@pytest.mark.parametrize("decay", [(0.0, 0.0), (0.0, 1e-30), (0.0, 1e-3), (0.999, 1.0), (1.0, 1.0)])
def test_decay_at_its_ends(kernels: Ops, decay: tuple[float, float]) -> None:
    check_delta(kernels, delta_arguments(200, 1, 2, 128, 32, decay))


# ---- The same bits ----------------------------------------------------------------------------------------------


def test_rows_together_and_one_by_one_give_the_same_bits(kernels: Ops) -> None:
    """The recurrence is the definition's, row after row: the size of a chunk changes nothing."""
    *rows, state = delta_arguments(21, 2, 4, 128, 96)
    whole, end = kernels.gated_delta(*rows, state)
    for i in range(21):
        row, state = kernels.gated_delta(*(array[i : i + 1] for array in rows), state)
        assert np.array_equal(row[0], whole[i])
    assert np.array_equal(state, end)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    arguments = delta_arguments(9, 2, 6, 40, 100)
    rng = np.random.default_rng(1)
    conv = normal(rng, 5, 1000), normal(rng, 3, 1000), normal(rng, 1000, 4)
    gates = normal(rng, 70, 33), normal(rng, 70, 33), normal(rng, 33), normal(rng, 33)
    for isa in isas():
        results = set()
        for threads in (1, 2, 3, 2):
            kernels = Ops(isa=isa, threads=threads)
            found = [*kernels.gated_delta(*arguments), *kernels.conv1d(*conv), *kernels.delta_gates(*gates)]
            results.add(b"".join(array.tobytes() for array in found))
        assert len(results) == 1, isa
