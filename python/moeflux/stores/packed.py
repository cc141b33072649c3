"""What lies in a packed store beside the weights themselves: model_weights.json, layout.json and moeflux.json.

moeflux.json is the description of the whole folder: the variant, the storage of the experts, the size of each file and
the SHA-256 of each dense tensor and each expert. Its fingerprint depends on the model's shape and weights alone, so
equal weights have equal fingerprints wherever they came from and wherever they lie.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeflux import files
from moeflux._core import ExpertFormats, ExpertLayout, QuantFormat
from moeflux.errors import ArgumentError, FormatError
from moeflux.models.layers import (
    DenseMlp,
    FeedForward,
    GatedDelta,
    GroupedAttention,
    LatentAttention,
    Mixer,
    RoutedExperts,
    Yarn,
)
from moeflux.models.variants import Variant

__all__ = [
    "DESCRIPTION",
    "EXPERTS_DIRECTORY",
    "JOURNAL",
    "MANIFEST",
    "WEIGHTS",
    "DenseTensor",
    "Description",
    "format_from_json",
    "format_to_json",
    "layer_file",
    "place_tensors",
    "read_description",
]

WEIGHTS = "model_weights.bin"
MANIFEST = "model_weights.json"
DESCRIPTION = "moeflux.json"
JOURNAL = "journal.jsonl"
"""Of a conversion that has not ended, see moeflux.conversion.journal."""
EXPERTS_DIRECTORY = "packed_experts"
LAYOUT = "layout.json"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
ALIGNMENT = 64
"""Each dense tensor begins at a multiple of this; the gap before it is zeros."""

VERSION = 2
"""Of moeflux.json. Version 1 said the variant in one list of fields for all layers; it is read for ever."""

NOT_WEIGHTS = ("name", "max_context", "eos_ids", "bos_id", "think_start_id", "think_end_id")
"""Fields of a variant that do not change what the weights are, and so are no part of the fingerprint."""


def layer_file(layer: int) -> str:
    return f"layer_{layer:02d}.bin"


# ---- Formats ----------------------------------------------------------------------------------------------------


def format_to_json(storage: QuantFormat) -> dict[str, Any]:
    if storage.is_affine:
        return {"bits": storage.bits, "group_size": storage.group_size, "scale_type": storage.scale_type}
    return {"element": str(storage) if storage.is_quantised else storage.element}


def format_from_json(value: Any, where: str) -> QuantFormat:
    if not isinstance(value, dict) or set(value) not in ({"bits", "group_size", "scale_type"}, {"element"}):
        raise FormatError(f"{where}: expected bits, group_size and scale_type, or element, found {value!r:.120}")
    if value.get("element") in QuantFormat.float_types():
        return QuantFormat.floats(value["element"])
    if value.get("element") in QuantFormat.block_types():
        return QuantFormat.blocks(value["element"])
    numbers = [value[key] for key in ("bits", "group_size") if key in value]
    names = [value[key] for key in ("scale_type", "element") if key in value]
    if any(type(number) is not int for number in numbers) or any(type(name) is not str for name in names):
        raise FormatError(f"{where}: expected whole numbers and a type's name, found {value!r:.120}")
    try:
        return QuantFormat.affine(*numbers, *names) if numbers else QuantFormat.plain(*names)
    except ArgumentError as error:
        raise FormatError(f"{where}: {error}") from None


# ---- Dense tensors ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DenseTensor:
    """One tensor of model_weights.bin. `bits` is that of a quantised matrix' codes, 0 for all else."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    bits: int = 0
    block: str = ""  # type of the blocks that its bytes are, if they are such
    offset: int = -1
    is_table: bool = False  # of rows that are read one by one

    def manifest_entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "offset": self.offset,
            "size": self.bytes,
            "shape": list(self.shape),
            "dtype": self.dtype,
        }
        if self.block:
            return {**entry, "block": self.block}
        return {**entry, "bits": self.bits} if self.dtype == "U32" else entry


def place_tensors(tensors: list[DenseTensor]) -> dict[str, DenseTensor]:
    """The tensors in the order of the file, ascending by name, each with its offset. Tables come last: what is in
    memory, or mapped, ends before them."""
    placed: dict[str, DenseTensor] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.is_table, tensor.name)):
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        placed[tensor.name] = dataclasses.replace(tensor, offset=offset)
        end = offset + tensor.bytes
    return placed


def end_of(placed: dict[str, DenseTensor]) -> int:
    return max((tensor.offset + tensor.bytes for tensor in placed.values()), default=0)


# ---- The JSON files ---------------------------------------------------------------------------------------------


