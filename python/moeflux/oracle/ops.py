"""Every op as a function of float64 arrays.

Shapes: n rows (tokens) of this call; t rows in the cache, these n included, which are the last ones; h hidden size; m
intermediate size; E experts, K of them used. A matrix is [out, in] and is applied to rows: y = x @ W.T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moeflux.models.layers import Rope, yarn_mscale

Array = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


# ---- Small functions --------------------------------------------------------------------------------------------


def sigmoid(x: Array) -> Array:
    # Through tanh, which does not overflow.
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    """ln(1 + e^x), for any x."""
    return np.logaddexp(0.0, x)


def softmax(x: Array) -> Array:
    """Over the last axis. Entries of minus infinity get weight 0."""
    weights: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    total: Array = weights.sum(axis=-1, keepdims=True)
    return weights / total


# ---- Ops: vectors and matrices ----------------------------------------------------------------------------------


def embed(table: Array, ids: Sequence[int]) -> Array:
    """table [vocab, h], ids [n] -> [n, h]"""
    for token in ids:
        if not 0 <= token < len(table):
            raise ValueError(f"token id: expected 0 to {len(table) - 1}, found {token}")
    return table[np.asarray(ids, np.int64)]


def matmul(x: Array, matrix: Array) -> Array:
    """x [n, in], matrix [out, in] -> [n, out]"""
    return x @ matrix.T


def matvec(x: Array, matrix: Array) -> Array:
    """x [in], matrix [out, in] -> [out]"""
    return matrix @ x


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """x [..., d], weight [d] or none -> [..., d]. The weight is taken as stored: nothing is added to it."""
    normed: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * weight


def rms_norm_heads(x: Array, weight: Array | None, eps: float) -> Array:
    """x [n, heads, d], one weight [d] shared by the heads. -> [n, heads, d]"""
    return rms_norm(x, weight, eps)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """x [..., d], weight and bias [d]"""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    return np.asarray(centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps) * weight + bias)


def gated_rms_norm(x: Array, z: Array, weight: Array, eps: float) -> Array:
    """x and z [n, heads, d], weight [d] -> rms_norm(x) * silu(z)"""
    return rms_norm(x, weight, eps) * silu(z)


def swiglu(gate: Array, up: Array) -> Array:
    return silu(gate) * up


def clamped_swiglu(gate: Array, up: Array, alpha: float, limit: float) -> Array:
    """A gate is never above the limit, and what it meets lies around 1 instead of 0."""
    gate, raised = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1.0
    return np.asarray(gate * sigmoid(alpha * gate) * raised)


def gelu(x: Array) -> Array:
    """By its tanh approximation."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def geglu(gate: Array, up: Array) -> Array:
    return gelu(gate) * up


def sigmoid_gate(x: Array, gate: Array) -> Array:
    """x * sigmoid(gate), broadcast."""
    return x * sigmoid(gate)


def residual_add(x: Array, y: Array) -> Array:
    return x + y


def bias_add(x: Array, bias: Array) -> Array:
    """x [n, width], bias [width]"""
    return x + bias


def scale(x: Array, factor: float) -> Array:
    return x * factor


def soft_cap(x: Array, cap: float) -> Array:
    """Nearly x where that is small, and never beyond the cap."""
    return cap * np.tanh(x / cap)


# ---- Ops: rotary embedding --------------------------------------------------------------------------------------


def vanilla_frequencies(rotary_dim: int, theta: float) -> Array:
    """Radians a position, pair by pair. -> [rotary_dim / 2]"""
    return theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)


