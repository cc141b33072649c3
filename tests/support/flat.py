"""Variants in the words of version 1 of moeflux.json, one list of fields for all layers: short to write in a test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from moeflux import Variant

UNUSED: dict[str, Any] = {
    "attention_gate": False, "tied_embeddings": False, "rms_norm_eps": 1e-6, "max_context": 1 << 20,
    "linear_key_heads": 0, "linear_value_heads": 0, "linear_key_dim": 0, "linear_value_dim": 0, "conv_kernel": 0,
    "q_lora_rank": 0, "kv_lora_rank": 0, "qk_nope_dim": 0, "qk_rope_dim": 0, "v_head_dim": 0,
    "shared_intermediate": 0, "dense_intermediate": 0, "normalize_topk": True, "num_groups": 0, "groups_per_token": 0,
    "routed_scaling": 1.0, "yarn_factor": 0.0, "yarn_original_context": 0, "yarn_beta_fast": 0.0,
    "yarn_beta_slow": 0.0, "yarn_mscale": 0.0, "yarn_mscale_all_dim": 0.0, "eos_ids": (), "bos_id": -1,
    "think_start_id": -1, "think_end_id": -1, "lossy": (),
}  # fmt: skip


def flat(**fields: Any) -> Variant:
    return Variant.from_dict(UNUSED | fields, version=1)


def changed(variant: Variant, **fields: Any) -> Variant:
    """The variant with other fields. Fields of parts that no layer has were 0 before."""
    return Variant.from_dict(variant.identity() | fields, version=1)


def words(variant: Variant) -> SimpleNamespace:
    """The fields by which version 1 says it."""
    return SimpleNamespace(**variant.identity())
