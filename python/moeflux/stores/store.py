"""A store: one model's dense weights, routed experts and variant, opened for reading and checked once.

`open_store` takes a packed folder (ours, or one made by older tools), a stock MLX folder, a checkpoint in plain
elements as it is published, or a GGUF file. It presents all alike: tensors by their canonical name,
experts by layer and number. See docs/formats.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from moeflux import _core, files
from moeflux._core import QuantFormat, StoreDirectory
from moeflux.errors import FormatError, refusals
from moeflux.models.config import variant_from_config, variant_from_manifest
from moeflux.models.gguf import GgufValues, find_gguf
from moeflux.models.gguf_config import variant_of_gguf
from moeflux.models.model_files import files_of
from moeflux.models.variants import Variant
from moeflux.stores.floats import decode, logarithms
from moeflux.stores.packed import DESCRIPTION, JOURNAL, MANIFEST, Description, read_description
from moeflux.stores.spans import SpanReader

__all__ = ["Store", "StoredTensor", "is_packed", "is_store", "open_store"]

EXTRAS = ("config.json", "tokenizer.json", "tokenizer_config.json")
"""Files that turning text into tokens and back needs beside the weights."""


@dataclass(frozen=True)
class StoredTensor:
    """A vector, a matrix or a stack of matrices as it lies in the store. The oracle takes these as they are.

    Affine: `weight` u32 [..., rows, columns * bits / 32], `scales` and `biases` [..., rows, columns / group_size].
    MXFP4, MXFP8, NVFP4: the same with `scales` u8 and no `biases`.
    FP8: `weight` u8 [..., rows, columns], `scales` [..., rows, columns / 128] and no `biases`.
    Blocks: `weight` u8 [..., rows, bytes of a row] alone.
    Plain: `weight` alone. BF16 is u16 bits, in all three.
    """

    format: QuantFormat
    weight: np.ndarray
    scales: np.ndarray | None = None
    biases: np.ndarray | None = None


@dataclass
class Store:
    """A model on disk, read-only. Close it, or use it in a `with`, to give back its file descriptors."""

    path: Path  # a folder, or a GGUF file
    kind: str  # "packed", "mlx", "gguf", or "published" of a checkpoint
    variant: Variant
    directory: StoreDirectory
    description: Description | None  # the content of moeflux.json, where there is one
    reader: SpanReader = field(repr=False)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self.reader.close()

    # ---- Weights ------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        return name in self.directory.formats or name in self.directory.tensors

    def tensor(self, name: str) -> StoredTensor:
        """A vector by its name ("model.norm.weight"), a matrix by its base name ("lm_head")."""
        tensors = self.directory.tensors
        if name in self.directory.formats:
            present = {part: f"{name}.{part}" for part in PARTS if f"{name}.{part}" in tensors}
            return StoredTensor(self.directory.formats[name], **{part: self._array(n) for part, n in present.items()})
        if name not in tensors:
            raise FormatError(f'{self.path}: tensor "{name}": expected to be in the store, found nothing')
        added, array = tensors[name].added, self._array(name)
        if tensors[name].negated_exp:
            numbers = logarithms(decode(array, tensors[name].dtype))
            return StoredTensor(QuantFormat.plain("F32"), numbers)
        if added:
            numbers = decode(array, tensors[name].dtype) + np.float32(added)
            return StoredTensor(QuantFormat.plain("F32"), numbers)
        return StoredTensor(QuantFormat.plain(tensors[name].dtype), array)

    def expert(self, layer: int, expert: int) -> tuple[StoredTensor, StoredTensor, StoredTensor]:
        """The gate, up and down matrices of one routed expert."""
        variant = self.variant
        if layer not in variant.moe_layers or not 0 <= expert < variant.experts.count:
            raise FormatError(
                f"{self.path}: expected an expert 0 to {variant.experts.count - 1} of a layer with experts, "
                f"found expert {expert} of layer {layer}"
            )
        layout = self.directory.experts_of(layer)
        data = self._read(self.directory.expert_spans(layer, expert))
        arrays: dict[str, dict[str, np.ndarray]] = {}
        for name, offset, size, dtype, shape in layout.pieces:
            matrix, part = name.split(".")
            stored = data[offset : offset + size]
            arrays.setdefault(matrix, {})[part] = stored.view(NUMPY_TYPES[dtype]).reshape(shape)
        formats = layout.formats
        return (
            StoredTensor(formats.gate, **arrays["gate_proj"]),
            StoredTensor(formats.up, **arrays["up_proj"]),
            StoredTensor(formats.down, **arrays["down_proj"]),
        )

    @property
    def expert_files(self) -> list[str]:
        """The files that routed experts are read from."""
        return sorted(self.directory.files[file] for file in self.directory.expert_files)

    def _array(self, name: str) -> np.ndarray:
        tensor = self.directory.tensors[name]
        numbers = self._read(tensor.spans).view(NUMPY_TYPES[tensor.dtype])[:: tensor.step]
        return numbers.reshape(tensor.shape)

    def _read(self, spans: Sequence[tuple[int, int, int]]) -> np.ndarray:
        """The bytes of the spans, one after another."""
        data = np.empty(sum(size for _, _, size in spans), np.uint8)
        view, requests, at = memoryview(data), [], 0
        for file, offset, size in spans:
            requests.append((file, offset, view[at : at + size]))
            at += size
        self.reader.read_all(requests)
        return data

    # ---- Identity -----------------------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits that differ whenever the model does.

        A packed store carries it: a hash over every tensor and expert. A folder without checksums would have to be read
        whole for that. So its fingerprint covers the variant, the place of every tensor, all vectors (norms differ
        between any two trainings), and a sample of each file.
        """
        if self.description is not None:
            return self.description.fingerprint
        digest = hashlib.sha256(json.dumps(self.variant.identity(), separators=(",", ":")).encode())
        tensors = self.directory.tensors
        places = sorted((name, t.dtype, t.shape, t.spans) for name, t in tensors.items())
        digest.update(json.dumps(places).encode())
        for name in sorted(tensors):
            if tensors[name].is_vector:
                digest.update(self._read(tensors[name].spans))
        for index, file in enumerate(self.directory.files):
            size = files.size_of(file)
            digest.update(f"{Path(file).name}:{size}".encode())
            for offset in range(0, size, max(size // SAMPLES, SAMPLE_BYTES)):
                digest.update(self.reader.read(index, offset, min(SAMPLE_BYTES, size - offset)))
        return digest.hexdigest()

    def missing_extras(self) -> list[str]:
        """What a user would miss beside the weights, a sentence each."""
        beside = files_of(self.path)
        return [f"{name}: not in the folder" for name in EXTRAS if not beside.has(name)]


PARTS = ("weight", "scales", "biases")
NUMPY_TYPES = {"U8": "|u1", "F8_E4M3": "|u1", "U32": "<u4", "BF16": "<u2", "F16": "<f2", "F32": "<f4"}
SAMPLES = 64
SAMPLE_BYTES = 4096


# ---- Opening ----------------------------------------------------------------------------------------------------


def open_store(path: str | Path, *, experts: str | Path | None = None, experts_per_token: int | None = None) -> Store:
    """Opens and checks a folder or a GGUF file. `experts` is the folder with the layer files if it is not the default
    one. An `experts_per_token` other than the model's own makes its variant lossy.

    Raises FormatError, naming file, tensor, expected and found, when anything is missing or does not fit.
    """
    path = files.expanded(path)
    with refusals(f"opening {path}"):
        gguf = find_gguf(path)
        if gguf is not None:
            return _opened_gguf(gguf, experts_per_token)
        return _opened(files.expect_folder(path), experts, experts_per_token)


def _opened(folder: Path, experts: str | Path | None, experts_per_token: int | None) -> Store:
    if files.exists(folder / DESCRIPTION):
        description = read_description(folder)
        variant = _adjusted(description.variant, experts_per_token)
        layers = files.expanded(experts or folder / description.experts_directory)
        directory = _core.open_packed(folder, layers, variant.to_json(), description.experts)
        return _store(folder, "packed", variant, directory, description)
    weights = next((f for f in (folder, folder / "artifacts") if files.exists(f / MANIFEST)), None)
    if weights is not None:
        if files.exists(folder / JOURNAL):
            raise FormatError(
                f"{folder / DESCRIPTION}: expected in a store, found {JOURNAL} of a conversion that has not ended: "
                f"convert again, which goes on from there"
            )
        variant = _adjusted(_older_variant(folder, weights), experts_per_token)
        layers = files.expanded(experts) if experts else _older_experts(folder)
        return _store(folder, "packed", variant, _core.open_packed(weights, layers, variant.to_json()))
    if files.listed(folder, "*.safetensors"):
        variant = _adjusted(variant_from_config(folder), experts_per_token)
        directory = _core.open_mlx(folder, variant.to_json())
        return _store(folder, "published" if directory.as_published else "mlx", variant, directory)
    raise FormatError(
        f"{folder}: expected a packed store (moeflux.json or model_weights.json), an MLX folder "
        f"(config.json and *.safetensors) or a GGUF file, found none of them"
    )


def _opened_gguf(path: Path, experts_per_token: int | None) -> Store:
    values = GgufValues(path)
    variant = _adjusted(variant_of_gguf(path, values), experts_per_token)
    return _store(path, "gguf", variant, _core.open_gguf(values.file, variant.to_json()))


def is_store(folder: Path) -> bool:
    """Whether there is something that `open_store` would try to open."""
    weights = files.exists(folder / "config.json") and bool(files.listed(folder, "*.safetensors"))
    return weights or is_packed(folder) or find_gguf(folder) is not None


def is_packed(folder: Path) -> bool:
    return any(files.exists(folder / file) for file in (DESCRIPTION, MANIFEST, f"artifacts/{MANIFEST}"))


def _adjusted(variant: Variant, experts_per_token: int | None) -> Variant:
    return variant if experts_per_token is None else variant.with_experts_per_token(experts_per_token)


def _store(
    folder: Path, kind: str, variant: Variant, directory: StoreDirectory, description: Description | None = None
) -> Store:
    return Store(folder, kind, variant, directory, description, SpanReader(directory.files))


def _older_variant(folder: Path, weights: Path) -> Variant:
    """The variant, from config.json if the older tools left one, else from the manifest's own `config`."""
    for config in (folder / "config.json", folder / "mlx" / "config.json"):
        if files.exists(config):
            return variant_from_config(config)
    manifest = weights / MANIFEST
    return variant_from_manifest(files.read_json(manifest), str(manifest), files.resolved(folder).name)


def _older_experts(folder: Path) -> Path:
    candidates = [
        folder / parent / name for parent in ("", "root") for name in ("packed_experts", "packed_experts_2bit")
    ]
    found = [candidate for candidate in candidates if files.is_folder(candidate)]
    if not found:
        raise FormatError(f"{folder}: expected a folder packed_experts or packed_experts_2bit, found neither")
    return found[0]
