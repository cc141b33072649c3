"""The values of a GGUF file as the config.json of the same model, which the readers of those read.

Every value of the model is used, known not to matter, or refused by name. What the runtime that the file was made for
takes for granted of an architecture is said here as its config.json says it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moeflux.errors import FormatError
from moeflux.models.config import read_config
from moeflux.models.config_fields import REQUIRED, Fields
from moeflux.models.gguf import GgufValues
from moeflux.models.gguf_tokenizer import end_ids
from moeflux.models.layers import GatedDelta
from moeflux.models.variants import Variant

__all__ = ["config_of_gguf", "generation_config", "variant_of_gguf"]

PREFIXES = ("general.", "tokenizer.", "split.", "quantize.", "imatrix.")
"""Of values that are not of the model itself: names, licences, and how the file was made. The tokenizer is read by
itself."""

SOFTMAX, SIGMOID = 1, 2
"""Of `expert_gating_func`."""

LARGE = 1e20
"""An angle divided by so much is nothing."""


def variant_of_gguf(path: Path, values: GgufValues) -> Variant:
    """The variant. Of qwen35moe, the converter reorders value heads, so that they take turns at the key heads. The
    columns of the last product go with them, where no byte ranges could bring them back: a block has several heads."""
    config = config_of_gguf(values)
    variant = read_config(config, f"{path}: as config.json", values.text("general.name", path.stem))
    if values.text("general.architecture") != "qwen35moe":
        return variant
    shared = config["linear_num_value_heads"] != config["linear_num_key_heads"]
    return variant.with_parts(GatedDelta, tiled=shared)


def config_of_gguf(values: GgufValues) -> dict[str, Any]:
    kind = values.text("general.type", "model")
    if kind != "model":
        raise values.fail("general.type", "'model'")
    architecture = values.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise values.fail("general.architecture", f"one of {', '.join(sorted(ARCHITECTURES))}")
    prefix = f"{architecture}."
    for key in sorted(values.keys):
        if not key.startswith((prefix, *PREFIXES)):
            raise FormatError(f"{values.path}: {key}: expected values of {prefix[:-1]}, found one of something else")
    fields = Fields(dict(values.under(prefix)), f"{values.path}: {architecture}")
    config = common(fields, values) | ARCHITECTURES[architecture](fields, values)
    fields.finish(frozenset({"vocab_size"}))  # which is that of the embedding
    return config


SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
"""What `general.sampling` calls a value -> what generation_config.json does."""


def generation_config(values: GgufValues) -> dict[str, Any]:
    """generation_config.json of the model: tokens are drawn as the file asks for it, or else the likeliest is taken."""
    given = {SAMPLING[name]: value for name, value in values.under("general.sampling.") if name in SAMPLING}
    return {"do_sample": bool(given), "eos_token_id": end_ids(values), **given}


# ---- What all have ----------------------------------------------------------------------------------------------


def common(fields: Fields, values: GgufValues) -> dict[str, Any]:
    embedding = values.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise FormatError(f"{values.path}: token_embd.weight: expected a matrix, found none")
    fields.only("attention.causal", True)
    return {
        "num_hidden_layers": layers_of(fields),
        "max_position_embeddings": fields.count("context_length"),
        "hidden_size": fields.count("embedding_length"),
        "vocab_size": embedding.shape[0],
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in values.tensors,
        "eos_token_id": end_ids(values),
        "bos_token_id": values.token("tokenizer.ggml.bos_token_id"),
    }


def layers_of(fields: Fields) -> int:
    """How many there are, without those that draft."""
    return fields.count("block_count") - fields.count("nextn_predict_layers", 0, minimum=0)


def heads(fields: Fields) -> dict[str, Any]:
    """Of grouped attention, whose keys and values are equally long."""
    count = fields.count("attention.head_count")
    head_dim = fields.count("attention.key_length", fields.count("embedding_length") // count)
    fields.only("attention.value_length", head_dim)
    return {
        "num_attention_heads": count,
        "num_key_value_heads": fields.count("attention.head_count_kv", count),
        "head_dim": head_dim,
    }


def rope(fields: Fields, dim: int) -> dict[str, Any]:
    """The rope of `dim` channels. Sections are of image positions."""
    fields.only("rope.dimension_count", dim)
    fields.seen.add("rope.dimension_sections")
    parameters: dict[str, Any] = {"rope_theta": fields.number("rope.freq_base", 10000.0)}
    if fields.get("rope.scaling.type", str, "a string", "none") == "none":
        return parameters
    fields.only("rope.scaling.type", "yarn")
    parameters |= {
        "rope_type": "yarn",
        "factor": fields.number("rope.scaling.factor"),
        "original_max_position_embeddings": fields.count("rope.scaling.original_context_length"),
    }
    for own, said in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if (number := fields.number(f"rope.scaling.{own}", None)) is not None:
            parameters[said] = number
    for key in ("yarn_ext_factor", "yarn_attn_factor"):
        fields.only(f"rope.scaling.{key}", 1.0)
    fields.seen.add("rope.scaling.finetuned")
    return parameters


def experts(fields: Fields, count: str) -> dict[str, Any]:
    return {count: fields.count("expert_count"), "num_experts_per_tok": fields.count("expert_used_count")}


def plain_routing(fields: Fields) -> None:
    """Softmax over all experts, which llama.cpp takes for granted of some architectures."""
    fields.only("expert_gating_func", SOFTMAX)
    for key in ("expert_group_count", "expert_group_used_count"):
        fields.only(key, 0, 1)
    fields.only("expert_weights_scale", 1.0, 0.0)


def has(values: GgufValues, tensor: str) -> bool:
    """Whether any layer has a tensor of that name."""
    return any(name.startswith("blk.") and name.split(".", 2)[2] == tensor for name in values.tensors)


# ---- Qwen -------------------------------------------------------------------------------------------------------


def qwen3_moe(fields: Fields, values: GgufValues) -> dict[str, Any]:
    """Also the text part of a model that sees, whose experts have the same layout here."""
    plain_routing(fields)
    fields.only("expert_weights_norm", True)
    # Dense layers, which it has none of, and layers that images are put into.
    fields.seen |= {"feed_forward_length", "interleave_moe_layer_step", "n_deepstack_layers"}
    attention = heads(fields)
    return {
        **attention,
        **experts(fields, "num_experts"),
        "model_type": "qwen3_moe",
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "rope_parameters": rope(fields, attention["head_dim"]),
    }


def qwen2_moe(fields: Fields, values: GgufValues) -> dict[str, Any]:
    plain_routing(fields)
    fields.only("expert_weights_norm", False)
    fields.seen.add("feed_forward_length")
    attention = heads(fields)
    return {
        **attention,
        **experts(fields, "num_experts"),
        "model_type": "qwen2_moe",
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "rope_parameters": rope(fields, attention["head_dim"]),
    }


def qwen3_next(fields: Fields, values: GgufValues) -> dict[str, Any]:
    plain_routing(fields)
    fields.only("expert_weights_norm", True)
    fields.seen.add("feed_forward_length")
    attention = heads(fields)
    turning = fields.count("rope.dimension_count")
    value_heads = fields.count("ssm.time_step_rank")
    return {
        **attention,
        **experts(fields, "num_experts"),
        "model_type": "qwen3_next",
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
        "rope_parameters": rope(fields, turning) | {"partial_rotary_factor": turning / attention["head_dim"]},
        "layer_types": kinds_of_layers(fields),
        "linear_conv_kernel_dim": fields.count("ssm.conv_kernel"),
        "linear_key_head_dim": fields.count("ssm.state_size"),
        "linear_num_key_heads": fields.count("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": fields.count("ssm.inner_size") // value_heads,
    }


def qwen35_moe(fields: Fields, values: GgufValues) -> dict[str, Any]:
    """Its value heads take turns at the key heads (see `variant_of_gguf`)."""
    return qwen3_next(fields, values) | {"model_type": "qwen3_5_moe_text"}


def kinds_of_layers(fields: Fields) -> list[str]:
    """By the list of layers that are recurrent, or by the interval of those that are not."""
    layers = layers_of(fields)
    interval = fields.count("full_attention_interval", 4)
    recurrent = fields.get(
        "attention.recurrent_layers", list, "a list", [(i + 1) % interval != 0 for i in range(layers)]
    )
    if len(recurrent) < layers or not all(type(each) is bool for each in recurrent):
        raise fields.fail("attention.recurrent_layers", f"true or false for each of {layers} layers")
    return ["linear_attention" if each else "full_attention" for each in recurrent[:layers]]


# ---- DeepSeek, GLM ----------------------------------------------------------------------------------------------


def deepseek2(fields: Fields, values: GgufValues) -> dict[str, Any]:
    """DeepSeek-V2, and V3 with what has its parts: Kimi-K2, GLM-4.7-Flash. Where the router is not named, as in the
    last, it is the one of V3 if it has that one's correction."""
    unsaid = SIGMOID if has(values, "exp_probs_b.bias") else SOFTMAX
    sigmoid = fields.count("expert_gating_func", unsaid) == SIGMOID
    fields.only("expert_gating_func", SOFTMAX, SIGMOID)
    rank, turning = fields.count("attention.kv_lora_rank"), fields.count("rope.dimension_count")
    whole = fields.count("attention.key_length_mla", fields.count("attention.key_length"))
    value = fields.count("attention.value_length_mla", fields.count("attention.value_length"))
    fields.seen |= {"attention.head_count_kv", "vocab_size"}  # one in keys that are not spread, or all of them
    groups = fields.count("expert_group_count", 1, minimum=0), fields.count("expert_group_used_count", 1, minimum=0)
    config = {
        **experts(fields, "n_routed_experts"),
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "num_attention_heads": fields.count("attention.head_count"),
        "q_lora_rank": fields.count("attention.q_lora_rank", None),
        "kv_lora_rank": rank,
        "qk_nope_head_dim": whole - turning,
        "qk_rope_head_dim": turning,
        "v_head_dim": value,
        "intermediate_size": fields.count("feed_forward_length"),
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "n_shared_experts": fields.count("expert_shared_count", 0, minimum=0),
        "first_k_dense_replace": fields.count("leading_dense_block_count", 0, minimum=0),
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "n_group": groups[0] or 1,
        "topk_group": groups[1] or 1,
        "rope_parameters": deepseek_rope(fields, turning),
    }
    if not sigmoid:
        config["topk_method"] = "group_limited_greedy" if groups[0] > 1 else "greedy"
    return config


