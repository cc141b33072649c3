"""Every constant and derived figure of the known models, held to the published tables."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from moeflux import PRESETS, ArgumentError, FormatError, QuantFormat, Variant
from moeflux._core import ExpertLayout
from moeflux.models.layers import (
    DenseMlp,
    GatedDelta,
    GroupedAttention,
    LatentAttention,
    Layer,
    Rope,
    RoutedExperts,
    Router,
    SharedExpert,
    Yarn,
)
from moeflux.models.presets import preset
from moeflux.models.tensors import dense_shapes
from moeflux.models.variants import MAX_CONTEXT

A17B = PRESETS["Qwen3.5-397B-A17B"]
A3B = PRESETS["Qwen3.6-35B-A3B"]
COGITO = PRESETS["Cogito-V2-671B"]
KNOWN = (A17B, A3B, COGITO)
GLM = (PRESETS["GLM-4.5-Air"], PRESETS["GLM-4.7"])
GPT_OSS = (PRESETS["gpt-oss-20b"], PRESETS["gpt-oss-120b"])

# In the words of version 1 of moeflux.json: (A17B, A3B, Cogito)
TABLE = {
    "model_type": ("qwen3_5_moe", "qwen3_5_moe", "deepseek_v3"),
    "attention": ("gqa", "gqa", "mla"),
    "rope": ("vanilla", "vanilla", "yarn"),
    "router": ("softmax", "softmax", "noaux_tc"),
    "shared_expert": ("gated", "gated", "plain"),
    "attention_gate": (True, True, False),
    "tied_embeddings": (False, False, False),
    "hidden_size": (4096, 2048, 7168),
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
    "dense_intermediate": (0, 0, 18_432),
    "yarn_factor": (0.0, 0.0, 40.0),
    "yarn_original_context": (0, 0, 4096),
    "yarn_beta_fast": (0.0, 0.0, 32.0),
    "yarn_beta_slow": (0.0, 0.0, 1.0),
    "yarn_mscale": (0.0, 0.0, 1.0),
    "yarn_mscale_all_dim": (0.0, 0.0, 1.0),
    "max_context": (1_048_576,) * 3,
}


@pytest.mark.parametrize("field", TABLE)
def test_table(field: str) -> None:
    found = [variant.identity()[field] for variant in KNOWN]
    assert [tuple(value) if isinstance(value, list) else value for value in found] == list(TABLE[field])


def test_derived_beyond_the_table() -> None:
    assert [variant.num_layers for variant in KNOWN] == [60, 40, 61]
    full = [variant.layers_with(GroupedAttention, LatentAttention) for variant in KNOWN]
    assert full == [tuple(range(3, 60, 4)), tuple(range(3, 40, 4)), tuple(range(61))]
    assert [len(variant.layers_with(GatedDelta)) for variant in KNOWN] == [45, 30, 0]
    assert COGITO.moe_layers == tuple(range(3, 61))
    delta = [variant.layers[0].mixer for variant in (A17B, A3B)]
    assert [(d.key_width, d.value_width, d.channels) for d in delta] == [(2048, 8192, 12_288), (2048, 4096, 8192)]
    grouped = A3B.layers[3].mixer
    assert grouped.kv_width == 512
    latent = COGITO.layers[0].mixer
    assert latent.head_dim == 192
    fixed, rows = zip(*(variant.state_numbers() for variant in KNOWN), strict=True)
    assert [4 * count for count in rows] == [61_440, 40_960, 140_544]
    assert [4 * count for count in fixed] == [45 * (147_456 + 4_194_304), 30 * (98_304 + 2_097_152), 0]


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
    layout = ExpertLayout(variant.hidden_size, variant.experts.intermediate, fmt, fmt, fmt)
    size, offsets = EXPERTS[bits, name]
    assert layout.bytes == size
    assert tuple(offset for _, offset, *_ in layout.pieces) == offsets
    names = [f"{matrix}_proj.{part}" for matrix in ("gate", "up", "down") for part in ("weight", "scales", "biases")]
    assert [name for name, *_ in layout.pieces] == names


def test_expert_totals() -> None:
    fmt = QuantFormat.affine(4, 64)
    layouts = [ExpertLayout(v.hidden_size, v.experts.intermediate, fmt, fmt, fmt) for v in KNOWN]
    layer_files = [layout.bytes * variant.experts.count for layout, variant in zip(layouts, KNOWN, strict=True)]
    assert layer_files == [3_623_878_656, 452_984_832, 6_341_787_648]
    totals = [size * len(variant.moe_layers) for size, variant in zip(layer_files, KNOWN, strict=True)]
    assert [round(total / 1e9, 2) for total in totals] == [217.43, 18.12, 367.82]
    per_token = [
        layout.bytes * variant.experts.per_token * len(variant.moe_layers)
        for layout, variant in zip(layouts, KNOWN, strict=True)
    ]
    assert [round(total / 1e9, 3) for total in per_token] == [4.247, 0.566, 11.494]
    assert all(layout.bytes % (16 << 10) == 0 for layout in layouts)


def parameters(v: Variant) -> tuple[float, float]:
    """Of the whole model and of a token's way through it, in thousands of millions."""
    dense = sum(math.prod(shape.shape) for shape in dense_shapes(v))
    expert = 3 * v.hidden_size * v.experts.intermediate * len(v.moe_layers)
    counts = (dense + expert * v.experts.count, dense + expert * v.experts.per_token)
    return round(counts[0] / 1e9, 1), round(counts[1] / 1e9, 1)


