"""config.json of gpt_oss."""

from __future__ import annotations

import dataclasses

from moeflux.models.config_fields import Fields
from moeflux.models.config_parts import common, expert_count, layer_count, rope
from moeflux.models.layers import ClampedSwiglu, GroupedAttention, Layer, RoutedExperts, Router
from moeflux.models.variants import Variant


def read_gpt_oss(fields: Fields, declared: str, name: str) -> Variant:
    """gpt_oss: layers that see a window and layers that see everything. Every product adds a bias, and every head has a
    sink. Its experts are what others call intermediate_size wide."""
    layers = layer_count(fields)
    fields.only("attention_bias", True)
    fields.only("tie_word_embeddings", False)
    fields.said("head_dim", "rope_parameters" if "rope_parameters" in fields.values else "rope_scaling")
    head_dim = fields.count("head_dim")
    turn = rope(fields, head_dim, may_truncate=(True, False))
    if turn.yarn:
        fields.only("initial_context_length", turn.yarn.original_context)
    everything = GroupedAttention(
        heads=fields.count("num_attention_heads"),
        kv_heads=fields.count("num_key_value_heads"),
        head_dim=head_dim,
        rope=turn,
        qk_norm=False,
        bias=True,
        out_bias=True,
        sinks=True,
    )
    windowed = dataclasses.replace(everything, window=fields.count("sliding_window"))
    kinds = {"sliding_attention": windowed, "full_attention": everything}
    types = fields.get("layer_types", list, "a list", [*kinds] * (layers // 2) + [*kinds][: layers % 2])
    if len(types) != layers or not all(isinstance(kind, str) and kind in kinds for kind in types):
        raise fields.fail("layer_types", f"{layers} entries of {' or '.join(kinds)}")
    alpha, limit = fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)
    experts = RoutedExperts(
        count=expert_count(fields, "num_local_experts", "num_experts"),
        per_token=expert_count(fields, "num_experts_per_tok", "experts_per_token"),
        intermediate=fields.count("intermediate_size"),
        router=Router(scoring="softmax", bias=True),
        bias=True,
        clamped=ClampedSwiglu(alpha=alpha, limit=limit),
    )
    return Variant(layers=tuple(Layer(kinds[kind], experts) for kind in types), **common(fields, declared, name))
