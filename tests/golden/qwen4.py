"""Tiny checkpoints of qwen4_exp, as it is published."""

from __future__ import annotations

from typing import Any

import numpy as np

from golden.checkpoint import HIDDEN, LAYERS, VOCAB, Checkpoint
from golden.elements import normal, uniform

END = 260
"""A token of the fixed input: n-grams end there."""

OF_A_MODEL_THAT_SEES = {
    "architectures": ["Qwen4ExpForConditionalGeneration"], "image_token_id": 380, "language_model_only": False,
    "model_type": "qwen4_exp", "tie_word_embeddings": False, "video_token_id": 381, "vision_end_token_id": 383,
    "vision_start_token_id": 382,
    "vision_config": {"model_type": "qwen4_exp", "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2,
                      "out_hidden_size": HIDDEN},
}  # fmt: skip


def qwen4_exp_text(name: str = "qwen4_exp_text", *, prefix: str = "model.", **changes: Any) -> Checkpoint:
    """Gates mix three residual streams; the second layer has rows of an n-gram table; the last attends to rows that an
    indexer picks. Its heads are many: between rows that no head scores above zero, which are picked is up to chance."""
    config = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": END, "dtype": "bfloat16",
        "eos_token_id": END, "full_attention_interval": 4, "hc_count": 3, "hc_lowrank": 32, "head_dim": 64,
        "heads_per_ngram": 4, "hidden_act": "silu", "hidden_size": HIDDEN, "indexer_budget": 32,
        "indexer_compress_ratio": 4, "indexer_head_dim": 32, "indexer_kv_heads": 1, "indexer_n_heads": 12,
        "initializer_range": 0.02, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
        "linear_value_head_dim": 32, "make_ngram_vocab_size_divisible_by": 16, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 1024, "model_type": "qwen4_exp_text", "moe_intermediate_size": 64,
        "mtp": {"hybrid": True, "layer_types": ["full_attention"], "num_hidden_layers": 1, "rope_theta": 10000000},
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "ngram_size": 3,
        "ngram_vocab_size_base": 101, "num_attention_heads": 6, "num_experts": 16, "num_experts_per_tok": 4,
        "num_hidden_layers": LAYERS, "num_key_value_heads": 2, "output_gate_type": "sigmoid",
        "output_router_logits": False, "pad_token_id": None, "partial_rotary_factor": 0.25, "ple_conv_kernel_size": 4,
        "ple_embed_dim": 64, "ple_layer_ids": [2], "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25,
                            "rope_theta": 10000000, "rope_type": "default"},
        "shared_expert_intermediate_size": 64, "split_ngram_parts": 4, "tie_word_embeddings": False, "use_cache": True,
        "vocab_size": VOCAB,
        **changes,
    }  # fmt: skip
    c = Checkpoint(name, config)
    hidden, experts, m = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    c.matrix(f"{prefix}embed_tokens.weight", config["vocab_size"], hidden, gain=float(np.sqrt(hidden)))
    for layer, kind in enumerate(config["layer_types"]):
        at = f"{prefix}layers.{layer}."
        if layer + 1 in config["ple_layer_ids"]:
            ngram_rows(c, f"{at}ple.", sorted(config["ple_layer_ids"]).index(layer + 1))
        streams(c, f"{at}attn_hyper_connection.")
        streams(c, f"{at}mlp_hyper_connection.")
        if kind == "linear_attention":
            delta_net(c, f"{at}linear_attn.")
        else:
            indexed_attention(c, f"{at}self_attn.")
        c.matrix(f"{at}mlp.gate.weight", experts, hidden, gain=3.0)
        c.matrix(f"{at}mlp.shared_expert_gate.weight", 1, hidden)
        c.swiglu(f"{at}mlp.shared_expert.", hidden, config["shared_expert_intermediate_size"])
        c.matrix(f"{at}mlp.experts.gate_up_proj", experts, 2 * m, hidden, gain=2.5)
        c.matrix(f"{at}mlp.experts.down_proj", experts, hidden, m, gain=2.0)
    streams(c, f"{prefix}hyper_connection_mixer.", yields=False)
    c.matrix("lm_head.weight", config["vocab_size"], hidden, gain=3.0)
    c.matrix("mtp.fc.weight", hidden, 2 * hidden)  # which a text model must drop
    return c


def streams(c: Checkpoint, at: str, *, yields: bool = True) -> None:
    all_streams = c.config["hc_count"] * c.config["hidden_size"]
    c.norm(f"{at}hc_norm.weight", all_streams, 0.2)
    c.matrix(f"{at}input_mix_weight_down.weight", c.config["hc_lowrank"], all_streams, gain=5.0)
    c.matrix(f"{at}input_mix_weight_up.weight", all_streams, c.config["hc_lowrank"], gain=3.0)
    if yields:
        c.matrix(f"{at}block_inject_weight.weight", c.config["hc_count"], all_streams, gain=4.0)


def delta_net(c: Checkpoint, at: str) -> None:
    config, hidden = c.config, c.config["hidden_size"]
    heads = config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    c.matrix(f"{at}in_proj_qkv.weight", 2 * keys + values, hidden)
    c.matrix(f"{at}in_proj_z.weight", values, hidden, gain=2.0)
    c.matrix(f"{at}in_proj_b.weight", heads, hidden)
    c.matrix(f"{at}in_proj_a.weight", heads, hidden)
    c.matrix(f"{at}conv1d.weight", 2 * keys + values, 1, config["linear_conv_kernel_dim"], gain=1.5)
    c.add(f"{at}A_log", uniform(f"{c.name}/{at}A_log", (heads,), -3.0, 1.5), "F32")
    c.add(f"{at}dt_bias", normal(f"{c.name}/{at}dt_bias", (heads,), 1.0))
    c.norm(f"{at}norm.weight", config["linear_value_head_dim"], 1.0)
    c.matrix(f"{at}out_proj.weight", hidden, values, gain=2.0)


