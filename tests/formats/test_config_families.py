"""config.json of families whose parts others have too: Qwen2-MoE, Mixtral, OLMoE, MiniMax-M2, DeepSeek-V2; and
of Gemma 4."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moeflux import PRESETS, FormatError
from moeflux.models.config import variant_from_config
from moeflux.models.layers import DenseMlp, GroupedAttention, Index, LatentAttention
from support.published_configs import (
    DEEPSEEK_V2,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V32,
    GEMMA4_26B,
    GEMMA4_26B_TEXT,
    GLM_5,
    GLM_47_FLASH,
    KIMI_K25,
    MINIMAX_M2,
    MIXTRAL_8X7B,
    OLMOE_1B_7B,
    QWEN15_MOE,
)

PUBLISHED = {
    "MiniMax-M2": MINIMAX_M2,
    "Qwen1.5-MoE-A2.7B": QWEN15_MOE,
    "Mixtral-8x7B": MIXTRAL_8X7B,
    "OLMoE-1B-7B": OLMOE_1B_7B,
    "DeepSeek-V2": DEEPSEEK_V2,
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "gemma-4-26B-A4B": GEMMA4_26B,
}


OF_DEEPSEEK = {"GLM-4.7-Flash": GLM_47_FLASH, "Kimi-K2.5": KIMI_K25, "DeepSeek-V3.2": DEEPSEEK_V32, "GLM-5": GLM_5}


@pytest.mark.parametrize("name", PUBLISHED | OF_DEEPSEEK)
def test_published_configs_equal_the_presets(name: str) -> None:
    config = (PUBLISHED | OF_DEEPSEEK)[name]
    assert dataclasses.replace(variant_from_config(config), name=name) == PRESETS[name]


def test_what_the_families_are_made_of() -> None:
    variants = {name: variant_from_config(config) for name, config in PUBLISHED.items()}
    mixers = {name: variant.layers[0].mixer for name, variant in variants.items()}
    flavours = {
        name: (m.qk_norm, m.joint_norm, m.bias, m.rope.dim)
        for name, m in mixers.items()
        if isinstance(m, GroupedAttention)
    }
    assert flavours == {
        "MiniMax-M2": (True, True, False, 64),
        "Qwen1.5-MoE-A2.7B": (False, False, True, 128),
        "Mixtral-8x7B": (False, False, False, 128),
        "OLMoE-1B-7B": (True, True, False, 128),
        "gemma-4-26B-A4B": (True, False, False, 256),
    }
    routers = {name: variant.experts.router for name, variant in variants.items()}
    assert {name: (r.scoring, r.normalize, r.scaling, r.groups, r.groups_kept) for name, r in routers.items()} == {
        "MiniMax-M2": ("noaux_tc", True, 1.0, 1, 1),
        "Qwen1.5-MoE-A2.7B": ("softmax", False, 1.0, 0, 0),
        "Mixtral-8x7B": ("softmax", True, 1.0, 0, 0),
        "OLMoE-1B-7B": ("softmax", False, 1.0, 0, 0),
        "DeepSeek-V2": ("softmax", False, 16.0, 8, 3),
        "DeepSeek-V2-Lite": ("softmax", False, 1.0, 0, 0),
        "gemma-4-26B-A4B": ("softmax", True, 1.0, 0, 0),
    }
    assert mixers["DeepSeek-V2-Lite"].q_rank == 0 and mixers["DeepSeek-V2"].q_rank == 1536
    assert variants["DeepSeek-V2"].moe_layers == tuple(range(1, 60))


def test_the_index_of_deepseek_v32() -> None:
    """What its fields are, and which of them have one value. Other models of the kind do not say that they have one."""
    variant = variant_from_config(DEEPSEEK_V32)
    assert {layer.mixer.index for layer in variant.layers if isinstance(layer.mixer, LatentAttention)} == {
        Index(heads=64, dim=128, count=2048)
    }
    layers = ["indexed_attention"] * 61
    said = {"layer_types": layers, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58, "indexer_rope_interleave": False}
    assert variant_from_config(DEEPSEEK_V32 | said) == variant
    wrong = {
        "index_topk": 0, "index_n_heads": None, "index_head_dim": 32, "q_lora_rank": None, "mlp_bias": True,
        "indexer_rope_interleave": True, "layer_types": [*layers[1:], "full_attention"],
        "mlp_layer_types": ["sparse"] * 61, "index_topk_freq": 4,
    }  # fmt: skip
    for field, value in wrong.items():
        with pytest.raises(FormatError, match=field):
            variant_from_config(DEEPSEEK_V32 | {field: value})
    with pytest.raises(FormatError, match=r'"index_head_dim" .* an indexer'):
        variant_from_config(DEEPSEEK_V32 | {"model_type": "deepseek_v3"})


def test_the_index_of_glm_moe_dsa() -> None:
    """Its rope turns neighbours, whether the config says so or not. No layer takes what another one has selected."""
    variant = variant_from_config(GLM_5)
    unsaid = {name: value for name, value in GLM_5.items() if name != "indexer_rope_interleave"}
    every = {"indexer_types": ["full"] * 78, "index_topk_freq": 1, "index_skip_topk_offset": 2}
    assert variant_from_config(unsaid) == variant_from_config(GLM_5 | every) == variant
    shared = {"indexer_types": ["full"] * 77 + ["shared"], "index_topk_freq": 4, "index_topk_pattern": "FS" * 39}
    for field, value in (shared | {"indexer_rope_interleave": False}).items():
        with pytest.raises(FormatError, match=field):
            variant_from_config(GLM_5 | {field: value})


def test_layers_of_qwen2_moe_may_be_dense() -> None:
    variant = variant_from_config({**QWEN15_MOE, "mlp_only_layers": [0], "decoder_sparse_step": 2})
    assert variant.layers_with(DenseMlp)[:3] == (0, 2, 4)


MOVED = {key: value for key, value in MINIMAX_M2.items() if key not in ("rope_theta", "rotary_dim")}


@pytest.mark.parametrize(
    ("base", "same"),
    [
        # As transformers 5 writes it: rope parameters in one place.
        (MINIMAX_M2, {**MOVED, "rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}}),
        (MINIMAX_M2, {**MINIMAX_M2, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        (MINIMAX_M2, {**MINIMAX_M2, "num_experts": 256}),
        (MIXTRAL_8X7B, {**MIXTRAL_8X7B, "head_dim": 128}),
        (MIXTRAL_8X7B, {**MIXTRAL_8X7B, "head_dim": None, "router_jitter_noise": 0.0}),
        (QWEN15_MOE, {**QWEN15_MOE, "qkv_bias": True, "layer_types": ["full_attention"] * 24}),
        (QWEN15_MOE, {**QWEN15_MOE, "mlp_only_layers": None}),
        (DEEPSEEK_V2_LITE, {**DEEPSEEK_V2_LITE, "topk_method": None, "mlp_bias": False, "head_dim": 64}),
        (DEEPSEEK_V2_LITE, {**DEEPSEEK_V2_LITE, "n_group": None, "topk_group": None}),
    ],
)
def test_other_words_for_the_same(base: dict[str, Any], same: dict[str, Any]) -> None:
    assert variant_from_config(same) == variant_from_config(base)


GEMMA4_EACH = {
    **{k: v for k, v in GEMMA4_26B_TEXT.items() if k not in ("global_head_dim", "num_global_key_value_heads")},
    "per_layer_config": {str(i): {"head_dim": 512, "num_key_value_heads": 2} for i in range(5, 30, 6)},
}


def test_gemma4() -> None:
    """Its text part by itself; the sizes layer by layer, as transformers 5 writes them."""
    variant = variant_from_config(GEMMA4_26B)
    windowed, everything = variant.layers[4].mixer, variant.layers[5].mixer
    assert (windowed.window, windowed.kv_heads, windowed.rope.dim, windowed.rope.turning) == (1024, 8, 256, 0)
    assert (everything.window, everything.kv_heads, everything.rope.dim, everything.rope.turning) == (0, 2, 512, 64)
    assert (windowed.keys_as_values, everything.keys_as_values, everything.scale) == (False, True, 1.0)
    assert variant.embedding_scale**2 == pytest.approx(2816) and variant.eos_ids == (1, 106)
    alone = variant_from_config(GEMMA4_26B_TEXT)
    assert alone == dataclasses.replace(variant, name=alone.name, eos_ids=(1,))
    assert variant_from_config(GEMMA4_EACH) == alone
    both = {**GEMMA4_EACH, "global_head_dim": 512, "num_global_key_value_heads": 2}
    assert variant_from_config(both) == alone
    assert variant_from_config({**GEMMA4_26B_TEXT, "final_logit_softcapping": None}).logit_cap == 0
    own = variant_from_config({**GEMMA4_26B_TEXT, "attention_k_eq_v": False}).layers[5].mixer
    assert (own.kv_heads, own.keys_as_values) == (8, False)
    assert variant_from_config({**GEMMA4_26B, "vocab_size": 262144}) == variant


ROPES = GEMMA4_26B_TEXT["rope_parameters"]


def rope_of(kind: str, **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**ROPES, kind: {**ROPES[kind], **changes}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": False}, "enable_moe_block: expected True, found False"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input: expected 0, found 256"),
        ({"num_kv_shared_layers": 20}, "num_kv_shared_layers: expected 0, found 20"),
        ({"hidden_activation": "silu"}, "hidden_activation: expected 'gelu_pytorch_tanh', found 'silu'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: expected None or 'vision'"),
        ({"layer_types": ["sliding_attention"] * 30}, "layer_types: expected full_attention in the last layer"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected 30 entries of sliding_attention or"),
        ({"final_logit_softcapping": -1.0}, "logit_cap: expected 0 or a positive number, found -1"),
        ({"attention_bias": True}, "attention_bias: expected False, found True"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config: expected the same for each layer of full"),
        ({"per_layer_config": {"5": {"colour": 1}}}, 'per_layer_config: 5: field "colour" is not one'),
        (rope_of("full_attention", rope_type="yarn"), "rope_type: expected 'default' or 'proportional', found 'yarn'"),
        (rope_of("full_attention", factor=8.0), "factor: expected 1.0 or None, found 8.0"),
        (
            rope_of("full_attention", partial_rotary_factor=0.001),
            "expected a number with which a whole number of pairs",
        ),
        (rope_of("full_attention", partial_rotary_factor=0.3), "a number with which a whole number of pairs"),
        (rope_of("sliding_attention", partial_rotary_factor=0.5), "partial_rotary_factor: expected 1, or a number up"),
        (rope_of("sliding_attention", colour=1), 'rope_parameters: sliding_attention: field "colour" is not one'),
        ({"colour": "red"}, 'text_config: field "colour" is not one'),
    ],
)
def test_refused_of_gemma4(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        variant_from_config({**GEMMA4_26B, "text_config": {**GEMMA4_26B_TEXT, **changes}})


def test_what_gemma4_must_agree_with() -> None:
    with pytest.raises(FormatError, match="vocab_size: expected 262144, found 5"):
        variant_from_config({**GEMMA4_26B, "vocab_size": 5})
    with pytest.raises(FormatError, match=r"head_dim and num_key_value_heads \(256, 2\) as elsewhere"):
        variant_from_config({**GEMMA4_EACH, "global_head_dim": 256, "num_global_key_value_heads": 2})
    for field in ("hidden_size_per_layer_input", "num_kv_shared_layers", "layer_types", "final_logit_softcapping"):
        with pytest.raises(FormatError, match=f"{field}: expected a value, for implementations differ"):
            variant_from_config({key: value for key, value in GEMMA4_26B_TEXT.items() if key != field})


YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (MINIMAX_M2, {"attn_type_list": [0] * 62}, r"attn_type_list: expected None or \[1, 1"),
        (MINIMAX_M2, {"qk_norm_type": "per_head"}, "qk_norm_type: expected 'per_layer', found 'per_head'"),
        (MINIMAX_M2, {"use_qk_norm": False}, "use_qk_norm: expected True, found False"),
        (MINIMAX_M2, {"use_routing_bias": False}, "use_routing_bias: expected True, found False"),
        (MINIMAX_M2, {"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid', found 'softmax'"),
        (MINIMAX_M2, {"shared_intermediate_size": 1536}, "shared_intermediate_size: expected 0, found 1536"),
        (MINIMAX_M2, {"layernorm_mlp_beta": 2.0}, "layernorm_mlp_beta: expected 1.0, found 2.0"),
        (MINIMAX_M2, {"sliding_window": 512}, "sliding_window: expected None, found 512"),
        (MINIMAX_M2, {"rotary_dim": None}, "rotary_dim: expected how many channels of a head turn, found None"),
        (MINIMAX_M2, {"partial_rotary_factor": 0.25}, "rotary_dim: expected 32, which partial_rotary_factor comes to"),
        (MINIMAX_M2, {"rope_scaling": YARN}, "rope_scaling: expected none, for implementations differ about it"),
        (MINIMAX_M2, {"colour": "red"}, 'field "colour" is not one that moeflux knows'),
        (QWEN15_MOE, {"qkv_bias": False}, "qkv_bias: expected True, found False"),
        (QWEN15_MOE, {"head_dim": 64}, "head_dim: expected 128 or None, found 64"),
        (QWEN15_MOE, {"use_sliding_window": True}, "use_sliding_window: expected False, found True"),
        (QWEN15_MOE, {"tie_word_embeddings": True}, "tie_word_embeddings: expected False, found True"),
        (MIXTRAL_8X7B, {"sliding_window": 4096}, "sliding_window: expected None, found 4096"),
        (MIXTRAL_8X7B, {"rope_scaling": YARN}, "rope_scaling: expected none"),
        (MIXTRAL_8X7B, {"norm_topk_prob": True}, 'field "norm_topk_prob" is not one that moeflux knows'),
        (OLMOE_1B_7B, {"clip_qkv": 8.0}, "clip_qkv: expected None, found 8.0"),
        (OLMOE_1B_7B, {"attention_bias": True}, "attention_bias: expected False, found True"),
        (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, "topk_method: expected 'greedy' or 'group_limited_greedy'"),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob: expected False, found True"),
        (DEEPSEEK_V2, {"scoring_func": "sigmoid"}, "scoring_func: expected 'softmax', found 'sigmoid'"),
        (DEEPSEEK_V2, {"n_group": None}, "n_group: expected a whole number of at least 1, found None"),
        (DEEPSEEK_V2, {"n_group": 7}, r"router.groups: expected a divisor of count \(160\), found 7"),
        (DEEPSEEK_V2, {"moe_layer_freq": 2}, "moe_layer_freq: expected 1, found 2"),
    ],
)
def test_refused(base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        variant_from_config({**base, **changes})


@pytest.mark.parametrize(("base", "field"), [(OLMOE_1B_7B, "tie_word_embeddings"), (DEEPSEEK_V2, "n_shared_experts")])
def test_defaults_about_which_implementations_differ(base: dict[str, Any], field: str) -> None:
    with pytest.raises(FormatError, match=f"{field}: expected a value, for implementations differ .* found nothing"):
        variant_from_config({key: value for key, value in base.items() if key != field})


# ---- What a refusal says ----------------------------------------------------------------------------------------


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(FormatError) as caught:
        variant_from_config(config)
    return str(caught.value)


INDEXER = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}


def test_a_refusal_names_every_field_and_the_block_that_is_missing() -> None:
    said = refusal({**MIXTRAL_8X7B, **INDEXER, "colour": "red"})
    assert said.startswith(
        'config.json: field "colour" is not one that moeflux knows for this architecture, nor are "index_head_dim", '
        '"index_n_heads", "index_topk"; moeflux does not have what the model needs: an indexer that picks the rows to '
        "attend to (index_head_dim, index_n_heads, index_topk); supported: "
    )


def test_a_refused_family_says_which_block_is_missing() -> None:
    said = refusal({**DEEPSEEK_V2, **INDEXER, "model_type": "deepseek_v9"})
    assert "model_type: expected qwen3_5_moe or " in said
    assert said.endswith(
        "found 'deepseek_v9'; moeflux does not have what the model needs: an indexer that picks the rows to attend to "
        "(index_head_dim, index_n_heads, index_topk)"
    )
    nested = {"model_type": "seer", "text_config": {"attn_logit_softcapping": 30.0, "hc_mult": 4}}
    assert refusal(nested).endswith(
        "a soft cap of attention's scores (attn_logit_softcapping); residual streams with gated mixing "
        "(hyper-connections) (hc_mult)"
    )
    assert refusal({"model_type": "llama", "colour": 1}).endswith("found 'llama'")


def test_a_refusal_stays_short() -> None:
    assert len(refusal({**MIXTRAL_8X7B, **{f"{'x' * 1000}{i}": 1 for i in range(1000)}})) < 4000
