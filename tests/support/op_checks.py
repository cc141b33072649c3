"""Checks of every backend's ops, against the oracle and against themselves. `run` has the methods of Ops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from moeflux import oracle
from moeflux.stores.floats import bf16_bits
from support.ops import StoredMatrix, numbers
from support.tolerances import CODE_ROUNDING, INT16_ROUNDING, TILE_ROUNDING, assert_agrees, assert_close

Array = np.ndarray


def wide(*arrays: Array) -> list[Array]:
    return [array.astype(np.float64) for array in arrays]


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


# ---- Products ---------------------------------------------------------------------------------------------------


def rounding_of_int16(sizes: Array, matrix: StoredMatrix) -> Array:
    """The most that elements of a product can be off because numbers of these sizes are written in two digits."""
    if not matrix.format.is_quantised:
        return np.zeros((len(sizes), len(matrix.exact)))
    largest = sizes.reshape(len(sizes), -1, matrix.format.group_size).max(axis=2)
    weights = np.abs(matrix.exact).reshape(len(matrix.exact), -1, matrix.format.group_size).sum(axis=2)
    return INT16_ROUNDING * largest @ weights.T


def check_combine(run: Any, n: int, hidden: int, k: int) -> None:
    rng = np.random.default_rng(4)
    residual, outputs = numbers(rng, n, hidden), numbers(rng, n, k, hidden)
    weights, shared, gate = numbers(rng, n, k), numbers(rng, n, hidden), numbers(rng, n)
    r, o, w, s = wide(residual, outputs, weights, shared)
    gated = s * oracle.ops.sigmoid(gate.astype(np.float64))[:, None]
    size = np.abs(r) + np.einsum("nk,nkh->nh", np.abs(w), np.abs(o)) + np.abs(s)
    assert_close("combine", run.combine(residual, outputs, weights), oracle.ops.combine(r, o, w, None), size)
    assert_close("combine", run.combine(None, outputs, weights), oracle.ops.combine(None, o, w, None), size)
    assert_close("combine", run.combine(residual, outputs, weights, shared), oracle.ops.combine(r, o, w, s), size)
    found = run.combine(residual, outputs, weights, shared, gate)
    assert_close("combine", found, oracle.ops.combine(r, o, w, gated), size)


def check_geglu(run: Any, width: int) -> None:
    rng = np.random.default_rng(width)
    gate, up = numbers(rng, width) * 4, numbers(rng, width)
    if width > 6:
        gate[:6] = [0, -0.0, 30, -30, 1e30, -1e30]
    found, expected = run.geglu(gate, up), oracle.ops.geglu(*wide(gate, up))
    assert_close("geglu", found, expected, np.abs(wide(gate * up)[0]))


def check_scale_and_cap(run: Any, width: int) -> None:
    rng = np.random.default_rng(width)
    x = numbers(rng, width) * 40
    if width > 2:
        x[:2] = [1e30, -1e30]
    assert_close("scale", run.scale(x, 0.37), oracle.ops.scale(wide(x)[0], float(np.float32(0.37))))
    found = run.soft_cap(x, 30.0)
    assert_close("soft_cap", found, oracle.ops.soft_cap(wide(x)[0], 30.0), np.full(width, 30.0))
    assert np.abs(found).max() <= 30


Clamped = tuple[float, float]


def check_experts(
    found: Array,
    x: Array,
    experts: Sequence[tuple[StoredMatrix, StoredMatrix, StoredMatrix]],
    chosen: Array,
    int16: bool = False,
    biases: tuple[Array, Array, Array] | None = None,
    clamped: Clamped | None = None,
    geglu: bool = False,
) -> None:
    """`found` has a row for each place of `chosen` [n, k]; with `int16`, products were of such."""
    k = chosen.shape[1]
    for pair, expert in enumerate(chosen.reshape(-1)):
        gate, up, down = experts[expert]
        row = x[pair // k : pair // k + 1].astype(np.float64)
        own = wide(*(bias[expert] for bias in biases)) if biases else [np.zeros(1)] * 3
        expected = oracle.ops.expert_ffn(row, gate.exact, up.exact, down.exact, own, clamped, geglu)
        of_gate, of_up, of_down = map(np.abs, own)
        inner = (np.abs(row) @ gate.size.T + of_gate) * (np.abs(row) @ up.size.T + of_up + (1 if clamped else 0))
        rounding = rounding_of_expert(row, gate, up, down, own, clamped) if int16 else 0.0
        assert_close("expert_ffn", found[pair : pair + 1], expected, inner @ down.size.T + of_down, rounding)


def rounding_of_expert(
    row: Array,
    gate: StoredMatrix,
    up: StoredMatrix,
    down: StoredMatrix,
    biases: Sequence[Array],
    clamped: Clamped | None,
) -> Array:
    """What it can be off by for the digits of x, and for those of what gate and up become."""
    g, u = row @ gate.exact.T + biases[0], row @ up.exact.T + biases[1]
    of_g, of_u = rounding_of_int16(np.abs(row), gate), rounding_of_int16(np.abs(row), up)
    steepest = 1.13  # silu, whatever alpha, and gelu, which is never larger
    alpha, limit = clamped or (1.0, np.inf)
    gated = np.abs(np.minimum(g, limit) * oracle.ops.sigmoid(alpha * np.minimum(g, limit)))
    met = np.abs(np.clip(u, -limit, limit) + (1 if clamped else 0))
    of_h = steepest * of_g * (met + of_u) + gated * of_u
    return of_h @ np.abs(down.exact).T + rounding_of_int16(gated * met + of_h, down)


# ---- The delta-net ----------------------------------------------------------------------------------------------


def delta_arguments(
    n: int, key_heads: int, value_heads: int, dk: int, dv: int, decay: tuple[float, float] = (0.0, 1.0)
) -> tuple[Array, ...]:
    """q and k as the model makes them: unit vectors, q then by 1 / sqrt(dk)."""
    rng = np.random.default_rng([n, key_heads, value_heads, dk, dv])
    q, k = oracle.ops.delta_net_query_key(*wide(normal(rng, n, key_heads, dk), normal(rng, n, key_heads, dk)))
    return (
        q.astype(np.float32),
        k.astype(np.float32),
        normal(rng, n, value_heads, dv),
        rng.uniform(*decay, (n, value_heads)).astype(np.float32),
        rng.uniform(0, 1, (n, value_heads)).astype(np.float32),
        normal(rng, value_heads, dv, dk),
    )


def check_convolution(run: Any, n: int, channels: int, taps: int, dilation: int = 1) -> None:
    rng = np.random.default_rng([channels, taps, n])
    x, weight = numbers(rng, n, channels), numbers(rng, channels, taps)
    state = numbers(rng, (taps - 1) * dilation, channels)
    expected, expected_state = oracle.ops.conv1d(*wide(x, state, weight), dilation)
    found, found_state = run.conv1d(x, state, weight, dilation)
    assert_agrees("conv1d", found, expected)
    assert np.array_equal(found_state, expected_state)  # copies


def check_convolution_row_by_row(run: Any, rng: np.random.Generator, n: int, channels: int) -> None:
    x, state, weight = numbers(rng, n, channels), numbers(rng, 3, channels), numbers(rng, channels, 4)
    whole, end = run.conv1d(x, state, weight)
    for i in range(n):
        row, state = run.conv1d(x[i : i + 1], state, weight)
        assert np.array_equal(row[0], whole[i])
    assert np.array_equal(state, end)


# ---- Attention --------------------------------------------------------------------------------------------------


def widened(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def as_codes(rows: Array) -> Array:
    """As ops take them: each head is its codes and the two bytes of their scale."""
    codes, scales = oracle.quantize_rows(rows)
    return np.concatenate([codes, scales[..., None].view(np.int8)], axis=-1)


def cached(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> tuple[Array, Array]:
    """Rows as a cache holds them, and what they are."""
    rows = rng.standard_normal(shape, dtype=np.float32)
    if dtype == "f32":
        return rows, rows.astype(np.float64)
    if dtype == "q8":
        return as_codes(rows), oracle.rows_of_codes(*oracle.quantize_rows(rows)).astype(np.float64)
    bits = bf16_bits(rows)
    return bits, widened(bits).astype(np.float64)


def rounding_of_attention(
    run: Any, dtype: str, q: Sequence[Array], k: Sequence[Array], v: Array, scale: float, window: int = 0
) -> Array | float:
    """The most that attention over k [rows, kv_heads, ...] and v can be off beside float32's roundings, where it takes
    digits of bf16 or whole numbers. q and k have one part, or two: what is multiplied apart.

    Scores are off by that part of the terms that add up to them, or of the query's largest number instead of its own.
    So weights, before and after they are divided by their sum, are off by e to twice the most of that. Then they are
    rounded, too.
    """
    tiled = run.isa == "amx" and dtype == "bf16" and not window
    whole = run.isa in ("amx", "avx512vnni") and dtype == "q8" and all(part.shape[-1] % 32 == 0 for part in k)
    if not tiled and not whole:
        return 0.0
    n, group, total = len(q[0]), q[0].shape[1] // v.shape[1], len(v)
    seen = np.tri(n, total, total - n, dtype=bool)[:, None]
    if window:
        seen &= ~np.tri(n, total, total - n - window, dtype=bool)[:, None]
    k, v = [np.repeat(part, group, axis=1) for part in k], np.repeat(v, group, axis=1)
    scores = sum(np.einsum("nhd,thd->nht", a, b) for a, b in zip(q, k, strict=True)) * scale
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    sizes = [np.abs(part) if tiled else np.broadcast_to(largest(part), part.shape) for part in q]
    terms = sum(np.einsum("nhd,thd->nht", size, np.abs(part)) for size, part in zip(sizes, k, strict=True)) * scale
    off = (TILE_ROUNDING if tiled else CODE_ROUNDING) * np.where(seen, terms, 0).max(axis=-1)
    size = np.einsum("nht,thd->nhd", weights, np.abs(v))
    if tiled:
        return (np.expm1(2 * off) + TILE_ROUNDING)[..., None] * size
    # Rows of codes share a unit with those of their block: the largest weight times the scale of its values.
    scales = largest(v)[..., 0] / 127
    codes = np.abs(v) / np.where(scales > 0, scales, 1)[..., None]
    of_values = np.zeros_like(size)
    for first in range(0, total, 64):
        block = slice(first, first + 64)
        units = (weights[..., block] * scales[block].T).max(axis=-1)
        of_values += CODE_ROUNDING * units[..., None] * codes[block].sum(axis=0)
    return np.expm1(2 * off)[..., None] * size + np.exp(2 * off)[..., None] * of_values


def largest(heads: Array) -> Array:
    return np.abs(heads).max(axis=-1, keepdims=True)


def check_attention(
    run: Any,
    n: int,
    first: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: str,
    scale: float = 0.0,
    window: int = 0,
    sinks: float | None = None,
) -> None:
    """`sinks`: each head's is a normal number beside this one."""
    scale = scale or dim**-0.5
    (q, k, v, ends), (k_numbers, v_numbers), expected = attention_case(
        n, first, heads, kv_heads, dim, dtype, scale, window, sinks
    )
    rounding = rounding_of_attention(run, dtype, wide(q), [k_numbers], v_numbers, scale, window)
    assert_agrees("attention", run.attention(q, k, v, scale, ends, window), expected, dtype, rounding)


