"""Tiny checkpoints of architectures whose every layer has full attention without a gate: Qwen2-MoE, Mixtral, MiniMax-M2
and OLMoE. As in checkpoints.py, which lists them."""

from __future__ import annotations

from typing import Any

import numpy as np

from golden.checkpoint import HIDDEN, VOCAB, Checkpoint
from golden.elements import normal


def plain_attention(
    c: Checkpoint, at: str, sizes: tuple[int, int, int], *, bias: bool = False, joint_norm: bool = False
) -> None:
    """Two norms of a layer and its attention; `sizes` are those of its heads, of its key heads, and of a head."""
    hidden, (heads, kv_heads, head_dim) = c.config["hidden_size"], sizes
    c.norm(f"{at}input_layernorm.weight", hidden, 1.0)
    c.norm(f"{at}post_attention_layernorm.weight", hidden, 1.0)
    for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        c.matrix(f"{at}self_attn.{part}_proj.weight", count * head_dim, hidden, gain=2.0 if part == "v" else 1.0)
        if bias:
            name = f"{at}self_attn.{part}_proj.bias"
            c.add(name, normal(f"{c.name}/{name}", (count * head_dim,), 0.4))
        if joint_norm and part != "v":
            c.norm(f"{at}self_attn.{part}_norm.weight", count * head_dim, 1.5)
    c.matrix(f"{at}self_attn.o_proj.weight", hidden, heads * head_dim)


def ends(c: Checkpoint) -> None:
    """The embedding, the last norm and the output matrix."""
    vocab, hidden = c.config["vocab_size"], c.config["hidden_size"]
    c.matrix("model.embed_tokens.weight", vocab, hidden, gain=float(np.sqrt(hidden)))
    c.norm("model.norm.weight", hidden, 1.0)
    if not c.config["tie_word_embeddings"]:
        c.matrix("lm_head.weight", vocab, hidden, gain=2.0)


PLAIN = {
    "attention_dropout": 0.0, "eos_token_id": 256, "hidden_act": "silu", "hidden_size": HIDDEN,
    "initializer_range": 0.02, "max_position_embeddings": 4096, "num_attention_heads": 4, "num_experts_per_tok": 4,
    "num_hidden_layers": 3, "num_key_value_heads": 2, "output_router_logits": False, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": VOCAB,
}  # fmt: skip


def qwen2_moe(name: str = "qwen2_moe", **changes: Any) -> Checkpoint:
    """Biases, no norm of heads, a gated shared expert wider than the others; one layer may be dense."""
    config = {
        **PLAIN, "architectures": ["Qwen2MoeForCausalLM"], "bos_token_id": 257, "decoder_sparse_step": 1,
        "intermediate_size": 256, "max_window_layers": 21, "model_type": "qwen2_moe", "moe_intermediate_size": 64,
        "norm_topk_prob": False, "num_experts": 12, "rms_norm_eps": 1e-06, "shared_expert_intermediate_size": 192,
        "sliding_window": 32768, "use_sliding_window": False, **changes,
    }  # fmt: skip
    c = Checkpoint(name, config)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    ends(c)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        plain_attention(c, at, (heads, config["num_key_value_heads"], hidden // heads), bias=True)
        if layer in config.get("mlp_only_layers", []):
            c.swiglu(f"{at}mlp.", hidden, config["intermediate_size"])
            continue
        c.matrix(f"{at}mlp.gate.weight", config["num_experts"], hidden, gain=2.0)
        c.matrix(f"{at}mlp.shared_expert_gate.weight", 1, hidden)
        c.swiglu(f"{at}mlp.shared_expert.", hidden, config["shared_expert_intermediate_size"])
        for expert in range(config["num_experts"]):
            c.swiglu(f"{at}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
    return c


def mixtral_experts(c: Checkpoint, at: str) -> None:
    """Mixtral's own words: w1 is the gate, w3 what it is multiplied by, w2 the way back."""
    hidden, wide = c.config["hidden_size"], c.config["intermediate_size"]
    c.matrix(f"{at}block_sparse_moe.gate.weight", c.config["num_local_experts"], hidden, gain=2.0)
    for expert in range(c.config["num_local_experts"]):
        c.matrix(f"{at}block_sparse_moe.experts.{expert}.w1.weight", wide, hidden, gain=1.5)
        c.matrix(f"{at}block_sparse_moe.experts.{expert}.w2.weight", hidden, wide)
        c.matrix(f"{at}block_sparse_moe.experts.{expert}.w3.weight", wide, hidden, gain=1.5)


def mixtral(name: str = "mixtral", **changes: Any) -> Checkpoint:
    config = {
        **PLAIN, "architectures": ["MixtralForCausalLM"], "bos_token_id": 257, "intermediate_size": 64,
        "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8, "sliding_window": None, **changes,
    }  # fmt: skip
    c = Checkpoint(name, config)
    heads = config["num_attention_heads"]
    ends(c)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        plain_attention(c, at, (heads, config["num_key_value_heads"], config["hidden_size"] // heads))
        mixtral_experts(c, at)
    return c


def minimax_m2(name: str = "minimax_m2", **changes: Any) -> Checkpoint:
    """All q heads are normed as one row, all k heads as another; half of each head turns; noaux_tc without a scale."""
    config = {
        **PLAIN, "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 3, "head_dim": 64,
        "intermediate_size": 64, "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 256, "model_type": "minimax_m2",
        "mtp_transformer_layers": 1, "num_local_experts": 16, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 32, "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid",
        "sliding_window": None, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, **changes,
    }  # fmt: skip
    c = Checkpoint(name, config)
    sizes = (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])
    ends(c)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        plain_attention(c, at, sizes, joint_norm=True)
        mixtral_experts(c, at)
        correction = f"{at}block_sparse_moe.e_score_correction_bias"
        c.add(correction, normal(f"{name}/{correction}", (config["num_local_experts"],), 0.2), "F32")
    return c


def olmoe(name: str = "olmoe", **changes: Any) -> Checkpoint:
    """q and k are normed as in MiniMax-M2; a softmax router whose weights are not normalised."""
    config = {
        **PLAIN, "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None,
        "intermediate_size": 64, "model_type": "olmoe", "norm_topk_prob": False, "num_experts": 16,
        "pad_token_id": 1, "rope_scaling": None, "rope_theta": 10000.0, **changes,
    }  # fmt: skip
    c = Checkpoint(name, config)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    ends(c)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        plain_attention(c, at, (heads, config["num_key_value_heads"], hidden // heads), joint_norm=True)
        c.matrix(f"{at}mlp.gate.weight", config["num_experts"], hidden, gain=2.0)
        for expert in range(config["num_experts"]):
            c.swiglu(f"{at}mlp.experts.{expert}.", hidden, config["intermediate_size"])
    return c
