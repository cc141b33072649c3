"""Checkpoints as they are published: which folders hold one, and in which files its weights lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeflux import files
from moeflux._core import SafetensorsFile
from moeflux.errors import FormatError
from moeflux.stores.store import is_packed

__all__ = ["is_mlx", "needs_converting", "source_files"]

INDEX = "model.safetensors.index.json"
PLAIN = ("BF16", "F16", "F32")
AS_PUBLISHED = (
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "minimax_m2",
    "glm4_moe", "glm4v_moe", "gemma4", "gemma4_text",
)  # fmt: skip
"""Families whose checkpoints run in place. Others have rows of two matrices in turns, matrices that must be transposed,
or latent attention."""


def source_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those that its index names, or all of them if it has no index."""
    index = folder / INDEX
    if not files.exists(index):
        shards = files.listed(folder, "*.safetensors")
        if not shards:
            raise FormatError(f"{folder}: expected *.safetensors files, found none")
        return shards
    weight_map = files.read_json(index)
    weight_map = weight_map.get("weight_map") if isinstance(weight_map, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise FormatError(f"{index}: weight_map: expected an object of file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if "/" in name or not name.endswith(".safetensors"):
            raise FormatError(f"{index}: weight_map: expected names of safetensors files, found {name!r:.120}")
        kind = files.kind_of(folder / name)
        if kind != "a file":
            raise FormatError(f"{folder / name}: named in {INDEX}, expected a file, found {kind}")
    return [folder / name for name in names]


def is_mlx(folder: Path, config: dict[str, Any]) -> bool:
    """MLX stacks experts as switch_mlp or switch_glu, or those of gpt_oss one projection at a time, and says
    "quantization" where Hugging Face says "quantization_config"."""
    if "quantization" in config:
        return True
    names = (name for path in source_files(folder) for name in SafetensorsFile(str(path)).tensors)
    marks = (".switch_mlp.", ".experts.switch_glu.", ".mlp.experts.gate_proj.")
    return any(mark in name for name in names for mark in marks)


def needs_converting(folder: Path) -> bool:
    """Whether the folder is a checkpoint as Hugging Face lays it out that does not run as it is."""
    config = folder / "config.json"
    if is_packed(folder) or not files.exists(config) or not files.listed(folder, "*.safetensors"):
        return False
    fields = files.read_json(config)
    return isinstance(fields, dict) and not is_mlx(folder, fields) and not _runs_as_published(folder, fields)


def _runs_as_published(folder: Path, config: dict[str, Any]) -> bool:
    """Whether its experts are plain elements, each in one stretch of bytes."""
    if config.get("model_type") not in AS_PUBLISHED or "quantization_config" in config:
        return False
    types = {
        tensor.dtype
        for path in source_files(folder)
        for name, tensor in SafetensorsFile(str(path)).tensors.items()
        if ".experts." in name
    }
    return bool(types) and types <= {*PLAIN}