def test_glm_has_as_many_parameters_as_published() -> None:
    """106 and 355 billion, 12 and 32 of them active, says their card, which counts embeddings and the layer for
    multi-token prediction as it likes."""
    assert [parameters(v) for v in GLM] == [(106.9, 13.4), (352.8, 33.6)]
    assert [v.state_numbers() for v in GLM] == [(0, 46 * 2 * 1024), (0, 92 * 2 * 1024)]
    assert [v.moe_layers for v in GLM] == [tuple(range(1, 46)), tuple(range(3, 92))]


# In thousands of millions, with what a token goes through. Their cards say 230 and 10, 14.3 and 2.7, 46.7 and 12.9, 141
# and 39, 6.9 and 1.3, 236 and 21, 15.7 and 2.4, 1000 and 32, 30 and 3, 25.2 and 3.8, 671 and 37, 744 and 40: some leave
# out embeddings.
PARAMETERS = {
    "MiniMax-M2": (228.7, 11.0),
    "Qwen1.5-MoE-A2.7B": (14.3, 2.7),
    "Mixtral-8x7B": (46.7, 12.9),
    "Mixtral-8x22B": (140.6, 39.2),
    "OLMoE-1B-7B": (6.9, 1.3),
    "DeepSeek-V2": (235.7, 21.4),
    "DeepSeek-V2-Lite": (15.7, 2.7),
    "Kimi-K2.5": (1026.4, 32.9),
    "GLM-4.7-Flash": (29.9, 3.9),
    "gemma-4-26B-A4B": (25.2, 3.8),
    "DeepSeek-V3.2": (671.9, 38.4),
    "GLM-5": (743.9, 41.8),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_others_have_as_many_parameters_as_published(name: str) -> None:
    assert parameters(PRESETS[name]) == PARAMETERS[name]


def test_what_a_position_takes_in_others() -> None:
    assert PRESETS["MiniMax-M2"].state_numbers() == (0, 62 * 2 * 1024)
    assert PRESETS["DeepSeek-V2-Lite"].state_numbers() == (0, 27 * 576)
    assert PRESETS["DeepSeek-V3.2"].state_numbers() == (0, 61 * (576 + 128))
    assert PRESETS["GLM-5"].state_numbers() == (0, 78 * (576 + 128))
    assert PRESETS["gemma-4-26B-A4B"].state_numbers() == (0, 25 * 2 * 2048 + 5 * 2 * 1024)


def test_gpt_oss_has_as_many_parameters_as_published() -> None:
    """20.9 and 116.8 billion, 3.6 and 5.1 of them active, where the embedding does not count."""
    totals, active, files = [], [], []
    for v in GPT_OSS:
        biases = (2 * v.experts.intermediate + v.hidden_size) * len(v.moe_layers)
        dense = sum(math.prod(shape.shape) for shape in dense_shapes(v)) - biases * v.experts.count
        expert = 3 * v.hidden_size * v.experts.intermediate * len(v.moe_layers) + biases
        totals.append(dense + expert * v.experts.count)
        active.append(dense + expert * v.experts.per_token - v.vocab_size * v.hidden_size)
        layout = ExpertLayout(v.hidden_size, v.experts.intermediate, *[QuantFormat.mxfp4()] * 3)
        assert layout.bytes == 3 * 2880 * 2880 * 17 // 32
        assert [name.partition(".")[2] for name, *_ in layout.pieces] == ["weight", "scales"] * 3
        files.append(layout.bytes * v.experts.count * len(v.moe_layers))
    assert [round(total / 1e9, 1) for total in totals] == [20.9, 116.8]
    assert [round(count / 1e9, 1) for count in active] == [3.6, 5.1]
    assert [round(size / 1e9, 1) for size in files] == [10.2, 60.9]
    assert [v.state_numbers() for v in GPT_OSS] == [(0, 24 * 2 * 512), (0, 36 * 2 * 512)]


def test_json_round_trip() -> None:
    for variant in PRESETS.values():
        assert Variant.from_dict(json.loads(variant.to_json())) == variant


def test_from_dict_is_strict() -> None:
    fields = A3B.to_dict()
    with pytest.raises(FormatError, match='unknown field "colour"'):
        Variant.from_dict({**fields, "colour": 1})
    with pytest.raises(FormatError, match='field "hidden_size" is missing'):
        Variant.from_dict({key: value for key, value in fields.items() if key != "hidden_size"})
    with pytest.raises(FormatError, match=r'variant\.hidden_size: expected a whole number, found the string "2048"'):
        Variant.from_dict({**fields, "hidden_size": "2048"})
    with pytest.raises(FormatError, match=r"variant\.hidden_size: expected a whole number"):
        Variant.from_dict({**fields, "hidden_size": True})
    with pytest.raises(FormatError, match=r"variant\.eos_ids\[1\]: expected a whole number"):
        Variant.from_dict({**fields, "eos_ids": [1, 2.0]})


def test_layers_that_are_alike_are_said_once() -> None:
    fields = A17B.to_dict()
    assert (len(fields["mixers"]), len(fields["feed_forwards"]), len(fields["layers"])) == (2, 1, 60)
    assert fields["layers"][:4] == [[0, 0], [0, 0], [0, 0], [1, 0]]
    assert "tied_embeddings" not in fields and "lossy" not in fields  # what has its default
    assert len(A17B.to_json()) < 2000


def test_layers_may_differ_in_anything_that_no_slot_depends_on() -> None:
    rope = Rope(dim=8, theta=1e6)
    layers = tuple(
        Layer(dataclasses.replace(mixer, heads=heads, rope=rope), rest)
        for heads, (mixer, rest) in zip(
            (2, 4, 8), ((A3B.layers[3].mixer, A3B.layers[3].feed_forward),) * 3, strict=True
        )
    )
    mixed = dataclasses.replace(A3B, layers=(*layers, *A3B.layers[:2]))
    assert Variant.from_dict(json.loads(mixed.to_json())) == mixed
    assert len(mixed.to_dict()["mixers"]) == 4
    assert mixed.identity() == mixed.to_dict()  # version 1 cannot say it
    with pytest.raises(
        FormatError, match=r"layer 1: count: expected 256 as in the layers with experts before, found 8"
    ):
        experts = dataclasses.replace(A3B.experts, count=8)
        dataclasses.replace(A3B, layers=(A3B.layers[0], Layer(A3B.layers[1].mixer, experts)))


@pytest.mark.parametrize("variant", [*KNOWN, A3B.with_layers(5), COGITO.with_layers(4)], ids=lambda v: v.name)
def test_version_1_is_read_for_ever(variant: Variant) -> None:
    assert "layer_kinds" in variant.identity()
    assert Variant.from_dict(variant.identity(), version=1) == variant


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        A3B.hidden_size = 1  # type: ignore[misc]


YARN = Yarn(factor=4.0, original_context=64, beta_fast=32.0, beta_slow=1.0)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        (None, {"hidden_size": 0}, "hidden_size: expected 1 to 1048576, found 0"),
        (None, {"hidden_size": 100}, "hidden_size: expected a multiple of 32, found 100"),
        (None, {"layers": ()}, "layers: expected 1 to 4096, found 0"),
        (None, {"max_context": MAX_CONTEXT + 1}, "max_context: expected 1 to 1048576"),
        (None, {"layers": (Layer(A3B.layers[0].mixer, DenseMlp(intermediate=4)),)}, "at least one layer with experts"),
        (RoutedExperts, {"per_token": 257}, "layer 0: per_token: expected 1 to 256, found 257"),
        (GroupedAttention, {"heads": 15}, r"layer 3: heads: expected a multiple of kv_heads \(2\), found 15"),
        (GatedDelta, {"value_heads": 17}, r"layer 0: value_heads: expected a multiple of key_heads \(16\), found 17"),
        (Rope, {"dim": 63}, r"layer 3: rope\.dim: expected an even number, found 63"),
        (Rope, {"dim": 512}, r"rope\.dim: expected 1 to 256, found 512"),
        (Rope, {"yarn": dataclasses.replace(YARN, factor=0.0)}, r"rope\.yarn\.factor: expected a positive number"),
        (Rope, {"yarn": dataclasses.replace(YARN, mscale=-1.0)}, r"mscale: expected 0 or a positive number, found -1"),
        (Router, {"scoring": "random"}, 'scoring: expected softmax or noaux_tc, found the string "random"'),
        (GroupedAttention, {"joint_norm": True}, r"layer 3: joint_norm: expected false with a gate, .*, found true"),
        (
            GroupedAttention,
            {"joint_norm": True, "qk_norm": False, "gate": False},
            "joint_norm: expected false without qk_norm, found true",
        ),
        (Router, {"scoring": "noaux_tc"}, r"router\.groups: expected 1 to 256, found 0"),
        (Router, {"groups_kept": 1}, r"router\.groups_kept: expected 0 to 0, found 1"),
        (Router, {"groups": 7, "groups_kept": 1}, r"router\.groups: expected a divisor of count \(256\), found 7"),
        (Router, {"groups": 64, "groups_kept": 1}, "per_token: expected at most the 4 experts of the kept groups"),
        (SharedExpert, {"intermediate": "512"}, "intermediate: expected a whole number, found the string"),
    ],
)
def test_inconsistent_variant(part: type | None, changes: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        A3B.with_parts(part, **changes) if part else dataclasses.replace(A3B, **changes)


def test_experts_per_token_is_marked_lossy() -> None:
    assert A17B.lossy == ()
    assert A17B.with_experts_per_token(10) is A17B
    fewer = A17B.with_experts_per_token(4)
    assert fewer.experts.per_token == 4
    assert fewer.lossy == ("uses 4 experts per token, the model's own number is 10",)
    with pytest.raises(ArgumentError, match="at most num_experts, 512, and at least 1, found 513"):
        A17B.with_experts_per_token(513)


def test_with_layers_keeps_the_pattern() -> None:
    assert A3B.with_layers(8).layers == A3B.layers[:8]
    assert A3B.with_layers(44).layers_with(GroupedAttention) == tuple(range(3, 44, 4))
    assert COGITO.with_layers(5).layers == COGITO.layers[:5]
    assert COGITO.with_layers(70).moe_layers == tuple(range(3, 70))


def test_preset_names() -> None:
    assert preset("a3b") is A3B
    assert preset("cogito") is COGITO
    assert preset("deepseek-v2") is PRESETS["DeepSeek-V2"]  # its whole name, which is a part of another
    with pytest.raises(ArgumentError, match=r'variant "qwen": expected one of Qwen3\.5-397B-A17B'):
        preset("qwen")
