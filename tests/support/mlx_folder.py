"""A stock MLX folder made of a packed store, in mlx_lm.convert's layout: experts stacked as switch_mlp, qwen3_next's
input projections fused, `language_model.` before the names of models that see, A_log in bf16 where that loses nothing.

NumPy only. test_convert.py holds it to the tensors that mlx_lm.convert itself wrote.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from golden.checkpoint import safetensors_bytes
from golden.elements import to_bf16
from moeflux import Variant
from moeflux.models.layers import GatedDelta

STORED = {"U8": "|u1", "U32": "<u4", "BF16": "<u2", "F16": "<f2", "F32": "<f4"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
Tensors = dict[str, tuple[str, np.ndarray]]


NORMS = ("norm.weight", "layernorm.weight")


def write_mlx_folder(packed: Path, folder: Path, shards: int = 2, *, rounded: bool = False) -> Path:
    """The store `packed` as an MLX folder with that many safetensors files. With `rounded`, norms are in bf16, as
    mlx-lm writes those to which it adds one. Otherwise they keep their bits."""
    description = json.loads((packed / "moeflux.json").read_text())
    variant = Variant.from_dict(description["variant"], version=description["version"])
    tensors = dense_tensors(packed)
    if variant.model_type == "qwen3_next":
        tensors = fused(variant, tensors)
    for layer in variant.moe_layers:
        at = f"model.layers.{layer}.mlp.switch_mlp."
        tensors |= {at + name: value for name, value in stacked_experts(packed, variant, layer).items()}
    for name in [name for name in tensors if name.endswith("A_log")]:
        values = tensors[name][1].view(np.uint32)
        if not (values & 0xFFFF).any():
            tensors[name] = ("BF16", (values >> 16).astype("<u2"))
    for name in [name for name in tensors if rounded and name.endswith(NORMS) and tensors[name][0] == "F32"]:
        tensors[name] = ("BF16", to_bf16(tensors[name][1]))
    config = json.loads((packed / "config.json").read_text())
    nested = variant.model_type == "qwen3_5_moe" or "text_config" in config
    prefix = "language_model." if nested else ""
    write_shards(folder, {prefix + own_word(variant, name): tensors[name] for name in sorted(tensors)}, shards)
    config.pop("quantization_config", None)
    if any(dtype == "U32" for dtype, _ in tensors.values()):
        config["quantization"] = declared(packed, tensors, description, prefix)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in TOKENIZER_FILES:
        if (packed / name).exists():
            (folder / name).write_bytes((packed / name).read_bytes())
    return folder


def own_word(variant: Variant, name: str) -> str:
    """What mlx-lm calls a tensor of that name."""
    if variant.model_type == "gpt_oss":
        return re.sub(r"\.mlp\.gate(?=\.|$)", ".mlp.router", name.replace(".mlp.switch_mlp.", ".mlp.experts."))
    if variant.model_type == "gemma4":
        name = re.sub(r"\.mlp\.gate(?=\.|$)", ".router.proj", name)
        return name.replace(".mlp.switch_mlp.", ".experts.switch_glu.")
    if variant.model_type not in ("minimax_m2", "mixtral"):
        return name
    return name.replace(".mlp.gate.e_score", ".mlp.e_score").replace(".mlp.", ".block_sparse_moe.")


def dense_tensors(packed: Path) -> Tensors:
    data = (packed / "model_weights.bin").read_bytes()
    manifest = json.loads((packed / "model_weights.json").read_text())
    return {
        name: (entry["dtype"], array(data, entry["dtype"], entry["shape"], entry["offset"]))
        for name, entry in manifest["tensors"].items()
    }


def array(data: bytes, dtype: str, shape: list[int], offset: int) -> np.ndarray:
    return np.frombuffer(data, STORED[dtype], int(np.prod(shape)), offset).reshape(shape)


def stacked_experts(packed: Path, variant: Variant, layer: int) -> Tensors:
    layout = json.loads((packed / "packed_experts" / "layout.json").read_text())
    data = (packed / "packed_experts" / f"layer_{layer:02d}.bin").read_bytes()
    size, count = layout["expert_size"], variant.experts.count
    assert len(data) == size * count
    return {
        piece["name"]: (
            piece["dtype"],
            np.stack([array(data, piece["dtype"], piece["shape"], e * size + piece["offset"]) for e in range(count)]),
        )
        for piece in layout["components"]
    }


def fused(variant: Variant, tensors: Tensors) -> Tensors:
    """Rows of qkv and z gathered by key head into in_proj_qkvz, those of b and a into in_proj_ba."""
    delta = variant.layers[variant.layers_with(GatedDelta)[0]].mixer
    heads, key = delta.key_heads, delta.key_dim
    ratio = delta.value_heads // heads
    value = ratio * delta.value_dim
    result = {}
    for name, (dtype, rows) in tensors.items():
        owner, _, part = name.rpartition(".")
        if owner.endswith("in_proj_qkv"):
            at = owner.removesuffix("qkv")
            q, k, v = np.split(rows, [heads * key, 2 * heads * key])
            z = tensors[f"{at}z.{part}"][1]
            parts = [(q, key), (k, key), (v, value), (z, value)]
            result[f"{at}qkvz.{part}"] = (dtype, by_head(parts, heads))
        elif owner.endswith("in_proj_b"):
            at = owner.removesuffix("b")
            result[f"{at}ba.{part}"] = (dtype, by_head([(rows, ratio), (tensors[f"{at}a.{part}"][1], ratio)], heads))
        elif not owner.endswith(("in_proj_z", "in_proj_a")):
            result[name] = (dtype, rows)
    return result


def by_head(parts: list[tuple[np.ndarray, int]], heads: int) -> np.ndarray:
    return np.concatenate([part[h * n : (h + 1) * n] for h in range(heads) for part, n in parts])


def declared(packed: Path, tensors: Tensors, description: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The `quantization` of config.json: the commonest format, and every matrix that has another."""
    manifest = json.loads((packed / "model_weights.json").read_text())["tensors"]
    bits = {name.removesuffix(".weight"): entry["bits"] for name, entry in manifest.items() if "bits" in entry}
    formats = {}
    for name, (dtype, words) in tensors.items():
        base = name.removesuffix(".weight")
        if dtype != "U32":
            continue
        if ".switch_mlp." in base:
            expert = description["experts"][base.rpartition(".")[2]]
            is_mxfp4 = expert == {"element": "MXFP4"}
            formats[base] = (4, 32, "mxfp4") if is_mxfp4 else (expert["bits"], expert["group_size"], "affine")
        else:
            source = base.replace("in_proj_qkvz", "in_proj_qkv").replace("in_proj_ba", "in_proj_b")
            columns = words.shape[-1] * 32 // bits[source]
            formats[base] = (bits[source], columns // tensors[f"{base}.scales"][1].shape[-1], "affine")
    common = Counter(formats.values()).most_common(1)[0][0]
    variant = Variant.from_dict(description["variant"], version=description["version"])
    others = {prefix + own_word(variant, base): form for base, form in formats.items() if form != common}
    as_json = {base: {"bits": form[0], "group_size": form[1]} for base, form in others.items()}
    for base, (_, _, mode) in others.items():
        if mode != "affine":
            as_json[base]["mode"] = mode
    return {"bits": common[0], "group_size": common[1], "mode": common[2], **as_json}


def write_shards(folder: Path, tensors: Tensors, shards: int) -> None:
    folder.mkdir(parents=True)
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        (folder / file).write_bytes(safetensors_bytes({name: tensors[name] for name in part}))
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
