"""Experts with the bits of CUDA: every instruction set of this machine gives those that the definition says, and the
exponential is as exact as it claims. tests/cuda/test_cuda_host_experts.py compares with the kernels."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import ArgumentError, QuantFormat
from moeflux.ops import Ops
from moeflux.oracle.stored import pack_codes
from support.digit_products import product, same_bits
from support.ops import AFFINE, MXFP4, StoredMatrix, isa, narrowed, numbers, random_matrix, run

__all__ = ["isa", "run"]

Array = np.ndarray


def with_codes(format: QuantFormat, codes: Array, scales: Array, biases: Array) -> tuple[StoredMatrix, Array, Array]:
    """The matrix, and its scales and biases as the format keeps them, in float32."""
    (stored, exact), (stored_biases, exact_biases) = (narrowed(each, format.scale_type) for each in (scales, biases))
    packed = np.ascontiguousarray(pack_codes(codes, format.bits))
    matrix = StoredMatrix(format, packed, stored, stored_biases, codes, codes)
    return matrix, exact.astype(np.float32), exact_biases.astype(np.float32)


def by_definition(run: Ops, x: Array, parts: list[tuple[Array, Array, Array]], group: int) -> Array:
    """An expert of each row of x. What gate and up become is SwiGLU with the exponential of `run`."""
    (gate, up), down = [product(x, *part, group) for part in parts[:2]], parts[2]
    with np.errstate(over="ignore", invalid="ignore"):
        below = np.float32(1) + run.digit_exp(-gate.reshape(-1)).reshape(gate.shape)
        inner = gate * (np.float32(1) / below) * up
    return product(inner, *down, group)


@pytest.mark.parametrize("format", AFFINE, ids=str)
def test_experts_are_what_their_definition_says(run: Ops, format: QuantFormat) -> None:
    """Whole parts of the columns and a piece of one, more groups than a vector has and fewer; the largest codes; zeros,
    tiny and infinite numbers in x and among the scales."""
    group = format.group_size
    rng = np.random.default_rng([format.bits, group])
    hidden, inner = (1408, 192) if group < 128 else (1408, 128)
    x = numbers(rng, 6, hidden)
    x[1] = rng.choice([0x3F7F7F, 0x3F7F80, 0x3F8080, -0x3F7F80, -0x400000, 0x3FFFFF, 128, -128], hidden)
    x[1, ::group] = 0x3FFFFF
    x[2, :group] = 0
    x[3] *= np.float32(1e-38)
    x[4, 5], x[5, hidden - 1] = np.inf, np.nan
    matrices, parts = [], []
    for rows, columns in ((inner, hidden), (inner, hidden), (hidden, inner)):
        codes = rng.integers(0, 1 << format.bits, (rows, columns))
        codes[:2] = (1 << format.bits) - 1
        scales, biases = numbers(rng, rows, columns // group) / 64, numbers(rng, rows, columns // group) / 64
        scales[3], biases[4, 0] = 1e-40, -1e-45
        if columns == hidden:
            scales[5, 0], biases[6, -1], scales[7, 1] = np.inf, -np.inf, np.nan
        matrix, *exact = with_codes(format, codes, scales, biases)
        matrices.append(matrix)
        parts.append((codes, *exact))
    for special in (False, True):
        if not special:  # one that is not finite makes NaN of every output
            for each in (0, 1):
                matrices[each].scales[5:8] = matrices[each].scales[8]
                matrices[each].biases[5:8] = matrices[each].biases[8]
                for j in (1, 2):
                    parts[each][j][5:8] = parts[each][j][8]
        expected = by_definition(run, x, parts, group)
        found = run.digit_expert_ffn(x, [tuple(matrices)], [(0, list(range(len(x))))], 1)
        assert same_bits(found, expected)
        assert np.isfinite(expected[:4]).all() and np.isnan(expected[4:]).all()


def test_mxfp4_is_affine(run: Ops) -> None:
    rng = np.random.default_rng(4)
    sizes = np.array([0, 1, 2, 3, 4, 6, 8, 12])
    matrices, parts = [], []
    for rows, columns in ((96, 320), (96, 320), (320, 96)):
        codes = rng.integers(0, 16, (rows, columns))
        scales = rng.integers(110, 126, (rows, columns // 32)).astype(np.uint8)
        scales[0] = 0
        half = np.maximum(scales.astype(np.uint32) << 23, 0x00400000).view(np.float32) * np.float32(0.5)
        packed = np.ascontiguousarray(pack_codes(codes, 4))
        matrices.append(StoredMatrix(MXFP4, packed, scales, None, codes, codes))
        parts.append((np.concatenate([12 + sizes, 12 - sizes])[codes], half, half * np.float32(-12)))
    x = numbers(rng, 3, 320)
    found = run.digit_expert_ffn(x, [tuple(matrices)], [(0, [0, 1, 2])], 1)
    assert same_bits(found, by_definition(run, x, parts, 32)) and found.any(axis=1).all()


@pytest.mark.parametrize("kind", ["swiglu", "clamped", "geglu", "biases"])
def test_instruction_sets_agree_on_what_gate_and_up_become(run: Ops, kind: str) -> None:
    rng = np.random.default_rng(6)
    formats = [QuantFormat.affine(4, 64), QuantFormat.affine(8, 32), QuantFormat.affine(5, 128)]
    shapes = ((128, 256), (128, 256), (256, 128))
    experts = [tuple(random_matrix(rng, f, *shape) for f, shape in zip(formats, shapes, strict=True)) for _ in range(2)]
    x = numbers(rng, 3, 256)
    settings = {
        "swiglu": {},
        "clamped": {"clamped": (1.702, 7.0)},
        "geglu": {"geglu": True},
        "biases": {"biases": tuple(numbers(rng, 2, width) for width in (128, 128, 256))},
    }[kind]
    jobs = [(1, [0, 3]), (0, [2, 5])]
    found = run.digit_expert_ffn(x, experts, jobs, 2, **settings)
    assert same_bits(found, Ops(isa="portable", threads=1).digit_expert_ffn(x, experts, jobs, 2, **settings))
    close = run.expert_ffn(x, experts, jobs, 2, **settings)
    assert np.abs(found - close).max() < 1e-3 * np.abs(close).max()
    assert found.any(axis=1).tolist() == [True, False, True, True, False, True]


def test_the_exponential_over_its_whole_range(run: Ops) -> None:
    """Within two units of the last place, subnormal numbers too; infinite where float32 is; and the bits of the plain
    loop."""
    plain = Ops(isa="portable", threads=1)
    for first in range(0, 1 << 32, 1 << 28):
        x = np.arange(first, first + (1 << 28), 4099, dtype=np.uint64).astype(np.uint32).view(np.float32)
        found = run.digit_exp(x)
        assert same_bits(found, plain.digit_exp(x))
        with np.errstate(over="ignore", invalid="ignore"):
            exact = np.exp(x.astype(np.float64))
            rounded = exact.astype(np.float32)
        is_nan, is_infinite = np.isnan(x), np.isinf(rounded)
        assert np.isnan(found[is_nan]).all() and np.isinf(found[is_infinite]).all()
        rest = ~(is_nan | is_infinite)
        unit = np.spacing(np.maximum(rounded[rest], np.float32(2.0**-126)))
        assert np.all(np.abs(found[rest] - exact[rest]) <= 2 * unit)


def test_other_formats_are_refused(run: Ops) -> None:
    rng = np.random.default_rng(8)
    plain = [tuple(random_matrix(rng, QuantFormat.plain("BF16"), 64, 64) for _ in range(3))]
    with pytest.raises(ArgumentError, match="affine formats or MXFP4"):
        run.digit_expert_ffn(numbers(rng, 1, 64), plain, [(0, [0])], 1)
