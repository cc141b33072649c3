"""Stores that nobody has made or downloaded yet: the plan of what a model would take needs only its config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeflux import _core, files
from moeflux._core import QuantFormat, StoreDirectory
from moeflux.errors import ArgumentError, FormatError, NotFoundError
from moeflux.models import builtin
from moeflux.models.config import variant_from_config
from moeflux.models.hub import downloaded_gguf, find_config, is_repository
from moeflux.models.presets import PRESETS, preset
from moeflux.models.published import published_format, runs_as_published
from moeflux.models.quantised import format_of_experts, quantisation_of
from moeflux.models.variants import Variant
from moeflux.stores.checkpoints import needs_converting
from moeflux.stores.store import Store, is_store, open_store

__all__ = ["PlannedStore", "folder_that_runs", "planned_store", "store_to_plan"]

OF_MLX = {"mxfp4": "MXFP4", "mxfp8": "MXFP8", "nvfp4": "MLX_NVFP4"}
"""What MLX calls formats whose codes are floats."""

DEFAULT_FORMAT = QuantFormat.affine(4, 64)
"""The format of a model that does not say how its matrices are stored."""


@dataclass(frozen=True)
class PlannedStore:
    """Answers what planning asks of a store, without a store."""

    path: Path  # where the store might lie
    kind: str  # "preset", or "config"
    variant: Variant
    directory: StoreDirectory
    note: str
    fingerprint: str = ""
    expert_files: tuple[Path, ...] = ()

    def __enter__(self) -> PlannedStore:
        return self

    def __exit__(self, *exception: object) -> None:
        """There is nothing to close."""


def store_to_plan(name: str | Path | None, experts_per_token: int | None = None) -> Store | PlannedStore:
    """Opens a folder, the built-in model or a GGUF file, maybe one that was downloaded. Of a checkpoint that is not
    converted, a config.json, a preset, or a repository, whose config alone is fetched, it makes a planned store."""
    folder = folder_that_runs(name)
    if folder is not None:
        return open_store(folder, experts_per_token=experts_per_token)
    return planned_store(builtin.path() if name is None else name, experts_per_token)


def folder_that_runs(name: str | Path | None) -> Path | None:
    """The folder, or the GGUF file, of a model that runs as it is; None if the name is of something else. A repository
    is not one, unless the name stands for a GGUF file of it that was downloaded."""
    folder = builtin.path() if name is None else downloaded_gguf(name) or files.expanded(name)
    runs = files.exists(folder) and is_store(folder) and not needs_converting(folder)
    return folder if runs else None


def planned_store(name: str | Path, experts_per_token: int | None = None) -> PlannedStore:
    """The planned store of a config.json or its folder, of a repository, whose config alone is fetched, or of a
    preset."""
    variant, kind, path = _named(name)
    if experts_per_token is not None:
        variant = variant.with_experts_per_token(experts_per_token)
    of_experts = QuantFormat.mxfp4() if variant.model_type == "gpt_oss" else DEFAULT_FORMAT
    format = of_experts if path is None else _format(path, of_experts, in_place=is_repository(name))
    is_checkpoint = path is not None and files.is_folder(path) and needs_converting(path)
    what = "the store that `moeflux convert` makes of it," if is_checkpoint else "a store"
    if not format.is_quantised:
        what = "the checkpoint as it is published,"
    matrices = (
        f"experts in {format} and every other matrix BF16" if format.has_float_codes else f"every matrix {format}"
    )
    note = f"of {what} with {matrices}, which is not here yet"
    return PlannedStore(Path(), kind, variant, _core.planned_store(variant.to_json(), format), note)


def _named(name: str | Path) -> tuple[Variant, str, Path | None]:
    """The variant of a model, where it comes from ("preset" or "config"), and its config.json or the folder of that."""
    path = files.expanded(name)
    if not files.exists(path):
        if is_repository(name):
            path = find_config(str(name))
        else:
            try:
                return preset(str(name)), "preset", None
            except ArgumentError:
                raise NotFoundError(
                    f"{name!s:.200}: expected a folder, a config.json, a repository as owner/name or a preset, found "
                    f"nothing of that name; presets are {', '.join(PRESETS)}"
                ) from None
    if files.is_folder(path) and not files.exists(path / "config.json"):
        raise FormatError(f"{path}: expected a model, or its config.json, found neither")
    return variant_from_config(path), "config", path


def _format(path: Path, default: QuantFormat, in_place: bool) -> QuantFormat:
    """The format of its MLX weights, if the config says one. Or, of a checkpoint, that of its elements if it is to run
    in place and can, else the one in which `convert` stores its experts."""
    file = path / "config.json" if files.is_folder(path) else path
    config: dict[str, Any] = files.read_json(file)
    said = config.get("quantization")
    if said is None and in_place and runs_as_published(config):
        return published_format(config)
    if said is None:
        return format_of_experts(quantisation_of(file.parent, config)) or default
    if not isinstance(said, dict) or "bits" not in said:
        return default
    mode = said.get("mode")
    if isinstance(mode, str) and mode in OF_MLX:
        return QuantFormat.floats(OF_MLX[mode])
    try:
        return QuantFormat.affine(int(said["bits"]), int(said.get("group_size", 64)))
    except (ArgumentError, TypeError, ValueError) as error:
        raise FormatError(f"config.json: quantization: {error}") from error
