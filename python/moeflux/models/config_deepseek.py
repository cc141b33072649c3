"""config.json of DeepSeek's mixtures, and of those of Kimi and GLM, which have their parts."""

from __future__ import annotations

import dataclasses

from moeflux.models.config_fields import Fields
from moeflux.models.config_parts import common, expert_count, layer_count, partial_rope, rope, unscaled
from moeflux.models.layers import (
    DenseMlp,
    FeedForward,
    GroupedAttention,
    Index,
    LatentAttention,
    Layer,
    RoutedExperts,
    Router,
    SharedExpert,
)
from moeflux.models.variants import Variant


def read_deepseek(fields: Fields, declared: str, name: str) -> Variant:
    """deepseek_v3, deepseek_v32, glm_moe_dsa, kimi_k2, and glm4_moe_lite, whose config may leave out more."""
    lite = declared == "glm4_moe_lite"
    layers = layer_count(fields)
    for field, value in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid"), ("rope_interleave", True)):
        fields.only(field, value)
    if not lite:
        fields.said("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts")
    mixer = latent(fields, lite)
    if declared in ("deepseek_v32", "glm_moe_dsa"):
        mixer = indexed(fields, mixer, layers, interleaved=declared == "glm_moe_dsa")
    rest = deepseek_feed_forwards(fields, layers, lite)
    return Variant(layers=tuple(Layer(mixer, part) for part in rest), **common(fields, declared, name))


def latent(fields: Fields, lite: bool) -> LatentAttention:
    q_rank = 0 if "q_lora_rank" in fields.values else 768 if lite else 1536
    # In head_dim, some tools write the size of the rope part and some that of the whole head. num_key_value_heads does
    # not matter: every head has its own key.
    fields.seen |= {"head_dim", "num_key_value_heads"}
    return LatentAttention(
        heads=fields.count("num_attention_heads"),
        q_rank=fields.count("q_lora_rank", q_rank, minimum=0),
        kv_rank=fields.count("kv_lora_rank"),
        nope_dim=fields.count("qk_nope_head_dim"),
        v_dim=fields.count("v_head_dim"),
        rope=rope(fields, fields.count("qk_rope_head_dim"), heeds_factor=lite),
    )


def indexed(fields: Fields, mixer: LatentAttention, layers: int, interleaved: bool) -> LatentAttention:
    """An index selects the rows that a row attends to, in every layer. The rope of its keys has split halves in
    deepseek_v32 and neighbours in glm_moe_dsa, and transformers does not ask the field. Of the latter kind are models
    where a layer takes what the index of another one has selected."""
    fields.only("indexer_rope_interleave", interleaved)
    if interleaved:
        fields.only("indexer_types", ["full"] * layers, None)
        fields.only("index_topk_freq", 1)
        fields.only("index_topk_pattern", None)
        fields.seen |= {"index_skip_topk_offset", "index_share_for_mtp_iteration"}  # of no meaning then
    fields.only("layer_types", ["indexed_attention"] * layers, None)
    fields.only("mlp_bias", False)
    dense = min(fields.count("first_k_dense_replace", minimum=0), layers)
    fields.only("mlp_layer_types", ["dense"] * dense + ["sparse"] * (layers - dense), None)
    if not mixer.q_rank:
        raise fields.fail("q_lora_rank", "a number, for the index makes its queries of the compressed ones")
    index = Index(
        heads=fields.count("index_n_heads"),
        dim=fields.count("index_head_dim"),
        count=fields.count("index_topk"),
        interleaved=interleaved,
    )
    if index.dim < mixer.rope.dim:
        raise fields.fail("index_head_dim", f"at least {mixer.rope.dim}, which is qk_rope_head_dim")
    return dataclasses.replace(mixer, index=index)


def read_deepseek_v2(fields: Fields, declared: str, name: str) -> Variant:
    """deepseek_v2: latent attention as in deepseek_v3, and a softmax router that may keep to the best groups. Of
    norm_topk_prob, DeepSeek's own code makes more than the others."""
    layers = layer_count(fields)
    fields.only("scoring_func", "softmax")
    for field in ("norm_topk_prob", "mlp_bias", "tie_word_embeddings"):
        fields.only(field, False)
    fields.said("n_shared_experts")
    mixer = latent(fields, lite=False)
    dense = dense_first(fields, layers, lite=False)
    intermediate, shared = fields.count("moe_intermediate_size"), fields.count("n_shared_experts", 0, minimum=0)
    experts = RoutedExperts(
        count=expert_count(fields, "n_routed_experts", "num_experts", "num_local_experts"),
        per_token=fields.count("num_experts_per_tok"),
        intermediate=intermediate,
        router=greedy_router(fields),
        shared=SharedExpert(intermediate=shared * intermediate) if shared else None,
    )
    mlp = DenseMlp(intermediate=fields.count("intermediate_size", 0))
    rest = [mlp] * dense + [experts] * (layers - dense)
    return Variant(layers=tuple(Layer(mixer, part) for part in rest), **common(fields, declared, name))


