"""Tiny checkpoints with latent attention: DeepSeek's, and those of Kimi and GLM, which have its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from golden.checkpoint import HIDDEN, LAYERS, VOCAB, Checkpoint
from golden.elements import fp8_blocks, from_bf16, int4_groups, normal


def deepseek_v3(
    name: str = "deepseek_v3", *, prefix: str = "", fp8: bool = False, int4: bool = False, bias: str = "F32",
    mtp_layer: int = 61, **changes: Any
) -> Checkpoint:  # fmt: skip
    """`bias` is the type of the bias for choosing, which published models have in several; `mtp_layer` the number that
    the next-token-prediction layer has in the published model, by which the peers know it."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 257, "eos_token_id": 256, "ep_size": 1, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02, "intermediate_size": 256,
        "kv_lora_rank": 128, "max_position_embeddings": 256, "moe_intermediate_size": 64, "moe_layer_freq": 1,
        "n_group": 4, "n_routed_experts": 16, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 4, "num_experts_per_tok": 4, "num_hidden_layers": LAYERS, "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1, "q_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 2, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "use_cache": True, "v_head_dim": 64, "vocab_size": VOCAB,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 4, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 64, "type": "yarn"},
        **changes,
    }  # fmt: skip
    # The fp8 checkpoint is the bf16 one after rounding: same name, same numbers.
    c = Checkpoint(name, config)
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    c.matrix(f"{prefix}model.embed_tokens.weight", config["vocab_size"], hidden, gain=float(np.sqrt(hidden)))
    for layer in range(config["num_hidden_layers"]):
        at = f"{prefix}model.layers.{layer}."
        c.norm(f"{at}input_layernorm.weight", hidden, 1.0)
        c.norm(f"{at}post_attention_layernorm.weight", hidden, 1.0)
        if config["q_lora_rank"]:
            c.matrix(f"{at}self_attn.q_a_proj.weight", config["q_lora_rank"], hidden)
            c.norm(f"{at}self_attn.q_a_layernorm.weight", config["q_lora_rank"], 1.0)
            c.matrix(f"{at}self_attn.q_b_proj.weight", heads * (nope + rope), config["q_lora_rank"], gain=1.5)
        else:
            c.matrix(f"{at}self_attn.q_proj.weight", heads * (nope + rope), hidden, gain=1.5)
        c.matrix(f"{at}self_attn.kv_a_proj_with_mqa.weight", rank + rope, hidden, gain=1.5)
        c.norm(f"{at}self_attn.kv_a_layernorm.weight", rank, 1.0)
        c.matrix(f"{at}self_attn.kv_b_proj.weight", heads * (nope + value), rank)
        c.matrix(f"{at}self_attn.o_proj.weight", hidden, heads * value, gain=2.0)
        if layer < config["first_k_dense_replace"]:
            c.swiglu(f"{at}mlp.", hidden, config["intermediate_size"])
            continue
        experts = config["n_routed_experts"]
        c.matrix(f"{at}mlp.gate.weight", experts, hidden)
        correction = f"{at}mlp.gate.e_score_correction_bias"
        c.add(correction, normal(f"{name}/{correction}", (experts,), 0.2), bias)
        c.swiglu(f"{at}mlp.shared_experts.", hidden, config["n_shared_experts"] * config["moe_intermediate_size"])
        for expert in range(experts):
            c.swiglu(f"{at}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
    c.norm(f"{prefix}model.norm.weight", hidden, 1.0)
    c.matrix(f"{prefix}lm_head.weight", config["vocab_size"], hidden, gain=2.0)
    if config["num_nextn_predict_layers"]:  # that layer, and old rotary tables, must be dropped
        c.matrix(f"{prefix}model.layers.{mtp_layer}.eh_proj.weight", hidden, 2 * hidden)
    if mtp_layer == 61:
        c.add(f"{prefix}model.layers.0.self_attn.rotary_emb.inv_freq", np.ones(rope // 2), "F32")
    if fp8:
        c.config["quantization_config"] = {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        }  # fmt: skip
        for key in [key for key in c.tensors if key.endswith(("_proj.weight", "_with_mqa.weight"))]:
            codes, scales = fp8_blocks(from_bf16(c.tensors[key][1]).astype(np.float64))
            c.tensors[key] = ("F8_E4M3", codes)
            c.tensors[f"{key}_scale_inv"] = ("F32", scales)
    for key in [key for key in c.tensors if int4 and ".mlp.experts." in key]:
        values = from_bf16(c.tensors.pop(key)[1]).astype(np.float64)
        words, group_scales = int4_groups(values)
        c.tensors[f"{key}_packed"], c.tensors[f"{key}_scale"] = ("I32", words), ("BF16", group_scales)
        c.tensors[f"{key}_shape"] = ("I32", np.array(values.shape, np.int32))
    return c


def glm4_moe_lite() -> Checkpoint:
    """deepseek_v3 by another name, with fewer fields, values wider than keys and another epsilon."""
    c = deepseek_v3(
        "glm4_moe_lite", mtp_layer=47, n_group=1, topk_group=1, rope_scaling=None, rope_theta=1000000,
        routed_scaling_factor=1.8, v_head_dim=96, num_key_value_heads=4, rms_norm_eps=1e-5, n_routed_experts=8,
        num_experts_per_tok=2, partial_rotary_factor=1.0, pad_token_id=256, eos_token_id=[256, 257], dtype="bfloat16",
        architectures=["Glm4MoeLiteForCausalLM"], model_type="glm4_moe_lite",
    )  # fmt: skip
    for key in ("bos_token_id", "ep_size", "moe_layer_freq", "scoring_func", "torch_dtype", "use_cache"):
        del c.config[key]
    return c


def deepseek_v2(name: str = "deepseek_v2", **changes: Any) -> Checkpoint:
    """deepseek_v3 with a softmax router, whose weights are not normalised, and without a bias for choosing."""
    own = {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "scoring_func": "softmax",
        "topk_method": "group_limited_greedy", "norm_topk_prob": False, "num_nextn_predict_layers": 0,
        "n_shared_experts": 2, "routed_scaling_factor": 16.0, "num_hidden_layers": 3,
    }  # fmt: skip
    c = deepseek_v3(name, **own | changes)
    del c.config["num_nextn_predict_layers"]
    for key in [key for key in c.tensors if key.endswith(("e_score_correction_bias", "inv_freq"))]:
        del c.tensors[key]
    return c


def deepseek_v2_lite() -> Checkpoint:
    """Queries from one matrix, no groups, YaRN with the coefficients of the published model."""
    return deepseek_v2(
        "deepseek_v2_lite", q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1,
        routed_scaling_factor=1.0, num_experts_per_tok=3,
        rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                      "original_max_position_embeddings": 64, "type": "yarn"},
    )  # fmt: skip


def deepseek_v32(name: str = "deepseek_v32", **changes: Any) -> Checkpoint:
    """deepseek_v3 with an index in every layer, which selects fewer rows than the fixed input has. With these sizes, no
    two of its scores are so near that rounding would decide between them."""
    own = {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_head_dim": 64,
        "index_n_heads": 12, "index_topk": 18,
    }  # fmt: skip
    c = deepseek_v3(name, **own | changes)
    config = c.config
    hidden, heads, dim = config["hidden_size"], config["index_n_heads"], config["index_head_dim"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.self_attn.indexer."
        c.matrix(f"{at}wq_b.weight", heads * dim, config["q_lora_rank"], gain=1.5)
        c.matrix(f"{at}wk.weight", dim, hidden)
        c.norm(f"{at}k_norm.weight", dim, 1.0)
        c.add(f"{at}k_norm.bias", normal(f"{name}/{at}k_norm.bias", (dim,), 0.5))
        c.matrix(f"{at}weights_proj.weight", heads, hidden)
    c.tensors.pop("model.layers.0.self_attn.rotary_emb.inv_freq", None)  # mlx-lm would not drop it here
    return c


def glm_moe_dsa(name: str = "glm_moe_dsa", **changes: Any) -> Checkpoint:
    """deepseek_v32 with an index whose rope turns neighbours; no groups, no YaRN, values wider than keys."""
    own: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "head_dim": 32, "n_group": 1,
        "topk_group": 1, "rms_norm_eps": 1e-5, "v_head_dim": 96, "indexer_rope_interleave": True, "pad_token_id": 256,
        "rope_interleave": True, "eos_token_id": [256, 257], "rope_scaling": None,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "mtp_layer": 78,
    }  # fmt: skip
    c = deepseek_v32(name, **own | changes)
    for key in ("bos_token_id", "rope_scaling", "rope_theta"):
        c.config.pop(key)
    return c


def kimi_k25() -> Checkpoint:
    """The text part of a model that sees, its experts int4 as published; every scale of YaRN differs from 1."""
    c = deepseek_v3(
        "kimi_k25", prefix="language_model.", int4=True, n_group=1, topk_group=1, n_routed_experts=12,
        num_experts_per_tok=3, rms_norm_eps=1e-5, rope_theta=50000.0, routed_scaling_factor=2.827,
        num_nextn_predict_layers=0, add_cross_attention=False, tie_encoder_decoder=False, model_type="kimi_k2",
        rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                      "original_max_position_embeddings": 32, "type": "yarn"},
    )  # fmt: skip
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
        "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
    }  # fmt: skip
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    c.config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "bos_token_id": 257, "dtype": "bfloat16",
        "eos_token_id": 256, "ignore_index": -100, "media_placeholder_token_id": 400, "model_type": "kimi_k25",
        "pad_token_id": 256, "text_config": c.config, "tie_word_embeddings": False, "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "quantization_config": {"config_groups": {"group_0": group}, "format": "pack-quantized",
                                "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                                           "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
                                "kv_cache_scheme": None, "quant_method": "compressed-tensors",
                                "quantization_status": "compressed"},
        "vision_config": {"patch_size": 14, "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 64,
                          "intermediate_size": 64, "text_hidden_size": HIDDEN},
    }  # fmt: skip
    c.matrix("vision_tower.patch_embed.proj.bias", 64)
    c.matrix("mm_projector.pre_norm.bias", 1152)
    return c