def indexed_attention(c: Checkpoint, at: str) -> None:
    config, hidden = c.config, c.config["hidden_size"]
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    c.matrix(f"{at}q_proj.weight", heads * dim * 2, hidden)
    c.matrix(f"{at}k_proj.weight", kv_heads * dim, hidden)
    c.matrix(f"{at}v_proj.weight", kv_heads * dim, hidden, gain=3.0)
    c.matrix(f"{at}o_proj.weight", hidden, heads * dim, gain=3.0)
    c.norm(f"{at}q_norm.weight", dim, 0.5)
    c.norm(f"{at}k_norm.weight", dim, 0.5)
    index = config["indexer_head_dim"]
    c.matrix(f"{at}indexer.index_qk_proj.weight", (config["indexer_n_heads"] + 1) * index, hidden)
    c.norm(f"{at}indexer.q_layernorm.weight", index, 0.2)
    c.norm(f"{at}indexer.k_layernorm.weight", index, 0.2)


def ngram_rows(c: Checkpoint, at: str, index: int) -> None:
    config, hidden = c.config, c.config["hidden_size"]
    width, taps = config["ple_embed_dim"], config["ple_conv_kernel_size"]
    all_streams = config["hc_count"] * hidden
    sizes, multipliers = hashes(config, index)
    rows = -(-sum(sizes) // config["make_ngram_vocab_size_divisible_by"]) * config["make_ngram_vocab_size_divisible_by"]
    parts = config["split_ngram_parts"]
    for part in range(parts):
        name = f"{at}ple_embedding.ngram_embedding.shard_{part}.weight"
        c.add(name, normal(f"{c.name}/{name}", (rows // parts, width // len(sizes)), 1.0))
    for name, numbers in (
        ("layer_multipliers", multipliers),
        ("ngram_heads_vocab_sizes", sizes),
        ("ngram_heads_offsets", [sum(sizes[:i]) for i in range(len(sizes))]),
    ):
        c.tensors[f"{at}ple_embedding.{name}"] = ("I64", np.array(numbers, np.int64))
    c.matrix(f"{at}key_proj.weight", all_streams, width)
    c.matrix(f"{at}value_proj.weight", hidden, width, gain=2.0)
    for norm in ("norm_key", "norm_query", "norm_conv"):
        c.norm(f"{at}{norm}.weight", all_streams, 0.2)
    c.matrix(f"{at}conv1d.weight", all_streams, 1, taps, gain=1.5)


def hashes(config: dict[str, Any], index: int) -> tuple[list[int], list[int]]:
    """The rows of each head's part of a table, and the multipliers of the tokens, as they are published beside it."""
    heads = (config["ngram_size"] - 1) * config["heads_per_ngram"]
    numbers = range(config["ngram_vocab_size_base"], 1 << 20)
    primes = (n for n in numbers if all(n % d for d in range(2, int(n**0.5) + 1)))
    sizes = [next(primes) for _ in range((index + 1) * heads)][index * heads :]
    word, step = (1 << 64) - 1, 0x9E3779B97F4A7C15
    bound = max(1, ((1 << 63) - 1) // config["vocab_size"] // 2)
    multipliers = []
    for distance in range(config["ngram_size"]):
        z = config.get("seed", 1234) + 10007 * index + step * (distance + 2) & word
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & word
        z = (z ^ z >> 27) * 0x94D049BB133111EB & word
        multipliers.append(2 * ((z ^ z >> 31) % bound) + 1)
    return sizes, multipliers


def qwen4_exp() -> Checkpoint:
    """As a part of a model that sees."""
    text = qwen4_exp_text("qwen4_exp of a model that sees", prefix="model.language_model.")
    c = Checkpoint("qwen4_exp", {**OF_A_MODEL_THAT_SEES, "text_config": text.config}, text.tensors)
    c.matrix("model.visual.patch_embed.proj.bias", 64)
    return c


def qwen4_exp_linear() -> Checkpoint:
    """No layer attends, so nothing is picked."""
    c = qwen4_exp_text("qwen4_exp_linear", layer_types=["linear_attention"] * 2, num_hidden_layers=2, hc_count=4)
    for field in [field for field in c.config if field.startswith("indexer_")] + ["full_attention_interval"]:
        del c.config[field]
    return c


def qwen4_exp_other() -> Checkpoint:
    """Other sizes everywhere: five streams, two tables of longer n-grams, a gate of SiLU, units of two rows."""
    return qwen4_exp_text(
        "qwen4_exp_other", hc_count=5, hc_lowrank=64, ple_layer_ids=[1, 3], ngram_size=4, heads_per_ngram=2,
        ple_embed_dim=96, split_ngram_parts=2, ple_conv_kernel_size=3, ngram_vocab_size_base=40, seed=5,
        make_ngram_vocab_size_divisible_by=6, output_gate_type="silu", indexer_compress_ratio=2, indexer_budget=24,
        indexer_head_dim=64, indexer_n_heads=10, num_attention_heads=4, num_key_value_heads=1, num_experts=8,
        num_experts_per_tok=4, layer_types=["linear_attention", "indexed_attention"] * 2, full_attention_interval=2,
    )  # fmt: skip


QWEN4 = {
    "qwen4_exp": qwen4_exp, "qwen4_exp_text": qwen4_exp_text, "qwen4_exp_linear": qwen4_exp_linear,
    "qwen4_exp_other": qwen4_exp_other,
}  # fmt: skip
