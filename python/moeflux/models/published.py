"""Checkpoints as they are published: the files with their weights, and whether they run in place, as far as their
config.json tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeflux import files
from moeflux.errors import FormatError
from moeflux.models.variants import QuantFormat

__all__ = ["INDEX", "files_of_index", "parts_of", "published_format", "runs_as_published"]

INDEX = "model.safetensors.index.json"

AS_PUBLISHED = (
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "minimax_m2",
    "glm4_moe", "glm4v_moe", "gemma4", "gemma4_text",
)  # fmt: skip
"""Families whose plain checkpoints run in place. Others have matrices that must be transposed, or latent attention."""

ELEMENTS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def runs_as_published(config: dict[str, Any]) -> bool:
    """Whether a checkpoint with this config.json runs in place, if its tensors are what the config says."""
    said = [part["quantization_config"] for part in parts_of(config) if part.get("quantization_config")]
    if config.get("model_type") == "gpt_oss":  # in MXFP4; elsewhere its matrices are transposed
        return bool(said) and all(isinstance(each, dict) and each.get("quant_method") == "mxfp4" for each in said)
    return config.get("model_type") in AS_PUBLISHED and not said


def published_format(config: dict[str, Any]) -> QuantFormat:
    """The format of the experts of a checkpoint that runs in place, as its config.json has it."""
    if config.get("model_type") == "gpt_oss":
        return QuantFormat.mxfp4()
    said = [part.get(key) for part in parts_of(config) for key in ("dtype", "torch_dtype")]
    found = [ELEMENTS[word] for word in said if isinstance(word, str) and word in ELEMENTS]
    return QuantFormat.plain(found[0] if found else "BF16")


def files_of_index(index: Path) -> list[str]:
    """The names of the safetensors files that an index names: files beside it."""
    content = files.read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise FormatError(f"{index}: weight_map: expected an object of file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if "/" in name or not name.endswith(".safetensors"):
            raise FormatError(f"{index}: weight_map: expected names of safetensors files, found {name!r:.120}")
    return names


def parts_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The config, and the one of its text part where it has one."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]