@lru_cache(maxsize=8)  # as many as a test has, which then runs with the next instruction set
def attention_case(
    n: int,
    first: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: str,
    scale: float,
    window: int,
    sinks: float | None,
) -> tuple[tuple[Array, Array, Array, Array | None], tuple[Array, Array], Array]:
    """What an op is given, what k and v are, and what is expected."""
    rng = np.random.default_rng([n, first, heads, kv_heads, dim])
    q = rng.standard_normal((n, heads, dim), dtype=np.float32)
    k, k_numbers = cached(rng, (first + n, kv_heads, dim), dtype)
    v, v_numbers = cached(rng, (first + n, kv_heads, dim), dtype)
    ends = None if sinks is None else rng.standard_normal(heads, dtype=np.float32) + np.float32(sinks)
    wide_ends = None if ends is None else ends.astype(np.float64)
    expected = oracle.ops.attention(q.astype(np.float64), k_numbers, v_numbers, scale, wide_ends, window)
    return (q, k, v, ends), (k_numbers, v_numbers), expected


def check_latent_attention(run: Any, n: int, first: int, heads: int, rank: int, rope: int, dtype: str) -> None:
    rng = np.random.default_rng([n, first, heads, rank, rope])
    q_latent = rng.standard_normal((n, heads, rank), dtype=np.float32)
    q_pe = rng.standard_normal((n, heads, rope), dtype=np.float32)
    latent, latent_numbers = cached(rng, (first + n, rank), dtype)
    k_pe, k_pe_numbers = cached(rng, (first + n, rope), dtype)
    scale = (rank + rope) ** -0.5
    # With nothing to take in and nothing to take out, the absorbed form is the weighted latents.
    identity = np.broadcast_to(np.eye(rank), (heads, rank, rank))
    expected = oracle.ops.mla_attention(
        *wide(q_latent, q_pe), latent_numbers, k_pe_numbers, identity, identity, scale, absorbed=True
    )
    keys = latent_numbers[:, None], k_pe_numbers[:, None]
    rounding = rounding_of_attention(run, dtype, wide(q_latent, q_pe), keys, latent_numbers[:, None], scale)
    assert_agrees("mla_attention", run.mla_attention(q_latent, q_pe, latent, k_pe, scale), expected, dtype, rounding)