def yarn_frequencies(
    rotary_dim: int,
    theta: float,
    factor: float,
    original_context: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool = True,
) -> Array:
    """Pairs that turn more than `beta_fast` times within the original context keep their frequency, those that turn
    less than `beta_slow` times are slowed by `factor`, and those between are mixed linearly. -> [rotary_dim / 2]"""

    def pair_that_turns(times: float) -> float:
        return rotary_dim * math.log(original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    fast, slow = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    low: float = max(math.floor(fast) if truncate else fast, 0)
    high: float = min(math.ceil(slow) if truncate else slow, rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp: Array = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
    kept = vanilla_frequencies(rotary_dim, theta)
    return interpolated_frequencies(rotary_dim, theta, factor) * ramp + kept * (1.0 - ramp)


def interpolated_frequencies(rotary_dim: int, theta: float, factor: float) -> Array:
    """The frequencies of positions squeezed by `factor`. The factor divides the result and is not part of the base."""
    return vanilla_frequencies(rotary_dim, theta) / factor


def rope_frequencies(turn: Rope) -> Array:
    if turn.yarn is None:
        frequencies = vanilla_frequencies(turn.dim, turn.theta)
        frequencies[turn.turning or turn.dim :] = 0
        return frequencies
    yarn = turn.yarn
    edges = (yarn.beta_fast, yarn.beta_slow, yarn.truncate)
    return yarn_frequencies(turn.dim, turn.theta, yarn.factor, yarn.original_context, *edges)


def rope_magnitude(turn: Rope) -> float:
    """What YaRN multiplies the rotated vectors by. 1 where its two coefficients are equal."""
    if turn.yarn is None:
        return 1.0
    numerator = yarn_mscale(turn.yarn.factor, turn.yarn.mscale or 1.0)
    return numerator / yarn_mscale(turn.yarn.factor, turn.yarn.mscale_all_dim)


def latent_scale(head_dim: int, turn: Rope) -> float:
    """The factor of latent attention's scores. DeepSeek's YaRN scales it by m(factor, mscale_all_dim)^2."""
    scale = 1.0 / math.sqrt(head_dim)
    if turn.yarn and turn.yarn.mscale_all_dim:
        scale *= yarn_mscale(turn.yarn.factor, turn.yarn.mscale_all_dim) ** 2
    return scale


def rope(x: Array, positions: Array, frequencies: Array, *, interleaved: bool, magnitude: float = 1.0) -> Array:
    """Rotates pairs of the first 2 * len(frequencies) channels. x [n, heads, d], positions [n] -> [n, heads, d]

    Pair i is channels (i, i + half) of split halves (Qwen), or (2i, 2i + 1) when interleaved (DeepSeek).
    """
    half = len(frequencies)
    angles = positions[:, None, None] * frequencies  # [n, 1, half]
    cos, sin = np.cos(angles) * magnitude, np.sin(angles) * magnitude
    first, second = rope_pairs(half, interleaved)
    a, b = x[..., first], x[..., second]
    out = x.copy()
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


def rope_pairs(half: int, interleaved: bool) -> tuple[slice, slice]:
    """The channels of the first and of the second member of every pair."""
    if interleaved:
        return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    return slice(0, half), slice(half, 2 * half)


# ---- Ops: attention ---------------------------------------------------------------------------------------------


def causal(scores: Array, window: int = 0, seen: Mask | None = None) -> Array:
    """Hides from row i of the last n everything after it, and everything before the last `window` rows that end with
    it, unless that is 0. scores [..., n, t]; seen [n, t]: what else is needed for a row to be seen."""
    n, t = scores.shape[-2:]
    own, rows = (t - n + np.arange(n))[:, None], np.arange(t)[None, :]
    hidden = (rows > own) | (rows <= own - (window or t))
    if seen is not None:
        hidden |= ~seen
    return np.where(hidden, -np.inf, scores)


def attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    sinks: Array | None = None,
    window: int = 0,
    seen: Mask | None = None,
) -> Array:
    """q [n, heads, d], k and v [t, kv_heads, d] -> [n, heads, d]. Consecutive query heads share a key head.

    sinks [heads]: a score that each head has besides. It takes its part of the weight, and has no value.
    seen [n, t]: the rows that an index selected, from `selected_rows`.
    """
    n, t, shared_by = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (np.repeat(rows, shared_by, axis=1).swapaxes(0, 1) for rows in (k, v))
    scores = causal(q.swapaxes(0, 1) @ k.swapaxes(1, 2) * scale, window, seen)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (len(sinks), n, 1))], axis=-1)
    return np.asarray((softmax(scores)[..., :t] @ v).swapaxes(0, 1))


def mla_attention(
    q_nope: Array,
    q_pe: Array,
    latent: Array,
    k_pe: Array,
    key_matrix: Array,
    value_matrix: Array,
    scale: float,
    *,
    absorbed: bool,
    seen: Mask | None = None,
) -> Array:
    """Latent attention, in either of two forms that are equal up to rounding.

    q_nope [n, heads, nope], q_pe [n, heads, rope]; cached latent [t, rank] and k_pe [t, rope], shared by the heads;
    key_matrix [heads, nope, rank], value_matrix [heads, v, rank] -> [n, heads, v]
    Naive: keys and values of every cached row are made from its latent. Absorbed: the query goes into the latent space
    instead and the weighted latent comes out of it, so no key or value is ever made. seen: as in `attention`.
    """
    positional = np.einsum("nhr,tr->hnt", q_pe, k_pe)
    if absorbed:
        q_latent = np.einsum("nhi,hic->nhc", q_nope, key_matrix)
        weights = softmax(causal((np.einsum("nhc,tc->hnt", q_latent, latent) + positional) * scale, seen=seen))
        return np.asarray(np.einsum("nhc,hfc->nhf", np.einsum("hnt,tc->nhc", weights, latent), value_matrix))
    k = np.einsum("tc,hic->thi", latent, key_matrix)
    v = np.einsum("tc,hfc->thf", latent, value_matrix)
    weights = softmax(causal((np.einsum("nhi,thi->hnt", q_nope, k) + positional) * scale, seen=seen))
    return np.asarray(np.einsum("hnt,thf->nhf", weights, v))


