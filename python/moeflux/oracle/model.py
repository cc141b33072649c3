"""How the ops make a layer and the layers make a model: state, one layer, `Session`. Shapes are those of ops.py."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from moeflux.models.layers import (
    DenseMlp,
    GatedDelta,
    GroupedAttention,
    Index,
    LatentAttention,
    Mixer,
    Rope,
    RoutedExperts,
)
from moeflux.models.ngrams import ngram_rows, table_rows
from moeflux.models.variants import Variant
from moeflux.oracle.ops import (
    attention,
    bias_add,
    combine,
    conv1d,
    delta_net_gates,
    delta_net_query_key,
    embed,
    expert_ffn,
    gated_delta,
    gated_rms_norm,
    index_scores,
    index_select,
    latent_scale,
    layer_norm,
    matmul,
    mla_attention,
    residual_add,
    rms_norm,
    rms_norm_heads,
    rope,
    rope_frequencies,
    rope_magnitude,
    route_grouped,
    route_softmax,
    scale,
    selected_rows,
    sigmoid_gate,
    soft_cap,
)
from moeflux.oracle.stored import Stored, Weights, widen
from moeflux.oracle.streams import hyper_add, hyper_mix, hyper_norm, ngram_gate, silu

Array = np.ndarray

LATENT_EPS = 1e-6
"""Of the norms inside latent attention, whatever the model's own."""


# ---- State ------------------------------------------------------------------------------------------------------


class KeyValueState(NamedTuple):
    k: Array  # [t, kv_heads, d], after norm and rope
    v: Array  # [t, kv_heads, d]
    index_k: Array | None = None  # [t, index dim], what keys of units are made of; none without an index


class LatentState(NamedTuple):
    latent: Array  # [t, rank], after its norm
    k_pe: Array  # [t, rope], after rope
    index_k: Array | None = None  # [t, index dim], after norm and rope; none without an index


class LinearState(NamedTuple):
    conv: Array  # [taps - 1, C], oldest first, before the convolution
    recurrent: Array  # [value_heads, dv, dk]


class NgramState(NamedTuple):
    """What a layer with an n-gram embedding remembers."""

    mixer: KeyValueState | LatentState | LinearState
    conv: Array  # [kept rows, streams * h], oldest first, before the convolution


State = KeyValueState | LatentState | LinearState | NgramState


def empty_state(v: Variant, index: int) -> State:
    layer = v.layers[index]
    state = empty_mixer_state(layer.mixer)
    if layer.ngram is None or v.streams is None:
        return state
    kept = (layer.ngram.taps - 1) * layer.ngram.length
    return NgramState(state, np.zeros((kept, v.streams.count * v.hidden_size)))


def empty_mixer_state(mixer: Mixer) -> KeyValueState | LatentState | LinearState:
    if isinstance(mixer, GatedDelta):
        recurrent = (mixer.value_heads, mixer.value_dim, mixer.key_dim)
        return LinearState(np.zeros((mixer.taps - 1, mixer.channels)), np.zeros(recurrent))
    if isinstance(mixer, LatentAttention):
        index_k = np.zeros((0, mixer.index.dim)) if mixer.index else None
        return LatentState(np.zeros((0, mixer.kv_rank)), np.zeros((0, mixer.rope.dim)), index_k)
    rows = np.zeros((0, mixer.kv_heads, mixer.head_dim))
    return KeyValueState(rows, rows, np.zeros((0, mixer.index.dim)) if mixer.index else None)


# ---- Layers -----------------------------------------------------------------------------------------------------


