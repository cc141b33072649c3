"""Tiny checkpoints of every supported architecture, in the layout and under the names that Hugging Face publishes.

    PYTHONPATH=tests python -m golden.checkpoints FOLDER [NAME ...]

NumPy only, and deterministic for ever: the numbers come from a counter-based generator through exact arithmetic alone,
so the golden files stay valid whatever the machine or the version of NumPy. `write(name, folder)` writes config.json,
two safetensors shards with their index, and a byte-level tokenizer; `CHECKPOINTS[name]()` is the same in memory.

The weights matter: norms are far from 1, routing is decisive, decays are spread, queries are sharp. A wrong formula
moves the logits by whole units, not by the last digit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from golden.checkpoint import HIDDEN, LAYERS, VOCAB, Checkpoint, safetensors_bytes, tokenizer_files
from golden.checkpoints_plain import minimax_m2, mixtral, olmoe, qwen2_moe
from golden.deepseek import DEEPSEEK
from golden.elements import from_bf16, name_seed, normal, splitmix64, uniform
from golden.gemma4 import GEMMA4
from golden.gpt_oss import GPT_OSS
from golden.qwen4 import QWEN4

QWEN_MOE = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
    "attention_dropout": 0.0, "max_position_embeddings": 4096, "moe_intermediate_size": 64, "num_experts": 16,
    "num_experts_per_tok": 4, "output_router_logits": False, "router_aux_loss_coef": 0.001, "use_cache": True,
    "initializer_range": 0.02, "bos_token_id": None, "eos_token_id": 256,
}  # fmt: skip
QWEN_LINEAR = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_num_key_heads": 2, "linear_value_head_dim": 64,
    "linear_num_value_heads": 4, "full_attention_interval": 4, "shared_expert_intermediate_size": 64,
}  # fmt: skip


def qwen_hybrid(name: str, config: dict[str, Any], *, prefix: str, fused: bool, a_log: str, tied: bool) -> Checkpoint:
    """qwen3_5_moe and qwen3_next: three gated delta-net layers to one of gated attention, experts in every layer.

    Published norms are w - 1, except the one inside the delta-net. qwen3_next fuses the inputs of its delta-net and has
    one matrix an expert; qwen3_5_moe has four separate inputs and stacked experts.
    """
    c = Checkpoint(name, config)
    text = config.get("text_config", config)
    hidden, head_dim = text["hidden_size"], text["head_dim"]
    experts, intermediate = text["num_experts"], text["moe_intermediate_size"]
    key_heads, value_heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    key_dim, value_dim = text["linear_key_head_dim"], text["linear_value_head_dim"]
    keys, values = key_heads * key_dim, value_heads * value_dim
    c.matrix(f"{prefix}embed_tokens.weight", text["vocab_size"], hidden, gain=float(np.sqrt(hidden)))
    for layer in range(text["num_hidden_layers"]):
        at = f"{prefix}layers.{layer}."
        c.norm(f"{at}input_layernorm.weight", hidden, 0.0)
        c.norm(f"{at}post_attention_layernorm.weight", hidden, 0.0)
        if (layer + 1) % text["full_attention_interval"] == 0:
            c.matrix(f"{at}self_attn.q_proj.weight", text["num_attention_heads"] * head_dim * 2, hidden)
            c.matrix(f"{at}self_attn.k_proj.weight", text["num_key_value_heads"] * head_dim, hidden)
            c.matrix(f"{at}self_attn.v_proj.weight", text["num_key_value_heads"] * head_dim, hidden, gain=2.0)
            c.matrix(f"{at}self_attn.o_proj.weight", hidden, text["num_attention_heads"] * head_dim, gain=2.0)
            c.norm(f"{at}self_attn.q_norm.weight", head_dim, 0.5)
            c.norm(f"{at}self_attn.k_norm.weight", head_dim, 0.5)
        else:
            linear = f"{at}linear_attn."
            if fused:
                c.matrix(f"{linear}in_proj_qkvz.weight", 2 * keys + 2 * values, hidden)
                c.matrix(f"{linear}in_proj_ba.weight", 2 * value_heads, hidden)
            else:
                c.matrix(f"{linear}in_proj_qkv.weight", 2 * keys + values, hidden)
                c.matrix(f"{linear}in_proj_z.weight", values, hidden)
                c.matrix(f"{linear}in_proj_b.weight", value_heads, hidden)
                c.matrix(f"{linear}in_proj_a.weight", value_heads, hidden)
            c.matrix(f"{linear}conv1d.weight", 2 * keys + values, 1, text["linear_conv_kernel_dim"], gain=1.5)
            c.add(f"{linear}A_log", uniform(f"{name}/{linear}A_log", (value_heads,), -3.0, 1.5), a_log)
            c.add(f"{linear}dt_bias", normal(f"{name}/{linear}dt_bias", (value_heads,), 1.0))
            c.norm(f"{linear}norm.weight", value_dim, 1.0)
            c.matrix(f"{linear}out_proj.weight", hidden, values)
        c.matrix(f"{at}mlp.gate.weight", experts, hidden, gain=2.0)
        c.matrix(f"{at}mlp.shared_expert_gate.weight", 1, hidden)
        c.swiglu(f"{at}mlp.shared_expert.", hidden, text["shared_expert_intermediate_size"])
        if fused:
            for expert in range(experts):
                c.swiglu(f"{at}mlp.experts.{expert}.", hidden, intermediate)
        else:
            c.matrix(f"{at}mlp.experts.gate_up_proj", experts, 2 * intermediate, hidden, gain=1.5)
            c.matrix(f"{at}mlp.experts.down_proj", experts, hidden, intermediate)
    c.norm(f"{prefix}norm.weight", hidden, 0.0)
    if not tied:
        c.matrix("lm_head.weight", text["vocab_size"], hidden, gain=2.0)
    # Parts that a text model must drop.
    c.matrix("mtp.fc.weight", hidden, 2 * hidden)
    c.norm("mtp.norm.weight", hidden, 0.0)
    if "vision_config" in config:
        c.matrix("model.visual.patch_embed.proj.bias", 64)
    return c


def qwen3_5_moe(**changes: Any) -> Checkpoint:
    text = {
        **QWEN_MOE, **QWEN_LINEAR, "model_type": "qwen3_5_moe_text", "attn_output_gate": True, "dtype": "bfloat16",
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "tie_word_embeddings": False,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25,
                            "rope_theta": 10000000, "rope_type": "default"},
        **changes,
    }  # fmt: skip
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "image_token_id": 380,
        "video_token_id": 381, "vision_start_token_id": 382, "vision_end_token_id": 383, "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_5_moe", "depth": 1, "hidden_size": 64, "intermediate_size": 64,
                          "num_heads": 2, "out_hidden_size": HIDDEN},
    }  # fmt: skip
    return qwen_hybrid("qwen3_5_moe", config, prefix="model.language_model.", fused=False, a_log="F32", tied=False)


def qwen3_5_moe_text() -> Checkpoint:
    """The text part published alone: flat config, tied embeddings, bf16 A_log, m a multiple of 128."""
    config = {
        **QWEN_MOE, **QWEN_LINEAR, "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text",
        "attn_output_gate": True, "dtype": "bfloat16", "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "tie_word_embeddings": True, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 3,
        "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 100000, "rope_type": "default"},
    }  # fmt: skip
    return qwen_hybrid("qwen3_5_moe_text", config, prefix="model.", fused=False, a_log="BF16", tied=True)


def qwen3_next(**changes: Any) -> Checkpoint:
    config = {
        **QWEN_MOE, **QWEN_LINEAR, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        "decoder_sparse_step": 1, "mlp_only_layers": [], "intermediate_size": 256, "norm_topk_prob": True,
        "partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000000, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, **changes,
    }  # fmt: skip
    return qwen_hybrid("qwen3_next", config, prefix="model.", fused=True, a_log="BF16", tied=False)


def qwen3_moe(name: str = "qwen3_moe", *, prefix: str = "model.", stacked: bool = False, **changes: Any) -> Checkpoint:
    """Full attention without a gate in every layer, no shared expert; one layer may be dense. Norms are w itself.
    `stacked`: experts in two tensors, their rows the input."""
    config = {
        **QWEN_MOE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
        "mlp_only_layers": [], "intermediate_size": 256, "norm_topk_prob": True, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False, "max_window_layers": LAYERS,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", **changes,
    }  # fmt: skip
    c = Checkpoint(name, config)
    hidden, head_dim = (
        config["hidden_size"],
        config["head_dim"],
    )
    element = {"bfloat16": "BF16", "float16": "F16"}[config["torch_dtype"]]
    c.matrix(f"{prefix}embed_tokens.weight", config["vocab_size"], hidden, gain=float(np.sqrt(hidden)))
    for layer in range(config["num_hidden_layers"]):
        at = f"{prefix}layers.{layer}."
        c.norm(f"{at}input_layernorm.weight", hidden, 1.0)
        c.norm(f"{at}post_attention_layernorm.weight", hidden, 1.0)
        c.matrix(f"{at}self_attn.q_proj.weight", config["num_attention_heads"] * head_dim, hidden)
        c.matrix(f"{at}self_attn.k_proj.weight", config["num_key_value_heads"] * head_dim, hidden)
        c.matrix(f"{at}self_attn.v_proj.weight", config["num_key_value_heads"] * head_dim, hidden, gain=2.0)
        c.matrix(f"{at}self_attn.o_proj.weight", hidden, config["num_attention_heads"] * head_dim)
        c.norm(f"{at}self_attn.q_norm.weight", head_dim, 1.5)
        c.norm(f"{at}self_attn.k_norm.weight", head_dim, 1.5)
        if layer in config["mlp_only_layers"]:
            c.swiglu(f"{at}mlp.", hidden, config["intermediate_size"])
            continue
        c.matrix(f"{at}mlp.gate.weight", config["num_experts"], hidden, gain=2.0)
        if stacked:
            experts, intermediate = config["num_experts"], config["moe_intermediate_size"]
            wide, narrow = float(np.sqrt(2 * intermediate / hidden)), float(np.sqrt(hidden / intermediate))
            c.matrix(f"{at}mlp.experts.gate_up_proj", experts, hidden, 2 * intermediate, gain=1.5 * wide)
            c.matrix(f"{at}mlp.experts.down_proj", experts, intermediate, hidden, gain=narrow)
            continue
        for expert in range(config["num_experts"]):
            c.swiglu(f"{at}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
    c.norm(f"{prefix}norm.weight", hidden, 1.0)
    if not config["tie_word_embeddings"]:
        c.matrix("lm_head.weight", config["vocab_size"], hidden, gain=2.0)
    if element == "F16":
        c.tensors = {key: ("F16", from_bf16(bits).astype(np.float16)) for key, (_, bits) in c.tensors.items()}
    return c


def qwen3_moe_tied() -> Checkpoint:
    """Tied embeddings, fp16 weights, top-k weights not normalised, one dense layer."""
    return qwen3_moe(
        "qwen3_moe_tied", tie_word_embeddings=True, torch_dtype="float16", norm_topk_prob=False, mlp_only_layers=[1],
        num_attention_heads=6, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip


def qwen3_moe_coder() -> Checkpoint:
    """YaRN, heads as large as they must be, and the fields of Qwen3-Coder that change nothing."""
    c = qwen3_moe(
        "qwen3_moe_coder", head_dim=32, qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0,
        sliding_window=4096, num_local_experts=16, num_experts_per_tok=3,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    )  # fmt: skip
    del c.config["head_dim"]
    return c


def qwen3_vl_moe() -> Checkpoint:
    """The text part of a model that sees: nested, and its experts stacked the other way round."""
    c = qwen3_moe(
        "qwen3_vl_moe", prefix="model.language_model.", stacked=True, model_type="qwen3_vl_moe_text", num_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=192, rope_theta=5000000,
        rope_scaling={"mrope_interleaved": True, "mrope_section": [12, 10, 10], "rope_type": "default"},
    )  # fmt: skip
    for key in ("architectures", "max_window_layers", "sliding_window", "tie_word_embeddings", "use_sliding_window"):
        del c.config[key]
    c.config = {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "image_token_id": 400, "model_type": "qwen3_vl_moe",
        "text_config": c.config, "tie_word_embeddings": False, "video_token_id": 401, "vision_end_token_id": 403,
        "vision_start_token_id": 402,
        "vision_config": {"model_type": "qwen3_vl_moe", "depth": 1, "hidden_size": 64, "intermediate_size": 64,
                          "num_heads": 2, "out_hidden_size": HIDDEN, "deepstack_visual_indexes": [0]},
    }  # fmt: skip
    c.matrix("model.visual.patch_embed.proj.bias", 64)
    return c


def glm4_moe(name: str = "glm4_moe", **changes: Any) -> Checkpoint:
    """Full attention of which half of each head turns, with biases; leading dense layers; noaux_tc and a shared
    expert."""
    config = {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": [256, 257], "first_k_dense_replace": 1, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": HIDDEN, "initializer_range": 0.02, "intermediate_size": 256, "max_position_embeddings": 4096,
        "model_type": "glm4_moe", "moe_intermediate_size": 64, "n_group": 1, "n_routed_experts": 16,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 4, "num_experts_per_tok": 4,
        "num_hidden_layers": LAYERS, "num_key_value_heads": 2, "num_nextn_predict_layers": 1, "pad_token_id": 256,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16",
        "use_cache": True, "use_qk_norm": True, "vocab_size": VOCAB, **changes,
    }  # fmt: skip
    c = Checkpoint(name, config)
    hidden, head_dim, experts = config["hidden_size"], config["head_dim"], config["n_routed_experts"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    c.matrix("model.embed_tokens.weight", config["vocab_size"], hidden, gain=float(np.sqrt(hidden)))
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        c.norm(f"{at}input_layernorm.weight", hidden, 1.0)
        c.norm(f"{at}post_attention_layernorm.weight", hidden, 1.0)
        for part, count in heads.items():
            c.matrix(f"{at}self_attn.{part}_proj.weight", count * head_dim, hidden, gain=2.0 if part == "v" else 1.0)
            if config["attention_bias"]:
                bias = f"{at}self_attn.{part}_proj.bias"
                c.add(bias, normal(f"{name}/{bias}", (count * head_dim,), 0.4))
        c.matrix(f"{at}self_attn.o_proj.weight", hidden, heads["q"] * head_dim)
        if config["use_qk_norm"]:
            c.norm(f"{at}self_attn.q_norm.weight", head_dim, 1.5)
            c.norm(f"{at}self_attn.k_norm.weight", head_dim, 1.5)
        if layer < config["first_k_dense_replace"]:
            c.swiglu(f"{at}mlp.", hidden, config["intermediate_size"])
            continue
        c.matrix(f"{at}mlp.gate.weight", experts, hidden)
        correction = f"{at}mlp.gate.e_score_correction_bias"
        c.add(correction, normal(f"{name}/{correction}", (experts,), 0.2), "F32")
        c.swiglu(f"{at}mlp.shared_experts.", hidden, config["n_shared_experts"] * config["moe_intermediate_size"])
        for expert in range(experts):
            c.swiglu(f"{at}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
    c.norm("model.norm.weight", hidden, 1.0)
    c.matrix("lm_head.weight", config["vocab_size"], hidden, gain=2.0)
    if config["num_nextn_predict_layers"]:  # that layer must be dropped; the peers know it by the number 46
        c.matrix("model.layers.46.eh_proj.weight", hidden, 2 * hidden)
    return c


def glm4_moe_air() -> Checkpoint:
    """Heads without a norm, two dense layers, more than one shared expert, groups, m a multiple of 128."""
    return glm4_moe(
        "glm4_moe_air", use_qk_norm=False, first_k_dense_replace=2, n_shared_experts=2, n_routed_experts=8, n_group=2,
        topk_group=1, num_experts_per_tok=2, moe_intermediate_size=128, routed_scaling_factor=1.0, head_dim=32,
        num_attention_heads=6, partial_rotary_factor=0.25, num_nextn_predict_layers=0,
    )  # fmt: skip


CHECKPOINTS: dict[str, Callable[[], Checkpoint]] = {
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_5_moe_text": qwen3_5_moe_text,
    "qwen3_next": qwen3_next,
    "qwen3_moe": qwen3_moe,
    "qwen3_moe_tied": qwen3_moe_tied,
    "qwen3_moe_coder": qwen3_moe_coder,
    "qwen3_vl_moe": qwen3_vl_moe,
    "glm4_moe": glm4_moe,
    "glm4_moe_air": glm4_moe_air,
    "minimax_m2": minimax_m2,
    "qwen2_moe": qwen2_moe,
    "mixtral": mixtral,
    "olmoe": olmoe,
    **DEEPSEEK, **GPT_OSS, **GEMMA4, **QWEN4,
}  # fmt: skip


# What each peer answers for, and why not for others: make_goldens.py.
TRANSFORMERS = [name for name in CHECKPOINTS if name != "deepseek_v3_fp8"]
HF_ALONE = ("qwen3_moe_coder", "deepseek_v2", "deepseek_v2_lite", "gpt_oss", "gpt_oss_plain", "gemma4_other", *QWEN4)
MLX_CONVERTS = [name for name in CHECKPOINTS if name not in HF_ALONE]
MLX = [name for name in MLX_CONVERTS if name != "glm4_moe_lite"]


def token_ids(name: str) -> list[int]:
    """The fixed input. It runs well past position 64 and, with YaRN, past the original context."""
    count = 192 if name == "deepseek_v3" else 96
    return [int(bits % np.uint64(VOCAB)) for bits in splitmix64(name_seed("tokens"), count)]


# ---- Files ------------------------------------------------------------------------------------------------------


def write(name: str, folder: str | Path, shards: int = 2, *, decoded: bool = False) -> Path:
    """The checkpoint as a folder, its tensors spread over `shards` files without regard to layers."""
    return write_files(made_files(CHECKPOINTS[name], shards, decoded), folder)


def write_checkpoint(checkpoint: Checkpoint, folder: str | Path, shards: int = 2) -> Path:
    return write_files(files_of(checkpoint, shards), folder)


def write_files(files: dict[str, bytes], folder: str | Path) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (folder / file).write_bytes(data)
    return folder


@lru_cache(maxsize=16)
def made_files(make: Callable[[], Checkpoint], shards: int, decoded: bool) -> dict[str, bytes]:
    return files_of(make().decoded() if decoded else make(), shards)


def files_of(checkpoint: Checkpoint, shards: int) -> dict[str, bytes]:
    files = {"config.json": json.dumps(checkpoint.config, indent=2).encode()}
    files |= {file: text.encode() for file, text in tokenizer_files().items()}
    names = list(checkpoint.tensors)
    weight_map = {}
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        files[file] = safetensors_bytes({key: checkpoint.tensors[key] for key in part})
        weight_map |= dict.fromkeys(part, file)
    total = sum(array.nbytes for _, array in checkpoint.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    if shards > 1:
        files["model.safetensors.index.json"] = json.dumps(index, indent=2).encode()
    return files


if __name__ == "__main__":
    for chosen in sys.argv[2:] or CHECKPOINTS:
        print(write(chosen, Path(sys.argv[1]) / chosen))
