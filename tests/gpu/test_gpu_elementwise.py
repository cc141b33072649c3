"""Norms, activations, sums, rotations and copies of both GPUs, emulated, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux.oracle import ops as oracle
from moeflux.stores.floats import bf16_bits
from support.gpu_ops import GpuOps
from support.metal import needs_device
from support.op_checks import as_codes, check_combine, check_geglu, check_scale_and_cap, wide
from support.ops import numbers
from support.tolerances import assert_close

pytestmark = needs_device

WIDTHS = (1, 31, 33, 300)
EPS = 1e-6


@pytest.mark.parametrize("width", [*WIDTHS, 2050])
def test_rms_norm(run: GpuOps, width: int) -> None:
    rng = np.random.default_rng(1)
    x, weight = numbers(rng, 3, width) * 5, numbers(rng, width)
    found = run.rms_norm(x, weight, EPS)
    assert_close("rms_norm", found, oracle.rms_norm(*wide(x, weight), EPS))


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_of_heads(run: GpuOps, width: int) -> None:
    rng = np.random.default_rng(2)
    x, z, weight = numbers(rng, 2, 3, width), numbers(rng, 2, 3, width) * 4, numbers(rng, width)
    expected = oracle.rms_norm_heads(*wide(x, weight), EPS)
    assert_close("rms_norm_heads", run.rms_norm_heads(x, weight, EPS), expected)
    expected = oracle.rms_norm_heads(x.astype(np.float64), None, EPS) / 3
    assert_close("rms_norm_heads", run.rms_norm_heads(x, None, EPS, 1 / 3), expected)
    expected = oracle.gated_rms_norm(*wide(x, z, weight), EPS)
    assert_close("gated_rms_norm", run.gated_rms_norm(x, z, weight, EPS), expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_activations_and_sums(run: GpuOps, width: int) -> None:
    rng = np.random.default_rng(3)
    x, y = numbers(rng, width) * 3, numbers(rng, width)
    assert_close("swiglu", run.swiglu(x, y), oracle.swiglu(*wide(x, y)))
    assert_close("residual_add", run.residual_add(x, y), oracle.residual_add(*wide(x, y)))
    rows = numbers(rng, 3, width)
    assert_close("bias_add", run.bias_add(rows, y), oracle.bias_add(*wide(rows, y)))
    heads, gates = numbers(rng, 3, 2, width), numbers(rng, 3, 2, width) * 3
    assert_close("sigmoid_gate", run.sigmoid_gate(heads, gates), oracle.sigmoid_gate(*wide(heads, gates)))


@pytest.mark.parametrize("width", WIDTHS)
def test_geglu_scale_and_soft_cap(run: GpuOps, width: int) -> None:
    check_geglu(run, width)
    check_scale_and_cap(run, width)


def test_sigmoid_over_its_whole_range(run: GpuOps) -> None:
    gate = np.concatenate([np.linspace(-87, 87, 401), np.linspace(-1, 1, 101), [0.0]]).astype(np.float32)
    ones = np.ones_like(gate)
    exact = 1 / (1 + np.exp(-gate.astype(np.float64)))
    assert_close("sigmoid_gate", run.sigmoid_gate(ones[None, None], gate[None, None])[0, 0], exact)
    assert_close("swiglu", run.swiglu(gate, ones), gate * exact)


@pytest.mark.parametrize("hidden", [1, 100, 700])
@pytest.mark.parametrize(("n", "k"), [(1, 8), (3, 1)])
def test_combine(run: GpuOps, hidden: int, n: int, k: int) -> None:
    check_combine(run, n, hidden, k)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "half"), [(2, 1), (33, 16), (40, 3)])
def test_rope(run: GpuOps, interleaved: bool, dim: int, half: int) -> None:
    rng = np.random.default_rng(5)
    x = numbers(rng, 3, 2, dim)
    frequencies = oracle.vanilla_frequencies(2 * half, 10000.0)
    turns = np.arange(3)[:, None] * frequencies
    angles = np.stack([np.cos(turns), np.sin(turns)], axis=-1).astype(np.float32)
    exact = oracle.rope(x.astype(np.float64), np.arange(3), frequencies, interleaved=interleaved)
    found = run.rope(x, angles, interleaved=interleaved)
    # The angles are rounded, and the sum may be near nothing.
    assert_close("rope", found, exact, np.abs(x).max() * 2)
    assert np.array_equal(found[..., 2 * half :], x[..., 2 * half :])


@pytest.mark.parametrize("width", WIDTHS)
def test_append(run: GpuOps, width: int) -> None:
    rng = np.random.default_rng(6)
    x, kept = numbers(rng, 3, width), numbers(rng, 7, width)
    expected = kept.copy()
    expected[2:5] = x
    assert np.array_equal(run.append(x, kept, 2), expected)
    assert np.array_equal(run.append(x, bf16_bits(kept), 2), bf16_bits(expected))


@pytest.mark.parametrize("dim", [1, 31, 32, 33, 128, 257])
def test_append_makes_codes_as_the_oracle_does(run: GpuOps, dim: int) -> None:
    rng = np.random.default_rng(dim)
    x = numbers(rng, 9, 3, dim) * np.float32(10) ** rng.uniform(-20, 20, (9, 3, 1)).astype(np.float32)
    x[1], x[2, 0], x[2, 1, 0], x[3, 0, 0], x[4, 0] = 0, 126 * 2.0**-100, 127 * 2.0**-100, np.nan, 127.0
    x[3, 1, 0], x[4, 0, -1] = -np.inf, 0.5
    kept = rng.integers(-128, 128, (300, 3, dim + 2), np.int8)
    found = run.append(x.reshape(9, -1), kept, 250)
    assert np.array_equal(found[250:259], as_codes(x))
    assert np.array_equal(np.delete(found, slice(250, 259), 0), np.delete(kept, slice(250, 259), 0))
