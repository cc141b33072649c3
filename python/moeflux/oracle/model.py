"""How the ops make a layer, and the layers a model: state, one layer, `Session`. Shapes as in ops.py."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from moeflux.models.variants import Variant
from moeflux.oracle.ops import (
    attention,
    combine,
    conv1d,
    delta_net_gates,
    delta_net_query_key,
    embed,
    expert_ffn,
    gated_delta,
    gated_rms_norm,
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
    sigmoid_gate,
)
from moeflux.oracle.stored import Weights, widen

Array = np.ndarray

LATENT_EPS = 1e-6
"""Of the norms inside latent attention, whatever the model's own."""


# ---- State ------------------------------------------------------------------------------------------------------


class KeyValueState(NamedTuple):
    k: Array  # [t, kv_heads, d], after norm and rope
    v: Array  # [t, kv_heads, d]


class LatentState(NamedTuple):
    latent: Array  # [t, rank], after its norm
    k_pe: Array  # [t, rope], after rope


class LinearState(NamedTuple):
    conv: Array  # [taps - 1, C], oldest first, before the convolution
    recurrent: Array  # [value_heads, dv, dk]


State = KeyValueState | LatentState | LinearState


def empty_state(variant: Variant, layer: int) -> State:
    if variant.layer_kinds[layer] == "linear":
        heads, dv, dk = variant.linear_value_heads, variant.linear_value_dim, variant.linear_key_dim
        return LinearState(np.zeros((variant.conv_kernel - 1, variant.conv_channels)), np.zeros((heads, dv, dk)))
    if variant.attention == "mla":
        return LatentState(np.zeros((0, variant.kv_lora_rank)), np.zeros((0, variant.qk_rope_dim)))
    rows = np.zeros((0, variant.num_kv_heads, variant.head_dim))
    return KeyValueState(rows, rows)


# ---- Layers -----------------------------------------------------------------------------------------------------


@dataclass
class Widened:
    """The weights as float64. `remember` keeps every tensor it has made: quick for small models, 8 bytes a weight."""

    weights: Weights
    remember: bool = True
    kept: dict[Hashable, Any] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return self.weights.has(name)

    def __call__(self, name: str) -> Array:
        return self._once(name, lambda: widen(self.weights.tensor(name)))

    def expert(self, layer: int, expert: int) -> tuple[Array, Array, Array]:
        return self._once((layer, expert), lambda: tuple(map(widen, self.weights.expert(layer, expert))))

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key in self.kept:
            return self.kept[key]
        value = make()
        if self.remember:
            self.kept[key] = value
        return value


def full_attention(
    v: Variant, w: Widened, at: str, x: Array, positions: Array, state: KeyValueState
) -> tuple[Array, KeyValueState]:
    """Grouped-query attention with q/k norm, and an output gate where the variant has one. x [n, h] -> [n, h]"""
    n = len(x)
    q = matmul(x, w(f"{at}q_proj")).reshape(n, v.num_heads, -1)
    gate = None
    if v.attention_gate:
        q, gate = q[..., : v.head_dim], q[..., v.head_dim :]
    k = matmul(x, w(f"{at}k_proj")).reshape(n, v.num_kv_heads, v.head_dim)
    value = matmul(x, w(f"{at}v_proj")).reshape(n, v.num_kv_heads, v.head_dim)
    q = rms_norm_heads(q, w(f"{at}q_norm.weight"), v.rms_norm_eps)
    k = rms_norm_heads(k, w(f"{at}k_norm.weight"), v.rms_norm_eps)
    turn = {"frequencies": rope_frequencies(v), "interleaved": False, "magnitude": rope_magnitude(v)}
    q, k = rope(q, positions, **turn), rope(k, positions, **turn)
    state = KeyValueState(np.concatenate([state.k, k]), np.concatenate([state.v, value]))
    out = attention(q, state.k, state.v, v.softmax_scale)
    if gate is not None:
        out = sigmoid_gate(out, gate)
    return matmul(out.reshape(n, -1), w(f"{at}o_proj")), state


