"""config.json of every supported architecture -> Variant, and everything that must be refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from moeflux import PRESETS, FormatError, Variant, oracle
from moeflux.models.config import variant_from_config
from moeflux.models.layers import ClampedSwiglu, GatedDelta, GroupedAttention
from support.flat import words
from support.published_configs import (
    DEEPSEEK,
    GLM_45_AIR,
    GLM_45V,
    GLM_47,
    GLM_47_FLASH,
    GPT_OSS_20B,
    GPT_OSS_120B,
    KIMI_K25,
    KIMI_K25_TEXT,
    KIMI_VL,
    QWEN3_CODER,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_VL,
    QWEN35,
    QWEN35_TEXT,
)


def shape(variant: Variant) -> Variant:
    """The variant without what a config does not hold or a preset does not take from it."""
    return dataclasses.replace(
        variant, name="", max_context=1, eos_ids=(), bos_id=-1, think_start_id=-1, think_end_id=-1
    )


def test_published_configs_equal_the_presets() -> None:
    assert shape(variant_from_config(QWEN35)) == shape(PRESETS["Qwen3.6-35B-A3B"])
    assert shape(variant_from_config(DEEPSEEK)) == shape(PRESETS["Cogito-V2-671B"])
    published = {
        "GLM-4.5-Air": GLM_45_AIR,
        "GLM-4.7": GLM_47,
        "gpt-oss-20b": GPT_OSS_20B,
        "gpt-oss-120b": GPT_OSS_120B,
    }
    for name, config in published.items():
        assert dataclasses.replace(variant_from_config(config), name=name) == PRESETS[name]


def test_text_model_alone() -> None:
    alone = variant_from_config(QWEN35_TEXT)
    assert shape(alone) == shape(variant_from_config(QWEN35))
    assert alone.eos_ids == (248044,)
    assert alone.max_context == 262144


def test_qwen3_next() -> None:
    variant = variant_from_config(QWEN3_NEXT)
    assert variant.layers_with(GroupedAttention)[:2] == (3, 7) and variant.num_layers == 48
    assert (words(variant).rotary_dim, words(variant).shared_expert, words(variant).attention_gate) == (
        64,
        "gated",
        True,
    )
    assert (variant.bos_id, variant.eos_ids) == (151643, (151645,))


def test_qwen3_moe() -> None:
    variant = variant_from_config(QWEN3_MOE)
    assert variant.tied_embeddings and words(variant).normalize_topk and not words(variant).attention_gate
    assert (words(variant).rotary_dim, words(variant).shared_expert, variant.layers_with(GatedDelta)) == (
        128,
        "none",
        (),
    )
    assert variant.eos_ids == (151645, 151643)
    assert not words(variant_from_config({**QWEN3_MOE, "norm_topk_prob": False})).normalize_topk


def test_qwen3_moe_with_dense_layers() -> None:
    variant = variant_from_config({**QWEN3_MOE, "mlp_only_layers": [0], "decoder_sparse_step": 2})
    assert words(variant).mlp_kinds[:4] == ["dense", "moe", "dense", "moe"]
    assert words(variant).dense_intermediate == 6144


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (QWEN3_MOE, {key: QWEN3_CODER[key] for key in ("qkv_bias", "shared_expert_intermediate_size", "use_qk_norm")}),
        (QWEN3_MOE, {"sliding_window": 4096}),
        (QWEN3_MOE, {"num_local_experts": 128}),
        (QWEN3_MOE, {"layer_types": ["full_attention"] * 48}),
        (QWEN3_MOE, {"add_cross_attention": False, "tie_encoder_decoder": False}),
        (QWEN3_MOE, {"_attn_implementation_autoset": True, "attn_implementation": "sdpa"}),
        (DEEPSEEK, {"num_local_experts": 256}),
    ],
)
def test_fields_that_change_nothing(base: dict[str, Any], changes: dict[str, Any]) -> None:
    assert variant_from_config({**base, **changes}) == variant_from_config(base)


def test_qwen3_coder() -> None:
    variant = variant_from_config(QWEN3_CODER)
    assert (variant.max_context, words(variant).rope_theta, words(variant).shared_expert) == (262144, 1e7, "none")


@pytest.mark.parametrize("unsaid", [{}, {"head_dim": None}])
def test_a_head_is_a_part_of_the_hidden_state_unless_it_is_said(unsaid: dict[str, Any]) -> None:
    config = {key: value for key, value in QWEN3_MOE.items() if key != "head_dim"}
    assert words(variant_from_config({**config, **unsaid})).head_dim == 2048 // 32


def test_experts_under_either_name() -> None:
    config = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}
    assert words(variant_from_config({**config, "num_local_experts": 64})).num_experts == 64


def test_dimensions_are_the_configs_own() -> None:
    small = {"hidden_size": 384, "head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 96}
    said = words(variant_from_config({**QWEN35_TEXT, **small, "num_attention_heads": 6}))
    assert (
        said.head_dim,
        said.rotary_dim,
        said.linear_key_dim,
        said.linear_value_dim,
    ) == (64, 16, 64, 96)


def test_rope_of_a_newer_transformers() -> None:
    moved = {key: value for key, value in DEEPSEEK.items() if key not in ("rope_theta", "rope_scaling")}
    parameters = {**DEEPSEEK["rope_scaling"], "rope_theta": 10000.0, "rope_type": "yarn"}
    del parameters["type"]
    assert shape(variant_from_config({**moved, "rope_parameters": parameters})) == shape(variant_from_config(DEEPSEEK))
    assert words(variant_from_config({**DEEPSEEK, "rope_parameters": parameters})).yarn_factor == 40.0


def test_kimi_shaped() -> None:
    kimi = {
        **DEEPSEEK,
        "model_type": "kimi_k2",
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
    }
    variant = variant_from_config(kimi)
    assert (variant.model_type, words(variant).num_groups, words(variant).rope, variant.experts.count) == (
        "deepseek_v3",
        1,
        "vanilla",
        384,
    )
    assert oracle.latent_scale(192, variant.layers[0].mixer.rope) == pytest.approx(192**-0.5)
    assert variant.moe_layers[0] == 1


def test_query_compression() -> None:
    assert words(variant_from_config({**DEEPSEEK, "q_lora_rank": None})).q_lora_rank == 0
    unsaid = {key: value for key, value in DEEPSEEK.items() if key != "q_lora_rank"}
    assert words(variant_from_config(unsaid)).q_lora_rank == 1536


def test_yarn_on_the_qwen_family() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    said = words(variant_from_config({**QWEN3_MOE, "rope_scaling": scaling}))
    assert (
        said.rope,
        said.yarn_beta_fast,
        said.yarn_beta_slow,
        said.yarn_mscale,
    ) == ("yarn", 32, 1, 0)


# ---- The same models by other names -----------------------------------------------------------------------------


def test_glm4_moe() -> None:
    air, large = variant_from_config(GLM_45_AIR), variant_from_config(GLM_47)
    mixers = [{layer.mixer for layer in variant.layers} for variant in (air, large)]
    assert [[(m.qk_norm, m.bias, m.gate, m.rope.dim) for m in each] for each in mixers] == [
        [(False, True, False, 64)],
        [(True, True, False, 64)],
    ]
    assert (air.moe_layers, large.moe_layers) == (tuple(range(1, 46)), tuple(range(3, 92)))
    unbiased = variant_from_config({**GLM_47, "attention_bias": False})
    assert not unbiased.layers[0].mixer.bias and "layer_kinds" in unbiased.identity()


def test_glm4_moe_as_transformers_5_writes_it() -> None:
    """Rope parameters in one place, and the number of its next-token-prediction layers by another name."""
    moved = {key: value for key, value in GLM_45_AIR.items() if not key.startswith(("rope", "partial", "num_next"))}
    parameters = {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5}
    again = variant_from_config({**moved, "rope_parameters": parameters, "num_mtp_layers": 1})
    assert again == variant_from_config(GLM_45_AIR)


def test_gpt_oss() -> None:
    variant = variant_from_config(GPT_OSS_20B)
    assert [layer.mixer.window for layer in variant.layers[:3]] == [128, 0, 128]
    mixer, experts = variant.layers[1].mixer, variant.experts
    assert (mixer.bias, mixer.out_bias, mixer.sinks, mixer.qk_norm, mixer.gate) == (True, True, True, False, False)
    assert (experts.bias, experts.router.bias, experts.clamped) == (True, True, ClampedSwiglu(alpha=1.702, limit=7.0))
    assert oracle.rope_magnitude(mixer.rope) == pytest.approx(0.1 * math.log(32) + 1)
    assert not mixer.rope.yarn.truncate and "layer_kinds" not in variant.identity()
    unsaid = {key: value for key, value in GPT_OSS_20B.items() if key not in ("layer_types", "swiglu_limit")}
    assert variant_from_config(unsaid) == variant
    assert variant_from_config({**GPT_OSS_20B, "swiglu_alpha": 1.5}).experts.clamped.alpha == 1.5
    whole = {**GPT_OSS_20B, "rope_scaling": {**GPT_OSS_20B["rope_scaling"], "truncate": True}}
    assert variant_from_config(whole).layers[0].mixer.rope.yarn.truncate


def test_gpt_oss_as_transformers_5_writes_it() -> None:
    """Rope parameters in one place, and every number once."""
    gone = ("rope_theta", "rope_scaling", "experts_per_token", "initial_context_length")
    moved = {key: value for key, value in GPT_OSS_120B.items() if key not in gone}
    parameters = {**GPT_OSS_120B["rope_scaling"], "rope_theta": 150000}
    again = variant_from_config({**moved, "rope_parameters": parameters, "swiglu_alpha": 1.702, "bos_token_id": None})
    assert again == variant_from_config(GPT_OSS_120B)


def test_glm_is_deepseek() -> None:
    """What it says of itself makes a deepseek_v3, which says more."""
    same = {
        **GLM_47_FLASH, "model_type": "deepseek_v3", "moe_layer_freq": 1, "scoring_func": "sigmoid",
        "rope_interleave": True,
    }  # fmt: skip
    variant = variant_from_config(GLM_47_FLASH)
    assert shape(variant) == shape(variant_from_config(same))
    assert (variant.model_type, variant.moe_layers[0], words(variant).v_head_dim, words(variant).head_dim) == (
        "deepseek_v3", 1, 256, 256,
    )  # fmt: skip
    assert variant.eos_ids == (154820, 154827, 154829)


@pytest.mark.parametrize(
    "unsaid", ["n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "q_lora_rank", "norm_topk_prob"]
)
def test_defaults_of_glm_are_agreed(unsaid: str) -> None:
    config = {key: value for key, value in GLM_47_FLASH.items() if key != unsaid}
    assert variant_from_config(config) == variant_from_config(GLM_47_FLASH)


def test_layers_of_glm_under_their_newer_name() -> None:
    types = ["dense", *["sparse"] * 46]
    assert variant_from_config({**GLM_47_FLASH, "mlp_layer_types": types}) == variant_from_config(GLM_47_FLASH)


def test_kimi_k25_is_kimi_k2() -> None:
    text = {key: value for key, value in KIMI_K25_TEXT.items() if key not in ("add_cross_attention", "_name_or_path")}
    assert shape(variant_from_config(KIMI_K25)) == shape(variant_from_config(text))
    variant = variant_from_config(KIMI_K25)
    assert (variant.model_type, variant.experts.count, words(variant).yarn_factor) == ("deepseek_v3", 384, 64.0)
    assert (variant.bos_id, variant.eos_ids, variant.max_context) == (163584, (163585,), 262144)


def test_qwen3_vl_is_qwen3_moe() -> None:
    variant = variant_from_config(QWEN3_VL)
    same = {**QWEN3_MOE, "rope_theta": 5000000, "tie_word_embeddings": False}
    assert shape(variant) == shape(variant_from_config(same))
    assert (variant.model_type, words(variant).rope, words(variant).rotary_dim) == ("qwen3_moe", "vanilla", 128)
    assert (variant.bos_id, variant.eos_ids, variant.max_context) == (151643, (151645,), 262144)


def test_glm_45v_is_glm_45_air() -> None:
    variant = variant_from_config(GLM_45V)
    assert shape(variant) == shape(variant_from_config({**GLM_45_AIR, "rope_theta": 10000.0}))
    assert (variant.eos_ids, variant.max_context) == ((151329, 151336, 151338), 65536)
    newer = {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"}
    text = {name: value for name, value in GLM_45V["text_config"].items() if not name.startswith("rope")}
    text |= {"rope_parameters": newer, "use_qk_norm": False, "bos_token_id": None}
    assert variant_from_config({**GLM_45V, "text_config": text}) == variant
    alone = {name: value for name, value in text.items() if not name.startswith(("image", "video"))}
    assert shape(variant_from_config(alone)) == shape(variant)


def test_kimi_vl_is_deepseek_v3() -> None:
    variant = variant_from_config(KIMI_VL)
    assert shape(variant) == shape(variant_from_config(KIMI_VL["text_config"]))
    assert (variant.model_type, variant.experts.count, words(variant).q_lora_rank) == ("deepseek_v3", 64, 0)
    assert (variant.bos_id, variant.eos_ids, variant.max_context) == (163584, (163585,), 131072)


def without_text(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "text_config"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (without_text(QWEN3_VL), "text_config: expected an object, found nothing"),
        (without_text(KIMI_K25), "text_config: expected an object, found nothing"),
        (without_text(KIMI_VL), "text_config: expected an object, found nothing"),
        (without_text(GLM_45V), "text_config: expected an object, found nothing"),
        ({**GLM_45V, "text_config": GLM_45_AIR}, "text_config: model_type: expected 'glm4v_moe_text'"),
        (
            {**GLM_45V, "text_config": {**GLM_45V["text_config"], "use_qk_norm": True}},
            "use_qk_norm: expected False, found True",
        ),
        (
            {**KIMI_VL, "text_config": {k: v for k, v in KIMI_VL["text_config"].items() if k != "tie_word_embeddings"}},
            "text_config: tie_word_embeddings: expected a value",
        ),
        ({**QWEN3_NEXT, "text_config": {}}, "text_config: expected none in a qwen3_next model"),
        ({**QWEN3_VL, "text_config": QWEN35_TEXT}, "text_config: model_type: expected 'qwen3_vl_moe_text'"),
        ({**KIMI_K25, "surprise": 1}, 'config.json: field "surprise" is not one that moeflux knows'),
        (
            {**KIMI_K25, "text_config": {**KIMI_K25_TEXT, "add_cross_attention": True}},
            "add_cross_attention: expected F",
        ),
        ({**KIMI_K25, "tie_word_embeddings": True}, "tie_word_embeddings: expected True, found False"),
        (
            {key: value for key, value in KIMI_K25.items() if key != "tie_word_embeddings"},
            "tie_word_embeddings: expected a value, for implementations differ",
        ),
        (
            {**QWEN3_VL, "text_config": {**QWEN3_VL["text_config"], "norm_topk_prob": False}},
            "norm_topk_prob: expected True, found False",
        ),
        ({**GLM_47_FLASH, "partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0, found 0.5"),
        ({**GLM_47_FLASH, "first_k_dense_replace": 2}, "mlp_layer_types: expected 2 dense layers, as first_k_dense_"),
        ({**GLM_47_FLASH, "mlp_layer_types": ["sparse"] * 47}, "mlp_layer_types: expected 1 dense layers"),
        ({**GLM_47_FLASH, "rope_interleave": False}, "rope_interleave: expected True"),
    ],
)
def test_refused_of_the_same_models_by_other_names(config: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        variant_from_config(config)


# ---- Where implementations differ -------------------------------------------------------------------------------


def scaled(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """With those changes of its YaRN; None takes a field away."""
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, **changes}
    return {**base, "rope_scaling": {key: value for key, value in scaling.items() if value is not None}}


YARN = 0.1 * math.log(40) + 1
HALF_YARN = 0.05 * math.log(40) + 1


@pytest.mark.parametrize(
    ("coefficients", "magnitude", "scale"),
    [
        ({}, YARN, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, YARN**2),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, YARN / HALF_YARN, HALF_YARN**2),
        # What is alone, and what is 0, where it makes no difference whether it is heeded.
        ({"mscale": 1.0}, YARN, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.0}, YARN, 1.0),
        ({"mscale_all_dim": 0.0}, YARN, 1.0),
        ({"mscale": 0.5, "factor": 1.0}, 1.0, 1.0),
    ],
)
def test_yarn_coefficients_that_mean_one_thing(coefficients: dict[str, Any], magnitude: float, scale: float) -> None:
    variant = variant_from_config(scaled(DEEPSEEK, **coefficients))
    assert oracle.rope_magnitude(variant.layers[0].mixer.rope) == pytest.approx(magnitude)
    assert oracle.latent_scale(192, variant.layers[0].mixer.rope) == pytest.approx(scale * 192**-0.5)


@pytest.mark.parametrize("base", [QWEN3_MOE, DEEPSEEK], ids=["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ({"mscale": 0.5}, "mscale_all_dim: expected both mscale and mscale_all_dim above 0, .* found nothing"),
        ({"mscale_all_dim": 1.0}, "mscale: expected both mscale and mscale_all_dim above 0, .* found nothing"),
        ({"mscale": 0.0, "mscale_all_dim": 1.0}, "mscale: expected both .* found 0.0"),
        ({"mscale": 0.0, "mscale_all_dim": 0.0}, "mscale: expected both .* found 0.0"),
        ({"mscale": 1.0, "mscale_all_dim": -1.0}, "mscale_all_dim: expected a number of at least 0, found -1.0"),
        ({"mscale": -1.0, "mscale_all_dim": 1.0}, "mscale: expected a number of at least 0, found -1.0"),
        ({"attention_factor": 1.0}, "attention_factor: expected None, found 1.0"),
        ({"truncate": False}, "truncate: expected True, found False"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1 with YaRN, .* found 0.5"),
    ],
)
def test_yarn_about_which_implementations_differ(
    base: dict[str, Any], coefficients: dict[str, Any], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        variant_from_config(scaled(base, **coefficients))


@pytest.mark.parametrize("base", [QWEN3_MOE, {**DEEPSEEK, "rope_scaling": None}], ids=["qwen3_moe", "deepseek_v3"])
def test_partial_rotary_factor_that_nobody_heeds(base: dict[str, Any]) -> None:
    assert variant_from_config({**base, "partial_rotary_factor": 0.5}) == variant_from_config(base)


UNSAID = [(DEEPSEEK, field) for field in ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts")]
UNSAID += [(QWEN3_NEXT, "norm_topk_prob")]
UNSAID += [(GPT_OSS_20B, field) for field in ("head_dim", "rope_scaling")]
UNSAID += [(GLM_45_AIR, field) for field in ("attention_bias", "use_qk_norm", "head_dim", "norm_topk_prob", "n_group")]


@pytest.mark.parametrize(("base", "field"), UNSAID, ids=[field for _, field in UNSAID])
def test_defaults_about_which_implementations_differ(base: dict[str, Any], field: str) -> None:
    with pytest.raises(FormatError, match=f"{field}: expected a value, for implementations differ .* found nothing"):
        variant_from_config({key: value for key, value in base.items() if key != field})


def test_from_path_names_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_MOE))
    assert variant_from_config(folder).name == "My-Model"
    assert variant_from_config(folder / "config.json").name == "My-Model"
    (folder / "config.json").write_text(json.dumps({**QWEN3_MOE, "hidden_size": "wide"}))
    with pytest.raises(
        FormatError, match=r"My-Model/config\.json: hidden_size: expected a whole number .* found 'wide'"
    ):
        variant_from_config(folder)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (QWEN3_MOE, {"model_type": "llama"}, r"model_type: expected qwen3_5_moe or .*, found 'llama'"),
    (QWEN3_MOE, {"model_type": None}, "model_type: expected a string, found None"),
    (QWEN3_MOE, {"colour": "red"}, 'field "colour" is not one that moeflux knows'),
    (QWEN3_MOE, {"hidden_act": "gelu"}, "hidden_act: expected 'silu', found 'gelu'"),
    (QWEN3_MOE, {"attention_bias": True}, "attention_bias: expected False, found True"),
    (QWEN3_MOE, {"use_sliding_window": True}, "use_sliding_window: expected False"),
    (QWEN3_MOE, {"qkv_bias": True}, "qkv_bias: expected False, found True"),
    (QWEN3_MOE, {"use_qk_norm": False}, "use_qk_norm: expected True, found False"),
    (QWEN3_MOE, {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size: expected 0, found 512"),
    (QWEN3_MOE, {"num_local_experts": 64}, "num_local_experts: expected 128, which is num_experts, found 64"),
    (QWEN3_MOE, {"layer_types": ["sliding_attention"] * 48}, "layer_types: expected None or .*full_attention"),
    (QWEN3_MOE, {"add_cross_attention": True}, "add_cross_attention: expected False, found True"),
    (QWEN35_TEXT, {"head_dim": None}, "head_dim: expected a whole number of at least 1, found None"),
    (QWEN3_MOE, {"hidden_size": True}, "hidden_size: expected a whole number"),
    (QWEN3_MOE, {"hidden_size": -2048}, "hidden_size: expected a whole number of at least 1, found -2048"),
    (QWEN3_MOE, {"hidden_size": 1 << 40}, "hidden_size: expected a whole number"),
    (QWEN3_MOE, {"mlp_only_layers": [48]}, "mlp_only_layers: expected layers below 48"),
    (QWEN3_MOE, {"num_hidden_layers": 5000}, "num_hidden_layers: expected at most 4096"),
    (QWEN3_MOE, {"eos_token_id": ["a"]}, "eos_token_id: expected a token id"),
    (QWEN3_MOE, {"rope_scaling": {"rope_type": "longrope"}}, "rope_type: expected 'default' or 'yarn'"),
    (QWEN3_MOE, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings: expected"),
    (QWEN3_MOE, {"rope_parameters": {"rope_theta": 5.0}}, "rope_theta: expected 5.0 as elsewhere"),
    (QWEN35_TEXT, {"attn_output_gate": False}, "attn_output_gate: expected True"),
    (QWEN35_TEXT, {"full_attention_interval": 5}, "full_attention_interval: expected the interval that layer_types"),
    (QWEN35_TEXT, {"layer_types": ["full_attention"]}, "layer_types: expected 40 entries"),
    (QWEN35_TEXT, {"layer_types": ["sliding_attention"] * 40}, "layer_types: expected 40 entries of full_attention"),
    (QWEN35_TEXT, {"layer_types": None, "full_attention_interval": None}, "layer_types: expected 40 layer types"),
    (QWEN35_TEXT, {"norm_topk_prob": False}, "norm_topk_prob: expected True"),
    (QWEN35_TEXT, {"rope_parameters": {"rope_theta": 1e7}}, "partial_rotary_factor: expected a number, found nothing"),
    (QWEN35, {"text_config": {**QWEN35_TEXT, "tie_word_embeddings": True}}, "tie_word_embeddings: expected False"),
    (QWEN35, {"text_config": []}, "text_config: expected an object"),
    (DEEPSEEK, {"topk_method": "greedy"}, "topk_method: expected 'noaux_tc', found 'greedy'"),
    (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid'"),
    (DEEPSEEK, {"rope_interleave": False}, "rope_interleave: expected True"),
    (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq: expected 1, found 2"),
    (DEEPSEEK, {"num_experts_per_tok": 1}, "norm_topk_prob: expected false with one expert a token"),
    (DEEPSEEK, {"n_group": 7}, r"router.groups: expected a divisor of count \(256\), found 7"),
    (DEEPSEEK, {"topk_group": 9}, r"router.groups_kept: expected 1 to 8, found 9"),
    (DEEPSEEK, {"attention_bias": True}, "attention_bias: expected False, found True"),
    (GLM_45_AIR, {"attention_bias": "q"}, "attention_bias: expected true or false, found 'q'"),
    (GLM_45_AIR, {"partial_rotary_factor": None}, "partial_rotary_factor: expected a number"),
    (
        GLM_45_AIR,
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}},
        "rope_scaling: expected none, for implementations differ about it",
    ),
    (GLM_45_AIR, {"tie_word_embeddings": True}, "tie_word_embeddings: expected False, found True"),
    (GLM_45_AIR, {"rope_interleave": True}, 'field "rope_interleave" is not one that moeflux knows'),
    (GLM_45_AIR, {"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid'"),
    (GPT_OSS_20B, {"attention_bias": False}, "attention_bias: expected True, found False"),
    (GPT_OSS_20B, {"tie_word_embeddings": True}, "tie_word_embeddings: expected False, found True"),
    (GPT_OSS_20B, {"experts_per_token": 8}, "experts_per_token: expected 4, which is num_experts_per_tok, found 8"),
    (GPT_OSS_20B, {"initial_context_length": 8192}, "initial_context_length: expected 4096, found 8192"),
    (GPT_OSS_20B, {"layer_types": ["full_attention"]}, "layer_types: expected 24 entries of sliding_attention or full"),
    (GPT_OSS_20B, {"layer_types": ["linear_attention"] * 24}, "layer_types: expected 24 entries of sliding_attention"),
    (GPT_OSS_20B, {"sliding_window": None}, "sliding_window: expected a whole number of at least 1, found None"),
    (GPT_OSS_20B, {"swiglu_limit": 0}, r"clamped.limit: expected a positive number, found 0"),
    (GPT_OSS_20B, {"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
    (GPT_OSS_20B, {"moe_intermediate_size": 64}, 'field "moe_intermediate_size" is not one that moeflux knows'),
    (GPT_OSS_20B, {"norm_topk_prob": True}, 'field "norm_topk_prob" is not one that moeflux knows'),
]


@pytest.mark.parametrize(("base", "changes", "message"), REFUSED)
def test_refused(base: dict, changes: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        variant_from_config({**base, **changes})


@pytest.mark.parametrize("field", ["num_experts", "rope_theta", "num_experts_per_tok", "moe_intermediate_size"])
def test_missing_field(field: str) -> None:
    with pytest.raises(FormatError, match=f"{field}: expected .* found nothing"):
        variant_from_config({key: value for key, value in QWEN3_MOE.items() if key != field})
