"""Experts on the CPU with the bits of the CUDA kernels: whichever kernels compute an expert, the CPU gives the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moeflux import QuantFormat
from moeflux.ops import Ops
from support.digit_products import same_bits
from support.gpu_ops import GpuOps
from support.metal import needs_device
from support.ops import AFFINE, numbers, random_matrix

pytestmark = needs_device

cuda, cpu = GpuOps("cuda"), Ops()

# Those whose tiles lie in shared memory, those that are known, and others: with scales of each type.
FORMATS = [
    *(f for f in AFFINE if f.bits in (4, 8) and f.group_size == 64),
    *(f for f in AFFINE if f.scale_type == "BF16" and f.bits not in (4, 8) and f.group_size == 32),
    *(QuantFormat.affine(4, group) for group in (32, 128)),
    QuantFormat.mxfp4(),
]


def experts_of(rng: np.random.Generator, format: QuantFormat, count: int, hidden: int, inner: int) -> list[Any]:
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    return [tuple(random_matrix(rng, format, *shape) for shape in shapes) for _ in range(count)]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_the_cpu_has_the_bits_of_every_kernel(format: QuantFormat) -> None:
    """One row's choice, several rows' choices, and pairs of an expert one by one, a few and more of them together."""
    rng = np.random.default_rng(11)
    experts = experts_of(rng, format, 4, 384, 128)
    x = numbers(rng, 9, 384)
    ids = np.array([[3, 0], [1, 3], [3, 2], [0, 3], [3, 1], [2, 3], [3, 0], [1, 3], [3, 2]], np.int32)
    jobs = [(e, [int(pair) for pair in np.flatnonzero(ids.reshape(-1) == e)]) for e in range(4)]
    expected = cpu.digit_expert_ffn(x, experts, jobs, 2)
    assert same_bits(cuda.chosen_expert_ffn(x[:1], experts, ids[:1]), expected[:2])
    assert same_bits(cuda.chosen_expert_ffn(x, experts, ids), expected)
    assert same_bits(cuda.expert_ffn(x, experts, jobs, 2), expected)
    few = [(3, jobs[3][1][:5])]
    assert same_bits(cuda.expert_ffn(x, experts, few, 2)[few[0][1]], expected[few[0][1]])
    assert same_bits(cuda.expert_ffn(x, experts, [(3, [0])], 2)[0], expected[0])
    assert expected.any(axis=1).all()


@pytest.mark.parametrize("kind", ["clamped", "geglu", "biases", "formats"])
def test_whatever_gate_and_up_become(kind: str) -> None:
    """Gates small and large, and so that exponentials are nothing or infinite; gate and up in two formats."""
    rng = np.random.default_rng(12)
    experts = experts_of(rng, QuantFormat.affine(4, 64), 2, 256, 128)
    settings: dict[str, Any] = {
        "clamped": {"clamped": (1.702, 7.0)},
        "geglu": {"geglu": True},
        "biases": {"biases": tuple(numbers(rng, 2, width) for width in (128, 128, 256))},
        "formats": {},
    }[kind]
    if kind == "formats":
        experts = [(random_matrix(rng, QuantFormat.affine(8, 32), 128, 256), up, down) for _, up, down in experts]
    x = numbers(rng, 6, 256) * np.float32([[1e-3], [1], [10], [100], [1e36], [0]])
    x[5, 7] = np.nan
    jobs = [(1, [0, 1, 2, 3, 4, 5])]
    expected = cpu.digit_expert_ffn(x, experts, jobs, 1, **settings)
    assert same_bits(cuda.expert_ffn(x, experts, jobs, 1, **settings), expected)
    one_by_one = [(1, [pair]) for pair in range(6)]
    assert same_bits(cuda.expert_ffn(x, experts, one_by_one, 1, **settings), expected)


def test_swiglu_by_itself_has_the_exponential_of_the_cpu() -> None:
    rng = np.random.default_rng(13)
    gate = np.concatenate([numbers(rng, 300) * 30, np.float32([0, -0.0, 88.8, -88.8, 104, -104, 1e30, -1e30, np.nan])])
    up = np.ones_like(gate)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = gate * (np.float32(1) / (np.float32(1) + cpu.digit_exp(-gate)))
    assert same_bits(cuda.swiglu(gate, up), expected * up)
