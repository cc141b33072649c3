"""config.json of gemma4's mixture: its text part."""

from __future__ import annotations

import math
from typing import Any

from moeflux.models.config_fields import REQUIRED, Fields
from moeflux.models.config_parts import common, layer_count
from moeflux.models.layers import GroupedAttention, Layer, Rope, RoutedExperts, Router, SharedExpert
from moeflux.models.variants import Variant

KINDS = ("sliding_attention", "full_attention")
WITHOUT_MEANING = ("use_double_wide_mlp", "vocab_size_per_layer_input")
"""To a model whose layers share no keys, and have no embedding of their own."""


def read_gemma4(fields: Fields, declared: str, name: str) -> Variant:
    """gemma4: layers that see a window and layers that see everything, with heads of other sizes and another rope. A
    dense part beside the experts of every layer, and norms before and after each."""
    fields.said("hidden_size_per_layer_input", "num_kv_shared_layers", "layer_types", "final_logit_softcapping")
    fields.only("enable_moe_block", True)
    fields.only("hidden_size_per_layer_input", 0)
    fields.only("num_kv_shared_layers", 0)
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    fields.only("use_bidirectional_attention", None, "vision")
    fields.seen |= set(WITHOUT_MEANING)
    types = layer_types(fields)
    mixers = {kind: mixer(fields, kind, types) for kind in KINDS}
    experts = RoutedExperts(
        count=fields.count("num_experts"),
        per_token=fields.count("top_k_experts"),
        intermediate=fields.count("moe_intermediate_size"),
        router=Router(scoring="softmax", factors=True),
        shared=SharedExpert(intermediate=fields.count("intermediate_size")),
        geglu=True,
        framed=True,
    )
    rest = common(fields, declared, name)
    return Variant(
        layers=tuple(Layer(mixers[kind], experts) for kind in types),
        embedding_scale=math.sqrt(rest["hidden_size"]),
        logit_cap=fields.number("final_logit_softcapping", 0.0),
        **{**rest, "tied_embeddings": fields.flag("tie_word_embeddings", True)},
    )


def layer_types(fields: Fields) -> list[str]:
    layers = layer_count(fields)
    types: list[Any] = fields.get("layer_types", list, "a list", REQUIRED)
    if len(types) != layers or not all(isinstance(kind, str) and kind in KINDS for kind in types):
        raise fields.fail("layer_types", f"{layers} entries of {' or '.join(KINDS)}")
    if types[-1] != "full_attention":
        raise fields.fail("layer_types", "full_attention in the last layer, for implementations differ about others")
    return types


def mixer(fields: Fields, kind: str, types: list[str]) -> GroupedAttention:
    everything = kind == "full_attention"
    shares_keys = fields.flag("attention_k_eq_v", False) and everything
    head_dim, kv_heads = fields.count("head_dim", 256), fields.count("num_key_value_heads")
    if everything:
        head_dim, kv_heads = of_full_layers(fields, types, shares_keys, kv_heads)
    return GroupedAttention(
        heads=fields.count("num_attention_heads"),
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=turns(fields, kind, head_dim),
        window=0 if everything else fields.count("sliding_window"),
        scale=1.0,
        keys_as_values=shares_keys,
        value_norm=True,
        out_norm=True,
    )


def of_full_layers(fields: Fields, types: list[str], shares_keys: bool, kv_heads: int) -> tuple[int, int]:
    """Size and number of the key heads in layers that see everything. transformers writes them for each such layer by
    itself, and no longer for all."""
    head_dim = fields.count("global_head_dim", None)
    own_heads = fields.count("num_global_key_value_heads", None)
    said = (head_dim or 512, (own_heads if shares_keys else None) or kv_heads)
    each: dict[str, Any] = fields.get("per_layer_config", dict, "an object", {})
    if not each:
        return said
    full = {str(i) for i, kind in enumerate(types) if kind == "full_attention"}
    found = {layer: Fields(values, f"{fields.where}: per_layer_config: {layer}") for layer, values in each.items()}
    sizes = {(one.count("head_dim", said[0]), one.count("num_key_value_heads", kv_heads)) for one in found.values()}
    for one in found.values():
        one.finish(frozenset())
    if {layer.lstrip("0") or "0" for layer in each} != full or len(sizes) != 1:
        raise fields.fail("per_layer_config", "the same for each layer of full_attention, and nothing for others")
    if (head_dim is not None or own_heads is not None) and sizes != {said}:
        raise fields.fail("per_layer_config", f"head_dim and num_key_value_heads {said} as elsewhere in this file")
    return sizes.pop()


def turns(fields: Fields, kind: str, head_dim: int) -> Rope:
    """Proportional: of the pairs of a whole head, only the first turn."""
    ropes = Fields(fields.get("rope_parameters", dict, "an object", REQUIRED), f"{fields.where}: rope_parameters")
    own = Fields(ropes.get(kind, dict, "an object", REQUIRED), f"{ropes.where}: {kind}")
    for other in KINDS:
        ropes.seen.add(other)
    ropes.finish(frozenset())
    own.only("rope_type", "default", "proportional")
    own.only("factor", 1.0, None)
    part = own.number("partial_rotary_factor", 1.0)
    if not 0 < part <= 1 or (part != 1 and own.values.get("rope_type") != "proportional"):
        raise own.fail("partial_rotary_factor", "1, or a number up to that and above 0 where rope_type is proportional")
    turning = int(part * head_dim // 2)
    if turning < 1 or part * head_dim != 2 * turning:
        raise own.fail("partial_rotary_factor", "a number with which a whole number of pairs turns")
    made = Rope(dim=head_dim, theta=own.number("rope_theta"), turning=0 if turning == head_dim // 2 else turning)
    own.finish(frozenset())
    return made
