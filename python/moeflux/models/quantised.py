"""What a checkpoint's config.json says about weights that are quantised already: fp8 in blocks, int4 in groups,
NVFP4 or MXFP4. Which matrices are, the names of the tensors tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from moeflux import files
from moeflux.errors import ArgumentError, FormatError
from moeflux.models.variants import QuantFormat

__all__ = ["Awq", "Fp8", "Gptq", "Int4", "Mxfp4", "Nvfp4", "Quantised", "format_of_experts", "quantisation_of"]


class Fp8(NamedTuple):
    """e4m3, where a block of a matrix shares a scale."""

    rows: int
    columns: int


class Int4(NamedTuple):
    """Four bits as compressed-tensors packs them. A group of a row shares a scale, and a zero point."""

    group_size: int
    symmetric: bool = True  # then the zero point of all is 8


class Awq(NamedTuple):
    """Four bits as AutoAWQ packs them, in the order of its gemm kernels, with zero points."""

    group_size: int


class Gptq(NamedTuple):
    """Four bits as GPTQ packs them. What stands for a zero point is `less` than it."""

    group_size: int
    symmetric: bool = True
    less: int = 1


class Mxfp4(NamedTuple):
    """Four bits, each code a float, as gpt_oss packs its experts. 32 numbers of a row share a power of two."""


class Nvfp4(NamedTuple):
    """Four bits, each code a float. 16 numbers of a row share a scale of 8 bits, and those of a tensor another."""

    divides: (
        bool  # whether scales are divided by that of the tensor, as in compressed-tensors, and not multiplied by it
    )


Quantised = Fp8 | Int4 | Awq | Gptq | Mxfp4 | Nvfp4

OF_MODELOPT = "hf_quant_config.json"
"""Where modelopt's tools say it if config.json does not."""


def quantisation_of(folder: Path, config: dict[str, Any]) -> Quantised | None:
    """None if nothing is quantised. FormatError if something is quantised in a way that we cannot read."""
    text = config.get("text_config")
    found = config.get("quantization_config") or (text if isinstance(text, dict) else {}).get("quantization_config")
    where = f"{folder / 'config.json'}: quantization_config"
    if found is None and files.exists(folder / OF_MODELOPT):
        content = files.read_json(folder / OF_MODELOPT)
        where = f"{folder / OF_MODELOPT}: quantization"
        found = content.get("quantization") if isinstance(content, dict) else content
        found = {"quant_method": "modelopt", **found} if isinstance(found, dict) else str(found)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise FormatError(f"{where}: expected an object, found {type(found).__name__}")
    method = found.get("quant_method")
    readers: dict[str, Callable[[dict[str, Any], str], Quantised]] = {
        "fp8": _fp8, "compressed-tensors": _compressed, "awq": _awq, "gptq": _gptq, "mxfp4": lambda *_: Mxfp4(),
        "modelopt": _modelopt,
    }  # fmt: skip
    if isinstance(method, str) and method in readers:
        return readers[method](found, where)
    raise FormatError(
        f"{where}.quant_method: expected {', '.join(map(repr, readers))}, found {method!r:.60}. Supported are "
        f"checkpoints in bf16, fp16, f32, fp8 with block scales, int4 in groups, NVFP4 and MXFP4, and MLX folders"
    )


def format_of_experts(kind: Quantised | None) -> QuantFormat | None:
    """In which experts are taken as they are, if they are, with scales of the usual type. Where there are zero points,
    scale and bias are kept in f32, for their product has more digits than a scale."""
    if isinstance(kind, Mxfp4):
        return QuantFormat.mxfp4()
    if isinstance(kind, Nvfp4):
        return QuantFormat.floats("NVFP4")
    if isinstance(kind, Int4):
        return QuantFormat.affine(4, kind.group_size, "BF16" if kind.symmetric else "F32")
    if isinstance(kind, Awq):
        return QuantFormat.affine(4, kind.group_size, "F32")
    if isinstance(kind, Gptq):
        return QuantFormat.affine(4, kind.group_size, "F16" if kind.symmetric else "F32")
    return None


def _fp8(found: dict[str, Any], where: str) -> Fp8:
    block = found.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise FormatError(f"{where}.weight_block_size: expected two sizes such as [128, 128], found {block!r:.60}")
    return Fp8(*block)


# ---- Four bits --------------------------------------------------------------------------------------------------


# What is not there is None.
OF_WEIGHTS: dict[str, tuple[object, ...]] = {
    "num_bits": (4,), "type": ("int",), "symmetric": (True, False), "strategy": ("group",),
    "actorder": (None, "static", "weight"),
}  # fmt: skip
OF_NVFP4: dict[str, tuple[object, ...]] = {
    "num_bits": (4,), "type": ("float",), "symmetric": (True, None), "strategy": ("tensor_group",), "group_size": (16,),
}  # fmt: skip
OF_AWQ: dict[str, tuple[object, ...]] = {"bits": (4,), "version": ("gemm", "GEMM", None), "zero_point": (True,)}
OF_GPTQ: dict[str, tuple[object, ...]] = {
    "bits": (4,), "desc_act": (False,), "sym": (True, False), "checkpoint_format": (None, "gptq", "gptq_v2"),
    "pack_dtype": (None, "int32"),
}  # fmt: skip


def _compressed(found: dict[str, Any], where: str) -> Int4 | Nvfp4:
    format = found.get("format")
    if format not in ("pack-quantized", "nvfp4-pack-quantized"):
        raise FormatError(f"{where}.format: expected 'pack-quantized' or 'nvfp4-pack-quantized', found {format!r:.60}")
    groups = found.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    weights = groups[0].get("weights") if len(groups) == 1 and isinstance(groups[0], dict) else None
    if not isinstance(weights, dict):
        raise FormatError(f"{where}.config_groups: expected one group that says how its weights are quantised")
    if format == "nvfp4-pack-quantized":
        _check(weights, OF_NVFP4, f"{where}: weights")
        return Nvfp4(divides=True)
    _check(weights, OF_WEIGHTS, f"{where}: weights")
    return Int4(_group_size(weights, f"{where}: weights"), weights["symmetric"])


def _modelopt(found: dict[str, Any], where: str) -> Nvfp4:
    _check(found, {"quant_algo": ("NVFP4",), "group_size": (16, None)}, where)
    return Nvfp4(divides=False)


def _awq(found: dict[str, Any], where: str) -> Awq:
    _check(found, OF_AWQ, where)
    return Awq(_group_size(found, where))


def _gptq(found: dict[str, Any], where: str) -> Gptq:
    _check(found, OF_GPTQ, where)
    others = found.get("dynamic") or {}
    # A rule that begins so leaves out what it matches. The names of the tensors tell that, too.
    if not isinstance(others, dict) or not all(rule.startswith("-:") for rule in others):
        raise FormatError(f"{where}.dynamic: expected rules for what is not quantised alone, found {others!r:.120}")
    return Gptq(_group_size(found, where), found["sym"], 0 if found.get("checkpoint_format") == "gptq_v2" else 1)


def _check(found: dict[str, Any], known: dict[str, tuple[object, ...]], where: str) -> None:
    for key, supported in known.items():
        value = found.get(key)
        if not any(value == each and type(value) is type(each) for each in supported):
            raise FormatError(f"{where}: {key}: expected {supported[0]!r}, found {value!r:.60}")


def _group_size(found: dict[str, Any], where: str) -> int:
    size = found.get("group_size")
    size = size if type(size) is int else 0
    try:
        QuantFormat.affine(4, size)
    except ArgumentError as error:
        raise FormatError(f"{where}: group_size: {error}") from None
    return size
