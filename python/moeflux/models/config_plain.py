"""config.json of mixtures whose every layer has full attention and experts alone: Mixtral, OLMoE, MiniMax-M2."""

from __future__ import annotations

from typing import Any

from moeflux.models.config_fields import Fields
from moeflux.models.config_parts import (
    common,
    divided_head,
    expert_count,
    finished,
    layer_count,
    rope,
    rope_parameters,
    unscaled,
)
from moeflux.models.layers import GroupedAttention, Layer, Rope, RoutedExperts, Router
from moeflux.models.variants import Variant


def read_mixtral(fields: Fields, declared: str, name: str) -> Variant:
    shared = common(fields, declared, name)
    fields.only("sliding_window", None)  # mlx-lm does not heed it
    mixer = attention(fields, shared["hidden_size"], qk_norm=False)
    return plain(fields, mixer, Router(scoring="softmax"), shared)


def read_olmoe(fields: Fields, declared: str, name: str) -> Variant:
    shared = common(fields, declared, name)
    fields.said("tie_word_embeddings")
    fields.only("clip_qkv", None)
    fields.only("mlp_bias", False)
    mixer = attention(fields, shared["hidden_size"], qk_norm=True)
    router = Router(scoring="softmax", normalize=fields.flag("norm_topk_prob", False))
    return plain(fields, mixer, router, shared)


def attention(fields: Fields, hidden: int, *, qk_norm: bool) -> GroupedAttention:
    heads = fields.count("num_attention_heads")
    head_dim = divided_head(fields, hidden, heads)
    return GroupedAttention(
        heads=heads,
        kv_heads=fields.count("num_key_value_heads"),
        head_dim=head_dim,
        rope=unscaled(fields, rope(fields, head_dim)),
        qk_norm=qk_norm,
        joint_norm=qk_norm,
    )


def read_minimax(fields: Fields, declared: str, name: str) -> Variant:
    """minimax_m2. Some of its fields are those of an older model with other kinds of layers, which it does not have."""
    layers = layer_count(fields)
    for field in ("use_qk_norm", "use_routing_bias"):
        fields.only(field, True)
    for field, value in (("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer"), ("sliding_window", None)):
        fields.only(field, value)
    for kind in ("full_attention", "linear_attention", "mlp"):
        fields.only(f"layernorm_{kind}_beta", 1.0)
    fields.only("shared_intermediate_size", 0)
    fields.only("attn_type_list", None, [1] * layers)
    fields.only("layer_types", None, ["full_attention"] * layers)
    fields.seen |= {"mlp_intermediate_size", "shared_moe_mode"}  # of parts that no layer has
    fields.seen |= {"use_mtp", "num_mtp_modules", "mtp_transformer_layers"}
    head_dim = fields.count("head_dim")
    mixer = GroupedAttention(
        heads=fields.count("num_attention_heads"),
        kv_heads=fields.count("num_key_value_heads"),
        head_dim=head_dim,
        rope=minimax_rope(fields, head_dim),
        joint_norm=True,
    )
    router = Router(scoring="noaux_tc", groups=1, groups_kept=1)
    return plain(fields, mixer, router, common(fields, declared, name))


def minimax_rope(fields: Fields, head_dim: int) -> Rope:
    """How much of each head turns is said as a number of channels, as a part, or as both."""
    parameters, yarn = rope_parameters(fields)
    channels = fields.count("rotary_dim", None)
    part = parameters.number("partial_rotary_factor", None)
    if channels is None and part is None:
        raise fields.fail("rotary_dim", "how many channels of a head turn")
    dim: int = int(head_dim * part) if channels is None else channels
    if part is not None and int(head_dim * part) != dim:
        raise fields.fail("rotary_dim", f"{int(head_dim * part)}, which partial_rotary_factor comes to")
    return unscaled(fields, finished(parameters, dim, yarn))


def plain(fields: Fields, mixer: GroupedAttention, router: Router, shared: dict[str, Any]) -> Variant:
    """`layers` that are all alike."""
    experts = RoutedExperts(
        count=expert_count(fields, "num_local_experts", "num_experts"),
        per_token=fields.count("num_experts_per_tok"),
        intermediate=fields.count("intermediate_size"),
        router=router,
    )
    return Variant(layers=(Layer(mixer, experts),) * layer_count(fields), **shared)
