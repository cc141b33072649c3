"""Every constant and derived figure of the known models, held to the published tables."""

from __future__ import annotations

import dataclasses
import json

import pytest

from moeflux import PRESETS, FormatError, QuantFormat, Variant
from moeflux._core import ExpertLayout
from moeflux.models.variants import MAX_CONTEXT, preset

A17B = PRESETS["Qwen3.5-397B-A17B"]
A3B = PRESETS["Qwen3.6-35B-A3B"]
COGITO = PRESETS["Cogito-V2-671B"]
KNOWN = (A17B, A3B, COGITO)

# field or property: (A17B, A3B, Cogito)
TABLE = {
    "model_type": ("qwen3_5_moe", "qwen3_5_moe", "deepseek_v3"),
    "attention": ("gqa", "gqa", "mla"),
    "rope": ("vanilla", "vanilla", "yarn"),
    "router": ("softmax", "softmax", "noaux_tc"),
    "shared_expert": ("gated", "gated", "plain"),
    "attention_gate": (True, True, False),
    "tied_embeddings": (False, False, False),
    "hidden_size": (4096, 2048, 7168),
    "num_layers": (60, 40, 61),
    "full_attention_interval": (4, 4, 1),
    "num_heads": (32, 16, 128),
    "num_kv_heads": (2, 2, 128),
    "head_dim": (256, 256, 192),
    "rotary_dim": (64, 64, 64),
    "rope_theta": (1e7, 1e7, 1e4),
    "rms_norm_eps": (1e-6, 1e-6, 1e-6),
    "vocab_size": (248_320, 248_320, 128_815),
    "num_experts": (512, 256, 256),
    "experts_per_token": (10, 8, 8),
    "moe_intermediate": (1024, 512, 2048),
    "shared_intermediate": (1024, 512, 2048),
    "linear_value_heads": (64, 32, 0),
    "linear_key_heads": (16, 16, 0),
    "linear_key_dim": (128, 128, 0),
    "linear_value_dim": (128, 128, 0),
    "conv_kernel": (4, 4, 0),
    "eos_ids": ((248_046, 248_044), (248_046, 248_044), (1,)),
    "bos_id": (-1, -1, 0),
    "think_start_id": (248_068, 248_068, -1),
    "think_end_id": (248_069, 248_069, -1),
    "q_lora_rank": (0, 0, 1536),
    "kv_lora_rank": (0, 0, 512),
    "qk_nope_dim": (0, 0, 128),
    "qk_rope_dim": (0, 0, 64),
    "v_head_dim": (0, 0, 128),
    "num_groups": (0, 0, 8),
    "groups_per_token": (0, 0, 4),
    "routed_scaling": (1.0, 1.0, 2.5),
    "first_dense_layers": (0, 0, 3),
    "dense_intermediate": (0, 0, 18_432),
    "yarn_factor": (0.0, 0.0, 40.0),
    "yarn_original_context": (0, 0, 4096),
    "yarn_beta_fast": (0.0, 0.0, 32.0),
    "yarn_beta_slow": (0.0, 0.0, 1.0),
    "yarn_mscale": (0.0, 0.0, 1.0),
    "yarn_mscale_all_dim": (0.0, 0.0, 1.0),
    "max_context": (1_048_576,) * 3,
    # derived
    "linear_total_key": (2048, 2048, 0),
    "linear_total_value": (8192, 4096, 0),
    "conv_channels": (12_288, 8192, 0),
    "conv_state_bytes": (147_456, 98_304, 0),
    "recurrent_state_bytes": (4_194_304, 2_097_152, 0),
    "q_proj_out": (16_384, 8192, 24_576),
    "o_proj_in": (8192, 4096, 16_384),
    "kv_a_out": (0, 0, 576),
    "kv_b_out": (0, 0, 32_768),
}


@pytest.mark.parametrize("field", TABLE)
def test_table(field: str) -> None:
    assert tuple(getattr(variant, field) for variant in KNOWN) == TABLE[field]


