"""Variant -> config.json, such that reading it gives the variant back: for stores that come from no checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

from moeflux.errors import FormatError
from moeflux.models.config import read_config
from moeflux.models.layers import DenseMlp, GatedDelta, GroupedAttention, LatentAttention, Rope
from moeflux.models.variants import Variant

__all__ = ["config_of"]

T = TypeVar("T")

NOT_IN_CONFIG = ("name", "think_start_id", "think_end_id", "lossy")
"""What a config.json cannot say."""


def config_of(variant: Variant) -> dict[str, Any]:
    """FormatError where a config.json of that architecture cannot express the variant."""
    experts = variant.experts
    config = {
        "model_type": variant.model_type,
        "hidden_act": "silu",
        "hidden_size": variant.hidden_size,
        "num_hidden_layers": variant.num_layers,
        "vocab_size": variant.vocab_size,
        "rms_norm_eps": variant.rms_norm_eps,
        "max_position_embeddings": variant.max_context,
        "tie_word_embeddings": variant.tied_embeddings,
        "num_experts_per_tok": experts.per_token,
        "eos_token_id": list(variant.eos_ids),
        "bos_token_id": variant.bos_id if variant.bos_id >= 0 else None,
        "torch_dtype": "bfloat16",
    }
    if variant.model_type == "gemma4":
        del config["hidden_act"], config["num_experts_per_tok"]
    elif variant.model_type not in ("minimax_m2", "mixtral", "olmoe", "gpt_oss"):
        config |= {"moe_intermediate_size": experts.intermediate, "norm_topk_prob": experts.router.normalize}
    config |= WRITERS.get(variant.model_type, _qwen)(variant)
    unspoken = {key: getattr(variant, key) for key in NOT_IN_CONFIG}
    found = dataclasses.replace(read_config(config, "config.json", variant.name), **unspoken)
    for wanted, got, field in _differences(variant, found):
        raise FormatError(
            f"{variant.name}: {field}: expected a value that a {variant.model_type} config.json can express, "
            f"found {wanted!r:.80}, which would read back as {got!r:.80}"
        )
    return config


def _differences(wanted: Any, got: Any, at: str = "") -> Iterator[tuple[Any, Any, str]]:
    """(one, the other, where) for each pair of values that differ, as deep down as possible."""
    if type(wanted) is type(got) and dataclasses.is_dataclass(wanted):
        for field in dataclasses.fields(wanted):
            where = f"{at}.{field.name}" if at else field.name
            yield from _differences(getattr(wanted, field.name), getattr(got, field.name), where)
    elif isinstance(wanted, tuple) and isinstance(got, tuple) and len(wanted) == len(got):
        for i, pair in enumerate(zip(wanted, got, strict=True)):
            yield from _differences(*pair, f"{at}[{i}]")
    elif wanted != got:
        yield wanted, got, at


def _first(variant: Variant, kind: type[T]) -> T | None:
    """The first part of that kind."""
    parts = (part for layer in variant.layers for part in (layer.mixer, layer.feed_forward))
    return next((part for part in parts if isinstance(part, kind)), None)


def _mixer(variant: Variant, kind: type[T], words: str) -> T:
    """The first part of that kind, which the config.json describes."""
    if part := _first(variant, kind):
        return part
    raise FormatError(f"{variant.name}: layers: expected {words}, which a {variant.model_type} config.json describes")


def _rope(rope: Rope, head_dim: int | None) -> dict[str, Any]:
    """`head_dim` is given where only a part of a head may turn."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if head_dim:
        parameters["partial_rotary_factor"] = rope.dim / head_dim
    if rope.yarn:
        parameters |= {
            "rope_type": "yarn",
            "factor": rope.yarn.factor,
            "original_max_position_embeddings": rope.yarn.original_context,
            "beta_fast": rope.yarn.beta_fast,
            "beta_slow": rope.yarn.beta_slow,
        }
        # An absent coefficient is 0 in a variant, and only there.
        scales = {"mscale": rope.yarn.mscale, "mscale_all_dim": rope.yarn.mscale_all_dim}
        parameters |= {key: value for key, value in scales.items() if value}
        if not rope.yarn.truncate:
            parameters["truncate"] = False
    return {"rope_parameters": parameters}


def _dense_intermediate(variant: Variant) -> int | None:
    dense = _first(variant, DenseMlp)
    return dense.intermediate if dense else None