# ---- Routers ----------------------------------------------------------------------------------------------------


def check_softmax_routing(run: Any, logits: Array, k: int, normalize: bool, **rest: float) -> None:
    expected_ids, expected = oracle.ops.route_softmax(logits.astype(np.float64), k, normalize=normalize, **rest)
    ids, weights = run.route_softmax(logits, k, normalize=normalize, **rest)
    assert np.array_equal(ids, expected_ids)
    assert_agrees("route_softmax", weights, expected)


GROUPED_SOFTMAX = [(160, 8, 3, 6), (8, 8, 3, 3), (12, 4, 4, 12), (6, 1, 1, 3), (40, 5, 2, 7), (64, 64, 64, 9)]
"""Experts, groups, groups kept, k: groups of one, one group, and all of them too."""


def check_grouped_softmax_routing(run: Any, experts: int, groups: int, groups_kept: int, k: int) -> None:
    logits = 3 * np.random.default_rng(experts).standard_normal((5, experts), dtype=np.float32)
    for normalize, scaling in ((False, 16.0), (True, 1.0)):
        rest = {"groups": groups, "groups_kept": groups_kept, "scaling": scaling}
        check_softmax_routing(run, logits, k, normalize, **rest)


def check_grouped_softmax_routing_by_hand(run: Any) -> None:
    """The second group has the best expert, the third the next best; the first's two good ones are no candidates. Ties
    go to the earlier group and expert, and what is no number is no candidate as long as there are others."""
    logits = np.log(np.array([[5, 5, 1, 9, 1, 1, 1, 8, 2]], np.float32))
    ids, weights = run.route_softmax(logits, 3, normalize=False, groups=3, groups_kept=2, scaling=33.0)
    assert ids.tolist() == [[3, 7, 8]]
    assert np.allclose(weights, [[9, 8, 2]], rtol=1e-5)
    ids, _ = run.route_softmax(np.zeros((1, 12), np.float32), 5, normalize=True, groups=4, groups_kept=2)
    assert ids.tolist() == [[0, 1, 2, 3, 4]]
    nan = np.array([[np.nan, np.nan, 0, 1, np.nan, -5]], np.float32)
    ids, _ = run.route_softmax(nan, 2, normalize=True, groups=3, groups_kept=1)
    assert ids.tolist() == [[3, 2]]
    ids, _ = run.route_softmax(nan, 4, normalize=True, groups=3, groups_kept=2)
    assert ids.tolist() == [[3, 2, 5, 4]]


def check_softmax_routing_by_factors(run: Any, experts: int, k: int) -> None:
    """Factors change no choice. They may be negative."""
    rng = np.random.default_rng(experts)
    logits, factors = 3 * normal(rng, 5, experts), normal(rng, experts)
    expected_ids, expected = oracle.ops.route_softmax(*wide(logits), k, normalize=True, factors=wide(factors)[0])
    ids, weights = run.route_softmax(logits, k, normalize=True, factors=factors)
    assert np.array_equal(ids, expected_ids)
    assert_agrees("route_softmax", weights, expected)


def check_softmax_routing_far_apart(run: Any) -> None:
    logits = np.array([[-1e30, 200, 1e4, -1e4, 9e3], [-np.inf, -np.inf, -5, -np.inf, -np.inf]], np.float32)
    ids, weights = run.route_softmax(logits, 3, normalize=True)
    assert ids.tolist() == [[2, 4, 1], [2, 0, 1]]
    assert weights.tolist() == [[1, 0, 0], [1, 0, 0]]