def test_derived_beyond_the_table() -> None:
    assert (A17B.kv_dim, A3B.kv_dim) == (512, 512)
    assert (len(A17B.full_layers), len(A17B.linear_layers)) == (15, 45)
    assert (len(A3B.full_layers), len(A3B.linear_layers)) == (10, 30)
    assert A3B.full_layers[:3] == (3, 7, 11)
    assert COGITO.moe_layers == tuple(range(3, 61))
    assert COGITO.softmax_scale == pytest.approx(0.1352338, abs=5e-8)
    assert A3B.softmax_scale == 1 / 16
    assert [variant.kv_row_bytes() for variant in KNOWN] == [4096, 4096, 2304]
    assert A17B.kv_row_bytes() * len(A17B.full_layers) == 61_440
    assert COGITO.kv_row_bytes() * COGITO.num_layers == 140_544
    state = [len(v.linear_layers) * (v.conv_state_bytes + v.recurrent_state_bytes) for v in (A17B, A3B)]
    assert [round(total / 1e6, 2) for total in state] == [195.38, 65.86]


# bits: model: (bytes of an expert, offset of each of the nine blocks)
EXPERTS = {
    (4, A17B.name): (
        7_077_888,
        (0, 2_097_152, 2_228_224, 2_359_296, 4_456_448, 4_587_520, 4_718_592, 6_815_744, 6_946_816),
    ),
    (4, A3B.name): (1_769_472, (0, 524_288, 557_056, 589_824, 1_114_112, 1_146_880, 1_179_648, 1_703_936, 1_736_704)),
    (4, COGITO.name): (
        24_772_608,
        (0, 7_340_032, 7_798_784, 8_257_536, 15_597_568, 16_056_320, 16_515_072, 23_855_104, 24_313_856),
    ),
    (2, A17B.name): (
        3_932_160,
        (0, 1_048_576, 1_179_648, 1_310_720, 2_359_296, 2_490_368, 2_621_440, 3_670_016, 3_801_088),
    ),
    (2, A3B.name): (983_040, (0, 262_144, 294_912, 327_680, 589_824, 622_592, 655_360, 917_504, 950_272)),
    (2, COGITO.name): (
        13_762_560,
        (0, 3_670_016, 4_128_768, 4_587_520, 8_257_536, 8_716_288, 9_175_040, 12_845_056, 13_303_808),
    ),
}


@pytest.mark.parametrize(("bits", "name"), EXPERTS)
def test_expert_layout(bits: int, name: str) -> None:
    variant, fmt = PRESETS[name], QuantFormat.affine(bits, 64)
    layout = ExpertLayout(variant.hidden_size, variant.moe_intermediate, fmt, fmt, fmt)
    size, offsets = EXPERTS[bits, name]
    assert layout.bytes == size
    assert tuple(offset for _, offset, *_ in layout.pieces) == offsets
    names = [f"{matrix}_proj.{part}" for matrix in ("gate", "up", "down") for part in ("weight", "scales", "biases")]
    assert [name for name, *_ in layout.pieces] == names


def test_expert_totals() -> None:
    fmt = QuantFormat.affine(4, 64)
    layouts = [ExpertLayout(v.hidden_size, v.moe_intermediate, fmt, fmt, fmt) for v in KNOWN]
    layer_files = [layout.bytes * variant.num_experts for layout, variant in zip(layouts, KNOWN, strict=True)]
    assert layer_files == [3_623_878_656, 452_984_832, 6_341_787_648]
    totals = [size * len(variant.moe_layers) for size, variant in zip(layer_files, KNOWN, strict=True)]
    assert [round(total / 1e9, 2) for total in totals] == [217.43, 18.12, 367.82]
    per_token = [
        layout.bytes * variant.experts_per_token * len(variant.moe_layers)
        for layout, variant in zip(layouts, KNOWN, strict=True)
    ]
    assert [round(total / 1e9, 3) for total in per_token] == [4.247, 0.566, 11.494]
    assert all(layout.bytes % (16 << 10) == 0 for layout in layouts)


def test_json_round_trip() -> None:
    for variant in KNOWN:
        assert Variant.from_dict(json.loads(variant.to_json())) == variant


