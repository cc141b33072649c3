"""A Hugging Face checkpoint as the content of a packed store. Its matrices are quantised as mlx_lm.convert would do it,
bit for bit. Vectors keep every bit: mlx-lm rounds norms to which it adds one, and we store those in f32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moeflux import _core
from moeflux._core import ExpertFormats, ExpertLayout
from moeflux.conversion.checkpoint import Checkpoint
from moeflux.conversion.importance import Calibration
from moeflux.conversion.made_of import Blocks, Matrix, Packed, Vector
from moeflux.conversion.packer import Content, DenseUnit, binding, companions
from moeflux.errors import FormatError
from moeflux.files import resolved
from moeflux.models.variants import QuantFormat, Variant
from moeflux.stores.floats import FLOAT_BYTES
from moeflux.stores.packed import DenseTensor
from moeflux.stores.storage import ConvertFormat, element_of, matrix_tensors

__all__ = ["content_of_checkpoint"]


def content_of_checkpoint(
    folder: Path,
    config: dict[str, Any],
    variant: Variant,
    asked: ConvertFormat,
    calibration: Calibration | None = None,
) -> Content:
    source = Checkpoint(folder, config, variant, keep_fp8=asked.keeps_fp8)
    experts = _experts(source, asked)
    layout = ExpertLayout(variant.hidden_size, variant.experts.intermediate, experts.gate, experts.up, experts.down)

    def read_experts(layer: int, first: int, count: int) -> np.ndarray:
        data = np.empty(count * layout.bytes, np.uint8)
        for i in range(count):
            part = data[i * layout.bytes : (i + 1) * layout.bytes]
            _fill_expert(source, layer, first + i, experts, part, calibration)
        return data

    return Content(
        variant=variant,
        source={"kind": "hf", "path": str(resolved(folder)), "dropped": source.dropped, **_said(calibration)},
        binding=binding(folder, source.files, f"{asked} with mtp" if variant.draft else str(asked))
        | _said(calibration),
        experts=experts,
        dense=[_unit(name, tensor, source, asked, calibration) for name, tensor in source.dense.items()],
        read_experts=read_experts,
        layer_position=lambda layer: source.expert(layer, 0)[0].position,
        copies=companions(folder),
        close=source.reader.close,
    )


def _said(calibration: Calibration | None) -> dict[str, str]:
    return {} if calibration is None else {"calibrated": calibration.label}


def _unit(
    name: str,
    tensor: Matrix | Packed | Vector,
    source: Checkpoint,
    asked: ConvertFormat,
    calibration: Calibration | None,
) -> DenseUnit:
    if isinstance(tensor, Vector):
        size = int(np.prod(tensor.shape)) * FLOAT_BYTES[tensor.element]
        place = DenseTensor(name, tensor.element, tensor.shape, size)
        return DenseUnit(name, (place,), lambda: iter([(tensor.read(source.reader),)]), tensor.position)
    if isinstance(tensor, Packed):
        places = matrix_tensors(name, tensor.shape, tensor.format)
        return DenseUnit(name, places, lambda: iter([tensor.parts(source.reader)]), tensor.position)
    if name in source.tables:
        element = tensor.runs[0][0].dtype
        size = int(np.prod(tensor.shape)) * FLOAT_BYTES[element]
        place = DenseTensor(name, element, tensor.shape, size, is_table=True)
        return DenseUnit(name, (place,), lambda: _plain_rows(tensor, source, element), tensor.position)
    storage = asked.of_matrix(name, tensor.shape[-1], source.variant)
    places = matrix_tensors(name, tensor.shape, storage)

    def produce() -> Iterator[tuple[np.ndarray, ...]]:
        return _stored_parts(tensor, source, storage, calibration.importance.of(name) if calibration else None)

    return DenseUnit(name, places, produce, tensor.position)


def _plain_rows(table: Matrix, source: Checkpoint, element: str) -> Iterator[tuple[np.ndarray, ...]]:
    for block in table.blocks(source.reader, element):
        yield (block.reshape(-1).view(np.uint8),)


def _experts(source: Checkpoint, asked: ConvertFormat) -> ExpertFormats:
    kept = [format for format in source.expert_formats if format is not None]
    own = kept[0] if kept else None
    alike = own is not None and own.element == asked.experts.element and own.is_mxfp4 == asked.experts.is_mxfp4
    if asked.experts.has_float_codes and not alike and not (asked.experts.is_mxfp4 and own is None):
        raise FormatError(
            f"{source.folder}: expected experts in {asked.experts}, for that is never made of others, found "
            f"{own or 'others'}"
        )
    if own is not None and (asked.experts.is_blocks or asked.experts.bits != own.bits):
        raise FormatError(
            f"{source.folder}: found experts in {own}, which are taken as they are; expected {own.bits} bits, found "
            f"{asked.experts}. The other matrices have bits of their own: --dense-bits"
        )
    made = asked.of_experts(source.variant)
    return ExpertFormats(
        *(own or each for own, each in zip(source.expert_formats, (made.gate, made.up, made.down), strict=True))
    )


def _stored_parts(
    matrix: Matrix | Packed | Blocks, source: Checkpoint, storage: QuantFormat, importance: np.ndarray | None
) -> Iterator[tuple[np.ndarray, ...]]:
    """The bytes of the weight, or of weight, scales and biases, one block of rows after the other. `importance` says
    what an error in a column weighs."""
    if isinstance(matrix, Packed | Blocks):
        yield matrix.parts(source.reader)
        return
    wide = storage.is_blocks or storage.has_float_codes
    for block in matrix.blocks(source.reader, "F32" if wide else element_of(storage)):
        parts = _core.quantize(block, storage, 1, importance) if storage.is_quantised else (block,)
        yield tuple(part.reshape(-1).view(np.uint8) for part in parts)


def _fill_expert(
    source: Checkpoint,
    layer: int,
    expert: int,
    formats: ExpertFormats,
    out: np.ndarray,
    calibration: Calibration | None,
) -> None:
    at = 0
    storages = (formats.gate, formats.up, formats.down)
    weights = calibration.importance.of_expert(layer, expert) if calibration else (None, None, None)
    for matrix, storage, importance in zip(source.expert(layer, expert), storages, weights, strict=True):
        rows, columns = matrix.shape
        sizes = [storage.weight_row_bytes(columns) * rows]
        sizes += [storage.scale_row_bytes(columns) * rows] * (storage.has_scales + storage.is_affine)
        ends = np.cumsum([at, *sizes]).tolist()
        begins = ends[:-1]
        for parts in _stored_parts(matrix, source, storage, importance):
            for i, part in enumerate(parts):
                out[begins[i] : begins[i] + len(part)] = part
                begins[i] += len(part)
        at = ends[-1]
