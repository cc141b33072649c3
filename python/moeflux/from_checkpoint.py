"""A Hugging Face checkpoint as the content of a packed store, quantised as mlx_lm.convert would, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeflux import _core
from moeflux._core import ExpertFormats, ExpertLayout
from moeflux.checkpoint import Checkpoint, Matrix, Vector
from moeflux.errors import FormatError
from moeflux.floats import FLOAT_BYTES
from moeflux.packed import DenseTensor
from moeflux.packer import Content, DenseUnit, binding, companions
from moeflux.variants import QuantFormat, Variant

__all__ = ["ConvertFormat", "affine_tensors", "content_of_checkpoint"]

ELEMENTS = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
DECLARED = {"bfloat16": "BF16", "float16": "F16"}
"""A checkpoint's own type -> that of everything plain and of the scales. An f32 checkpoint is rounded to bf16 first."""


@dataclass(frozen=True)
class ConvertFormat:
    """How to store matrices: the routed experts, and all others. Where groups do not fit a matrix it stays plain."""

    experts: QuantFormat
    dense: QuantFormat

    @classmethod
    def asked(
        cls, bits: int | str = 4, group_size: int = 64, *, dense_bits: int | str | None = None, element: str = "BF16"
    ) -> ConvertFormat:
        """`bits` is 2, 3, 4, 5, 6 or 8, or "bf16", "f16" or "f32" for none; `dense_bits` that of all but experts."""
        dense_bits = bits if dense_bits is None else dense_bits
        return cls(_storage(bits, group_size, element), _storage(dense_bits, group_size, element))

    @classmethod
    def default(cls, config: dict[str, Any]) -> ConvertFormat:
        """4 bits in groups of 64. Scales and plain tensors in the type that config.json declares."""
        text = config.get("text_config")
        layers = [config, text] if isinstance(text, dict) else [config]
        declared = [layer.get(key) for layer in layers for key in ("torch_dtype", "dtype")]
        element = next((DECLARED[name] for name in declared if isinstance(name, str) and name in DECLARED), "BF16")
        return cls.asked(element=element)

    @property
    def element(self) -> str:
        """The type of the tensors that are never quantised."""
        return _element(self.dense)

    def __str__(self) -> str:
        return f"experts {self.experts}, others {self.dense}"


def _storage(bits: int | str, group_size: int, element: str) -> QuantFormat:
    if isinstance(bits, str) and bits.lower() in ELEMENTS:
        return QuantFormat.plain(ELEMENTS[bits.lower()])
    try:
        return QuantFormat.affine(int(bits), group_size, element)
    except ValueError:
        raise FormatError(f"bits: expected 2, 3, 4, 5, 6, 8, bf16, f16 or f32, found {bits!r:.40}") from None


def _element(storage: QuantFormat) -> str:
    return storage.scale_type if storage.is_affine else storage.element


def storage_of(name: str, columns: int, asked: QuantFormat, variant: Variant) -> QuantFormat:
    """How a dense matrix is stored. Routers are small and decide much: 8 bits for softmax, plain for noaux_tc."""
    plain = QuantFormat.plain(_element(asked))
    if not asked.fits(columns):
        return plain
    is_router = name.endswith(".mlp.gate")
    if is_router and variant.router == "noaux_tc":
        return plain
    if asked.is_affine and (is_router or name.endswith(".shared_expert_gate")):
        router = QuantFormat.affine(8, 64, asked.scale_type)
        return router if router.fits(columns) else plain
    return asked


def affine_tensors(name: str, shape: tuple[int, ...], storage: QuantFormat) -> tuple[DenseTensor, ...]:
    """The tensors of a matrix (or a stack of them) of that logical shape: one, or weight, scales and biases."""
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    words = storage.weight_row_bytes(columns) * rows
    if not storage.is_affine:
        return (DenseTensor(f"{name}.weight", storage.element, shape, words),)
    groups = (*shape[:-1], columns // storage.group_size)
    scales = storage.scale_row_bytes(columns) * rows
    return (
        DenseTensor(f"{name}.weight", "U32", (*shape[:-1], columns * storage.bits // 32), words, storage.bits),
        DenseTensor(f"{name}.scales", storage.scale_type, groups, scales),
        DenseTensor(f"{name}.biases", storage.scale_type, groups, scales),
    )


def content_of_checkpoint(folder: Path, config: dict[str, Any], variant: Variant, asked: ConvertFormat) -> Content:
    source = Checkpoint(folder, config, variant)
    hidden, intermediate = variant.hidden_size, variant.moe_intermediate
    plain = QuantFormat.plain(_element(asked.experts))
    wide, tall = (asked.experts if asked.experts.fits(columns) else plain for columns in (hidden, intermediate))
    experts = ExpertFormats(gate=wide, up=wide, down=tall)
    layout = ExpertLayout(hidden, intermediate, wide, wide, tall)

    def read_experts(layer: int, first: int, count: int) -> np.ndarray:
        data = np.empty(count * layout.bytes, np.uint8)
        for i in range(count):
            _fill_expert(source, layer, first + i, experts, data[i * layout.bytes : (i + 1) * layout.bytes])
        return data

    return Content(
        variant=variant,
        source={"kind": "hf", "path": str(folder.resolve()), "dropped": source.dropped},
        binding=binding(folder, source.files, str(asked)),
        experts=experts,
        dense=[_unit(name, tensor, source, asked) for name, tensor in source.dense.items()],
        read_experts=read_experts,
        layer_position=lambda layer: source.expert(layer, 0)[0].position,
        copies=companions(folder),
    )


def _unit(name: str, tensor: Matrix | Vector, source: Checkpoint, asked: ConvertFormat) -> DenseUnit:
    if isinstance(tensor, Vector):
        element = tensor.element or asked.element
        size = int(np.prod(tensor.shape)) * FLOAT_BYTES[element]
        place = DenseTensor(name, element, tensor.shape, size)
        return DenseUnit(name, (place,), lambda: iter([(tensor.read(source.reader, element),)]), tensor.position)
    storage = storage_of(name, tensor.shape[-1], asked.dense, source.variant)
    places = affine_tensors(name, tensor.shape, storage)
    return DenseUnit(name, places, lambda: _stored_parts(tensor, source, storage), tensor.position)


def _stored_parts(matrix: Matrix, source: Checkpoint, storage: QuantFormat) -> Iterator[tuple[np.ndarray, ...]]:
    """The next bytes of the weight, or of weight, scales and biases, block of rows by block of rows."""
    for block in matrix.blocks(source.reader, _element(storage)):
        parts = _core.quantize(block, storage, threads=1) if storage.is_affine else (block,)
        yield tuple(part.reshape(-1).view(np.uint8) for part in parts)


def _fill_expert(source: Checkpoint, layer: int, expert: int, formats: ExpertFormats, out: np.ndarray) -> None:
    at = 0
    storages = (formats.gate, formats.up, formats.down)
    for matrix, storage in zip(source.expert(layer, expert), storages, strict=True):
        rows, columns = matrix.shape
        sizes = [storage.weight_row_bytes(columns) * rows]
        sizes += [storage.scale_row_bytes(columns) * rows] * (2 if storage.is_affine else 0)
        ends = np.cumsum([at, *sizes]).tolist()
        begins = ends[:-1]
        for parts in _stored_parts(matrix, source, storage):
            for i, part in enumerate(parts):
                out[begins[i] : begins[i] + len(part)] = part
                begins[i] += len(part)
        at = ends[-1]