# ---- Ops: rows that an index selects ----------------------------------------------------------------------------
# Rows are selected by units: so many positions that share an index key. The row at position p sees the units that end
# with p or before. If they are more than `count`, it attends to so many of them. It always attends to the rows behind
# the last unit that it sees.


def index_scores(q: Array, keys: Array, weights: Array | None, scale: float) -> Array:
    """q [n, heads, d], keys [u, d], weights [n, heads] or 1 for each -> [n, u]: what a unit is worth to a row"""
    positive = np.maximum(np.einsum("nhd,ud->nhu", q, keys) * scale, 0.0)
    return np.asarray(positive.sum(axis=1) if weights is None else np.einsum("nh,nhu->nu", weights, positive))


def index_select(scores: Array, count: int, *, first_position: int, unit: int = 1) -> Ids:
    """scores [n, u] -> ids [n, count], ascending: the units with the greatest scores. The lower unit wins a tie, and
    NaN is less than any number. Rows that see no more than `count` units have -1."""
    ids = np.full((len(scores), count), -1, np.intp)
    for i, row in enumerate(scores):
        seen = (first_position + i + 1) // unit
        if seen > count:
            ids[i] = np.sort(np.argsort(-row[:seen], kind="stable")[:count])
    return ids


def selected_rows(ids: Ids, rows: int, *, first_position: int, unit: int = 1) -> Mask:
    """Which of so many cached rows each of n rows attends to, by the `ids` of index_select. -> [n, rows]"""
    own, cached = (first_position + np.arange(len(ids)))[:, None], np.arange(rows)
    selected = np.array([np.isin(cached // unit, chosen) | (chosen < 0).any() for chosen in ids])
    return (cached <= own) & (selected | (cached >= (own + 1) // unit * unit))


def gather_rows(rows: Array, ids: Ids, *, position: int, unit: int = 1) -> Array:
    """rows [t, ...], ids [count] -> those that the row at `position` attends to"""
    return np.asarray(rows[selected_rows(ids[None], len(rows), first_position=position, unit=unit)[0]])


# ---- Ops: gated delta-net ---------------------------------------------------------------------------------------


def conv1d(x: Array, state: Array, weight: Array, dilation: int = 1) -> tuple[Array, Array]:
    """Depthwise causal convolution, then SiLU. x [n, C], state [(taps - 1) * dilation, C] with the oldest row first,
    weight [C, taps] whose last tap meets the newest row -> [n, C] and the new state: the last rows of the input."""
    n, taps = len(x), weight.shape[1]
    rows = np.concatenate([state, x])
    y = np.zeros(x.shape, x.dtype)
    for tap in range(taps):
        y = y + rows[tap * dilation : tap * dilation + n] * weight[:, tap]
    return silu(y), rows[n:]


def delta_net_query_key(q: Array, k: Array) -> tuple[Array, Array]:
    """Scales both to length 1, and then the query by 1 / sqrt(d). q, k [n, key_heads, d]. The 1e-6 is added to the sum
    of squares, whatever the model's own eps is."""
    d = q.shape[-1]
    return rms_norm_heads(q, None, 1e-6 / d) / d, rms_norm_heads(k, None, 1e-6 / d) / math.sqrt(d)


def delta_net_gates(alpha: Array, b: Array, a_log: Array, dt_bias: Array) -> tuple[Array, Array]:
    """alpha, b [n, value_heads]; a_log, dt_bias [value_heads] -> decay in (0, 1) and beta in (0, 1)"""
    return np.exp(-np.exp(a_log) * softplus(alpha + dt_bias)), sigmoid(b)


def gated_delta(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array, *, tiled: bool = False
) -> tuple[Array, Array]:
    """q, k [n, key_heads, dk]; v [n, value_heads, dv]; decay, beta [n, value_heads]; state [value_heads, dv, dk]
    -> [n, value_heads, dv] and the new state.

    The state is a linear map from keys to values. Each row lets the state fade, looks up what it holds for k, corrects
    that towards v by beta, and reads the state at q. Neighbouring value heads share a key head; `tiled`, they take
    turns at them.
    """
    shared_by = v.shape[1] // q.shape[1]
    heads = np.arange(v.shape[1])
    heads = heads % q.shape[1] if tiled else heads // shared_by
    q, k = q[:, heads], k[:, heads]
    out = np.empty(v.shape)
    for i in range(len(v)):
        state = state * decay[i][:, None, None]
        held = np.einsum("hvk,hk->hv", state, k[i])
        correction = (v[i] - held) * beta[i][:, None]
        state = state + correction[:, :, None] * k[i][:, None, :]
        out[i] = np.einsum("hvk,hk->hv", state, q[i])
    return out, state


# ---- Ops: experts -----------------------------------------------------------------------------------------------


def top_k(scores: Array, k: int) -> Ids:
    """scores [n, E] -> ids [n, k], best first; the earlier expert wins a tie."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def normalized(weights: Array) -> Array:
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total > 0, total, 1.0)


def of_best_groups(scores: Array, worth: Array, groups_kept: int) -> Array:
    """scores [n, E], worth [n, groups] -> the scores, minus infinity outside of the best groups"""
    kept = np.zeros(worth.shape, bool)
    np.put_along_axis(kept, top_k(worth, groups_kept), True, axis=-1)
    return np.where(np.repeat(kept, scores.shape[1] // worth.shape[1], axis=-1), scores, -np.inf)


def route_softmax(
    logits: Array,
    k: int,
    *,
    normalize: bool,
    groups: int = 0,
    groups_kept: int = 0,
    scaling: float = 1.0,
    factors: Array | None = None,
) -> tuple[Ids, Array]:
    """logits [n, E] -> ids [n, k] and weights [n, k]: probabilities among all experts, then made to sum to 1.

    Experts are chosen by logit. By probability, small ones would all round to 0 and tie. With groups, only the best of
    them are candidates, and each is worth its best expert. factors [E]: what each expert's weight is multiplied by.
    """
    choice = logits
    if groups:
        choice = of_best_groups(logits, logits.reshape(len(logits), groups, -1).max(axis=-1), groups_kept)
    ids = top_k(choice, k)
    weights = np.take_along_axis(softmax(logits), ids, axis=-1)
    weights = (normalized(weights) if normalize else weights) * scaling
    return ids, weights if factors is None else weights * factors[ids]


def route_grouped(
    logits: Array, bias: Array, k: int, *, groups: int, groups_kept: int, normalize: bool, scaling: float
) -> tuple[Ids, Array]:
    """noaux_tc. logits [n, E], bias [E] -> ids [n, k] and weights [n, k]

    The bias helps to choose and has no part in the weights. A group is worth the sum of its two best biased scores, and
    only the best groups are candidates.
    """
    scores = sigmoid(logits)
    choice = scores + bias
    worth = np.sort(choice.reshape(len(scores), groups, -1), axis=-1)[..., -2:].sum(axis=-1)
    ids = top_k(of_best_groups(choice, worth, groups_kept), k)
    weights = np.take_along_axis(scores, ids, axis=-1)
    return ids, (normalized(weights) if normalize else weights) * scaling


def expert_ffn(
    x: Array,
    gate: Array,
    up: Array,
    down: Array,
    biases: Sequence[Array] | None = None,
    clamped: tuple[float, float] | None = None,
    is_geglu: bool = False,
) -> Array:
    """x [n, h], gate and up [m, h], down [h, m] -> [n, h]. `biases`: of gate and up [m], of down [h]. `clamped`: alpha
    and limit of clamped_swiglu, which takes the place of swiglu, as geglu does with `is_geglu`."""
    of_gate, of_up, of_down = biases or (np.zeros(1),) * 3
    gated, raised = matmul(x, gate) + of_gate, matmul(x, up) + of_up
    if clamped:
        inner = clamped_swiglu(gated, raised, *clamped)
    else:
        inner = geglu(gated, raised) if is_geglu else swiglu(gated, raised)
    return matmul(inner, down) + of_down


def combine(residual: Array | None, outputs: Array, weights: Array, shared: Array | None) -> Array:
    """residual [n, h] or none, outputs [n, K, h] and weights [n, K] in router order, shared [n, h] already gated
    -> [n, h]

    The order of the sum is: experts as the router names them, the residual, the shared expert.
    """
    routed = np.zeros(outputs[:, 0].shape)
    for slot in range(weights.shape[1]):
        routed = routed + weights[:, slot, None] * outputs[:, slot]
    total = routed if residual is None else residual + routed
    return total if shared is None else total + shared