DEEPSEEK: dict[str, Callable[[], Checkpoint]] = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v3_fp8": lambda: deepseek_v3(fp8=True),
    # Shaped like Kimi-K2: one group, no YaRN, its bias in bf16.
    "kimi": lambda: deepseek_v3(
        "kimi", bias="BF16", n_group=1, topk_group=1, rope_scaling=None, rope_theta=50000.0,
        routed_scaling_factor=2.827, num_experts_per_tok=3, n_routed_experts=12,
    ),
    # Queries from one matrix, two shared experts, a bias in fp16, YaRN with two coefficients, m a multiple of 128.
    "kimi_plain_q": lambda: deepseek_v3(
        "kimi_plain_q", bias="F16", n_group=1, topk_group=1, q_lora_rank=None, n_shared_experts=2, n_routed_experts=8,
        moe_intermediate_size=128, num_experts_per_tok=2,
        rope_scaling={"beta_fast": 8, "beta_slow": 1, "factor": 8, "mscale": 1.0, "mscale_all_dim": 0.5,
                      "original_max_position_embeddings": 32, "type": "yarn"},
    ),
    "glm4_moe_lite": glm4_moe_lite,
    "kimi_k25": kimi_k25,
    "deepseek_v2": deepseek_v2,
    "deepseek_v2_lite": deepseek_v2_lite,
    "deepseek_v32": deepseek_v32,
    "glm_moe_dsa": glm_moe_dsa,
}  # fmt: skip