def deepseek_rope(fields: Fields, turning: int) -> dict[str, Any]:
    """What YaRN does to magnitudes is a tenth of `mscale_all_dim` here. All that have it have an equal `mscale`."""
    multiplier = fields.number("rope.scaling.yarn_log_multiplier", 0.0)
    parameters = rope(fields, turning)
    if multiplier and parameters.get("rope_type") == "yarn":
        scale = round(10 * multiplier, 6)
        parameters |= {"mscale": scale, "mscale_all_dim": scale}
    return parameters


def glm4_moe(fields: Fields, values: GgufValues) -> dict[str, Any]:
    fields.only("expert_gating_func", SIGMOID)
    attention = heads(fields)
    turning = fields.count("rope.dimension_count")
    return {
        **attention,
        **experts(fields, "n_routed_experts"),
        "model_type": "glm4_moe",
        "attention_bias": has(values, "attn_q.bias"),
        "use_qk_norm": has(values, "attn_q_norm.weight"),
        "intermediate_size": fields.count("feed_forward_length"),
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "n_shared_experts": fields.count("expert_shared_count"),
        "first_k_dense_replace": fields.count("leading_dense_block_count", 0, minimum=0),
        "norm_topk_prob": fields.flag("expert_weights_norm", True),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "n_group": fields.count("expert_group_count", 1),
        "topk_group": fields.count("expert_group_used_count", 1),
        "rope_parameters": rope(fields, turning) | {"partial_rotary_factor": turning / attention["head_dim"]},
    }


