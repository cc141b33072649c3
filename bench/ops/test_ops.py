"""Compares every op with NumPy and with a bare read of the memory it must touch, in one group each: make bench-ops

pytest-benchmark uses the op's own clock here (`Ops.take_times`): its time without the copying of arguments, on one
thread. The arguments were written a moment before, so those that fit lie in a cache, for NumPy too. The matrices are
larger than the caches of most machines. NumPy multiplies in f32 with weights that were dequantised before, so it reads
seven times as much as 4 bits would be, and unpacks nothing. Sizes are those of the layers of Qwen3.6-35B-A3B and, for
latents, of Cogito-V2-671B.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from moeflux import QuantFormat, _core
from moeflux.conversion.block_noise import block_noise
from moeflux.ops import Ops
from moeflux.oracle import ops as oracle
from moeflux.oracle.blocks import block_numbers
from moeflux.oracle.stored import float_numbers
from moeflux.stores.floats import bf16_bits

HIDDEN, CONTEXT = 2048, 4096
RNG = np.random.default_rng(0)
ROUNDS = 10


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


@dataclass(frozen=True)
class Stored:
    format: QuantFormat
    weight: np.ndarray
    scales: np.ndarray | None
    biases: np.ndarray | None

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in (self.weight, self.scales, self.biases) if part is not None)


def matrix(rows: int, columns: int, bits: int = 4) -> Stored:
    format = QuantFormat.affine(bits, 64)
    weight, scales, biases = _core.quantize(numbers(rows, columns), format)
    return Stored(format, weight, scales, biases)


def mxfp4(rows: int, columns: int) -> Stored:
    words = RNG.integers(0, 1 << 32, (rows, columns // 8), np.uint32)
    scales = RNG.integers(119, 122, (rows, columns // 32)).astype(np.uint8)
    return Stored(QuantFormat.mxfp4(), words, scales, None)


def nvfp4(rows: int, columns: int) -> Stored:
    words = RNG.integers(0, 1 << 32, (rows, columns // 8), np.uint32)
    scales = RNG.integers(40, 72, (rows, columns // 16)).astype(np.uint8)
    of_rows = np.full((rows, 1), 0.01, np.float32).view(np.uint8)
    return Stored(QuantFormat.floats("NVFP4"), words, np.hstack([of_rows, scales]), None)


def fp8(rows: int, columns: int) -> Stored:
    codes = (RNG.integers(0, 120, (rows, columns)) | RNG.integers(0, 2, (rows, columns)) << 7).astype(np.uint8)
    return Stored(QuantFormat.floats("FP8"), codes, bf16_bits(numbers(rows, columns // 128) * 0.001), None)


def mxfp8(rows: int, columns: int) -> Stored:
    words = fp8(rows, columns).weight.view(np.uint32)
    scales = RNG.integers(115, 118, (rows, columns // 32)).astype(np.uint8)
    return Stored(QuantFormat.floats("MXFP8"), words, scales, None)


def blocks(rows: int, name: str) -> Stored:
    format = QuantFormat.blocks(name)
    random = RNG.integers(0, 256, rows * format.weight_row_bytes(HIDDEN), np.uint8)
    return Stored(format, block_noise(random, name, 0.02).reshape(rows, -1), None, None)


def widened(stored: Stored) -> np.ndarray:
    if stored.format.is_blocks:
        return block_numbers(stored.weight, str(stored.format))
    if stored.biases is None:
        return float_numbers(stored.weight, stored.scales, stored.format).astype(np.float32)
    columns = stored.scales.shape[-1] * 64
    return _core.dequantize(stored.weight, stored.scales, stored.biases, stored.format, columns)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


@dataclass(frozen=True)
class Case:
    """An op, and the same in NumPy on arguments of its own liking."""

    ours: Callable[[Ops], Any]
    numpy: Callable[[], Any]


def product(rows: int, columns: int, n: int, bits: int = 4) -> Case:
    return product_of(matrix(rows, columns, bits), n)


def product_of(stored: Stored, n: int) -> Case:
    x = numbers(n, stored.format.columns_of(stored.weight.shape[1]))
    wide = widened(stored)
    return Case(lambda o: o.matmul(x, stored), lambda: x @ wide.T)


def experts(n: int, k: int) -> Case:
    """All of one layer's work: k experts a token of 16, width 512."""
    x = numbers(n, HIDDEN)
    pool = [(matrix(512, HIDDEN), matrix(512, HIDDEN), matrix(HIDDEN, 512)) for _ in range(16)]
    wide = [tuple(map(widened, expert)) for expert in pool]
    chosen = np.argsort(RNG.random((n, 16)), axis=1)[:, :k].reshape(-1)
    jobs = [(e, np.flatnonzero(chosen == e).tolist()) for e in range(16) if (chosen == e).any()]

    def reference() -> np.ndarray:
        out = np.zeros((n * k, HIDDEN), np.float32)
        for e, pairs in jobs:
            gate, up, down = wide[e]
            rows = x[np.array(pairs) // k]
            out[pairs] = (silu(rows @ gate.T) * (rows @ up.T)) @ down.T
        return out

    return Case(lambda o: o.expert_ffn(x, pool, jobs, k), reference)


def indexed(n: int, context: int) -> dict[str, Case]:
    """An index of 64 heads of 128 numbers that selects 2048 rows, in bf16; NumPy computes with f32."""
    q, weights, keys = numbers(n, 64, 128), numbers(n, 64), numbers(context, 128)
    narrow, first = bf16_bits(keys), context - n
    scores = numbers(n, context)
    rows, ids = bf16_bits(numbers(context, 576)), np.sort(RNG.permutation(context)[:2048]).astype(np.int32)
    return {
        "index_scores": Case(
            lambda o: o.index_scores(q, narrow, weights, 0.01, first_position=first),
            lambda: np.einsum("nh,nht->nt", weights, np.maximum(q @ keys.T * np.float32(0.01), 0)),
        ),
        "index_select": Case(
            lambda o: o.index_select(scores, 2048, first_position=first),
            lambda: np.sort(np.argpartition(-scores, 2048, axis=-1)[:, :2048]),
        ),
        "gather_rows": Case(lambda o: o.gather_rows(rows, ids, position=context - 1), lambda: rows[ids]),
    }


def windowed_attention(n: int) -> Case:
    """A window of 128 rows, and sinks, in 64 heads of 64 numbers; NumPy meets no row outside the windows either."""
    q, k, v, sinks = numbers(n, 64, 64), numbers(CONTEXT, 8, 64), numbers(CONTEXT, 8, 64), numbers(64)
    first = CONTEXT - n - 127
    hidden = np.tri(n, n + 127, -1, dtype=bool) | ~np.tri(n, n + 127, 127, dtype=bool)

    def reference() -> np.ndarray:
        scores = np.einsum("nghd,tgd->nght", q.reshape(n, 8, 8, 64), k[first:], optimize=True) / 8
        weights = np.exp(np.where(hidden[:, None, None], -np.inf, scores))
        total = weights.sum(axis=-1, keepdims=True) + np.exp(sinks.reshape(8, 8, 1))
        return np.einsum("nght,tgd->nghd", weights / total, v[first:], optimize=True)

    return Case(lambda o: o.attention(q, k, v, 1 / 8, sinks, 128), reference)


def attention(n: int, context: int = CONTEXT, narrow: bool = False) -> Case:
    """`narrow`: rows of bf16, for NumPy of f32."""
    q, k, v = numbers(n, 16, 256), numbers(context, 2, 256), numbers(context, 2, 256)
    cached = (bf16_bits(k), bf16_bits(v)) if narrow else (k, v)

    def reference() -> np.ndarray:
        scores = np.einsum("nghd,tgd->nght", q.reshape(n, 2, 8, 256), k, optimize=True) / 16
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.einsum("nght,tgd->nghd", weights / weights.sum(axis=-1, keepdims=True), v, optimize=True)

    return Case(lambda o: o.attention(q, *cached, 1 / 16), reference)


def latent_attention(n: int) -> Case:
    q, q_pe, latent, k_pe = numbers(n, 128, 512), numbers(n, 128, 64), numbers(CONTEXT, 512), numbers(CONTEXT, 64)

    def reference() -> np.ndarray:
        scores = (q @ latent.T + q_pe @ k_pe.T) / 14
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return (weights / weights.sum(axis=-1, keepdims=True)) @ latent

    return Case(lambda o: o.mla_attention(q, q_pe, latent, k_pe, 1 / 14), reference)


def clamped_experts(n: int) -> Case:
    """As `experts`, in MXFP4, with biases and clamped_swiglu."""
    x, biases = numbers(n, HIDDEN), (numbers(16, 512), numbers(16, 512), numbers(16, HIDDEN))
    pool = [(mxfp4(512, HIDDEN), mxfp4(512, HIDDEN), mxfp4(HIDDEN, 512)) for _ in range(16)]
    wide = [tuple(map(widened, expert)) for expert in pool]
    chosen = np.argsort(RNG.random((n, 16)), axis=1)[:, :4].reshape(-1)
    jobs = [(e, np.flatnonzero(chosen == e).tolist()) for e in range(16) if (chosen == e).any()]

    def reference() -> np.ndarray:
        out = np.zeros((n * 4, HIDDEN), np.float32)
        for e, pairs in jobs:
            rows = x[np.array(pairs) // 4]
            gate = np.minimum(rows @ wide[e][0].T + biases[0][e], 7)
            up = np.clip(rows @ wide[e][1].T + biases[1][e], -7, 7)
            out[pairs] = (gate * sigmoid(1.702 * gate) * (up + 1)) @ wide[e][2].T + biases[2][e]
        return out

    return Case(lambda o: o.expert_ffn(x, pool, jobs, 4, biases, (1.702, 7.0)), reference)


def convolution() -> Case:
    x, state, weight = numbers(1, 8192), numbers(3, 8192), numbers(8192, 4)
    return Case(
        lambda o: o.conv1d(x, state, weight), lambda: silu(np.einsum("tc,ct->c", np.concatenate([state, x]), weight))
    )


def delta() -> Case:
    q, k, v = numbers(1, 16, 128), numbers(1, 16, 128), numbers(1, 32, 128)
    decay, beta, state = np.full((1, 32), 0.9, np.float32), np.full((1, 32), 0.5, np.float32), numbers(32, 128, 128)
    keys, queries = np.repeat(k[0], 2, axis=0), np.repeat(q[0], 2, axis=0)

    def reference() -> np.ndarray:
        new = state * decay[0, :, None, None]
        wanted = (v[0] - np.einsum("hvk,hk->hv", new, keys)) * beta[0, :, None]
        new = new + wanted[:, :, None] * keys[:, None, :]
        return np.einsum("hvk,hk->hv", new, queries)

    return Case(lambda o: o.gated_delta(q, k, v, decay, beta, state), reference)


def simple() -> dict[str, Case]:
    """Ops on rows of the hidden state, 64 of them so that there is something to measure."""
    x, y, weight = numbers(64, HIDDEN), numbers(64, HIDDEN), numbers(HIDDEN)
    heads, gates, head_weight = numbers(64, 16, 256), numbers(64, 16, 256), numbers(256)
    outputs, weights, logits = numbers(64, 8, HIDDEN), numbers(64, 8), numbers(64, 256)
    angles, bias, table = numbers(64, 32, 2), numbers(256), matrix(8192, HIDDEN)
    ids, wide = np.arange(64, dtype=np.int32), widened(table)
    cache, rows = numbers(CONTEXT, 512), numbers(64, 512)
    alpha, b, a_log, dt = numbers(64, 32), numbers(64, 32), numbers(32), numbers(32)
    vocabulary = numbers(248_320)

    def append() -> None:
        cache[:64] = rows

    def turned() -> np.ndarray:
        first, second = heads[..., :32], heads[..., 32:64]
        cosine, sine = angles[:, None, :, 0], angles[:, None, :, 1]
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

    def softmax() -> np.ndarray:
        e = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return np.argpartition(-e, 8, axis=-1)[:, :8]

    def decayed() -> tuple[np.ndarray, np.ndarray]:
        return np.exp(-np.exp(a_log) * np.logaddexp(0, alpha + dt)), sigmoid(b)

    streams, stream_gates = numbers(16, 4, HIDDEN), numbers(16, 4, HIDDEN)
    one, injections, stream_weight = numbers(16, HIDDEN), numbers(16, 4), numbers(4, HIDDEN)

    def gated_value() -> np.ndarray:
        score = (streams * stream_gates).sum(axis=-1, keepdims=True) / np.float32(HIDDEN**0.5)
        return sigmoid(np.sqrt(np.maximum(np.abs(score), 1e-6)) * np.sign(score)) * one[:, None]

    grouped = {"groups": 8, "groups_kept": 4, "normalize": True, "scaling": 2.5}
    return {
        "embed": Case(lambda o: o.embed(table, ids), lambda: wide[ids].copy()),
        "rms_norm": Case(lambda o: o.rms_norm(x, weight, 1e-6), lambda: normed(x, weight)),
        "rms_norm_heads": Case(
            lambda o: o.rms_norm_heads(heads, head_weight, 1e-6), lambda: normed(heads, head_weight)
        ),
        "layer_norm": Case(
            lambda o: o.layer_norm(x, weight, weight, 1e-6),
            lambda: normed(x - x.mean(axis=-1, keepdims=True), weight) + weight,
        ),
        "gated_rms_norm": Case(
            lambda o: o.gated_rms_norm(heads, gates, head_weight, 1e-6),
            lambda: normed(heads, head_weight) * silu(gates),
        ),
        "rope": Case(lambda o: o.rope(heads, angles, interleaved=False), turned),
        "append": Case(lambda o: o.append(rows, cache, 0), append),
        "swiglu": Case(lambda o: o.swiglu(x, y), lambda: silu(x) * y),
        "geglu": Case(lambda o: o.geglu(x, y), lambda: x * sigmoid(1.5957691 * x + 0.0713548 * x**3) * y),
        "scale": Case(lambda o: o.scale(x, 0.3), lambda: x * np.float32(0.3)),
        "soft_cap": Case(lambda o: o.soft_cap(x, 30.0), lambda: np.float32(30) * np.tanh(x / np.float32(30))),
        "residual_add": Case(lambda o: o.residual_add(x, y), lambda: x + y),
        "bias_add": Case(lambda o: o.bias_add(x, weight), lambda: x + weight),
        "silu": Case(lambda o: o.silu(x, 0.25), lambda: silu(x * np.float32(0.25))),
        "hyper_norm": Case(
            lambda o: o.hyper_norm(streams, stream_weight, 1e-6), lambda: normed(streams, stream_weight)
        ),
        "hyper_mix": Case(
            lambda o: o.hyper_mix(streams, stream_gates), lambda: (streams * sigmoid(stream_gates)).mean(axis=1)
        ),
        "hyper_add": Case(
            lambda o: o.hyper_add(streams, one, injections),
            lambda: streams + one[:, None] * (2 * sigmoid(injections / 4))[..., None],
        ),
        "ngram_gate": Case(lambda o: o.ngram_gate(streams, stream_gates, one), gated_value),
        "sigmoid_gate": Case(lambda o: o.sigmoid_gate(heads, gates), lambda: heads * sigmoid(gates)),
        "combine": Case(
            lambda o: o.combine(x, outputs, weights), lambda: x + np.einsum("nk,nkh->nh", weights, outputs)
        ),
        "route_softmax": Case(lambda o: o.route_softmax(logits, 8, normalize=True), softmax),
        "route_grouped": Case(
            lambda o: o.route_grouped(logits, bias, 8, **grouped),
            lambda: oracle.route_grouped(logits, bias, 8, **grouped),
        ),
        "delta_gates": Case(lambda o: o.delta_gates(alpha, b, a_log, dt), decayed),
        "top_k": Case(lambda o: o.top_k(vocabulary, 40), lambda: np.argpartition(-vocabulary, 40)[:40]),
    }


CASES: dict[str, Callable[[], Case]] = {
    "matmul 1 x 2048 -> 65536": lambda: product(65536, HIDDEN, 1),
    "matmul 64 x 2048 -> 8192": lambda: product(8192, HIDDEN, 64),
    "matmul 1 x 2048 -> 65536, 8 bits": lambda: product(65536, HIDDEN, 1, 8),
    "matmul 1 x 2048 -> 65536, MXFP4": lambda: product_of(mxfp4(65536, HIDDEN), 1),
    "matmul 64 x 2048 -> 8192, MXFP4": lambda: product_of(mxfp4(8192, HIDDEN), 64),
    "matmul 1 x 2048 -> 65536, NVFP4": lambda: product_of(nvfp4(65536, HIDDEN), 1),
    "matmul 64 x 2048 -> 8192, NVFP4": lambda: product_of(nvfp4(8192, HIDDEN), 64),
    "matmul 1 x 2048 -> 32768, FP8": lambda: product_of(fp8(32768, HIDDEN), 1),
    "matmul 64 x 2048 -> 8192, FP8": lambda: product_of(fp8(8192, HIDDEN), 64),
    "matmul 1 x 2048 -> 32768, MXFP8": lambda: product_of(mxfp8(32768, HIDDEN), 1),
    **{
        f"matmul {n} x 2048 -> {rows}, {name}": lambda n=n, rows=rows, name=name: product_of(blocks(rows, name), n)
        for n, rows in ((1, 65536), (64, 8192))
        for name in ("Q8_0", "Q4_K", "Q6_K", "GGUF_MXFP4")
    },
    "expert_ffn 1 token, 8 experts": lambda: experts(1, 8),
    "expert_ffn 64 tokens, 8 experts": lambda: experts(64, 8),
    "expert_ffn 1 token, 4 experts, MXFP4, clamped": lambda: clamped_experts(1),
    "expert_ffn 64 tokens, 4 experts, MXFP4, clamped": lambda: clamped_experts(64),
    "attention 1 of 4096": lambda: attention(1),
    "attention 64 of 4096": lambda: attention(64),
    "attention 1 of 32768, bf16": lambda: attention(1, 32768, narrow=True),
    "attention 64 of 4096, bf16": lambda: attention(64, narrow=True),
    "attention 1 of 4096, window of 128": lambda: windowed_attention(1),
    "attention 64 of 4096, window of 128": lambda: windowed_attention(64),
    "mla_attention 1 of 4096": lambda: latent_attention(1),
    **{f"{name} 1 of 16384": lambda name=name: indexed(1, 16384)[name] for name in indexed(1, 4096)},
    "index_scores 8 of 16384": lambda: indexed(8, 16384)["index_scores"],
    "conv1d": convolution,
    "gated_delta": delta,
    **{name: lambda name=name: simple()[name] for name in simple()},
}


class OpClock:
    """Seconds that ops have taken since it was made; pytest-benchmark reads it as a clock."""

    def __init__(self, timed: Ops) -> None:
        self.timed = timed
        self.seconds = 0.0

    def __call__(self) -> float:
        for each in self.timed.take_times():
            self.seconds += each.seconds
        return self.seconds


CLOCK = OpClock(Ops(threads=1, timed=True))


@pytest.fixture(scope="module")
def cases() -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            made.clear()  # some are large
            made[name] = CASES[name]()
        return made[name]

    return case


def bytes_of(case: Case) -> int:
    """That the op must touch."""
    CLOCK()
    case.ours(CLOCK.timed)
    [time_of] = CLOCK.timed.take_times()
    return time_of.bytes


WAYS = [
    pytest.param("moeflux", marks=pytest.mark.benchmark(timer=CLOCK)),
    pytest.param("numpy", marks=pytest.mark.benchmark(timer=time.perf_counter)),
    pytest.param("bare read", marks=pytest.mark.benchmark(timer=time.perf_counter)),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_op(benchmark: Any, cases: Callable[[str], Case], name: str, way: str) -> None:
    """A bare read: as many bytes as the op must touch, summed; from a cache where they are few."""
    benchmark.group = name
    case = cases(name)
    touched = bytes_of(case)
    runs = {"moeflux": lambda: case.ours(CLOCK.timed), "numpy": case.numpy}
    if way == "bare read":
        runs[way] = np.ones(max(1, touched // 8), np.int64).sum
    benchmark.pedantic(runs[way], rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["GB/s"] = touched / benchmark.stats.stats.median / 1e9


def test_every_op_is_measured() -> None:
    measured = {name.split()[0] for name in CASES}
    named = {name for name, value in vars(Ops).items() if callable(value) and not name.startswith("_")}
    many_names = {"matmuls", "chosen_expert_ffn"}  # matmul and expert_ffn by other arguments
    of_a_gpu = {"attention_scores", "attention_softmax", "attention_values", "shortlist"}
    definitions = {"digit_exp", "digit_expert_ffn"}  # of what a GPU computes
    assert named - measured == many_names | of_a_gpu | definitions | {"take_times"}


def test_numpy_computes_the_same() -> None:
    """Of the products, whose NumPy is written here; the rest are short enough to read."""
    for name in ("matmul 64 x 2048 -> 8192", "expert_ffn 1 token, 8 experts", "attention 1 of 4096"):
        case = CASES[name]()
        mine, theirs = (np.asarray(each, np.float64).reshape(-1) for each in (case.ours(Ops()), case.numpy()))
        assert np.linalg.norm(mine - theirs) < 1e-4 * np.linalg.norm(theirs), name