def greedy_router(fields: Fields) -> Router:
    fields.only("topk_method", "greedy", "group_limited_greedy", None)
    groups = kept = 0
    if fields.values.get("topk_method") == "group_limited_greedy":
        groups, kept = fields.count("n_group"), fields.count("topk_group")
    fields.seen |= {"n_group", "topk_group"}  # of no meaning to the other method
    return Router(
        scoring="softmax",
        normalize=False,
        scaling=fields.number("routed_scaling_factor", 1.0),
        groups=groups,
        groups_kept=kept,
    )


def read_glm(fields: Fields, declared: str, name: str) -> Variant:
    """glm4_moe: grouped attention, and feed-forward parts as in deepseek_v3. Its biases are those of q, k and v alone,
    unlike those that other architectures call attention_bias. The text part of glm4v_moe is the same without norms of
    heads, and its configs need not say that."""
    layers = layer_count(fields)
    for field, value in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid"), ("tie_word_embeddings", False)):
        fields.only(field, value)
    fields.said("attention_bias", "head_dim", "norm_topk_prob")
    if declared == "glm4_moe":
        fields.said("use_qk_norm")
    else:
        fields.only("use_qk_norm", False)
    fields.said("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts")
    head_dim = fields.count("head_dim")
    turn = unscaled(fields, partial_rope(fields, head_dim))
    mixer = GroupedAttention(
        heads=fields.count("num_attention_heads"),
        kv_heads=fields.count("num_key_value_heads"),
        head_dim=head_dim,
        rope=turn,
        qk_norm=fields.flag("use_qk_norm", False),
        bias=fields.flag("attention_bias", False),
    )
    rest = deepseek_feed_forwards(fields, layers, lite=False)
    return Variant(layers=tuple(Layer(mixer, part) for part in rest), **common(fields, declared, name))


def deepseek_feed_forwards(fields: Fields, layers: int, lite: bool) -> list[FeedForward]:
    dense = dense_first(fields, layers, lite)
    rest: list[FeedForward] = [DenseMlp(intermediate=fields.count("intermediate_size", 0))] * dense
    rest += [deepseek_experts(fields, lite)] * (layers - dense)
    fields.seen.add("intermediate_size")
    return rest


def dense_first(fields: Fields, layers: int, lite: bool) -> int:
    """How many dense layers come before those with experts. For glm4_moe_lite, transformers reads only
    `mlp_layer_types` and mlx-lm only `first_k_dense_replace`. An absent field means one dense layer, and the two must
    agree."""
    dense = min(fields.count("first_k_dense_replace", 1 if lite else 0, minimum=0), layers)
    fields.only("moe_layer_freq", 1)  # transformers ignores any other value
    if lite:
        one = ["dense", *["sparse"] * (layers - 1)]
        if fields.get("mlp_layer_types", list, "a list", one) != ["dense"] * dense + ["sparse"] * (layers - dense):
            raise fields.fail(
                "mlp_layer_types", f"{dense} dense layers, as first_k_dense_replace says, then sparse ones"
            )
    return dense


def deepseek_experts(fields: Fields, lite: bool) -> RoutedExperts:
    per_token, intermediate = fields.count("num_experts_per_tok"), fields.count("moe_intermediate_size")
    normalize = fields.flag("norm_topk_prob", True)
    if per_token == 1 and normalize:
        raise fields.fail("norm_topk_prob", "false with one expert a token, for implementations differ about true")
    shared = fields.count("n_shared_experts", 1 if lite else 0, minimum=0)
    return RoutedExperts(
        count=expert_count(fields, "n_routed_experts", "num_experts", "num_local_experts"),
        per_token=per_token,
        intermediate=intermediate,
        router=Router(
            scoring="noaux_tc",
            normalize=normalize,
            scaling=fields.number("routed_scaling_factor"),
            groups=fields.count("n_group", 1),
            groups_kept=fields.count("topk_group", 1),
        ),
        shared=SharedExpert(intermediate=shared * intermediate) if shared else None,
    )
