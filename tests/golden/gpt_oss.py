"""Tiny checkpoints of gpt_oss, as it is published."""

from __future__ import annotations

from typing import Any

import numpy as np

from golden.checkpoint import HIDDEN, LAYERS, VOCAB, Checkpoint
from golden.elements import normal


def gpt_oss(name: str = "gpt_oss", *, mxfp4: bool = True, **changes: Any) -> Checkpoint:
    """Windows and full attention in turn, sinks, a bias in every product; experts whose gates are often at their limit,
    in MXFP4, or plain and the other way round."""
    config = {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 256,
        "experts_per_token": 4, "head_dim": 32, "hidden_act": "silu", "hidden_size": HIDDEN,
        "initial_context_length": 32, "initializer_range": 0.02, "intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2), "max_position_embeddings": 1024,
        "model_type": "gpt_oss", "num_attention_heads": 8, "num_experts_per_tok": 4, "num_hidden_layers": LAYERS,
        "num_key_value_heads": 2, "num_local_experts": 16, "output_router_logits": False, "pad_token_id": 257,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 32,
                         "rope_type": "yarn", "truncate": False},
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 24, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": VOCAB, **changes,
    }  # fmt: skip
    if mxfp4:
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"modules_to_not_convert": kept, "quant_method": "mxfp4"}
    c = Checkpoint(name, config)
    hidden, head_dim, m = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    heads, kv_heads, experts = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "num_local_experts")
    )

    def bias(tensor: str, *shape: int) -> None:
        c.add(tensor, normal(f"{name}/{tensor}", shape, 0.4))

    c.matrix("model.embed_tokens.weight", config["vocab_size"], hidden, gain=float(np.sqrt(hidden)))
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        c.norm(f"{at}input_layernorm.weight", hidden, 1.0)
        c.norm(f"{at}post_attention_layernorm.weight", hidden, 1.0)
        for part, rows, gain in (("q", heads, 1.5), ("k", kv_heads, 1.5), ("v", kv_heads, 2.0)):
            c.matrix(f"{at}self_attn.{part}_proj.weight", rows * head_dim, hidden, gain=gain)
            bias(f"{at}self_attn.{part}_proj.bias", rows * head_dim)
        c.matrix(f"{at}self_attn.o_proj.weight", hidden, heads * head_dim)
        bias(f"{at}self_attn.o_proj.bias", hidden)
        c.add(f"{at}self_attn.sinks", 1.0 + normal(f"{name}/{at}sinks", (heads,), 1.5))
        c.matrix(f"{at}mlp.router.weight", experts, hidden)
        bias(f"{at}mlp.router.bias", experts)
        for part, rows, columns, gain in (("gate_up_proj", 2 * m, hidden, 4.0), ("down_proj", hidden, m, 0.25)):
            if mxfp4:
                c.mxfp4(f"{at}mlp.experts.{part}", experts, rows, columns, gain=gain)
            else:
                c.matrix(f"{at}mlp.experts.{part}", experts, columns, rows, gain=gain * float(np.sqrt(rows / columns)))
            bias(f"{at}mlp.experts.{part}_bias", experts, rows)
    c.norm("model.norm.weight", hidden, 1.0)
    c.matrix("lm_head.weight", config["vocab_size"], hidden, gain=2.0)
    return c


def gpt_oss_whole_pairs() -> Checkpoint:
    """YaRN as mlx-lm knows it alone: the pairs between which it mixes are whole ones."""
    scaling = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 32,
               "rope_type": "yarn", "truncate": True}  # fmt: skip
    return gpt_oss("gpt_oss_whole_pairs", rope_scaling=scaling)


def gpt_oss_plain() -> Checkpoint:
    """Plain experts; an odd number of layers, of which two in a row see a window; another window, limit and alpha."""
    return gpt_oss(
        "gpt_oss_plain", mxfp4=False, num_hidden_layers=3, sliding_window=17, swiglu_limit=2.5, swiglu_alpha=1.25,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"], num_attention_heads=6, head_dim=64,
        num_key_value_heads=3, num_local_experts=8, num_experts_per_tok=2, experts_per_token=2, intermediate_size=96,
        initial_context_length=64, rope_theta=10000.0,
        rope_scaling={"beta_fast": 8.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 64,
                      "rope_type": "yarn"},
    )  # fmt: skip


GPT_OSS = {"gpt_oss": gpt_oss, "gpt_oss_whole_pairs": gpt_oss_whole_pairs, "gpt_oss_plain": gpt_oss_plain}
