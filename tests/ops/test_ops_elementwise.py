"""Norms, activations, sums, rotations and copies against the oracle, on every instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import ArgumentError, DeviceError, _core
from moeflux import oracle as oracle_package
from moeflux.ops import Ops, isas
from moeflux.oracle import ops as oracle
from moeflux.stores.floats import bf16_bits
from support.op_checks import as_codes, check_combine, check_geglu, check_scale_and_cap, wide
from support.ops import isa, numbers, ops_of, run
from support.tolerances import BF16_ROUNDING, assert_close

__all__ = ["isa", "run"]

WIDTHS = (1, 2, 15, 16, 17, 31, 33, 128, 257)
EPS = 1e-6


@pytest.mark.parametrize("width", [*WIDTHS, 7168])
def test_rms_norm(run: Ops, width: int) -> None:
    rng = np.random.default_rng(1)
    for n in (1, 3, 17):
        x, weight = numbers(rng, n, width) * 5, numbers(rng, width)
        assert_close("rms_norm", run.rms_norm(x, weight, EPS), oracle.rms_norm(*wide(x, weight), EPS))


def test_rms_norm_of_tiny_rows(run: Ops) -> None:
    """eps decides where the row is nearly nothing."""
    x, weight = np.full((2, 40), 1e-5, np.float32), np.ones(40, np.float32)
    x[1] = 0
    assert_close("rms_norm", run.rms_norm(x, weight, EPS), oracle.rms_norm(*wide(x, weight), EPS))


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_of_heads(run: Ops, width: int) -> None:
    rng = np.random.default_rng(2)
    for n, heads in [(1, 1), (2, 3), (17, 5)]:
        x, z, weight = numbers(rng, n, heads, width), numbers(rng, n, heads, width) * 4, numbers(rng, width)
        expected = oracle.rms_norm_heads(*wide(x, weight), EPS)
        assert_close("rms_norm_heads", run.rms_norm_heads(x, weight, EPS), expected)
        expected = oracle.rms_norm_heads(x.astype(np.float64), None, EPS) / 3
        assert_close("rms_norm_heads", run.rms_norm_heads(x, None, EPS, 1 / 3), expected)
        expected = oracle.gated_rms_norm(*wide(x, z, weight), EPS)
        assert_close("gated_rms_norm", run.gated_rms_norm(x, z, weight, EPS), expected)


@pytest.mark.parametrize("width", [*WIDTHS, 70000])
def test_activations_and_sums(run: Ops, width: int) -> None:
    rng = np.random.default_rng(3)
    # Not below -16 or so, where the oracle's own sigmoid has few digits left; the whole range is further down.
    x, y = numbers(rng, width) * 3, numbers(rng, width)
    assert_close("swiglu", run.swiglu(x, y), oracle.swiglu(*wide(x, y)))
    assert_close("residual_add", run.residual_add(x, y), oracle.residual_add(*wide(x, y)))
    rows = numbers(rng, 3, width)
    assert_close("bias_add", run.bias_add(rows, y), oracle.bias_add(*wide(rows, y)))
    heads = numbers(rng, 3, 2, min(width, 300))
    gates = numbers(rng, 3, 2, min(width, 300)) * 3
    assert_close("sigmoid_gate", run.sigmoid_gate(heads, gates), oracle.sigmoid_gate(*wide(heads, gates)))


def test_sigmoid_over_its_whole_range(run: Ops) -> None:
    gate = np.concatenate([np.linspace(-87, 87, 40001), np.linspace(-1, 1, 4001), [0.0]]).astype(np.float32)
    ones = np.ones_like(gate)
    exact = 1 / (1 + np.exp(-gate.astype(np.float64)))
    assert_close("sigmoid_gate", run.sigmoid_gate(ones[None, None], gate[None, None])[0, 0], exact)
    assert_close("swiglu", run.swiglu(gate, ones), gate * exact)


def test_extreme_gates(run: Ops) -> None:
    gate = np.array([-3e38, -1e4, -104, -89, -88, 88, 89, 104, 1e4, 3e38, np.inf], np.float32)
    ones = np.ones_like(gate)
    found = run.sigmoid_gate(ones[None, None], gate[None, None])[0, 0]
    assert np.all(np.abs(found - (gate > 0)) < 1e-38) and np.all(found >= 0)
    np.testing.assert_allclose(run.swiglu(gate, ones), np.maximum(gate, 0), rtol=1e-6, atol=1e-36)
    nan = np.full(3, np.nan, np.float32)
    assert np.isnan(run.swiglu(nan, ones[:3])).all() and np.isnan(run.residual_add(nan, ones[:3])).all()


@pytest.mark.parametrize("width", [*WIDTHS, 20000])
def test_geglu(run: Ops, width: int) -> None:
    check_geglu(run, width)


@pytest.mark.parametrize("width", [*WIDTHS, 20000])
def test_scale_and_soft_cap(run: Ops, width: int) -> None:
    check_scale_and_cap(run, width)


@pytest.mark.parametrize("hidden", [1, 31, 64, 100, 4100])
@pytest.mark.parametrize(("n", "k"), [(1, 8), (3, 1), (17, 10)])
def test_combine(run: Ops, hidden: int, n: int, k: int) -> None:
    check_combine(run, n, hidden, k)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "half"), [(2, 1), (33, 16), (64, 32), (40, 3)])
def test_rope(run: Ops, interleaved: bool, dim: int, half: int) -> None:
    rng = np.random.default_rng(5)
    for n, heads in [(1, 1), (3, 2), (17, 5)]:
        x = numbers(rng, n, heads, dim)
        frequencies = oracle.vanilla_frequencies(2 * half, 10000.0)
        turns = np.arange(n)[:, None] * frequencies
        angles = np.stack([np.cos(turns), np.sin(turns)], axis=-1).astype(np.float32)
        expected = x.astype(np.float64)
        first, second = oracle.rope_pairs(half, interleaved)
        cos, sin = angles[:, None, :, 0].astype(np.float64), angles[:, None, :, 1].astype(np.float64)
        a, b = expected[..., first].copy(), expected[..., second].copy()
        expected[..., first], expected[..., second] = a * cos - b * sin, a * sin + b * cos
        size = np.abs(expected) + np.abs(x).max()
        assert_close("rope", run.rope(x, angles, interleaved=interleaved), expected, size)
        # And the oracle's own rope, whose angles are not rounded.
        exact = oracle.rope(x.astype(np.float64), np.arange(n), frequencies, interleaved=interleaved)
        assert np.abs(run.rope(x, angles, interleaved=interleaved) - exact).max() < 1e-6
        assert np.array_equal(run.rope(x, angles, interleaved=interleaved)[..., 2 * half :], x[..., 2 * half :])


@pytest.mark.parametrize("width", WIDTHS)
def test_append(run: Ops, width: int) -> None:
    rng = np.random.default_rng(6)
    x = numbers(rng, 3, width)
    kept = numbers(rng, 7, width)
    found = run.append(x, kept, 2)
    assert np.array_equal(found[2:5], x)
    assert np.array_equal(np.delete(found, [2, 3, 4], 0), np.delete(kept, [2, 3, 4], 0))
    found = run.append(x, bf16_bits(kept), 4)
    assert np.array_equal(found[4:], bf16_bits(x))
    assert np.array_equal(found[:4], bf16_bits(kept)[:4])
    widened = (found[4:].astype(np.uint32) << 16).view(np.float32)
    assert np.all(np.abs(widened - x) <= np.abs(x) * BF16_ROUNDING)


def test_append_rounds_ties_to_even_and_keeps_nan(run: Ops) -> None:
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x80000000, 0x7F800001, 0xFFFFFFFF]
    for repeat in (1, 4):  # alone and within whole vectors
        x = np.tile(np.array(bits, np.uint32), repeat).view(np.float32)[None]
        found = run.append(x, np.zeros_like(x, np.uint16), 0)[0][:9]
        assert found[:7].tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7F80, 0xFF80, 0x8000]
        assert np.isnan((found[7:].astype(np.uint32) << 16).view(np.float32)).all()


CODED = (1, 2, 15, 16, 17, 31, 33, 128, 257)


@pytest.mark.parametrize("dim", CODED)
@pytest.mark.parametrize("heads", [1, 3])
def test_append_makes_codes_as_the_oracle_does(run: Ops, heads: int, dim: int) -> None:
    """Bit for bit: every rounding is part of the format."""
    rng = np.random.default_rng([heads, dim])
    x = numbers(rng, 300, heads, dim) * np.float32(10) ** rng.uniform(-20, 20, (300, heads, 1)).astype(np.float32)
    kept = rng.integers(-128, 128, (600, heads, dim + 2), np.int8)
    found = run.append(x.reshape(300, -1), kept, 150)
    assert np.array_equal(found[150:450], as_codes(x))
    assert np.array_equal(np.delete(found, slice(150, 450), 0), np.delete(kept, slice(150, 450), 0))


EDGES = {
    "zeros": [0.0, -0.0, 0.0],
    "ties to even": [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5],
    "a scale in the middle of two": [127 * (1 + 2.0**-8), 1.0],
    "a scale below one in the middle": [127 * (1 - 2.0**-9), 126.0],
    "of one size": [3.0, -3.0, 3.0],
    "too small": [127 * 2.0**-100 * (1 - 2.0**-7), 2.0**-149],
    "just large enough": [127 * 2.0**-100, -(2.0**-101), 2.0**-140],
    "large enough when rounded": [127 * 2.0**-100 * (1 - 2.0**-10), 2.0**-101],
    "all subnormal": [2.0**-130, -(2.0**-149)],
    "large": [3.4e38, -3.4e38, 1e38],
    "NaN": [1.0, np.nan, 2.0],
    "infinite": [1.0, -np.inf, 2.0],
}


@pytest.mark.parametrize("name", EDGES)
def test_codes_at_the_edges(run: Ops, name: str) -> None:
    for repeat in (1, 6, 7):  # alone, within whole vectors, and behind them
        x = np.tile(np.float32(EDGES[name]), repeat)[None]
        found = run.append(x, np.zeros((1, 1, x.shape[1] + 2), np.int8), 0)
        assert np.array_equal(found, as_codes(x[:, None]))
        codes, scale = found[0, 0, :-2], oracle_package.bf16_to_float(found[0, 0, -2:].view(np.uint16))[0]
        if not np.isfinite(x).all():
            assert np.isnan(scale) and not codes.any()
        elif np.abs(x).max() < 127 * 2.0**-100 * (1 - 2.0**-9):
            assert scale == 0 and not codes.any()
        else:
            assert np.abs(codes).max() == 127
            assert (np.abs(codes * np.float64(scale) - x) <= 0.5 * np.float64(scale) * (1 + 2.0**-22)).all()
            again = (codes * scale)[None]
            assert np.array_equal(run.append(again, np.zeros_like(found), 0), found)  # what they stand for is exact


# ---- The same thing twice -------------------------------------------------------------------------------------------


def test_threads_change_no_bit(isa: str) -> None:
    rng = np.random.default_rng(7)
    x, z, weight = numbers(rng, 70, 8, 130), numbers(rng, 70, 8, 130), numbers(rng, 130)
    outputs, weights = numbers(rng, 5, 3, 20000), numbers(rng, 5, 3)
    results = []
    for threads in (1, 2, 3):
        run = ops_of(isa, threads)
        results.append(
            [
                run.rms_norm(x.reshape(-1, 130), weight, EPS),
                run.rms_norm_heads(x, weight, EPS),
                run.gated_rms_norm(x, z, weight, EPS),
                run.swiglu(x, z),
                run.geglu(x, z),
                run.scale(x, 0.3),
                run.soft_cap(x, 2.0),
                run.residual_add(x, z),
                run.bias_add(x.reshape(-1, 130), weight),
                run.sigmoid_gate(x, z),
                run.combine(outputs[:, 0].copy(), outputs, weights, outputs[:, 1].copy(), weights[:, 0].copy()),
                run.rope(x, numbers(np.random.default_rng(8), 70, 20, 2), interleaved=True),
            ]
        )
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


# ---- The backend ----------------------------------------------------------------------------------------------------


def test_isa_is_chosen_by_name_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isas()[-1] == "portable"
    for name in isas():
        assert f"cpu: {name}, 2 threads" in repr(Ops(isa=name, threads=2))
        monkeypatch.setenv("MOEFLUX_ISA", name)
        assert f"cpu: {name}, 1 thread" in repr(Ops(threads=1))
    monkeypatch.setenv("MOEFLUX_ISA", "altivec")
    with pytest.raises(ArgumentError, match=r'MOEFLUX_ISA: expected one .*\(.*portable\), found "altivec"'):
        Ops()
    assert "portable" in repr(Ops(isa="portable"))
    with pytest.raises(ArgumentError, match=r'isa: expected one .*\(.*portable\), found "mmx"'):
        Ops(isa="mmx")
    with pytest.raises(ArgumentError, match=r'backend: expected auto, cpu, cuda or metal, found "tpu"'):
        Ops("tpu")


@pytest.mark.usefixtures("no_copies")
def test_a_failed_op_ends_its_batch_and_no_other() -> None:
    core = _core.testing.ops(_core.testing.Faults(fail_at_op=3), threads=2)
    x = np.ones(5, np.float32)
    found, errors, _ = core.doubled(x, 2)
    assert (found == 4).all() and errors == 0
    found, errors, text = core.doubled(x, 4)  # ops 2, 3, 4, 5: the last two are skipped and not counted
    assert (found == 2).all() and errors == 2
    assert text == "[residual_add] op 3 was told to fail"
    found, errors, _ = core.doubled(x, 3)
    assert (found == 8).all() and errors == 0
    with pytest.raises(DeviceError, match="op 0"):
        _core.testing.ops(_core.testing.Faults(fail_at_op=0)).residual_add(x, x)


def test_refusals_name_the_argument(run: Ops) -> None:
    x, row = np.ones((2, 3, 8), np.float32), np.ones((2, 8), np.float32)
    for call, argument in [
        (lambda: run.rms_norm(row, row[0, :7].copy(), EPS), "weight"),
        (lambda: run.rms_norm_heads(x, np.ones(8), EPS), "weight"),
        (lambda: run.rms_norm_heads(x, "no", EPS), "weight"),
        (lambda: run.gated_rms_norm(x, x[:1], row[0], EPS), "z"),
        (lambda: run.rope(x, np.ones((2, 5, 2), np.float32), interleaved=False), "angles"),
        (lambda: run.append(row, np.ones((3, 8), np.float32), 2), "first"),
        (lambda: run.append(row, np.ones((3, 8), np.int8), 0), "cache"),
        (lambda: run.residual_add(row, row[:1]), "y"),
        (lambda: run.geglu(row, row[:1]), "up"),
        (lambda: run.bias_add(row, row[0, :7].copy()), "bias"),
        (lambda: run.combine(row, x, np.ones((2, 2), np.float32)), "weights"),
        (lambda: run.combine(row[:1], x, np.ones((2, 3), np.float32)), "residual"),
        (lambda: run.combine(row, x, np.ones((2, 3), np.float32), row[:1]), "shared"),
        (lambda: run.sigmoid_gate(x, row), "gate"),
    ]:
        with pytest.raises(ArgumentError, match=rf"^\[\w+\] {argument}: expected .* found "):
            call()