def latent_attention(
    v: Variant, w: Widened, at: str, x: Array, positions: Array, state: LatentState, absorbed: bool
) -> tuple[Array, LatentState]:
    """x [n, h] -> [n, h]"""
    n = len(x)
    if v.q_lora_rank:
        q = rms_norm(matmul(x, w(f"{at}q_a_proj")), w(f"{at}q_a_layernorm.weight"), LATENT_EPS)
        q = matmul(q, w(f"{at}q_b_proj"))
    else:
        q = matmul(x, w(f"{at}q_proj"))
    q = q.reshape(n, v.num_heads, v.head_dim)
    kv = matmul(x, w(f"{at}kv_a_proj_with_mqa"))
    latent = rms_norm(kv[:, : v.kv_lora_rank], w(f"{at}kv_a_layernorm.weight"), LATENT_EPS)
    turn = {"frequencies": rope_frequencies(v), "interleaved": True, "magnitude": rope_magnitude(v)}
    q_pe = rope(q[..., v.qk_nope_dim :], positions, **turn)
    k_pe = rope(kv[:, None, v.kv_lora_rank :], positions, **turn)[:, 0]
    state = LatentState(np.concatenate([state.latent, latent]), np.concatenate([state.k_pe, k_pe]))
    keys, values = latent_matrices(v, w, at)
    q_nope = q[..., : v.qk_nope_dim]
    out = mla_attention(q_nope, q_pe, state.latent, state.k_pe, keys, values, v.softmax_scale, absorbed=absorbed)
    return matmul(out.reshape(n, -1), w(f"{at}o_proj")), state


def latent_matrices(v: Variant, w: Widened, at: str) -> tuple[Array, Array]:
    """The matrices from latent to keys [heads, nope, rank] and to values [heads, v, rank], stored together or apart."""
    if w.has(f"{at}kv_b_proj"):
        both = w(f"{at}kv_b_proj").reshape(v.num_heads, v.qk_nope_dim + v.v_head_dim, v.kv_lora_rank)
        return both[:, : v.qk_nope_dim], both[:, v.qk_nope_dim :]
    return w(f"{at}embed_q").transpose(0, 2, 1), w(f"{at}unembed_out")


def linear_attention(v: Variant, w: Widened, at: str, x: Array, state: LinearState) -> tuple[Array, LinearState]:
    """Gated delta-net. x [n, h] -> [n, h]"""
    n = len(x)
    qkv = matmul(x, w(f"{at}in_proj_qkv"))
    z = matmul(x, w(f"{at}in_proj_z")).reshape(n, v.linear_value_heads, v.linear_value_dim)
    alpha, b = matmul(x, w(f"{at}in_proj_a")), matmul(x, w(f"{at}in_proj_b"))
    mixed, conv_state = conv1d(qkv, state.conv, w(f"{at}conv1d.weight").reshape(v.conv_channels, v.conv_kernel))
    q, k, value = np.split(mixed, [v.linear_total_key, 2 * v.linear_total_key], axis=-1)
    keys = (n, v.linear_key_heads, v.linear_key_dim)
    q, k = delta_net_query_key(q.reshape(keys), k.reshape(keys))
    decay, beta = delta_net_gates(alpha, b, w(f"{at}A_log"), w(f"{at}dt_bias"))
    out, recurrent = gated_delta(q, k, value.reshape(z.shape), decay, beta, state.recurrent)
    out = gated_rms_norm(out, z, w(f"{at}norm.weight"), v.rms_norm_eps)
    return matmul(out.reshape(n, -1), w(f"{at}out_proj")), LinearState(conv_state, recurrent)


