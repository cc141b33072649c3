"""Opening a store in C++: everything is found where it lies, in every kind of folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeflux import PRESETS, FormatError, QuantFormat, Variant
from moeflux._core import ExpertFormats, ExpertLayout, StoreDirectory, open_mlx, open_packed
from support.tiny_stores import (
    OLD,
    OLD_EXPERT,
    OLD_EXPERT_2BIT,
    MlxFolder,
    Raw,
    expert_stacks,
    fuse,
    glm,
    hybrid,
    latent,
    minimax,
    quantised,
    raw,
    shapes,
    tensors,
    write_packed,
)

Q4 = QuantFormat.affine(4, 64)


def content(store: StoreDirectory, spans: list[tuple[int, int, int]]) -> bytes:
    out = b""
    for file, offset, size in spans:
        with open(store.files[file], "rb") as stream:
            stream.seek(offset)
            out += stream.read(size)
    return out


def check_holds(store: StoreDirectory, expected: dict[str, Raw]) -> None:
    assert store.tensors.keys() == expected.keys()
    for name, tensor in store.tensors.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert content(store, tensor.spans) == expected[name].data, name


def check_experts(store: StoreDirectory, v: Variant, stacks: dict[str, Raw]) -> None:
    for layer in v.moe_layers:
        for expert in range(v.experts.count):
            spans = store.expert_spans(layer, expert)
            assert len(spans) == len(store.experts.pieces)
            for (name, _, size, dtype, shape), span in zip(store.experts.pieces, spans, strict=True):
                stack = stacks[f"model.layers.{layer}.mlp.switch_mlp.{name}"]
                assert (dtype, shape) == (stack.dtype, stack.shape[1:])
                assert span[2] == size == len(stack.data) // v.experts.count
                assert content(store, [span]) == stack.data[expert * size : (expert + 1) * size]


# ---- Experts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bits", "total", "block", "scales"),
    [
        ("Qwen3.5-397B-A17B", 4, 7_077_888, 2_359_296, 2_097_152),
        ("Qwen3.6-35B-A3B", 4, 1_769_472, 589_824, 524_288),
        ("Cogito-V2-671B", 4, 24_772_608, 8_257_536, 7_340_032),
        ("Qwen3.5-397B-A17B", 2, 3_932_160, 1_310_720, 1_048_576),
        ("Qwen3.6-35B-A3B", 2, 983_040, 327_680, 262_144),
        ("Cogito-V2-671B", 2, 13_762_560, 4_587_520, 3_670_016),
    ],
)
def test_expert_layout(name: str, bits: int, total: int, block: int, scales: int) -> None:
    v, q = PRESETS[name], QuantFormat.affine(bits, 64)
    layout = ExpertLayout(v.hidden_size, v.experts.intermediate, q, q, q)
    assert layout.bytes == total
    each = (block - scales) // 2
    starts = [start + part for start in (0, block, 2 * block) for part in (0, scales, scales + each)]
    assert [piece[1] for piece in layout.pieces] == starts
    parts = ("weight", "scales", "biases")
    assert [piece[0] for piece in layout.pieces] == [f"{x}_proj.{p}" for x in ("gate", "up", "down") for p in parts]


def test_expert_layout_of_mixed_and_plain_formats() -> None:
    layout = ExpertLayout(
        96, 32, QuantFormat.affine(3, 32, "F16"), QuantFormat.plain("BF16"), QuantFormat.affine(8, 32, "F32")
    )
    assert layout.pieces == [
        ("gate_proj.weight", 0, 32 * 36, "U32", (32, 9)),
        ("gate_proj.scales", 1152, 32 * 6, "F16", (32, 3)),
        ("gate_proj.biases", 1344, 32 * 6, "F16", (32, 3)),
        ("up_proj.weight", 1536, 32 * 192, "BF16", (32, 96)),
        ("down_proj.weight", 7680, 96 * 32, "U32", (96, 8)),
        ("down_proj.scales", 10752, 96 * 4, "F32", (96, 1)),
        ("down_proj.biases", 11136, 96 * 4, "F32", (96, 1)),
    ]
    assert layout.bytes == 11520


@pytest.mark.parametrize("widths", [(96, 64), (64, 96), (0, 64), (64, -64), (1 << 40, 64)])
def test_expert_layout_that_does_not_fit(widths: tuple[int, int]) -> None:
    with pytest.raises(FormatError, match=r"expert .*: expected"):
        ExpertLayout(*widths, Q4, Q4, Q4)


# ---- MLX folders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_mlx_folder(tmp_path: Path, shards: int, prefix: str) -> None:
    v = hybrid("qwen3_5_moe")
    stored, stacks = tensors(v), expert_stacks(v)
    extra = {"vision_tower.blocks.0.weight": raw("v", "F32", (2, 3)), "mtp.norm.weight": raw("m", "BF16", (7,))}
    everything = {prefix + name: tensor for name, tensor in (stored | stacks).items()} | extra
    store = open_mlx(MlxFolder(everything, shards).write(tmp_path / "m"), v.to_json())
    check_holds(store, stored)
    check_experts(store, v, stacks)
    assert store.formats == dict.fromkeys(shapes(v)[0], QuantFormat.affine(4, 32))
    assert sorted(store.ignored) == sorted(extra)
    assert store.files == [str(path) for path in sorted((tmp_path / "m").glob("*.safetensors"))]
    q = store.experts.formats
    assert q == ExpertFormats(*[QuantFormat.affine(4, 32)] * 3)


def test_the_prefix_that_comes_second(tmp_path: Path) -> None:
    v = hybrid("qwen3_5_moe")
    stored = tensors(v) | expert_stacks(v)
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}
    assert open_mlx(MlxFolder(renamed).write(tmp_path / "m"), v.to_json()).tensors.keys() == tensors(v).keys()


@pytest.mark.parametrize("v", [latent(), latent(q_lora_rank=0)], ids=["q_lora", "q_proj"])
@pytest.mark.parametrize("split_kv", [False, True])
def test_latent_attention(tmp_path: Path, v: Variant, split_kv: bool) -> None:
    stored, stacks = tensors(v, split_kv), expert_stacks(v)
    extra = {
        "model.layers.3.eh_proj.weight": raw("e", "BF16", (3,)),
        "model.layers.3.mlp.gate.weight": raw("g", "U8", (3,)),
    }
    store = open_mlx(MlxFolder(stored | stacks | extra).write(tmp_path / "m"), v.to_json())
    check_holds(store, stored)
    check_experts(store, v, stacks)
    assert sorted(store.ignored) == sorted(extra)
    assert ("model.layers.0.self_attn.embed_q" in store.formats) == split_kv


@pytest.mark.parametrize("v", [glm(), minimax()], ids=lambda v: v.model_type)
def test_layers_behind_the_last_are_left_out_where_a_family_numbers_them_so(tmp_path: Path, v: Variant) -> None:
    stored, stacks = tensors(v), expert_stacks(v)
    extra = {"model.layers.2.eh_proj.weight": raw("e", "BF16", (3,))}
    store = open_mlx(MlxFolder(stored | stacks | extra).write(tmp_path / "m"), v.to_json())
    check_holds(store, stored)
    check_experts(store, v, stacks)
    assert list(store.ignored) == list(extra)
    other = hybrid("qwen3_5_moe")
    extra = {"model.layers.3.eh_proj.weight": raw("e", "BF16", (3,))}
    with pytest.raises(FormatError, match=r'tensor "model\.layers\.3\.eh_proj\.weight"'):
        open_mlx(MlxFolder(tensors(other) | expert_stacks(other) | extra).write(tmp_path / "o"), other.to_json())


def test_fused_projections_are_seen_in_canonical_order(tmp_path: Path) -> None:
    v = hybrid("qwen3_next")
    stored, stacks = tensors(v), expert_stacks(v)
    fused = fuse(v, stored)
    assert "model.layers.0.linear_attn.in_proj_qkvz.weight" in fused
    assert "model.layers.0.linear_attn.in_proj_z.weight" not in fused
    store = open_mlx(MlxFolder(fused | stacks).write(tmp_path / "m"), v.to_json())
    check_holds(store, stored)  # spans put together give the rows of the canonical tensors
    assert len(store.tensors["model.layers.0.linear_attn.in_proj_qkv.weight"].spans) == 3 * v.layers[0].mixer.key_heads
    assert len(store.tensors["model.layers.0.linear_attn.in_proj_z.scales"].spans) == v.layers[0].mixer.key_heads
    assert store.formats["model.layers.2.linear_attn.in_proj_b"] == QuantFormat.affine(4, 32)


def test_fused_projections_obey_their_own_declaration(tmp_path: Path) -> None:
    v = hybrid("qwen3_next")
    stored = tensors(v)
    for part in ("qkv", "z"):
        name = f"model.layers.0.linear_attn.in_proj_{part}"
        stored |= quantised(name, shapes(v)[0][name], bits=8, group=64)
    folder = MlxFolder(fuse(v, stored) | expert_stacks(v))
    with pytest.raises(FormatError, match=r"expected 4 bits as declared in .*config.json, found 8-bit g64"):
        open_mlx(folder.write(tmp_path / "a"), v.to_json())
    folder.config["quantization"]["model.layers.0.linear_attn.in_proj_qkvz"] = {"bits": 8, "group_size": 64}
    store = open_mlx(folder.write(tmp_path / "b"), v.to_json())
    assert store.formats["model.layers.0.linear_attn.in_proj_z"] == QuantFormat.affine(8, 64)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_formats_come_from_the_shapes(tmp_path: Path, bits: int, group: int) -> None:
    v = hybrid("qwen3_5_moe")
    stored = tensors(v) | expert_stacks(v)
    stored |= quantised("lm_head", (v.vocab_size, v.hidden_size), bits, group, "F16")
    config = {
        "quantization": {"bits": 4, "group_size": 32, "lm_head": {"bits": bits, "group_size": group, "mode": "affine"}}
    }
    store = open_mlx(MlxFolder(stored, config=config).write(tmp_path / "m"), v.to_json())
    assert store.formats["lm_head"] == QuantFormat.affine(bits, group, "F16")


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_unquantised_matrices(tmp_path: Path, dtype: str) -> None:
    v = hybrid("qwen3_5_moe")
    matrices, _ = shapes(v)
    stored = {
        name: tensor for name, tensor in tensors(v).items() if tensor.dtype != "U32" and name.count("scales") == 0
    }
    stored = {name: tensor for name, tensor in stored.items() if not name.endswith(".biases")}
    stored |= {f"{name}.weight": raw(name, dtype, shape) for name, shape in matrices.items()}
    stacks = {}
    for name, tensor in expert_stacks(v).items():
        if name.endswith(".weight"):
            shape = (*tensor.shape[:2], tensor.shape[2] * 8)
            stacks[name] = raw(name, dtype, shape)
    store = open_mlx(MlxFolder(stored | stacks, config={}).write(tmp_path / "m"), v.to_json())
    check_holds(store, stored)
    check_experts(store, v, stacks)
    assert store.formats == dict.fromkeys(matrices, QuantFormat.plain(dtype))


def test_tied_embeddings(tmp_path: Path) -> None:
    v = hybrid("qwen3_5_moe", tied_embeddings=True)
    stored = tensors(v) | expert_stacks(v)
    assert "lm_head.weight" not in stored
    store = open_mlx(MlxFolder(stored).write(tmp_path / "a"), v.to_json())
    assert "lm_head" not in store.formats
    spare = raw("lm_head", "BF16", (v.vocab_size, v.hidden_size))
    assert open_mlx(MlxFolder(stored | {"lm_head.weight": spare}).write(tmp_path / "b"), v.to_json()).ignored == [
        "lm_head.weight"
    ]


def test_calls_out_of_range(tmp_path: Path) -> None:
    v = latent()
    store = open_mlx(MlxFolder(tensors(v) | expert_stacks(v)).write(tmp_path / "m"), v.to_json())
    for layer in (-1, 0, 3):
        with pytest.raises(IndexError, match=f"expected a layer with experts, found layer {layer}"):
            store.expert_spans(layer, 0)
    for expert in (-1, 4):
        with pytest.raises(IndexError, match=f"expected an expert from 0 to 3, found {expert}"):
            store.expert_spans(1, expert)


def test_shards_behind_links(tmp_path: Path) -> None:
    """As the Hugging Face cache keeps them."""
    v = hybrid("qwen3_5_moe")
    folder = MlxFolder(tensors(v) | expert_stacks(v), shards=2).write(tmp_path / "m")
    for shard in folder.glob("*.safetensors"):
        shard.rename(tmp_path / f"blob-{shard.name}")
        shard.symlink_to(tmp_path / f"blob-{shard.name}")
    check_holds(open_mlx(folder, v.to_json()), tensors(v))


# ---- Packed folders -----------------------------------------------------------------------------------------------


def test_packed_folder_of_the_older_tools(tmp_path: Path) -> None:
    stored = tensors(OLD)
    gate = "model.layers.0.mlp.gate"
    stored |= quantised(gate, (4, 64), bits=8, group=64)
    folder = write_packed(tmp_path / "p", OLD, stored, OLD_EXPERT * 4, {gate: 8})
    store = open_packed(folder, folder / "packed_experts", OLD.to_json())
    check_holds(store, stored)
    assert store.formats[gate] == QuantFormat.affine(8, 64)
    assert store.experts.formats == ExpertFormats(Q4, Q4, Q4)
    names = ["model_weights.bin", *(f"packed_experts/layer_{i:02d}.bin" for i in OLD.moe_layers)]
    assert store.files == [str(folder / name) for name in names]
    for layer in OLD.moe_layers:
        whole = (folder / f"packed_experts/layer_{layer:02d}.bin").read_bytes()
        for expert in range(4):
            spans = store.expert_spans(layer, expert)
            assert len(spans) == 9
            assert content(store, spans) == whole[expert * OLD_EXPERT : (expert + 1) * OLD_EXPERT]


def test_packed_folder_with_formats(tmp_path: Path) -> None:
    formats = ExpertFormats(QuantFormat.affine(3, 32), QuantFormat.plain("BF16"), QuantFormat.affine(8, 32, "F16"))
    v = hybrid("qwen3_5_moe")
    size = ExpertLayout(v.hidden_size, v.experts.intermediate, formats.gate, formats.up, formats.down).bytes
    folder = write_packed(tmp_path / "p", v, tensors(v), size * v.experts.count, {})
    store = open_packed(folder, folder / "packed_experts", v.to_json(), formats)
    assert store.experts.formats == formats
    assert [span[2] for span in store.expert_spans(1, 3)] == [piece[2] for piece in store.experts.pieces]
    assert store.expert_spans(1, 3)[0] == (2, 3 * size, store.experts.pieces[0][2])


@pytest.mark.parametrize("split_kv", [False, True])
def test_packed_latent_attention(tmp_path: Path, split_kv: bool) -> None:
    v = latent(moe_intermediate=64)
    folder = write_packed(tmp_path / "p", v, tensors(v, split_kv), OLD_EXPERT * 4, {})
    store = open_packed(folder, folder / "packed_experts", v.to_json())
    check_holds(store, tensors(v, split_kv))
    assert [Path(file).name for file in store.files] == ["model_weights.bin", "layer_01.bin", "layer_02.bin"]


@pytest.mark.parametrize(
    ("name", "expert", "bits"),
    [
        ("packed_experts", OLD_EXPERT, 4),
        ("packed_experts_2bit", OLD_EXPERT_2BIT, 2),
        ("elsewhere", OLD_EXPERT, 4),
        ("elsewhere", OLD_EXPERT_2BIT, 2),
    ],
)
def test_expert_bits_of_the_older_tools(tmp_path: Path, name: str, expert: int, bits: int) -> None:
    folder = write_packed(tmp_path / "p", OLD, tensors(OLD), expert * 4, {})
    experts = (folder / "packed_experts").rename(folder / name)
    assert open_packed(folder, experts, OLD.to_json()).experts.formats.up == QuantFormat.affine(bits, 64)


def test_more_than_a_hundred_layers(tmp_path: Path) -> None:
    v = hybrid(
        "qwen3_moe", layer_kinds=("full",) * 101, mlp_kinds=("moe",) * 101, moe_intermediate=64, attention_gate=False
    )
    folder = write_packed(tmp_path / "p", v, tensors(v), OLD_EXPERT * 4, {})
    store = open_packed(folder, folder / "packed_experts", v.to_json())
    assert [Path(file).name for file in store.files[-2:]] == ["layer_99.bin", "layer_100.bin"]
    with pytest.raises(IndexError):
        store.expert_spans(101, 0)


def test_copies_of_experts_in_the_weight_file_are_not_used(tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "p", OLD, tensors(OLD) | expert_stacks(OLD), OLD_EXPERT * 4, {})
    store = open_packed(folder, folder / "packed_experts", OLD.to_json())
    assert sorted(store.ignored) == sorted(expert_stacks(OLD))