@dataclass
class Widened:
    """The weights as float64. With `remember` it keeps every tensor it has made, which is quick for small models and
    takes 8 bytes per weight."""

    weights: Weights
    remember: bool = True
    kept: dict[Hashable, tuple[Array, ...]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return self.weights.has(name)

    def __call__(self, name: str) -> Array:
        (values,) = self._once(name, lambda: (self.weights.tensor(name),))
        return values

    def expert(self, layer: int, expert: int) -> tuple[Array, Array, Array]:
        gate, up, down = self._once((layer, expert), lambda: self.weights.expert(layer, expert))
        return gate, up, down

    def _once(self, key: Hashable, stored: Callable[[], tuple[Stored, ...]]) -> tuple[Array, ...]:
        if key in self.kept:
            return self.kept[key]
        values = tuple(map(widen, stored()))
        if self.remember:
            self.kept[key] = values
        return values


def full_attention(
    a: GroupedAttention, eps: float, w: Widened, at: str, x: Array, positions: Array, state: KeyValueState
) -> tuple[Array, KeyValueState]:
    """Grouped-query attention, with what the model has of biases, q/k norm, sinks, window and output gate.
    x [n, h] -> [n, h]"""
    n = len(x)
    made = {name: matmul(x, w(f"{at}{name}_proj")) for name in ("qk" if a.keys_as_values else "qkv")}
    if a.bias:
        made = {name: bias_add(y, w(f"{at}{name}_proj.bias")) for name, y in made.items()}
    q, k, value = made["q"], made["k"], made["k" if a.keys_as_values else "v"]
    if a.joint_norm:
        q, k = rms_norm(q, w(f"{at}q_norm.weight"), eps), rms_norm(k, w(f"{at}k_norm.weight"), eps)
    q, k, value = q.reshape(n, a.heads, -1), k.reshape(n, a.kv_heads, -1), value.reshape(n, a.kv_heads, -1)
    gate = None
    if a.gate:
        q, gate = q[..., : a.head_dim], q[..., a.head_dim :]
    if a.qk_norm and not a.joint_norm:
        q = rms_norm_heads(q, w(f"{at}q_norm.weight"), eps)
        k = rms_norm_heads(k, w(f"{at}k_norm.weight"), eps)
    if a.value_norm:
        value = rms_norm_heads(value, None, eps)
    turn = _turn(a.rope, interleaved=False)
    q, k = rope(q, positions, **turn), rope(k, positions, **turn)
    kept, seen = state.index_k, None
    if a.index and kept is not None:
        kept, seen = unit_index(a, a.index, eps, w, f"{at}indexer.", x, positions, kept)
    state = KeyValueState(np.concatenate([state.k, k]), np.concatenate([state.v, value]), kept)
    sinks = w(f"{at}sinks") if a.sinks else None
    out = attention(q, state.k, state.v, a.scale or a.head_dim**-0.5, sinks, a.window, seen)
    if gate is not None:
        out = sigmoid_gate(out, gate)
    out = matmul(out.reshape(n, -1), w(f"{at}o_proj"))
    return bias_add(out, w(f"{at}o_proj.bias")) if a.out_bias else out, state


def _turn(turn: Rope, *, interleaved: bool) -> dict[str, Any]:
    return {"frequencies": rope_frequencies(turn), "interleaved": interleaved, "magnitude": rope_magnitude(turn)}


def unit_index(
    a: GroupedAttention, index: Index, eps: float, w: Widened, at: str, x: Array, positions: Array, kept: Array
) -> tuple[Array, Array]:
    """x [n, h], what the rows before yielded [t - n, d] -> the same of all rows, and which of them each of n rows
    attends to [n, t]. The key of a unit is the mean of its rows, normed, and turned as its first row is."""
    n, turn, unit = len(x), _turn(a.rope, interleaved=False), index.unit
    both = matmul(x, w(f"{at}index_qk_proj")).reshape(n, index.heads + 1, index.dim)
    q = rope(rms_norm_heads(both[:, :-1], w(f"{at}q_layernorm.weight"), eps), positions, **turn)
    kept = np.concatenate([kept, both[:, -1]])
    units = len(kept) // unit
    keys = rms_norm(kept[: units * unit].reshape(units, unit, -1).mean(axis=1), w(f"{at}k_layernorm.weight"), eps)
    keys = rope(keys[:, None], np.arange(units, dtype=np.float64) * unit, **turn)[:, 0]
    first = len(kept) - n
    scores = index_scores(q, keys, None, index.dim**-0.5)
    ids = index_select(scores, index.count, first_position=first, unit=unit)
    return kept, selected_rows(ids, len(kept), first_position=first, unit=unit)


def latent_attention(
    a: LatentAttention, w: Widened, at: str, x: Array, positions: Array, state: LatentState, absorbed: bool
) -> tuple[Array, LatentState]:
    """x [n, h] -> [n, h]"""
    n, compressed = len(x), x
    if a.q_rank:
        compressed = rms_norm(matmul(x, w(f"{at}q_a_proj")), w(f"{at}q_a_layernorm.weight"), LATENT_EPS)
    q = matmul(compressed, w(f"{at}q_b_proj" if a.q_rank else f"{at}q_proj")).reshape(n, a.heads, a.head_dim)
    kv = matmul(x, w(f"{at}kv_a_proj_with_mqa"))
    latent = rms_norm(kv[:, : a.kv_rank], w(f"{at}kv_a_layernorm.weight"), LATENT_EPS)
    turn = _turn(a.rope, interleaved=True)
    q_pe = rope(q[..., a.nope_dim :], positions, **turn)
    k_pe = rope(kv[:, None, a.kv_rank :], positions, **turn)[:, 0]
    kept, seen = state.index_k, None
    if a.index and kept is not None:
        kept, seen = latent_index(a, a.index, w, f"{at}indexer.", x, compressed, positions, kept)
    state = LatentState(np.concatenate([state.latent, latent]), np.concatenate([state.k_pe, k_pe]), kept)
    keys, values = latent_matrices(a, w, at)
    scale = latent_scale(a.head_dim, a.rope)
    q_nope = q[..., : a.nope_dim]
    out = mla_attention(q_nope, q_pe, state.latent, state.k_pe, keys, values, scale, absorbed=absorbed, seen=seen)
    return matmul(out.reshape(n, -1), w(f"{at}o_proj")), state


def latent_index(
    a: LatentAttention, index: Index, w: Widened, at: str, x: Array, compressed: Array, positions: Array, kept: Array
) -> tuple[Array, Array]:
    """x [n, h], the compressed queries [n, q_rank], the index keys of the rows before [t - n, d] -> those of all rows,
    and which of them each of n rows attends to [n, t]. The first channels turn. Unlike elsewhere in latent
    attention, those that turn together may lie in split halves."""
    n, turn = len(x), _turn(a.rope, interleaved=index.interleaved)
    q = rope(matmul(compressed, w(f"{at}wq_b")).reshape(n, index.heads, index.dim), positions, **turn)
    k = layer_norm(matmul(x, w(f"{at}wk")), w(f"{at}k_norm.weight"), w(f"{at}k_norm.bias"), LATENT_EPS)
    kept = np.concatenate([kept, rope(k[:, None], positions, **turn)[:, 0]])
    scores = index_scores(q, kept, matmul(x, w(f"{at}weights_proj")), (index.heads * index.dim) ** -0.5)
    first = len(kept) - n
    ids = index_select(scores, index.count, first_position=first)
    return kept, selected_rows(ids, len(kept), first_position=first)


def latent_matrices(a: LatentAttention, w: Widened, at: str) -> tuple[Array, Array]:
    """The matrices from latent to keys [heads, nope, rank] and to values [heads, v, rank]. A store has them together or
    apart."""
    if w.has(f"{at}kv_b_proj"):
        both = w(f"{at}kv_b_proj").reshape(a.heads, a.nope_dim + a.v_dim, a.kv_rank)
        return both[:, : a.nope_dim], both[:, a.nope_dim :]
    return w(f"{at}embed_q").transpose(0, 2, 1), w(f"{at}unembed_out")


def gated_delta_net(
    d: GatedDelta, eps: float, w: Widened, at: str, x: Array, state: LinearState
) -> tuple[Array, LinearState]:
    """x [n, h] -> [n, h]"""
    n = len(x)
    qkv = matmul(x, w(f"{at}in_proj_qkv"))
    z = matmul(x, w(f"{at}in_proj_z")).reshape(n, d.value_heads, d.value_dim)
    alpha, b = matmul(x, w(f"{at}in_proj_a")), matmul(x, w(f"{at}in_proj_b"))
    mixed, conv_state = conv1d(qkv, state.conv, w(f"{at}conv1d.weight").reshape(d.channels, d.taps))
    q, k, value = np.split(mixed, [d.key_width, 2 * d.key_width], axis=-1)
    keys = (n, d.key_heads, d.key_dim)
    q, k = delta_net_query_key(q.reshape(keys), k.reshape(keys))
    decay, beta = delta_net_gates(alpha, b, w(f"{at}A_log"), w(f"{at}dt_bias"))
    out, recurrent = gated_delta(q, k, value.reshape(z.shape), decay, beta, state.recurrent, tiled=d.tiled)
    if d.sigmoid:
        out = sigmoid_gate(rms_norm_heads(out, w(f"{at}norm.weight"), eps), z)
    else:
        out = gated_rms_norm(out, z, w(f"{at}norm.weight"), eps)
    return matmul(out.reshape(n, -1), w(f"{at}out_proj")), LinearState(conv_state, recurrent)


def feed_forward(w: Widened, at: str, x: Array, is_geglu: bool = False) -> Array:
    """A dense MLP or a shared expert. x [n, h] -> [n, h]"""
    gate, up, down = (w(f"{at}{name}_proj") for name in ("gate", "up", "down"))
    return expert_ffn(x, gate, up, down, is_geglu=is_geglu)


def route(e: RoutedExperts, w: Widened, at: str, x: Array) -> tuple[Array, Array]:
    """Which experts each token takes, and with what weights. x [n, h] -> ids [n, K], weights [n, K]"""
    logits, r = matmul(x, w(f"{at}mlp.gate")), e.router
    if r.bias:
        logits = bias_add(logits, w(f"{at}mlp.gate.bias"))
    rest: dict[str, Any] = {name: getattr(r, name) for name in ("groups", "groups_kept", "normalize", "scaling")}
    if r.scoring == "softmax":
        factors = w(f"{at}router.per_expert_scale") if r.factors else None
        return route_softmax(logits, e.per_token, factors=factors, **rest)
    return route_grouped(logits, w(f"{at}mlp.gate.e_score_correction_bias"), e.per_token, **rest)


def expert_outputs(e: RoutedExperts, w: Widened, index: int, x: Array, ids: Array) -> Array:
    """x [n, h], ids [n, K] -> [n, K, h]"""
    outputs = np.empty((*ids.shape, x.shape[1]))
    clamped = (e.clamped.alpha, e.clamped.limit) if e.clamped else None
    for expert in np.unique(ids):
        rows, slots = np.nonzero(ids == expert)
        beside: dict[str, Any] = {"clamped": clamped, "is_geglu": e.geglu}
        if e.bias:
            names = (f"model.layers.{index}.mlp.switch_mlp.{name}_proj.bias" for name in ("gate", "up", "down"))
            beside["biases"] = [w(name)[expert] for name in names]
        outputs[rows, slots] = expert_ffn(x[rows], *w.expert(index, int(expert)), **beside)
    return outputs


def framed_block(e: RoutedExperts, eps: float, w: Widened, index: int, at: str, x: Array) -> Array:
    """A block with norms before and after each part. x [n, h] is the stream -> [n, h], what the stream becomes"""

    def normed(values: Array, name: str) -> Array:
        return rms_norm(values, w(f"{at}{name}.weight"), eps)

    shared = feed_forward(w, f"{at}mlp.", normed(x, "pre_feedforward_layernorm"), e.geglu)
    read = scale(rms_norm(x, w(f"{at}router.scale"), eps), x.shape[1] ** -0.5)
    ids, weights = route(e, w, at, read)
    outputs = expert_outputs(e, w, index, normed(x, "pre_feedforward_layernorm_2"), ids)
    routed = normed(combine(None, outputs, weights, None), "post_feedforward_layernorm_2")
    both = residual_add(normed(shared, "post_feedforward_layernorm_1"), routed)
    whole = residual_add(x, normed(both, "post_feedforward_layernorm"))
    return scale(whole, float(w(f"{at}layer_scalar")[0]))


def expert_block(e: RoutedExperts, w: Widened, index: int, at: str, x: Array, residual: Array | None) -> Array:
    """residual + routed experts + shared expert. x and residual [n, h] -> [n, h]"""
    ids, weights = route(e, w, at, x)
    outputs = expert_outputs(e, w, index, x, ids)
    shared = None
    if e.shared and e.shared.gated:
        shared = feed_forward(w, f"{at}mlp.shared_expert.", x, e.geglu)
        shared = sigmoid_gate(shared, matmul(x, w(f"{at}mlp.shared_expert_gate")))
    elif e.shared:
        shared = feed_forward(w, f"{at}mlp.shared_experts.", x, e.geglu)
    return combine(residual, outputs, weights, shared)


def mix(
    v: Variant, w: Widened, index: int, normed: Array, positions: Array, state: State, absorbed: bool
) -> tuple[Array, KeyValueState | LatentState | LinearState]:
    """A layer's mixer. normed and what comes of it [n, h]"""
    at, eps, mixer = f"model.layers.{index}.", v.rms_norm_eps, v.layer(index).mixer
    mixed: Array
    if isinstance(mixer, GatedDelta):
        assert isinstance(state, LinearState)
        mixed, state = gated_delta_net(mixer, eps, w, f"{at}linear_attn.", normed, state)
    elif isinstance(mixer, LatentAttention):
        assert isinstance(state, LatentState)
        mixed, state = latent_attention(mixer, w, f"{at}self_attn.", normed, positions, state, absorbed)
    else:
        assert isinstance(state, KeyValueState)
        mixed, state = full_attention(mixer, eps, w, f"{at}self_attn.", normed, positions, state)
    return mixed, state


def layer(
    v: Variant, w: Widened, index: int, x: Array, positions: Array, state: State, *, absorbed: bool = True
) -> tuple[Array, State]:
    """One whole layer. x [n, h], positions [n] -> [n, h] and the state after it."""
    at, eps = f"model.layers.{index}.", v.rms_norm_eps
    rest = v.layer(index).feed_forward
    normed = rms_norm(x, w(f"{at}input_layernorm.weight"), eps)
    mixed, state = mix(v, w, index, normed, positions, state, absorbed)
    if isinstance(rest, RoutedExperts) and rest.framed:
        x = residual_add(x, rms_norm(mixed, w(f"{at}post_attention_layernorm.weight"), eps))
        return framed_block(rest, eps, w, index, at, x), state
    x = residual_add(x, mixed)
    normed = rms_norm(x, w(f"{at}post_attention_layernorm.weight"), eps)
    if isinstance(rest, DenseMlp):
        return residual_add(x, feed_forward(w, f"{at}mlp.", normed)), state
    return expert_block(rest, w, index, at, normed, x), state


# ---- Several residual streams -----------------------------------------------------------------------------------


def read_streams(v: Variant, w: Widened, at: str, x: Array) -> tuple[Array, Array]:
    """What a half of a layer reads of the streams x [n, streams, h], and these as it has normed them, flat. -> [n, h],
    [n, streams * h]"""
    n, count, _ = x.shape
    normed = hyper_norm(x, w(f"{at}hc_norm.weight").reshape(x.shape[1:]), v.rms_norm_eps)
    flat = normed.reshape(n, -1)
    low = silu(matmul(flat, w(f"{at}input_mix_weight_down")), 1.0 / count)
    return hyper_mix(normed, matmul(low, w(f"{at}input_mix_weight_up")).reshape(x.shape)), flat


def ngram_embedding(v: Variant, w: Widened, index: int, x: Array, rows: Array, conv: Array) -> tuple[Array, Array]:
    """What the rows of an n-gram table add to the streams. x [n, streams, h], rows [n, width] -> the streams after it,
    and the convolution's state"""
    at, shape = f"model.layers.{index}.ple.", v.layers[index].ngram
    assert shape is not None

    def normed(values: Array, name: str) -> Array:
        return hyper_norm(values.reshape(x.shape), w(f"{at}{name}.weight").reshape(x.shape[1:]), v.rms_norm_eps)

    key, query = normed(matmul(rows, w(f"{at}key_proj")), "norm_key"), normed(x, "norm_query")
    gated = ngram_gate(key, query, matmul(rows, w(f"{at}value_proj")))
    taps = w(f"{at}conv1d.weight").reshape(-1, shape.taps)
    convolved, conv = conv1d(normed(gated, "norm_conv").reshape(len(x), -1), conv, taps, shape.length)
    return residual_add(x, residual_add(gated, convolved.reshape(x.shape))), conv


def layer_of_streams(
    v: Variant, w: Widened, index: int, x: Array, positions: Array, state: State, rows: Array | None
) -> tuple[Array, State]:
    """One whole layer. x [n, streams, h]; rows [n, width] of its n-gram table, if it has one."""
    at, rest, conv = f"model.layers.{index}.", v.layers[index].feed_forward, None
    if rows is not None:
        assert isinstance(state, NgramState)
        x, conv = ngram_embedding(v, w, index, x, rows, state.conv)
        state = state.mixer
    read, normed = read_streams(v, w, f"{at}attn_hyper_connection.", x)
    mixed, after = mix(v, w, index, read, positions, state, True)
    x = hyper_add(x, mixed, matmul(normed, w(f"{at}attn_hyper_connection.block_inject_weight")))
    read, normed = read_streams(v, w, f"{at}mlp_hyper_connection.", x)
    assert isinstance(rest, RoutedExperts)
    yielded = expert_block(rest, w, index, at, read, None)
    x = hyper_add(x, yielded, matmul(normed, w(f"{at}mlp_hyper_connection.block_inject_weight")))
    return x, after if conv is None else NgramState(after, conv)


# ---- Whole model ------------------------------------------------------------------------------------------------


class Session:
    """One sequence: `states[i]` is what layer i remembers, `position` how many tokens it has seen.

    A call that raises leaves the session as it was.
    """

    def __init__(self, variant: Variant, weights: Weights, *, absorbed: bool = True, remember: bool = True) -> None:
        self.variant = variant
        self.weights = Widened(weights, remember)
        self.absorbed = absorbed
        self.clear()

    def clear(self) -> None:
        self.position = 0
        self.tokens: list[int] = []
        self.states = [empty_state(self.variant, i) for i in range(self.variant.num_layers)]

    def prefill(self, ids: Sequence[int]) -> Array:
        """Tokens [n] that follow what the session has seen -> logits [n, vocab]"""
        return self.head(self.hidden(ids))

    def head(self, x: Array) -> Array:
        """What it has read [n, h] -> logits [n, vocab]"""
        logits: Array = matmul(x, self.weights("model.embed_tokens" if self.variant.tied_embeddings else "lm_head"))
        return soft_cap(logits, self.variant.logit_cap) if self.variant.logit_cap else logits

    def hidden(self, ids: Sequence[int]) -> Array:
        """What the head reads of these tokens: [n, h]"""
        v, w = self.variant, self.weights
        if self.position + len(ids) > v.max_context:
            raise ValueError(f"position: expected at most {v.max_context}, found {self.position + len(ids)}")
        positions = np.arange(self.position, self.position + len(ids))
        x = scale(embed(w("model.embed_tokens"), ids), v.embedding_scale)
        states, tokens = list(self.states), [*self.tokens, *map(int, ids)]
        if v.streams:
            x = np.repeat(x[:, None], v.streams.count, axis=1)
        for i in range(v.num_layers):
            if v.streams:
                rows = self._ngram_rows(i, tokens)
                x, states[i] = layer_of_streams(v, w, i, x, positions, states[i], rows)
            else:
                x, states[i] = layer(v, w, i, x, positions, states[i], absorbed=self.absorbed)
        if v.streams:
            x, _ = read_streams(v, w, "model.hyper_connection_mixer.", x)
        else:
            x = rms_norm(x, w("model.norm.weight"), v.rms_norm_eps)
        self.states, self.tokens, self.position = states, tokens, self.position + len(ids)
        hidden: Array = x
        return hidden

    def _ngram_rows(self, index: int, tokens: Sequence[int]) -> Array | None:
        """The rows of the tokens behind those that the session has seen, side by side: [n, width]"""
        shape = self.variant.layers[index].ngram
        if shape is None:
            return None
        chosen = ngram_rows(shape, self.variant.vocab_size, tokens, self.position)
        length = table_rows(shape) // shape.parts
        values = np.empty((*chosen.shape, shape.row_width))
        for part in np.unique(chosen // length):
            name = f"model.layers.{index}.ple.ple_embedding.ngram_embedding.shard_{part}.weight"
            here = chosen // length == part
            values[here] = embed(self.weights(name), list(chosen[here] % length))
        return values.reshape(len(chosen), -1)

    def step(self, token: int) -> Array:
        """-> logits [vocab]"""
        logits: Array = self.prefill([token])[0]
        return logits
