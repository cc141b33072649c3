"""config.json of Qwen's mixtures."""

from __future__ import annotations

from moeflux.models.config_fields import Fields
from moeflux.models.config_parts import (
    ARCHITECTURES,
    common,
    divided_head,
    expert_count,
    full_layers,
    layer_count,
    partial_rope,
    rope,
)
from moeflux.models.layers import (
    DenseMlp,
    FeedForward,
    GatedDelta,
    GroupedAttention,
    Layer,
    Mixer,
    Rope,
    RoutedExperts,
    Router,
    SharedExpert,
)
from moeflux.models.variants import Variant


def read_qwen(fields: Fields, declared: str, name: str) -> Variant:
    """qwen3_5_moe, qwen3_next (both with gated delta-net layers) and qwen3_moe (full attention only)."""
    hybrid = ARCHITECTURES[declared] != "qwen3_moe"
    layers = layer_count(fields)
    shared = common(fields, declared, name)
    if hybrid:
        mixers = hybrid_mixers(fields, layers)
    else:
        heads = fields.count("num_attention_heads")
        head_dim = fields.count("head_dim", shared["hidden_size"] // heads)
        mixers = [grouped(fields, heads, head_dim, rope(fields, head_dim))] * layers
        # These would add or leave out what this architecture does not have. Some checkpoints say so.
        for field, value in (("qkv_bias", False), ("use_qk_norm", True), ("shared_expert_intermediate_size", 0)):
            fields.only(field, value)
        fields.only("layer_types", None, ["full_attention"] * layers)
    fields.only("use_sliding_window", False)
    fields.seen.add("sliding_window")  # its size, were it used

    rest = qwen_feed_forwards(fields, declared, layers)
    return Variant(layers=tuple(map(Layer, mixers, rest)), **shared)


def read_qwen2(fields: Fields, declared: str, name: str) -> Variant:
    """qwen2_moe: full attention with biases, and a gated shared expert. mlp_only_layers, decoder_sparse_step and
    norm_topk_prob are fields that mlx-lm does not know."""
    layers = layer_count(fields)
    shared = common(fields, declared, name)
    heads = fields.count("num_attention_heads")
    head_dim = divided_head(fields, shared["hidden_size"], heads)
    mixer = GroupedAttention(
        heads=heads,
        kv_heads=fields.count("num_key_value_heads"),
        head_dim=head_dim,
        rope=rope(fields, head_dim),
        qk_norm=False,
        bias=True,
    )
    for field in ("tie_word_embeddings", "use_sliding_window"):
        fields.only(field, False)
    fields.only("qkv_bias", True)
    fields.only("layer_types", None, ["full_attention"] * layers)
    fields.seen.add("sliding_window")  # its size, were it used
    rest = qwen_feed_forwards(fields, declared, layers)
    return Variant(layers=tuple(Layer(mixer, part) for part in rest), **shared)


def grouped(fields: Fields, heads: int, head_dim: int, turn: Rope, *, gate: bool = False) -> GroupedAttention:
    kv_heads = fields.count("num_key_value_heads")
    return GroupedAttention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=turn, gate=gate)


def hybrid_mixers(fields: Fields, layers: int) -> list[Mixer]:
    fields.only("attn_output_gate", True)
    heads, head_dim = fields.count("num_attention_heads"), fields.count("head_dim")
    full = grouped(fields, heads, head_dim, partial_rope(fields, head_dim), gate=True)
    delta = gated_delta(fields)
    return [full if attends else delta for attends in full_layers(fields, layers)]


def gated_delta(fields: Fields, *, sigmoid: bool = False) -> GatedDelta:
    return GatedDelta(
        key_heads=fields.count("linear_num_key_heads"),
        value_heads=fields.count("linear_num_value_heads"),
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        taps=fields.count("linear_conv_kernel_dim"),
        sigmoid=sigmoid,
    )


def qwen_feed_forwards(fields: Fields, declared: str, layers: int) -> list[FeedForward]:
    shares = ARCHITECTURES[declared] != "qwen3_moe"
    if declared == "qwen3_next":
        fields.said("norm_topk_prob")
    # Models with a vision tower have no such switch: their weights are always normalised.
    always = declared not in ("qwen3_next", "qwen3_moe", "qwen2_moe")
    normalize = fields.flag("norm_topk_prob", always or declared == "qwen3_next")
    if always:
        fields.only("norm_topk_prob", True)
    experts = RoutedExperts(
        count=expert_count(fields, "num_experts", "num_local_experts"),
        per_token=fields.count("num_experts_per_tok"),
        intermediate=fields.count("moe_intermediate_size"),
        router=Router(scoring="softmax", normalize=normalize),
        shared=SharedExpert(intermediate=fields.count("shared_expert_intermediate_size"), gated=True)
        if shares
        else None,
    )
    dense = dense_qwen_layers(fields, layers)
    mlp = DenseMlp(intermediate=fields.count("intermediate_size", 0))
    return [mlp if layer in dense else experts for layer in range(layers)]


def dense_qwen_layers(fields: Fields, layers: int) -> set[int]:
    """Layers named in `mlp_only_layers`, and those that `decoder_sparse_step` leaves without experts."""
    step = fields.count("decoder_sparse_step", 1)
    named = set(fields.counts("mlp_only_layers"))
    if any(layer >= layers for layer in named):
        raise fields.fail("mlp_only_layers", f"layers below {layers}")
    return named | {i for i in range(layers) if (i + 1) % step != 0}