def _qwen(v: Variant) -> dict[str, Any]:
    hybrid = v.model_type != "qwen3_moe"
    # A config.json has the sizes even of a kind that no layer has.
    full = _first(v, GroupedAttention) or GroupedAttention(heads=1, kv_heads=1, head_dim=2, rope=Rope(dim=2, theta=1.0))
    config: dict[str, Any] = {
        "num_attention_heads": full.heads,
        "num_key_value_heads": full.kv_heads,
        "head_dim": full.head_dim,
        "num_experts": v.experts.count,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(v.layers_with(DenseMlp)),
        "intermediate_size": _dense_intermediate(v),
        **_rope(full.rope, full.head_dim if hybrid else None),
    }
    if not hybrid:
        return config
    delta = _first(v, GatedDelta) or GatedDelta(key_heads=1, value_heads=1, key_dim=1, value_dim=1, taps=2)
    kinds: dict[type, str] = {GroupedAttention: "full_attention", GatedDelta: "linear_attention"}
    return config | {
        "layer_types": [kinds.get(type(layer.mixer), "?") for layer in v.layers],
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.taps,
        "shared_expert_intermediate_size": v.experts.shared.intermediate if v.experts.shared else None,
    }


def _qwen2(v: Variant) -> dict[str, Any]:
    shared = v.experts.shared
    return {
        **_grouped(v),
        "num_experts": v.experts.count,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(v.layers_with(DenseMlp)),
        "intermediate_size": _dense_intermediate(v),
        "shared_expert_intermediate_size": shared.intermediate if shared else None,
    }


def _plain(v: Variant) -> dict[str, Any]:
    return {**_grouped(v), "num_local_experts": v.experts.count, "intermediate_size": v.experts.intermediate}


def _olmoe(v: Variant) -> dict[str, Any]:
    return {**_plain(v), "norm_topk_prob": v.experts.router.normalize}


def _minimax(v: Variant) -> dict[str, Any]:
    mixer = _mixer(v, GroupedAttention, "grouped attention")
    return {**_plain(v), "rotary_dim": mixer.rope.dim}


def _grouped(v: Variant) -> dict[str, Any]:
    mixer = _mixer(v, GroupedAttention, "grouped attention")
    return {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        **_rope(mixer.rope, None),
    }


def _deepseek_v2(v: Variant) -> dict[str, Any]:
    router = v.experts.router
    return _deepseek(v) | {
        "topk_method": "group_limited_greedy" if router.groups else "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": router.normalize,
    }


def _deepseek(v: Variant) -> dict[str, Any]:
    mixer = _mixer(v, LatentAttention, "latent attention")
    index = mixer.index
    indexed: dict[str, Any] = {}
    if index:
        indexed = {"index_n_heads": index.heads, "index_head_dim": index.dim, "index_topk": index.count}
        indexed["indexer_rope_interleave"] = index.interleaved
    return {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.heads,
        "q_lora_rank": mixer.q_rank or None,
        "kv_lora_rank": mixer.kv_rank,
        "qk_nope_head_dim": mixer.nope_dim,
        "qk_rope_head_dim": mixer.rope.dim,
        "v_head_dim": mixer.v_dim,
        "moe_layer_freq": 1,
        **indexed,
        **_noaux(v),
        **_rope(mixer.rope, None),
    }


def _glm(v: Variant) -> dict[str, Any]:
    mixer = _mixer(v, GroupedAttention, "grouped attention")
    return {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "use_qk_norm": mixer.qk_norm,
        "attention_bias": mixer.bias,
        **_noaux(v),
        **_rope(mixer.rope, mixer.head_dim),
    }


def _gpt_oss(v: Variant) -> dict[str, Any]:
    mixer = _mixer(v, GroupedAttention, "grouped attention")
    windows = [layer.mixer.window for layer in v.layers if isinstance(layer.mixer, GroupedAttention)]
    config: dict[str, Any] = {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "attention_bias": True,
        "sliding_window": max(windows) or 128,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "num_local_experts": v.experts.count,
        "intermediate_size": v.experts.intermediate,
    }
    if v.experts.clamped:
        config |= {"swiglu_alpha": v.experts.clamped.alpha, "swiglu_limit": v.experts.clamped.limit}
    return config | _rope(mixer.rope, None)