def manifest(
    variant: Variant, source_path: str, placed: dict[str, DenseTensor], experts: ExpertFormats
) -> dict[str, Any]:
    return {
        "model": source_path,
        "num_tensors": len(placed),
        "tensors": {name: tensor.manifest_entry() for name, tensor in placed.items()},
        "config": _legacy_config(variant, experts.gate),
    }


def _legacy_config(v: Variant, storage: QuantFormat) -> dict[str, Any]:
    """What the older tools print about a model of the two kinds that they know. moeflux reads none of it."""
    common: dict[str, Any] = {
        "hidden_size": v.hidden_size,
        "num_hidden_layers": v.num_layers,
        "vocab_size": v.vocab_size,
        "rms_norm_eps": v.rms_norm_eps,
        "num_experts_per_tok": v.experts.per_token,
        "moe_intermediate_size": v.experts.intermediate,
        "default_bits": storage.bits or 4,
        "default_group_size": storage.group_size or 64,
    }
    parts: dict[str, Any] = {}
    for layer in v.layers:
        for part in (layer.mixer, layer.feed_forward):
            parts |= _legacy_part(part)
    if v.layers_with(LatentAttention):
        return common | parts | {"first_k_dense_replace": v.moe_layers[0]}
    full = v.layers_with(GroupedAttention)
    interval = full[0] + 1 if full else 0
    regular = interval and full == tuple(range(interval - 1, v.num_layers, interval))
    kinds = ["full_attention" if i in full else "linear_attention" for i in range(v.num_layers)]
    return common | parts | {"full_attention_interval": interval if regular else 0, "layer_types": kinds}


def _legacy_part(part: Mixer | FeedForward) -> dict[str, Any]:
    match part:
        case GroupedAttention():
            return {
                "num_attention_heads": part.heads,
                "num_key_value_heads": part.kv_heads,
                "head_dim": part.head_dim,
                "rope_theta": part.rope.theta,
                "partial_rotary_factor": part.rope.dim / part.head_dim,
            }
        case LatentAttention():
            return {
                "num_attention_heads": part.heads,
                "qk_nope_head_dim": part.nope_dim,
                "qk_rope_head_dim": part.rope.dim,
                "v_head_dim": part.v_dim,
                "q_lora_rank": part.q_rank,
                "kv_lora_rank": part.kv_rank,
                "rope_theta": part.rope.theta,
                "rope_scaling": _legacy_yarn(part.rope.yarn) if part.rope.yarn else None,
            }
        case GatedDelta():
            return {
                "linear_num_value_heads": part.value_heads,
                "linear_num_key_heads": part.key_heads,
                "linear_key_head_dim": part.key_dim,
                "linear_value_head_dim": part.value_dim,
                "linear_conv_kernel_dim": part.taps,
            }
        case RoutedExperts() if part.router.scoring == "noaux_tc":
            return {
                "n_routed_experts": part.count,
                "n_shared_experts": part.shared.intermediate // part.intermediate if part.shared else 0,
                "n_group": part.router.groups,
                "topk_group": part.router.groups_kept,
                "routed_scaling_factor": part.router.scaling,
            }
        case RoutedExperts():
            shared = part.shared.intermediate if part.shared else 0
            return {"num_experts": part.count, "shared_expert_intermediate_size": shared}
        case DenseMlp():
            return {"intermediate_size": part.intermediate}


