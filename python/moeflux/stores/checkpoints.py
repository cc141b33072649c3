"""Checkpoints as they are published: which folders hold one, and in which files its weights lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeflux import files
from moeflux._core import SafetensorsFile
from moeflux.errors import FormatError
from moeflux.models.published import INDEX, files_of_index, runs_as_published
from moeflux.stores.store import is_packed

__all__ = ["PLAIN", "is_mlx", "needs_converting", "source_files"]

PLAIN = ("BF16", "F16", "F32")


def source_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those that its index names, or all of them if it has no index."""
    index = folder / INDEX
    if not files.exists(index):
        shards = files.listed(folder, "*.safetensors")
        if not shards:
            raise FormatError(f"{folder}: expected *.safetensors files, found none")
        return shards
    names = files_of_index(index)
    for name in names:
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
    """Whether its experts are plain elements, each in one stretch of bytes, or those of gpt_oss in MXFP4."""
    if not runs_as_published(config):
        return False
    types = {
        tensor.dtype
        for path in source_files(folder)
        for name, tensor in SafetensorsFile(str(path)).tensors.items()
        if ".experts." in name
    }
    mxfp4 = {"U8"} if config["model_type"] == "gpt_oss" else set()
    return bool(types) and types <= {*PLAIN} | mxfp4