def _gemma4(v: Variant) -> dict[str, Any]:
    """Layers of a kind that the variant lacks are as the others, for a config.json has their sizes all the same."""
    mixers = [layer.mixer for layer in v.layers if isinstance(layer.mixer, GroupedAttention)]
    full = next((mixer for mixer in mixers if not mixer.window), _mixer(v, GroupedAttention, "grouped attention"))
    sliding = next((mixer for mixer in mixers if mixer.window), full)
    return {
        "model_type": "gemma4_text",
        "num_attention_heads": full.heads,
        "num_key_value_heads": sliding.kv_heads if full.keys_as_values else full.kv_heads,
        "num_global_key_value_heads": full.kv_heads,
        "head_dim": sliding.head_dim,
        "global_head_dim": full.head_dim,
        "attention_k_eq_v": full.keys_as_values,
        "sliding_window": sliding.window or 1,
        "layer_types": ["sliding_attention" if mixer.window else "full_attention" for mixer in mixers],
        "rope_parameters": {
            "full_attention": _turning(full),
            "sliding_attention": _turning(sliding),
        },
        "enable_moe_block": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "num_experts": v.experts.count,
        "top_k_experts": v.experts.per_token,
        "moe_intermediate_size": v.experts.intermediate,
        "intermediate_size": v.experts.shared.intermediate if v.experts.shared else None,
        "final_logit_softcapping": v.logit_cap or None,
    }


def _turning(mixer: GroupedAttention) -> dict[str, Any]:
    rope = mixer.rope
    if not rope.turning:
        return {"rope_type": "default", "rope_theta": rope.theta}
    return {
        "rope_type": "proportional",
        "rope_theta": rope.theta,
        "partial_rotary_factor": 2 * rope.turning / mixer.head_dim,
    }


def _noaux(v: Variant) -> dict[str, Any]:
    """The feed-forward parts of deepseek_v3."""
    experts = v.experts
    return {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_routed_experts": experts.count,
        "n_shared_experts": experts.shared.intermediate // experts.intermediate if experts.shared else 0,
        "n_group": experts.router.groups,
        "topk_group": experts.router.groups_kept,
        "routed_scaling_factor": experts.router.scaling,
        "first_k_dense_replace": v.moe_layers[0],
        "intermediate_size": _dense_intermediate(v),
    }


def _qwen4(v: Variant) -> dict[str, Any]:
    delta = _mixer(v, GatedDelta, "gated delta-net")
    ngram = next((layer.ngram for layer in v.layers if layer.ngram), None)
    config = _qwen(v) | {
        "model_type": "qwen4_exp_text",
        "output_gate_type": "sigmoid" if delta.sigmoid else "silu",
        "ple_layer_ids": [i + 1 for i, layer in enumerate(v.layers) if layer.ngram],
    }
    for field in ("decoder_sparse_step", "mlp_only_layers", "intermediate_size"):
        del config[field]
    full = _first(v, GroupedAttention)
    if full and full.index:
        config |= {
            "indexer_n_heads": full.index.heads,
            "indexer_kv_heads": 1,
            "indexer_head_dim": full.index.dim,
            "indexer_budget": full.index.count * full.index.unit,
            "indexer_compress_ratio": full.index.unit,
        }
    if v.streams:
        config |= {"hc_count": v.streams.count, "hc_lowrank": v.streams.rank}
    if ngram:
        config |= {
            "eos_token_id": [ngram.end_id, *(token for token in v.eos_ids if token != ngram.end_id)],
            "ple_embed_dim": ngram.width,
            "ple_conv_kernel_size": ngram.taps,
            "ngram_size": ngram.length,
            "heads_per_ngram": ngram.heads,
            "ngram_vocab_size_base": ngram.min_rows,
            "make_ngram_vocab_size_divisible_by": ngram.divisor,
            "seed": ngram.seed,
            "split_ngram_parts": ngram.parts,
        }
    return config


WRITERS = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "gemma4": _gemma4,
    "glm4_moe": _glm,
    "glm_moe_dsa": _deepseek,
    "gpt_oss": _gpt_oss,
    "minimax_m2": _minimax,
    "mixtral": _plain,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2,
    "qwen4_exp": _qwen4,
}
"""`model_type` -> what it says besides; all others, what Qwen's say."""