def feed_forward(w: Widened, at: str, x: Array) -> Array:
    """A dense MLP or a shared expert. x [n, h] -> [n, h]"""
    return expert_ffn(x, w(f"{at}gate_proj"), w(f"{at}up_proj"), w(f"{at}down_proj"))


def route(v: Variant, w: Widened, layer: int, x: Array) -> tuple[Array, Array]:
    """Which experts, and how much of each. x [n, h] -> ids [n, K], weights [n, K]"""
    at = f"model.layers.{layer}.mlp.gate"
    logits = matmul(x, w(at))
    if v.router == "softmax":
        return route_softmax(logits, v.experts_per_token, normalize=v.normalize_topk)
    return route_grouped(
        logits,
        w(f"{at}.e_score_correction_bias"),
        v.experts_per_token,
        groups=v.num_groups,
        groups_kept=v.groups_per_token,
        normalize=v.normalize_topk,
        scaling=v.routed_scaling,
    )


def expert_block(v: Variant, w: Widened, layer: int, x: Array, residual: Array) -> Array:
    """residual + routed experts + shared expert. x and residual [n, h] -> [n, h]"""
    at = f"model.layers.{layer}.mlp."
    ids, weights = route(v, w, layer, x)
    outputs = np.empty((*ids.shape, x.shape[1]))
    for expert in np.unique(ids):
        rows, slots = np.nonzero(ids == expert)
        outputs[rows, slots] = expert_ffn(x[rows], *w.expert(layer, int(expert)))
    shared = None
    if v.shared_expert == "gated":
        shared = sigmoid_gate(feed_forward(w, f"{at}shared_expert.", x), matmul(x, w(f"{at}shared_expert_gate")))
    elif v.shared_expert == "plain":
        shared = feed_forward(w, f"{at}shared_experts.", x)
    return combine(residual, outputs, weights, shared)


def layer(
    v: Variant, w: Widened, index: int, x: Array, positions: Array, state: State, *, absorbed: bool = True
) -> tuple[Array, State]:
    """One whole layer. x [n, h], positions [n] -> [n, h] and the state after it."""
    at = f"model.layers.{index}."
    normed = rms_norm(x, w(f"{at}input_layernorm.weight"), v.rms_norm_eps)
    if v.layer_kinds[index] == "linear":
        mixed, state = linear_attention(v, w, f"{at}linear_attn.", normed, state)
    elif v.attention == "mla":
        mixed, state = latent_attention(v, w, f"{at}self_attn.", normed, positions, state, absorbed)
    else:
        mixed, state = full_attention(v, w, f"{at}self_attn.", normed, positions, state)
    x = residual_add(x, mixed)
    normed = rms_norm(x, w(f"{at}post_attention_layernorm.weight"), v.rms_norm_eps)
    if v.mlp_kinds[index] == "dense":
        return residual_add(x, feed_forward(w, f"{at}mlp.", normed)), state
    return expert_block(v, w, index, normed, x), state


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
        self.states = [empty_state(self.variant, i) for i in range(self.variant.num_layers)]

    def prefill(self, ids: Sequence[int]) -> Array:
        """Tokens [n] that follow what the session has seen -> logits [n, vocab]"""
        v, w = self.variant, self.weights
        if self.position + len(ids) > v.max_context:
            raise ValueError(f"position: expected at most {v.max_context}, found {self.position + len(ids)}")
        positions = np.arange(self.position, self.position + len(ids))
        x = embed(w("model.embed_tokens"), ids)
        states = list(self.states)
        for i in range(v.num_layers):
            x, states[i] = layer(v, w, i, x, positions, states[i], absorbed=self.absorbed)
        x = rms_norm(x, w("model.norm.weight"), v.rms_norm_eps)
        logits = matmul(x, w("model.embed_tokens" if v.tied_embeddings else "lm_head"))
        self.states, self.position = states, self.position + len(ids)
        return logits

    def step(self, token: int) -> Array:
        """-> logits [vocab]"""
        return self.prefill([token])[0]