# ---- Others -----------------------------------------------------------------------------------------------------


def gpt_oss(fields: Fields, values: GgufValues) -> dict[str, Any]:
    """Every other layer sees a window. That its YaRN does not round to whole channels is said by config.json alone."""
    plain_routing(fields)
    fields.seen.add("feed_forward_length")
    attention = heads(fields)
    parameters = rope(fields, attention["head_dim"])
    if "rope_type" in parameters:
        parameters = {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0} | parameters
    return {
        **attention,
        **experts(fields, "num_local_experts"),
        "model_type": "gpt_oss",
        "attention_bias": True,
        "intermediate_size": fields.count("expert_feed_forward_length"),
        "sliding_window": fields.count("attention.sliding_window"),
        "rope_parameters": parameters,
    }


def minimax_m2(fields: Fields, values: GgufValues) -> dict[str, Any]:
    fields.only("expert_gating_func", SIGMOID)
    fields.seen.add("feed_forward_length")
    attention = heads(fields)
    turning = fields.count("rope.dimension_count", attention["head_dim"])
    return {
        **attention,
        **experts(fields, "num_local_experts"),
        "model_type": "minimax_m2",
        "intermediate_size": fields.count("expert_feed_forward_length"),
        "rotary_dim": turning,
        "rope_parameters": rope(fields, turning),
    }


def olmoe(fields: Fields, values: GgufValues) -> dict[str, Any]:
    plain_routing(fields)
    fields.only("expert_weights_norm", False)
    fields.only("attention.clamp_kqv", 0.0)
    attention = heads(fields)
    return {
        **attention,
        **experts(fields, "num_experts"),
        "model_type": "olmoe",
        "intermediate_size": fields.count("feed_forward_length"),
        "norm_topk_prob": False,
        "rope_parameters": rope(fields, attention["head_dim"]),
    }


