"""Folders of MLX safetensors with every rule broken once: refused, by the name of file and tensor."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeflux import FormatError, IoError
from moeflux._core import open_mlx
from support.tiny_stores import (
    MlxFolder,
    edit_json,
    expert_stacks,
    fuse,
    hybrid,
    latent,
    quantised,
    raw,
    replace_by_directory,
    shapes,
    tensors,
)


# Each takes a good folder of hybrid("qwen3_next") apart before it is written.
def drop(*names: str) -> Callable[[MlxFolder], None]:
    return lambda folder: steps(*[lambda f, n=name: f.tensors.pop(n) for name in names])(folder)


def put(name: str, dtype: str, shape: tuple[int, ...]) -> Callable[[MlxFolder], None]:
    return lambda folder: folder.tensors.update({name: raw(name, dtype, shape)})


def requantise(
    name: str, shape: tuple[int, ...], bits: int, group: int, scales: str = "BF16"
) -> Callable[[MlxFolder], None]:
    return lambda folder: folder.tensors.update(quantised(name, shape, bits, group, scales))


def quantization(**changes: Any) -> Callable[[MlxFolder], None]:
    return lambda folder: folder.config["quantization"].update(changes)


def config(value: dict[str, Any]) -> Callable[[MlxFolder], None]:
    return lambda folder: setattr(folder, "config", value)


def steps(*damages: Callable[[MlxFolder], None]) -> Callable[[MlxFolder], None]:
    def all_of_them(folder: MlxFolder) -> None:
        for damage in damages:
            damage(folder)

    return all_of_them


def rename_experts(folder: MlxFolder) -> None:
    folder.tensors = {name.replace("switch_mlp", "experts.0"): tensor for name, tensor in folder.tensors.items()}


def without_experts(folder: MlxFolder) -> None:
    folder.tensors = {name: tensor for name, tensor in folder.tensors.items() if "switch_mlp" not in name}


LA = "model.layers.0.linear_attn"
Q = "model.layers.1.self_attn.q_proj"  # [128, 64]
S = "model.layers.1.mlp.switch_mlp"

BAD_TENSORS: list[tuple[str, Callable[[MlxFolder], None], str]] = [
    (
        "vector missing",
        drop("model.norm.weight"),
        r'index\.json: expected a tensor "model\.norm\.weight" for tiny hybrid',
    ),
    (
        "matrix missing",
        drop(f"{Q}.weight", f"{Q}.scales", f"{Q}.biases"),
        f'expected a tensor "{Q}.weight" .*found none',
    ),
    ("scales missing", drop(f"{Q}.scales"), f'expected a tensor "{Q}.scales"'),
    ("biases missing", drop(f"{Q}.biases"), f'expected a tensor "{Q}.biases"'),
    ("conv missing", drop(f"{LA}.conv1d.weight"), f'expected a tensor "{LA}.conv1d.weight"'),
    ("fused missing", drop(f"{LA}.in_proj_ba.weight"), f'expected a tensor "{LA}.in_proj_b.weight"'),
    ("expert stack missing", drop(f"{S}.up_proj.weight"), f'expected a tensor "{S}.up_proj.weight"'),
    ("expert scales missing", drop(f"{S}.down_proj.scales"), f'expected a tensor "{S}.down_proj.scales"'),
    ("no experts", without_experts, "no routed experts found: expected tensors .*switch_mlp"),
    ("experts of Hugging Face", rename_experts, "no routed experts found.* as Hugging Face lays them out"),
    (
        "unknown tensor",
        put("model.layers.0.mystery", "F32", (2,)),
        'model-0000.*: tensor "model.layers.0.mystery": expected only',
    ),
    ("bias of a projection", put(f"{Q}.bias", "BF16", (128,)), r"found BF16 \[128\] that it does not have"),
    ("layer too many", put("model.layers.3.input_layernorm.weight", "BF16", (64,)), 'tensor "model.layers.3.input'),
    (
        "expert of a layer too many",
        put("model.layers.3.mlp.switch_mlp.up_proj.weight", "BF16", (1,)),
        "layers.3.*expected only",
    ),
    ("fp8 scale", put(f"{Q}.weight_scale_inv", "F32", (1, 1)), "weight_scale_inv.*expected only"),
    (
        "kv_b in gqa",
        put("model.layers.1.self_attn.kv_b_proj.weight", "BF16", (1, 1)),
        "kv_b_proj.weight.*expected only",
    ),
    (
        "both prefixes",
        put("language_model.lm_head.weight", "BF16", (48, 64)),
        'tensor ".*lm_head.weight": expected it once',
    ),
    (
        "vector too long",
        put("model.norm.weight", "BF16", (65,)),
        r'norm\.weight": expected BF16, F16 or F32 \[64\], found BF16 \[65\]',
    ),
    ("vector of rank 2", put("model.norm.weight", "BF16", (64, 1)), r"expected .* \[64\], found BF16 \[64, 1\]"),
    (
        "vector of integers",
        put("model.norm.weight", "I32", (64,)),
        r"expected BF16, F16 or F32 \[64\], found I32 \[64\]",
    ),
    (
        "conv in Hugging Face order",
        put(f"{LA}.conv1d.weight", "BF16", (128, 1, 4)),
        r"expected .* \[128, 4, 1\], found BF16 \[128, 1, 4\]",
    ),
    (
        "plain matrix transposed",
        put("model.layers.0.mlp.gate.weight", "BF16", (64, 4)),
        r"expected .* \[4, 64\], found BF16 \[64, 4\]",
    ),
    ("scales of a plain matrix", put("lm_head.weight", "BF16", (48, 64)), 'tensor "lm_head.biases": expected only'),
    (
        "fp8 matrix",
        put("lm_head.weight", "F8_E4M3", (48, 64)),
        r"expected whole groups of 128 columns of a \[48, 64\] matrix in FP8, found F8_E4M3",
    ),
    (
        "codes with other rows",
        put(f"{Q}.weight", "U32", (127, 8)),
        r"expected the packed codes of a \[128, 64\] matrix, found U32 \[127, 8\]",
    ),
    (
        "codes of rank 1",
        put(f"{Q}.weight", "U32", (1024,)),
        r"expected the packed codes of a \[128, 64\] matrix, found U32 \[1024\]",
    ),
    ("codes of rank 0", put(f"{Q}.weight", "U32", ()), r"expected the packed codes .*found U32 \[\]"),
    (
        "no codes",
        put(f"{Q}.weight", "U32", (128, 0)),
        "bits: expected 2, 3, 4, 5, 6 or 8, found 0 .0 words and 2 scales for 64",
    ),
    ("7 bits", put(f"{Q}.weight", "U32", (128, 14)), "bits: expected 2, 3, 4, 5, 6 or 8, found 7"),
    ("bits no whole number", put(f"{Q}.weight", "U32", (128, 9)), "bits: expected .*found 0 .9 words"),
    ("too many words", put(f"{Q}.weight", "U32", (128, 65)), "bits: expected .*found 0 .65 words"),
    ("groups of 16", requantise(Q, (128, 64), 4, 16), "group_size: expected 32, 64 or 128, found 16"),
    (
        "groups of no whole number",
        steps(put(f"{Q}.scales", "BF16", (128, 3)), put(f"{Q}.biases", "BF16", (128, 3))),
        "group_size: expected .*found 0",
    ),
    (
        "no scales",
        steps(put(f"{Q}.scales", "BF16", (128, 0)), put(f"{Q}.biases", "BF16", (128, 0))),
        "group_size: expected .*found 0 .8 words and 0 scales",
    ),
    (
        "scales of other rows",
        put(f"{Q}.scales", "BF16", (64, 2)),
        r"q_proj\.scales\": expected BF16, F16 or F32 scales of a \[128, 64\]",
    ),
    ("scales of bytes", put(f"{Q}.scales", "U8", (128, 2)), "expected the mode affine as declared .*found MXFP4"),
    ("scales of 16 columns", put(f"{Q}.scales", "U8", (128, 4)), "expected the mode affine as .*found MLX_NVFP4"),
    ("scales of rows", put(f"{Q}.scales", "U8", (128, 8)), "expected the mode affine as .*found NVFP4"),
    ("scales of no shape", put(f"{Q}.scales", "U8", ()), r"q_proj\.scales\": expected \[128, 2\] of a .* in MXFP4"),
    (
        "biases of another type",
        put(f"{Q}.biases", "F16", (128, 2)),
        r"q_proj\.biases\": expected BF16 \[128, 2\] as the scales are, found F16",
    ),
    (
        "biases of another shape",
        put(f"{Q}.biases", "BF16", (128, 1)),
        r"expected BF16 \[128, 2\] as the scales are, found BF16 \[128, 1\]",
    ),
    (
        "fused rows missing",
        put(f"{LA}.in_proj_qkvz.weight", "U32", (223, 8)),
        "in_proj_qkvz.weight.: expected a matrix of 224 rows, found U32 .223",
    ),
    (
        "fused of rank 3",
        put(f"{LA}.in_proj_ba.scales", "BF16", (12, 2, 1)),
        "in_proj_ba.scales.: expected a matrix of 12 rows",
    ),
    (
        "fused and split",
        put(f"{LA}.in_proj_z.weight", "U32", (96, 8)),
        "in_proj_z.weight.: expected either it or .*in_proj_qkvz.weight., found both",
    ),
    (
        "fused of other columns",
        put(f"{LA}.in_proj_ba.weight", "BF16", (12, 32)),
        r"in_proj_b\.weight\": expected .* \[6, 64\], found BF16 \[6, 32\]",
    ),
    (
        "an expert less",
        requantise(f"{S}.up_proj", (3, 32, 64), 4, 32),
        r"expected the packed codes of a \[4, 32, 64\] matrix, found U32 \[3, 32, 8\]",
    ),
    (
        "experts transposed",
        requantise(f"{S}.up_proj", (4, 64, 32), 4, 32),
        r"expected the packed codes of a \[4, 32, 64\]",
    ),
    (
        "plain experts of other rows",
        put(f"{S}.up_proj.weight", "BF16", (4, 31, 64)),
        r"expected .* \[4, 32, 64\], found BF16",
    ),
    (
        "layers of other formats",
        steps(requantise(f"{S}.up_proj", (4, 32, 64), 8, 32), quantization(**{f"{S}.up_proj": {"bits": 8}})),
        "experts of layer 1: expected the formats of layer 0, .*up_proj 4-bit.* found .*up_proj 8-bit",
    ),
    ("other bits declared", quantization(bits=8), r"expected 8 bits as declared in .*config\.json, found 4-bit g32"),
    ("other groups declared", quantization(group_size=64), "expected groups of 64 as declared in"),
    ("other bits declared for one", quantization(**{Q: {"bits": 5}}), f'tensor "{Q}.weight": expected 5 bits'),
    (
        "other bits declared with prefix",
        quantization(**{f"language_model.{Q}": {"bits": 5}}),
        f'tensor "{Q}.weight": expected 5 bits',
    ),
    (
        "other groups declared for one",
        quantization(**{Q: {"group_size": 128}}),
        f'tensor "{Q}.weight": expected groups of 128',
    ),
    (
        "other bits declared for experts",
        quantization(**{f"{S}.up_proj": {"bits": 2}}),
        "switch_mlp.up_proj.weight.: expected 2 bits",
    ),
    (
        "declared unquantised",
        quantization(lm_head=False),
        'tensor "lm_head.weight": expected an unquantised matrix as declared',
    ),
    (
        "declared quantised",
        steps(
            drop("lm_head.scales", "lm_head.biases"),
            put("lm_head.weight", "BF16", (48, 64)),
            quantization(lm_head=True),
        ),
        'tensor "lm_head.weight": expected a quantised matrix as declared .*found BF16',
    ),
    (
        "declared twice",
        quantization(**{Q: {"bits": 4}, f"language_model.{Q}": {"bits": 4}}),
        "expected one entry a module",
    ),
    ("nothing declared", config({}), "found 4-bit g32, but .*config.json declares no quantisation"),
    (
        "quantization no object",
        config({"quantization": 4}),
        "config.json: quantization: expected an object, found the number 4",
    ),
    (
        "mode mxfp6",
        quantization(mode="mxfp6"),
        'quantization: mode: expected "affine", "mxfp4", "mxfp8" or "nvfp4", found the string "mxfp6"',
    ),
    ("mode of one", quantization(**{Q: {"mode": "nf4"}}), 'q_proj": mode: expected "affine"'),
    (
        "mode of others",
        quantization(**{Q: {"mode": "nvfp4"}}),
        "expected the mode nvfp4 as declared in .*found 4-bit g32",
    ),
    (
        "bits a string",
        quantization(bits="4"),
        'quantization: bits: expected a positive whole number, found the string "4"',
    ),
    ("entry a number", quantization(lm_head=4), 'quantization: "lm_head": expected an object, true or false'),
    (
        "another method",
        config({"quantization_config": {"quant_method": "fp8"}}),
        r'quantization_config: quant_method: expected "mxfp4", or none .* found the string "fp8"',
    ),
]


@pytest.mark.parametrize(("damage", "message"), [c[1:] for c in BAD_TENSORS], ids=[c[0] for c in BAD_TENSORS])
def test_bad_mlx_tensors(tmp_path: Path, damage: Callable[[MlxFolder], None], message: str) -> None:
    v = hybrid("qwen3_next")
    folder = MlxFolder(fuse(v, tensors(v)) | expert_stacks(v))
    damage(folder)
    with pytest.raises(FormatError, match=message) as error:
        open_mlx(folder.write(tmp_path / "m"), v.to_json())
    assert str(tmp_path / "m") in str(error.value)


def test_a_module_that_is_declared_unquantised_may_be_it(tmp_path: Path) -> None:
    """As mlx_lm.convert says it of what it leaves alone: `"lm_head": false`."""
    v = hybrid("qwen3_next")
    folder = MlxFolder(fuse(v, tensors(v)) | expert_stacks(v))
    drop("lm_head.scales", "lm_head.biases")(folder)
    put("lm_head.weight", "BF16", (48, 64))(folder)
    quantization(**{"lm_head": False, Q: True})(folder)
    store = open_mlx(folder.write(tmp_path / "m"), v.to_json())
    assert not store.formats["lm_head"].is_affine
    assert store.formats[Q].is_affine


def test_fused_projections_belong_to_qwen3_next(tmp_path: Path) -> None:
    v = hybrid("qwen3_5_moe")
    folder = MlxFolder(fuse(v, tensors(v)) | expert_stacks(v)).write(tmp_path / "m")
    with pytest.raises(FormatError, match=r'expected a tensor "model.layers.0.linear_attn.in_proj_qkv.weight"'):
        open_mlx(folder, v.to_json())


@pytest.mark.parametrize("name", ["embed_q", "unembed_out", "kv_b_proj"])
def test_latent_attention_in_both_forms_or_half_of_one(tmp_path: Path, name: str) -> None:
    v = latent()
    stored = tensors(v, split_kv=True) | expert_stacks(v)
    at = f"model.layers.1.self_attn.{name}"
    if name == "kv_b_proj":
        stored |= quantised(at, shapes(v)[0][at])
        message = f'tensor "{at}.biases": expected only tensors of tiny latent'
    else:
        stored = {key: tensor for key, tensor in stored.items() if not key.startswith(at)}
        message = f'expected a tensor "{at}.weight"'
    with pytest.raises(FormatError, match=message):
        open_mlx(MlxFolder(stored).write(tmp_path / "m"), v.to_json())


# Each damages the files of a good folder with three shards.
def edit_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "model.safetensors.index.json", lambda index: change(index["weight_map"]))


def shard_named(name: object) -> Callable[[Path], None]:
    return edit_index(lambda weight_map: weight_map.update({"model.norm.weight": name}))


def move_a_tensor(weight_map: dict[str, str]) -> None:
    first, second = sorted(set(weight_map.values()))[:2]
    name = min(name for name, shard in weight_map.items() if shard == first)
    weight_map[name] = second


SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"

BAD_FOLDERS: list[tuple[str, Callable[[Path], object], str]] = [
    ("shard missing", lambda m: (m / SHARD).unlink(), f"{SHARD}: expected this file, found none"),
    ("shard a directory", lambda m: replace_by_directory(m / SHARD), f"{SHARD}: expected a regular file"),
    ("shard empty", lambda m: (m / SHARD).write_bytes(b""), f"{SHARD}: expected the 8 bytes of a header length"),
    (
        "shard truncated",
        lambda m: os.truncate(m / SHARD, (m / SHARD).stat().st_size - 1),
        f"{SHARD}: tensor .* ends at byte",
    ),
    (
        "shard a dangling link",
        lambda m: ((m / SHARD).unlink(), (m / SHARD).symlink_to("gone")),
        f"{SHARD}: expected this file",
    ),
    ("config missing", lambda m: (m / "config.json").unlink(), "config.json: expected this file, found none"),
    ("config damaged", lambda m: (m / "config.json").write_text("{"), r"config\.json: line 1, column 2"),
    ("config a directory", lambda m: replace_by_directory(m / "config.json"), "config.json: expected a regular file"),
    (
        "index damaged",
        lambda m: (m / INDEX).write_text("[]"),
        f"{INDEX}: weight_map: expected an object, found nothing",
    ),
    ("index without map", lambda m: (m / INDEX).write_text('{"weight_map": 1}'), "weight_map: expected an object"),
    (
        "index with empty map",
        lambda m: (m / INDEX).write_text('{"weight_map": {}}'),
        "expected the tensors of a model, found none",
    ),
    ("index a directory", lambda m: replace_by_directory(m / INDEX), f"{INDEX}: expected a regular file"),
    (
        "index gone",
        lambda m: (m / INDEX).unlink(),
        "expected model.safetensors.index.json or a single .* found 3 such files",
    ),
    (
        "tensor not listed",
        edit_index(lambda w: w.pop("model.norm.weight")),
        'expected tensor "model.norm.weight" of .* to be listed',
    ),
    ("listed in another shard", edit_index(move_a_tensor), "expected tensor .* of .* to be listed there"),
    (
        "listed and not there",
        edit_index(lambda w: w.update(ghost=SHARD)),
        f'expected tensor "ghost" in "{SHARD}", found none',
    ),
    (
        "a name of two lines",
        edit_index(lambda w: w.update({"gho\nst": SHARD})),
        rf'expected tensor "gho\\x0ast" in "{SHARD}", found none',
    ),
    (
        "shard name a number",
        shard_named(7),
        'weight_map: "model.norm.weight": expected the plain name .*found the number 7',
    ),
    *[
        (f"shard name {name!r}", shard_named(name), "expected the plain name of a .safetensors file in this folder")
        for name in (
            "",
            ".",
            "..",
            "/etc/passwd",
            "../x.safetensors",
            "/x.safetensors",
            "a/b.safetensors",
            "a\\b.safetensors",
            "x\0.safetensors",
            ".safetensors",
            ".hidden.safetensors",
            "x.bin",
        )
    ],
]


@pytest.mark.parametrize(("damage", "message"), [c[1:] for c in BAD_FOLDERS], ids=[c[0] for c in BAD_FOLDERS])
def test_bad_mlx_files(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    v = hybrid("qwen3_5_moe")
    folder = MlxFolder(tensors(v) | expert_stacks(v), shards=3).write(tmp_path / "m")
    open_mlx(folder, v.to_json())
    damage(folder)
    with pytest.raises(FormatError, match=message):
        open_mlx(folder, v.to_json())


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"none: expected a folder, found nothing"):
        open_mlx(tmp_path / "none", hybrid().to_json())
    (tmp_path / "file").touch()
    with pytest.raises(FormatError, match=r"file: expected a folder, found a file"):
        open_mlx(tmp_path / "file", hybrid().to_json())
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(IoError, match=r"loop: "):
        open_mlx(tmp_path / "loop", hybrid().to_json())
    with pytest.raises(FormatError, match=r"expected .*index.json or a single .safetensors file, found 0"):
        open_mlx(tmp_path, hybrid().to_json())
    with pytest.raises(FormatError, match=r"variant: line 1"):
        open_mlx(tmp_path, "")
