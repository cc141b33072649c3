"""Tiny checkpoints of gemma4's mixture, as it is published."""

from __future__ import annotations

from typing import Any

import numpy as np

from golden.checkpoint import HIDDEN, LAYERS, VOCAB, Checkpoint

OF_A_MODEL_THAT_SEES = {
    "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "audio_token_id": 1000,
    "boa_token_id": 1001, "boi_token_id": 1002, "dtype": "bfloat16", "eoa_token_id": 1003, "eoa_token_index": 1003,
    "eoi_token_id": 1004, "eos_token_id": [256, 258], "image_token_id": 1005, "initializer_range": 0.02,
    "model_type": "gemma4", "tie_word_embeddings": True, "video_token_id": 1006, "vision_config": None,
    "vision_soft_tokens_per_image": 280,
}  # fmt: skip


def gemma4_text(name: str = "gemma4_text", *, prefix: str = "model.", **changes: Any) -> Checkpoint:
    """Windows, and at last everything; heads and ropes of two sizes; a norm before and after each part; logits that
    are often near their cap."""
    config = {
        "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True, "bos_token_id": 257,
        "dtype": "bfloat16", "enable_moe_block": True, "eos_token_id": 256, "final_logit_softcapping": 5.0,
        "global_head_dim": 64, "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": HIDDEN,
        "hidden_size_per_layer_input": 0, "initializer_range": 0.02, "intermediate_size": 192,
        "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"], "max_position_embeddings": 1024,
        "model_type": "gemma4_text", "moe_intermediate_size": 64, "num_attention_heads": 8, "num_experts": 16,
        "num_global_key_value_heads": 2, "num_hidden_layers": LAYERS, "num_key_value_heads": 4,
        "num_kv_shared_layers": 0, "pad_token_id": 0, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 24, "tie_word_embeddings": True, "top_k_experts": 4, "use_bidirectional_attention": "vision",
        "use_cache": True, "use_double_wide_mlp": False, "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB,
        **changes,
    }  # fmt: skip
    c = Checkpoint(name, {key: value for key, value in config.items() if value != "absent"})
    hidden, heads, experts = (config[key] for key in ("hidden_size", "num_attention_heads", "num_experts"))
    m = config["moe_intermediate_size"]
    c.matrix(f"{prefix}embed_tokens.weight", config["vocab_size"], hidden)
    for layer, kind in enumerate(config["layer_types"]):
        at = f"{prefix}layers.{layer}."
        head_dim, kv_heads = sizes_of(config, layer)
        shares_keys = config["attention_k_eq_v"] and kind == "full_attention"
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            c.norm(f"{at}{norm}_layernorm.weight", hidden, 1.0)
        for norm in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
            c.norm(f"{at}{norm}.weight", hidden, 1.0)
        for part, rows, gain in (("q", heads, 1.0), ("k", kv_heads, 1.0), ("v", kv_heads, 2.0)):
            if not (part == "v" and shares_keys):
                c.matrix(f"{at}self_attn.{part}_proj.weight", rows * head_dim, hidden, gain=gain)
        for norm in ("q_norm", "k_norm"):
            c.norm(f"{at}self_attn.{norm}.weight", head_dim, 1.3 * head_dim**-0.25)  # scores deviate by less than 2
        c.matrix(f"{at}self_attn.o_proj.weight", hidden, heads * head_dim, gain=2.0)
        c.swiglu(f"{at}mlp.", hidden, config["intermediate_size"])
        c.matrix(f"{at}router.proj.weight", experts, hidden, gain=1.5 * float(np.sqrt(hidden)))
        c.norm(f"{at}router.scale", hidden, 1.0)
        c.norm(f"{at}router.per_expert_scale", experts, 1.0)
        c.matrix(f"{at}experts.gate_up_proj", experts, 2 * m, hidden, gain=1.5)
        c.matrix(f"{at}experts.down_proj", experts, hidden, m)
        c.norm(f"{at}layer_scalar", 1, 0.8)
    c.norm(f"{prefix}norm.weight", hidden, 3.0)
    return c


def sizes_of(config: dict[str, Any], layer: int) -> tuple[int, int]:
    """The size of a layer's heads, and how many keys have."""
    own = (config.get("per_layer_config") or {}).get(str(layer))
    if own:
        return own["head_dim"], own["num_key_value_heads"]
    if config["layer_types"][layer] == "sliding_attention":
        return config["head_dim"], config["num_key_value_heads"]
    kv_heads = "num_global_key_value_heads" if config["attention_k_eq_v"] else "num_key_value_heads"
    return config["global_head_dim"], config[kv_heads]


def gemma4() -> Checkpoint:
    """As a part of a model that sees."""
    text = gemma4_text("gemma4", prefix="model.language_model.")
    return Checkpoint("gemma4", {**OF_A_MODEL_THAT_SEES, "text_config": text.config}, text.tensors)


def gemma4_other() -> Checkpoint:
    """As transformers writes it, sizes layer by layer; values of their own everywhere, other sizes, and no cap."""
    sizes = {"head_dim": 96, "num_key_value_heads": 3}
    return gemma4_text(
        "gemma4_other", attention_k_eq_v=False, final_logit_softcapping=None, global_head_dim="absent",
        num_global_key_value_heads="absent", per_layer_config={"1": sizes, "3": sizes},
        layer_types=["sliding_attention", "full_attention"] * 2, head_dim=64,
        num_attention_heads=6, num_key_value_heads=3, sliding_window=17, num_experts=8, top_k_experts=2,
        moe_intermediate_size=96, intermediate_size=64, use_bidirectional_attention=None,
        rope_parameters={
            "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 50000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 2000.0, "rope_type": "default"},
        },
    )  # fmt: skip


GEMMA4 = {"gemma4": gemma4, "gemma4_text": gemma4_text, "gemma4_other": gemma4_other}