def mixtral(fields: Fields, values: GgufValues) -> dict[str, Any]:
    """Of the architecture llama, those with experts alone."""
    if "llama.expert_count" not in values.keys:
        raise FormatError(f"{values.path}: llama.expert_count: expected a mixture of experts, found a dense model")
    plain_routing(fields)
    attention = heads(fields)
    return {
        **attention,
        **experts(fields, "num_local_experts"),
        "model_type": "mixtral",
        "intermediate_size": fields.count("feed_forward_length"),
        "rope_parameters": rope(fields, attention["head_dim"]),
    }


def gemma4(fields: Fields, values: GgufValues) -> dict[str, Any]:
    """Its mixture. Layers that see a window and layers that see everything have heads of their own sizes; the latter
    have no matrix for values if their keys are those, too. How much of a head turns is said by a tensor."""
    plain_routing(fields)
    fields.only("rope.scaling.type", "none", None)
    count = layers_of(fields)
    sees_window: list[Any] = fields.get("attention.sliding_window_pattern", list, "a list", REQUIRED)
    if len(sees_window) != count or not all(type(each) is bool for each in sees_window):
        raise fields.fail("attention.sliding_window_pattern", f"true or false for each of {count} layers")
    sizes = fields.count("attention.key_length"), fields.count("attention.key_length_swa")
    for own, size in zip(("", "_swa"), sizes, strict=True):
        fields.only(f"attention.value_length{own}", size)
        fields.only(f"rope.dimension_count{own}", size)
    kv_heads = heads_of_keys(fields, sees_window)
    full = [layer for layer, window in enumerate(sees_window) if not window]
    return {
        "model_type": "gemma4_text",
        "num_experts": fields.count("expert_count"),
        "top_k_experts": fields.count("expert_used_count"),
        "enable_moe_block": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": fields.count("embedding_length_per_layer_input", minimum=0),
        "num_kv_shared_layers": fields.count("attention.shared_kv_layers", 0, minimum=0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", None),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in sees_window],
        "sliding_window": fields.count("attention.sliding_window"),
        "num_attention_heads": fields.count("attention.head_count"),
        "num_key_value_heads": kv_heads[1],
        "head_dim": sizes[1],
        "per_layer_config": {str(layer): {"head_dim": sizes[0], "num_key_value_heads": kv_heads[0]} for layer in full},
        "attention_k_eq_v": not any(f"blk.{layer}.attn_v.weight" in values.tensors for layer in full),
        "intermediate_size": fields.count("feed_forward_length"),
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": fields.number("rope.freq_base"),
                "partial_rotary_factor": turning_part(values, sizes[0]),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)},
        },
    }


def heads_of_keys(fields: Fields, sees_window: list[bool]) -> tuple[int, int]:
    """In layers that see everything, and in those that see a window: one number, or one a layer."""
    given = fields.values.get("attention.head_count_kv")
    if not isinstance(given, list):
        number = fields.count("attention.head_count_kv")
        return number, number
    fields.seen.add("attention.head_count_kv")
    if len(given) != len(sees_window) or not all(type(each) is int for each in given):
        raise fields.fail("attention.head_count_kv", f"a number for each of {len(sees_window)} layers")
    kinds = [
        [each for each, window in zip(given, sees_window, strict=True) if window == kind] for kind in (False, True)
    ]
    if any(len(set(kind)) > 1 for kind in kinds):
        raise fields.fail("attention.head_count_kv", "one number for all layers of a kind")
    full, window = ((kind or given)[0] for kind in kinds)
    return full, window


def turning_part(values: GgufValues, head_dim: int) -> float:
    """Of the pairs of a head: those whose angles are divided by 1, before those of which next to nothing is left."""
    divisors = values.vector("rope_freqs.weight", head_dim // 2)
    turning = int(np.count_nonzero(divisors == 1))
    if turning == 0 or not (divisors[:turning] == 1).all() or not (divisors[turning:] >= LARGE).all():
        raise FormatError(
            f"{values.path}: tensor rope_freqs.weight: expected ones and then numbers from {LARGE:g} on, found others"
        )
    return 2 * turning / head_dim


ARCHITECTURES: dict[str, Callable[[Fields, GgufValues], dict[str, Any]]] = {
    "qwen3moe": qwen3_moe,
    "qwen3vlmoe": qwen3_moe,
    "qwen2moe": qwen2_moe,
    "qwen3next": qwen3_next,
    "qwen35moe": qwen35_moe,
    "deepseek2": deepseek2,
    "glm4moe": glm4_moe,
    "gpt-oss": gpt_oss,
    "gemma4": gemma4,
    "minimax-m2": minimax_m2,
    "olmoe": olmoe,
    "llama": mixtral,
}
"""`general.architecture` -> what makes the fields of its config.json that are its own."""
