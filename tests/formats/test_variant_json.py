"""The C++ twin of `Variant`: the same fields, the same meaning, the same rules."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moeflux import PRESETS, FormatError, Variant
from moeflux._core import read_variant
from support.tiny_stores import (
    deepseek_v2,
    glm,
    hybrid,
    latent,
    minimax,
)

# ---- Variants -----------------------------------------------------------------------------------------------------


TINY = [hybrid(), latent(), glm(), minimax(), deepseek_v2()]


@pytest.mark.parametrize("variant", [*PRESETS.values(), *TINY], ids=lambda v: v.name)
def test_variant_means_the_same_to_both(variant: Variant) -> None:
    found = read_variant(variant.to_json())
    assert found == variant.to_dict()
    assert Variant.from_dict(found) == variant


def test_every_field_of_version_1_is_read() -> None:
    """A field that was dropped or taken from another would not survive."""
    fields = latent(
        rope="yarn", yarn_factor=2.5, yarn_original_context=7, yarn_beta_fast=3.5, yarn_beta_slow=0.5
    ).identity()
    fields |= {"bos_id": 11, "think_start_id": 12, "think_end_id": 13, "eos_ids": [5, 6], "lossy": ["a", "\u20ac"]}
    fields |= {"yarn_mscale": 0.25, "yarn_mscale_all_dim": 0.75, "routed_scaling": 1.25}
    fields |= {"rms_norm_eps": 1e-5, "max_context": 99, "normalize_topk": False, "tied_embeddings": True}
    assert Variant.from_dict(fields, version=1).identity() == fields
    fields = hybrid().identity() | {"linear_key_heads": 3, "linear_value_heads": 9, "linear_key_dim": 4}
    fields |= {"linear_value_dim": 5, "conv_kernel": 8}
    assert Variant.from_dict(fields, version=1).identity() == fields


def test_every_field_of_version_1_is_needed() -> None:
    for name in latent().identity():
        fields = latent().identity()
        del fields[name]
        with pytest.raises(FormatError, match=f'variant: field "{name}" is missing'):
            read_variant(json.dumps(fields), "variant", 1)


def test_what_has_no_default_is_needed() -> None:
    fields = latent().to_dict()
    for name in ("name", "model_type", "hidden_size", "vocab_size", "rms_norm_eps", "max_context", "mixers", "layers"):
        with pytest.raises(FormatError, match=f'variant: field "{name}" is missing'):
            read_variant(json.dumps({key: value for key, value in fields.items() if key != name}))
    for name in ("heads", "kv_rank", "rope"):
        mixer = {key: value for key, value in fields["mixers"][0].items() if key != name}
        with pytest.raises(FormatError, match=rf'variant\.mixers\[0\]: field "{name}" is missing'):
            read_variant(json.dumps(fields | {"mixers": [mixer]}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"surprise": 1}, 'unknown field "surprise"'),
        ({"mixers": 5}, r"variant\.mixers: expected an array"),
        ({"mixers": [5]}, r"variant\.mixers\[0\]: expected an object"),
        ({"mixers": [{}]}, r"mixers\[0\]\.kind: expected grouped_attention or latent_attention or gated_delta"),
        ({"mixers": [{"kind": "dense_mlp", "intermediate": 4}]}, r"mixers\[0\]\.kind: expected grouped_attention or"),
        ({"feed_forwards": [{"kind": "dense_mlp", "intermediate": 4, "x": 1}]}, r'forwards\[0\]: unknown field "x"'),
        ({"layers": [[0, 0], [0]]}, r"layers\[1\]: expected a mixer's number, a feed-forward part's, and an n-gram"),
        ({"layers": [[0, 0], [1, 0]]}, r"layers\[1\]\[0\]: expected 0 to 0, found 1"),
        ({"layers": [[0, -1]]}, r"layers\[0\]\[1\]: expected 0 to 1, found -1"),
        ({"layers": [["0", 0]]}, r"layers\[0\]\[0\]: expected a whole number"),
        ({"layers": []}, "layers: expected 1 to 4096, found 0"),
        ({"layers": [[0, 1]] * 4097}, "layers: expected 1 to 4096, found 4097"),
    ],
)
def test_bad_parts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_variant(json.dumps(latent().to_dict() | changes))


YARN = latent(rope="yarn", yarn_factor=4.0, yarn_original_context=64, yarn_beta_fast=32.0, yarn_beta_slow=1.0)

BAD_VARIANTS: list[tuple[Variant, str, Any, str]] = [
    (hybrid(), "surprise", 1, 'unknown field "surprise"'),
    (hybrid(), "hidden_size", "64", r'variant\.hidden_size: expected a whole number, found the string "64"'),
    (hybrid(), "hidden_size", 64.0, "hidden_size: expected a whole number"),
    (hybrid(), "hidden_size", True, "hidden_size: expected a whole number"),
    (hybrid(), "attention_gate", 1, "attention_gate: expected true or false"),
    (hybrid(), "rope_theta", "1", "rope_theta: expected a number"),
    (hybrid(), "name", 5, "name: expected a string"),
    (hybrid(), "lossy", "x", "lossy: expected an array"),
    (hybrid(), "lossy", [1], r"lossy\[0\]: expected a string"),
    (hybrid(), "model_type", "llama", 'model_type: expected qwen3_5_moe or .*found the string "llama"'),
    (hybrid(), "attention", "mha", "attention: expected gqa or mla"),
    (hybrid(), "rope", 1, "rope: expected vanilla or yarn, found the number 1"),
    (hybrid(), "router", "", "router: expected softmax or noaux_tc"),
    (hybrid(), "shared_expert", None, "shared_expert: expected none or gated or plain, found null"),
    (hybrid(), "layer_kinds", ["full", "half", "full"], r"layer_kinds\[1\]: expected linear or full"),
    (hybrid(), "layer_kinds", [], "mlp_kinds: expected 0 entries, one a layer, found 3"),
    (hybrid(), "mlp_kinds", ["moe"] * 2, "mlp_kinds: expected 3 entries, one a layer, found 2"),
    (hybrid(), "mlp_kinds", ["dense"] * 3, "layers: expected at least one layer with experts"),
    (hybrid(), "mlp_kinds", ["dense", "moe", "moe"], "layer 0: intermediate: expected 1 to"),
    *[
        (hybrid(), field, value, f"{word}.*: expected .*found -?{abs(value)}")
        for field, word in (
            ("hidden_size", "hidden_size"),
            ("vocab_size", "vocab_size"),
            ("num_heads", "heads"),
            ("num_kv_heads", "kv_heads"),
            ("head_dim", "head_dim"),
            ("num_experts", "count"),
        )
        for value in (0, -1, 1 << 62)
    ],
    (hybrid(), "hidden_size", 48, "hidden_size: expected a multiple of 32, found 48"),
    (hybrid(), "moe_intermediate", 33, "intermediate: expected a multiple of 32"),
    (hybrid(), "max_context", (1 << 20) + 1, "max_context: expected 1 to 1048576"),
    (hybrid(), "rms_norm_eps", 0, "rms_norm_eps: expected a positive number"),
    (hybrid(), "rope_theta", -1.0, "theta: expected a positive number"),
    (hybrid(), "routed_scaling", 0.0, "scaling: expected a positive number"),
    (hybrid(), "rotary_dim", 3, "rope.dim: expected an even number"),
    (hybrid(), "rotary_dim", 18, "rope.dim: expected 1 to 16"),
    (hybrid(), "experts_per_token", 5, "per_token: expected 1 to 4, found 5"),
    (hybrid(), "num_kv_heads", 3, r"heads: expected a multiple of kv_heads \(3\), found 4"),
    (hybrid(), "linear_key_heads", 0, "key_heads: expected 1 to"),
    (hybrid(), "linear_key_heads", 4, r"value_heads: expected a multiple of key_heads \(4\)"),
    (hybrid(), "conv_kernel", 1, "taps: expected 2 to 16"),
    (hybrid(), "shared_intermediate", 0, "shared.intermediate: expected 1 to"),
    (hybrid(head_dim=1 << 20), "num_heads", 1 << 20, "heads.*: expected 1 to 67108864"),
    (latent(), "head_dim", 32, r"head_dim: expected qk_nope_dim \+ qk_rope_dim"),
    (latent(), "qk_rope_dim", 0, "head_dim: expected qk_nope_dim"),
    (latent(), "rotary_dim", 8, r"rotary_dim: expected qk_rope_dim \(16\)"),
    (latent(), "attention_gate", True, "attention_gate: expected false with latent attention"),
    (latent(), "layer_kinds", ["full", "full", "linear"], "layer_kinds: expected only full layers"),
    (latent(), "q_lora_rank", -1, "q_rank: expected 0 to"),
    (latent(), "num_groups", 0, "groups: expected 1 to 4, found 0"),
    (latent(), "num_groups", 3, r"groups: expected a divisor of count \(4\)"),
    (latent(), "groups_per_token", 3, "groups_kept: expected 1 to 2"),
    (latent(), "experts_per_token", 3, "per_token: expected at most the 2 experts of the kept groups"),
    (latent(), "rope", "yarn", "yarn.factor: expected a positive number"),
    (YARN, "yarn_mscale", -0.5, "yarn.mscale: expected 0 or a positive number, found -0.5"),
    (YARN, "yarn_mscale_all_dim", -0.5, "yarn.mscale_all_dim: expected 0 or a positive number, found -0.5"),
]


@pytest.mark.parametrize(("variant", "field", "value", "message"), BAD_VARIANTS)
def test_bad_variant(variant: Variant, field: str, value: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_variant(json.dumps(variant.identity() | {field: value}), "variant", 1)