def _legacy_yarn(yarn: Yarn) -> dict[str, Any]:
    scales = {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    return {
        "type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_context,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        **{key: value for key, value in scales.items() if value},
    }


def layout(variant: Variant, experts: ExpertLayout) -> dict[str, Any]:
    """layout.json, for people and the older tools; no engine reads it."""
    result: dict[str, Any] = {
        "expert_size": experts.bytes,
        "num_layers": variant.num_layers,
        "num_experts": variant.experts.count,
        "components": [
            {"name": name, "offset": offset, "size": size, "dtype": dtype, "shape": list(shape)}
            for name, offset, size, dtype, shape in experts.pieces
        ],
    }
    if len(variant.moe_layers) < variant.num_layers:
        result["moe_layers"] = list(variant.moe_layers)
    return result


def expert_formats_to_json(formats: ExpertFormats) -> dict[str, Any]:
    storages = (formats.gate, formats.up, formats.down)
    return {name: format_to_json(storage) for name, storage in zip(PROJECTIONS, storages, strict=True)}


@dataclass(frozen=True)
class Description:
    """moeflux.json."""

    variant: Variant
    source: dict[str, Any]  # kind, path, dropped
    experts: ExpertFormats
    expert_sha256: dict[int, list[str]]  # layer -> one a expert
    tensor_sha256: dict[str, str]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # path in the folder -> bytes, sha256 of small ones
    experts_directory: str = EXPERTS_DIRECTORY
    said_before: dict[str, Any] | None = None  # the variant as the file says it, if the file has version 1

    @property
    def fingerprint(self) -> str:
        """Without the layer that drafts, which decides about no answer: states of sessions fit with it and without."""
        said = self.said_before or self.variant.identity()
        shape = {key: value for key, value in said.items() if key not in NOT_WEIGHTS}
        content = {
            "variant": shape,
            "experts": expert_formats_to_json(self.experts),
            "expert_sha256": {
                str(layer): sums for layer, sums in self.expert_sha256.items() if layer < self.variant.num_layers
            },
            "tensor_sha256": {
                name: checksum for name, checksum in self.tensor_sha256.items() if not self.variant.is_of_draft(name)
            },
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "moeflux-packed",
            "version": VERSION,
            "variant": self.variant.to_dict(),
            "fingerprint": self.fingerprint,
            "source": self.source,
            "experts": {"directory": self.experts_directory, **expert_formats_to_json(self.experts)},
            "files": self.files,
            "expert_sha256": {str(layer): sums for layer, sums in sorted(self.expert_sha256.items())},
            "tensor_sha256": dict(sorted(self.tensor_sha256.items())),
        }


# ---- Reading ----------------------------------------------------------------------------------------------------


def read_description(folder: Path) -> Description:
    """moeflux.json of a folder, checked: a wrong or inconsistent field is a FormatError that names it."""
    path = folder / DESCRIPTION
    root = _object(files.read_json(path), str(path))
    if root.get("format") != "moeflux-packed":
        raise FormatError(f'{path}: format: expected "moeflux-packed", found {root.get("format")!r:.60}')
    version = root.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise FormatError(f"{path}: version: expected 1 to {VERSION}, found {version!r:.60}")
    variant = Variant.from_dict(root.get("variant"), f"{path}: variant", version)
    experts = _object(root.get("experts"), f"{path}: experts")
    directory = experts.get("directory")
    if type(directory) is not str or not _is_inside(directory) or "/" in directory:
        raise FormatError(f"{path}: experts.directory: expected the name of a folder, found {directory!r:.120}")
    formats = ExpertFormats(*(format_from_json(experts.get(name), f"{path}: experts.{name}") for name in PROJECTIONS))
    description = Description(
        variant=variant,
        source=_object(root.get("source"), f"{path}: source"),
        experts=formats,
        expert_sha256=_expert_checksums(root.get("expert_sha256"), variant, f"{path}: expert_sha256"),
        tensor_sha256=_checksums(root.get("tensor_sha256"), f"{path}: tensor_sha256"),
        files=_files(root.get("files"), f"{path}: files"),
        experts_directory=directory,
        said_before=root["variant"] if version == 1 else None,
    )
    if root.get("fingerprint") != description.fingerprint:
        raise FormatError(
            f"{path}: fingerprint: expected {description.fingerprint} from the checksums in this file, "
            f"found {root.get('fingerprint')!r:.80}"
        )
    return description


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected an object, found {type(value).__name__}")
    return value


def _checksum(value: Any, where: str) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise FormatError(f"{where}: expected 64 hexadecimal digits, found {value!r:.80}")
    return value


def _checksums(value: Any, where: str) -> dict[str, str]:
    return {name: _checksum(item, f"{where}.{name}") for name, item in _object(value, where).items()}


def _expert_checksums(value: Any, variant: Variant, where: str) -> dict[int, list[str]]:
    value = _object(value, where)
    expected = {str(layer) for layer in variant.moe_layers}
    if set(value) != expected:
        odd = sorted(set(value) ^ expected)[0]
        raise FormatError(f"{where}: expected the {len(expected)} layers with experts, one is missing or extra: {odd}")
    result = {}
    for layer in variant.moe_layers:
        sums = value[str(layer)]
        if not isinstance(sums, list) or len(sums) != variant.experts.count:
            raise FormatError(f"{where}.{layer}: expected a list of {variant.experts.count}, one for each expert")
        result[layer] = [_checksum(item, f"{where}.{layer}[{e}]") for e, item in enumerate(sums)]
    return result


def _files(value: Any, where: str) -> dict[str, dict[str, Any]]:
    named = _object(value, where)
    for name, entry in named.items():
        entry = _object(entry, f"{where}.{name}")
        if not _is_inside(name):
            raise FormatError(f"{where}: expected paths inside the folder, found {name!r:.120}")
        if type(entry.get("bytes")) is not int or entry["bytes"] < 0:
            raise FormatError(f"{where}.{name}.bytes: expected a size, found {entry.get('bytes')!r:.60}")
        if "sha256" in entry:
            _checksum(entry["sha256"], f"{where}.{name}.sha256")
    return named


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return bool(name) and "\0" not in name and "\\" not in name and not any(part in ("", ".", "..") for part in parts)
