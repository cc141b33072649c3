"""Variant -> config.json, such that reading it gives the variant back: for stores that come from no checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

from moeflux.errors import FormatError
from moeflux.models.config import read_config
from moeflux.models.variants import Variant

__all__ = ["config_of"]

NOT_IN_CONFIG = ("name", "think_start_id", "think_end_id", "lossy")
"""What a config.json cannot say."""


def config_of(variant: Variant) -> dict[str, Any]:
    """FormatError where a config.json of that architecture cannot express the variant."""
    config = {
        "model_type": variant.model_type,
        "hidden_act": "silu",
        "hidden_size": variant.hidden_size,
        "num_hidden_layers": variant.num_layers,
        "vocab_size": variant.vocab_size,
        "rms_norm_eps": variant.rms_norm_eps,
        "max_position_embeddings": variant.max_context,
        "tie_word_embeddings": variant.tied_embeddings,
        "num_attention_heads": variant.num_heads,
        "num_key_value_heads": variant.num_kv_heads,
        "num_experts_per_tok": variant.experts_per_token,
        "moe_intermediate_size": variant.moe_intermediate,
        "norm_topk_prob": variant.normalize_topk,
        "rope_parameters": _rope(variant),
        "eos_token_id": list(variant.eos_ids),
        "bos_token_id": variant.bos_id if variant.bos_id >= 0 else None,
        "torch_dtype": "bfloat16",
    }
    config |= _deepseek(variant) if variant.attention == "mla" else _qwen(variant)
    unspoken = {key: getattr(variant, key) for key in NOT_IN_CONFIG}
    found = dataclasses.replace(read_config(config, "config.json", variant.name), **unspoken)
    for field in dataclasses.fields(Variant):
        wanted, got = getattr(variant, field.name), getattr(found, field.name)
        if wanted != got:
            raise FormatError(
                f"{variant.name}: {field.name}: expected a value that a {variant.model_type} config.json can express, "
                f"found {wanted!r:.80}, which would read back as {got!r:.80}"
            )
    return config


def _rope(v: Variant) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": v.rope_theta}
    if (v.attention == "gqa" and v.rotary_dim != v.head_dim) or v.attention_gate:
        parameters["partial_rotary_factor"] = v.rotary_dim / v.head_dim
    if v.rope == "yarn":
        parameters |= {
            "rope_type": "yarn",
            "factor": v.yarn_factor,
            "original_max_position_embeddings": v.yarn_original_context,
            "beta_fast": v.yarn_beta_fast,
            "beta_slow": v.yarn_beta_slow,
        }
        # An absent coefficient is 0 in a variant, and only there.
        scales = {"mscale": v.yarn_mscale, "mscale_all_dim": v.yarn_mscale_all_dim}
        parameters |= {key: value for key, value in scales.items() if value}
    return parameters


def _qwen(v: Variant) -> dict[str, Any]:
    config: dict[str, Any] = {
        "head_dim": v.head_dim,
        "num_experts": v.num_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, kind in enumerate(v.mlp_kinds) if kind == "dense"],
        "intermediate_size": v.dense_intermediate or None,
    }
    if v.model_type == "qwen3_moe":
        return config
    return config | {
        "layer_types": [f"{kind}_attention" for kind in v.layer_kinds],
        "linear_num_key_heads": v.linear_key_heads,
        "linear_num_value_heads": v.linear_value_heads,
        "linear_key_head_dim": v.linear_key_dim,
        "linear_value_head_dim": v.linear_value_dim,
        "linear_conv_kernel_dim": v.conv_kernel,
        "shared_expert_intermediate_size": v.shared_intermediate,
    }


def _deepseek(v: Variant) -> dict[str, Any]:
    return {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "q_lora_rank": v.q_lora_rank or None,
        "kv_lora_rank": v.kv_lora_rank,
        "qk_nope_head_dim": v.qk_nope_dim,
        "qk_rope_head_dim": v.qk_rope_dim,
        "v_head_dim": v.v_head_dim,
        "n_routed_experts": v.num_experts,
        "n_shared_experts": v.shared_intermediate // v.moe_intermediate,
        "n_group": v.num_groups,
        "topk_group": v.groups_per_token,
        "routed_scaling_factor": v.routed_scaling,
        "first_k_dense_replace": v.first_dense_layers,
        "moe_layer_freq": 1,
        "intermediate_size": v.dense_intermediate or None,
    }