def test_from_dict_is_strict() -> None:
    fields = A3B.to_dict()
    with pytest.raises(FormatError, match='unknown field "colour"'):
        Variant.from_dict({**fields, "colour": 1})
    with pytest.raises(FormatError, match='field "hidden_size" is missing'):
        Variant.from_dict({key: value for key, value in fields.items() if key != "hidden_size"})
    with pytest.raises(FormatError, match=r"variant\.hidden_size: expected int, found str"):
        Variant.from_dict({**fields, "hidden_size": "2048"})
    with pytest.raises(FormatError, match=r"variant\.hidden_size: expected int, found bool"):
        Variant.from_dict({**fields, "hidden_size": True})
    with pytest.raises(FormatError, match=r"variant\.eos_ids\[1\]: expected int, found float"):
        Variant.from_dict({**fields, "eos_ids": [1, 2.0]})


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        A3B.hidden_size = 1  # type: ignore[misc]


YARN = {
    "rope": "yarn", "yarn_factor": 4.0, "yarn_original_context": 64, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size: expected a positive number, found 0"),
        ({"hidden_size": 100}, "hidden_size: expected a multiple of 32, found 100"),
        ({"experts_per_token": 257}, r"experts_per_token: expected at most num_experts \(256\), found 257"),
        ({"num_heads": 15}, r"num_heads: expected a multiple of num_kv_heads \(2\), found 15"),
        ({"linear_value_heads": 17}, r"linear_value_heads: expected a multiple of linear_key_heads \(16\), found 17"),
        ({"rotary_dim": 63}, "rotary_dim: expected an even number, found 63"),
        ({"rotary_dim": 512}, r"rotary_dim: expected at most head_dim \(256\), found 512"),
        ({"router": "random"}, "router: expected softmax or noaux_tc, found 'random'"),
        ({"mlp_kinds": ("moe",)}, "mlp_kinds: expected 40 entries, one a layer"),
        ({"mlp_kinds": ("dense",) * 40}, "mlp_kinds: expected at least one layer with experts"),
        ({"layer_kinds": ("sliding",) * 40}, "layer_kinds: expected only linear, full"),
        ({"router": "noaux_tc"}, "num_groups: expected a positive number, found 0"),
        ({"rope": "yarn"}, "yarn_factor: expected a positive number"),
        ({**YARN, "yarn_mscale": -1.0}, "yarn_mscale: expected 0 or a positive number, found -1.0"),
        ({**YARN, "yarn_mscale_all_dim": -1.0}, "yarn_mscale_all_dim: expected 0 or a positive number"),
        ({"attention": "mla"}, "kv_lora_rank: expected a positive number"),
        ({"max_context": MAX_CONTEXT + 1}, "max_context: expected at most 1048576"),
    ],
)
def test_inconsistent_variant(changes: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        dataclasses.replace(A3B, **changes)


def test_experts_per_token_is_marked_lossy() -> None:
    assert A17B.lossy == ()
    assert A17B.with_experts_per_token(10) is A17B
    fewer = A17B.with_experts_per_token(4)
    assert fewer.experts_per_token == 4
    assert fewer.lossy == ("uses 4 experts per token, the model's own number is 10",)
    with pytest.raises(FormatError, match="experts_per_token: expected at most num_experts"):
        A17B.with_experts_per_token(513)


def test_with_layers_keeps_the_pattern() -> None:
    assert A3B.with_layers(8).layer_kinds == A3B.layer_kinds[:8]
    assert A3B.with_layers(44).full_layers == (*A3B.full_layers, 43)
    assert COGITO.with_layers(5).mlp_kinds == ("dense",) * 3 + ("moe",) * 2


def test_irregular_layers_have_no_interval() -> None:
    kinds = ("full", "linear", "linear", "full")
    assert dataclasses.replace(A3B, layer_kinds=kinds, mlp_kinds=("moe",) * 4).full_attention_interval == 0


def test_preset_names() -> None:
    assert preset("a3b") is A3B
    assert preset("cogito") is COGITO
    with pytest.raises(FormatError, match=r'variant "qwen": expected one of Qwen3\.5-397B-A17B'):
        preset("qwen")
