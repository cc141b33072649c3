"""Canonical weights straight from a tiny published checkpoint, for the oracle: a second opinion on what conversion and
the stores do, in NumPy alone and in full precision (norms keep 1 + w unrounded, nothing is quantised)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from golden.checkpoints import CHECKPOINTS
from golden.elements import from_bf16
from moeflux import QuantFormat
from moeflux.models.config import variant_from_config
from moeflux.models.layers import GatedDelta
from moeflux.models.variants import Variant

PLAIN = QuantFormat.plain("F32")
UNUSED = ("mtp.", "model.visual.", "vision_tower.", "mm_projector.", *(f"model.layers.{n}." for n in (46, 47, 61)))
FOLDED_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight")
FOLDED_NORMS += tuple(
    f"{name}.weight" for name in ("hc_norm", "norm_key", "norm_query", "norm_conv", "q_layernorm", "k_layernorm")
)


MIXTRAL_WORDS = (
    ("block_sparse_moe.e_score", "mlp.gate.e_score"),
    ("block_sparse_moe", "mlp"),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)


class Plain(NamedTuple):
    weight: np.ndarray
    format: QuantFormat = PLAIN
    scales: np.ndarray | None = None
    biases: np.ndarray | None = None


@dataclass
class ReferenceWeights:
    """What the oracle's `Weights` asks for."""

    tensors: dict[str, np.ndarray]  # by canonical name, matrices by their base name
    experts: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str) -> Plain:
        return Plain(self.tensors[name])

    def expert(self, layer: int, expert: int) -> tuple[Plain, Plain, Plain]:
        gate, up, down = self.experts[layer, expert]
        return Plain(gate), Plain(up), Plain(down)


def load(name: str) -> tuple[Variant, ReferenceWeights]:
    checkpoint = CHECKPOINTS[name]().decoded()
    variant = variant_from_config(checkpoint.config)
    tensors: dict[str, np.ndarray] = {}
    for key, (dtype, raw) in checkpoint.tensors.items():
        canonical = key.replace("model.language_model.", "model.", 1).removeprefix("language_model.")
        for own, usual in MIXTRAL_WORDS:
            canonical = canonical.replace(own, usual)
        canonical = canonical.replace(".mlp.router.", ".mlp.gate.").replace(".router.proj.", ".mlp.gate.")
        canonical = re.sub(r"^(model\.layers\.\d+)\.experts\.", r"\1.mlp.experts.", canonical)
        if not key.startswith(UNUSED):
            tensors[canonical] = from_bf16(raw) if dtype == "BF16" else raw.astype(np.float32)
    if variant.model_type in ("qwen3_5_moe", "qwen3_next", "qwen4_exp"):
        for key in tensors:
            if key.endswith(FOLDED_NORMS) or key == "model.norm.weight":
                tensors[key] = tensors[key] + np.float32(1)
    experts = {}
    for layer in range(variant.num_layers):
        at = f"model.layers.{layer}."
        if f"{at}linear_attn.in_proj_qkvz.weight" in tensors:
            tensors |= unfuse(variant.layers[layer].mixer, variant.hidden_size, tensors, f"{at}linear_attn.")
        if variant.model_type == "gpt_oss":
            both, down = (tensors[f"{at}mlp.experts.{part}"] for part in ("gate_up_proj", "down_proj"))
            experts |= {
                (layer, e): (both[e, :, 0::2].T, both[e, :, 1::2].T, down[e].T) for e in range(variant.experts.count)
            }
            biases = tensors[f"{at}mlp.experts.gate_up_proj_bias"]
            each = (biases[:, 0::2], biases[:, 1::2], tensors[f"{at}mlp.experts.down_proj_bias"])
            tensors |= {
                f"{at}mlp.switch_mlp.{n}_proj.bias": b for n, b in zip(("gate", "up", "down"), each, strict=True)
            }
        elif f"{at}mlp.experts.gate_up_proj" in tensors:
            both, down = tensors[f"{at}mlp.experts.gate_up_proj"], tensors[f"{at}mlp.experts.down_proj"]
            half = variant.experts.intermediate
            if both.shape[1] != 2 * half:
                both, down = both.swapaxes(1, 2), down.swapaxes(1, 2)
            experts |= {(layer, e): (both[e, :half], both[e, half:], down[e]) for e in range(variant.experts.count)}
        elif layer in variant.moe_layers:
            for e in range(variant.experts.count):
                parts = ("gate_proj", "up_proj", "down_proj")
                experts[layer, e] = tuple(tensors[f"{at}mlp.experts.{e}.{part}.weight"] for part in parts)
    vectors = re.compile(r"(norm|norm_[a-z12]+|conv1d|shard_\d+)\.weight$")
    named = {k if vectors.search(k) else k.removesuffix(".weight"): tensors[k] for k in tensors}
    return variant, ReferenceWeights(named, experts)


def unfuse(d: GatedDelta, hidden: int, tensors: dict[str, np.ndarray], at: str) -> dict[str, np.ndarray]:
    """qwen3_next fuses its inputs by key head: [q | k | v of its value heads | z of them], [b of them | a of them]."""
    shared_by = d.value_heads // d.key_heads
    cuts = np.cumsum([d.key_dim, d.key_dim, shared_by * d.value_dim])
    by_head = tensors[f"{at}in_proj_qkvz.weight"].reshape(d.key_heads, -1, hidden)
    q, k, value, z = (part.reshape(-1, hidden) for part in np.split(by_head, cuts, axis=1))
    by_head = tensors[f"{at}in_proj_ba.weight"].reshape(d.key_heads, -1, hidden)
    b, a = (part.reshape(-1, hidden) for part in np.split(by_head, 2, axis=1))
    parts = {"in_proj_qkv": np.concatenate([q, k, value]), "in_proj_z": z, "in_proj_b": b, "in_proj_a": a}
    return {f"{at}{name}.weight": matrix for name, matrix in parts.items()}
