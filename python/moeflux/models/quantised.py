"""What a checkpoint's config.json says about weights that are quantised already: fp8 in blocks, int4 in groups, or
MXFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from moeflux.errors import ArgumentError, FormatError
from moeflux.models.variants import QuantFormat

__all__ = ["Fp8", "Int4", "Mxfp4", "quantisation_of"]


class Fp8(NamedTuple):
    """e4m3, where a block of a matrix shares a scale."""

    rows: int
    columns: int


class Int4(NamedTuple):
    """Four bits, symmetric, as compressed-tensors packs the experts of a model. A group of a row shares a scale."""

    group_size: int


class Mxfp4(NamedTuple):
    """Four bits, each code a float, as gpt_oss packs its experts. 32 numbers of a row share a power of two."""


def quantisation_of(folder: Path, config: dict[str, Any]) -> Fp8 | Int4 | Mxfp4 | None:
    """None if nothing is quantised. FormatError if something is quantised in a way that we cannot read."""
    text = config.get("text_config")
    found = config.get("quantization_config") or (text if isinstance(text, dict) else {}).get("quantization_config")
    if found is None:
        return None
    where = f"{folder / 'config.json'}: quantization_config"
    if not isinstance(found, dict):
        raise FormatError(f"{where}: expected an object, found {type(found).__name__}")
    method = found.get("quant_method")
    if method == "fp8":
        return _fp8(found, where)
    if method == "compressed-tensors":
        return _int4(found, where)
    if method == "mxfp4":
        return Mxfp4()
    raise FormatError(
        f"{where}.quant_method: expected 'fp8', 'compressed-tensors' or 'mxfp4', found {method!r:.60}. Supported are "
        f"checkpoints in bf16, fp16, f32, fp8 with block scales, int4 in groups and MXFP4, and MLX folders with affine "
        f"quantisation or MXFP4"
    )


def _fp8(found: dict[str, Any], where: str) -> Fp8:
    block = found.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise FormatError(f"{where}.weight_block_size: expected two sizes such as [128, 128], found {block!r:.60}")
    return Fp8(*block)


# Of `weights`; what is not there is None.
INT4 = {"num_bits": (4,), "type": ("int",), "symmetric": (True,), "strategy": ("group",), "actorder": (None,)}


def _int4(found: dict[str, Any], where: str) -> Int4:
    if found.get("format") != "pack-quantized":
        raise FormatError(f"{where}.format: expected 'pack-quantized', found {found.get('format')!r:.60}")
    groups = found.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    weights = groups[0].get("weights") if len(groups) == 1 and isinstance(groups[0], dict) else None
    if not isinstance(weights, dict):
        raise FormatError(f"{where}.config_groups: expected one group that says how its weights are quantised")
    for key, supported in INT4.items():
        if weights.get(key) not in supported:
            raise FormatError(f"{where}: weights: {key}: expected {supported[0]!r}, found {weights.get(key)!r:.60}")
    size = weights.get("group_size")
    size = size if type(size) is int else 0
    try:
        QuantFormat.affine(4, size)
    except ArgumentError as error:
        raise FormatError(f"{where}: weights: group_size: {error}") from None
    return Int4(size)
