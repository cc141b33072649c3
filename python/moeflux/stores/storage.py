"""How the matrices of a packed store are stored: the format of each, and the tensors that it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moeflux._core import ExpertFormats
from moeflux.errors import ArgumentError
from moeflux.models.published import parts_of
from moeflux.models.variants import QuantFormat, Variant
from moeflux.stores.floats import FLOAT_BYTES
from moeflux.stores.packed import DenseTensor

__all__ = ["BLOCKS", "ConvertFormat", "element_of", "matrix_tensors"]

ELEMENTS = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
AS_PUBLISHED = {"mxfp4": "MXFP4", "fp8": "FP8"}
"""Formats that are kept and never made of others."""

DECLARED = {"bfloat16": "BF16", "float16": "F16"}
"""A checkpoint's own type -> that of plain matrices and of the scales. An f32 checkpoint is rounded to bf16 first."""
BLOCKS = ("q8_0", "q6_k", "q5_k", "q4_k", "q4_0")
"""GGUF's types of blocks that conversion makes."""
WIDE = QuantFormat.blocks("Q8_0")
"""Of matrices whose rows are not whole blocks of 256, of routers and of gates, where others are blocks."""


@dataclass(frozen=True)
class ConvertFormat:
    """How to store the routed experts and all other matrices. A matrix that groups do not fit stays plain. One that
    blocks of 256 do not fit has blocks of 32, with 8 bits."""

    experts: QuantFormat
    dense: QuantFormat
    plain: str = "BF16"  # the type of what stays plain beside blocks

    @classmethod
    def asked(
        cls, bits: int | str = 4, group_size: int = 64, *, dense_bits: int | str | None = None, element: str = "BF16"
    ) -> ConvertFormat:
        """`bits` is 2, 3, 4, 5, 6 or 8, one of GGUF's types of blocks as "q4_k", or "bf16", "f16" or "f32" for no
        quantisation. `dense_bits` is the same for all matrices but the experts. Experts may be "mxfp4", or "fp8" as
        they are published. Then the other matrices are not quantised unless asked for; those in fp8 stay in it, too."""
        kept = AS_PUBLISHED.get(bits) if isinstance(bits, str) else None
        if dense_bits is None:
            dense_bits = element if kept else bits
        dense = _storage(dense_bits, group_size, element)
        return cls(QuantFormat.floats(kept) if kept else _storage(bits, group_size, element), dense, element)

    @staticmethod
    def is_rounded(format: QuantFormat) -> bool:
        """Whether conversion chooses scales for it, so that it can weigh errors."""
        return format.is_affine or format.is_mxfp4 or (format.is_blocks and format != WIDE)

    @classmethod
    def default(cls, config: dict[str, Any]) -> ConvertFormat:
        """4 bits in groups of 64. Scales and plain matrices in the type that config.json declares. If experts are
        published in MXFP4, nothing is quantised."""
        declared = [part.get(key) for part in parts_of(config) for key in ("torch_dtype", "dtype")]
        element = next((DECLARED[name] for name in declared if isinstance(name, str) and name in DECLARED), "BF16")
        said = config.get("quantization_config")
        is_mxfp4 = isinstance(said, dict) and said.get("quant_method") == "mxfp4"
        return cls.asked("mxfp4" if is_mxfp4 else 4, element=element)

    @property
    def keeps_fp8(self) -> bool:
        return self.experts.element == "F8_E4M3"

    @property
    def element(self) -> str:
        """The type of the matrices that are not quantised."""
        return self.plain if self.dense.is_blocks else element_of(self.dense)

    def of_experts(self, variant: Variant) -> ExpertFormats:
        element = self.plain if self.experts.is_blocks else element_of(self.experts)
        widths = (variant.hidden_size, variant.experts.intermediate)
        wide, tall = (_fitting(self.experts, columns, element) for columns in widths)
        return ExpertFormats(gate=wide, up=wide, down=tall)

    def of_matrix(self, name: str, columns: int, variant: Variant) -> QuantFormat:
        """The format of a dense matrix. Routers are small and decide much: softmax ones get 8 bits, noaux_tc ones stay
        plain."""
        plain = QuantFormat.plain(self.element)
        asked = _fitting(self.dense, columns, self.element)
        if not asked.is_quantised:
            return plain
        is_router = name.endswith(".mlp.gate")
        if is_router and variant.experts.router.scoring == "noaux_tc":
            return plain
        is_small = is_router or name.endswith(".shared_expert_gate")
        if asked.is_blocks and is_small:
            return WIDE
        if asked.is_affine and is_small:
            router = QuantFormat.affine(8, 64, asked.scale_type)
            return router if router.fits(columns) else plain
        return asked

    def __str__(self) -> str:
        return f"experts {self.experts}, others {self.dense}"


def _fitting(asked: QuantFormat, columns: int, element: str) -> QuantFormat:
    """What was asked for, or what a matrix of so many columns can have instead."""
    if asked.fits(columns):
        return asked
    return WIDE if asked.is_blocks and WIDE.fits(columns) else QuantFormat.plain(element)


def _storage(bits: int | str, group_size: int, element: str) -> QuantFormat:
    if isinstance(bits, str) and bits.lower() in BLOCKS:
        return QuantFormat.blocks(bits.upper())
    if isinstance(bits, str) and bits.lower() in ELEMENTS:
        return QuantFormat.plain(ELEMENTS[bits.lower()])
    try:
        return QuantFormat.affine(int(bits), group_size, element)
    except ValueError:
        raise ArgumentError(
            f"bits: expected 2, 3, 4, 5, 6, 8, {', '.join(BLOCKS)}, mxfp4, fp8, bf16, f16 or f32, found {bits!r:.40}"
        ) from None


def element_of(storage: QuantFormat) -> str:
    if storage.is_affine:
        return storage.scale_type
    return "BF16" if storage.is_quantised else storage.element


def matrix_tensors(name: str, shape: tuple[int, ...], storage: QuantFormat) -> tuple[DenseTensor, ...]:
    """The tensors of a matrix (or a stack of them) of that logical shape: one, or weight, scales and biases."""
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    words = storage.weight_row_bytes(columns) * rows
    if storage.is_blocks:
        row = storage.weight_row_bytes(columns)
        return (DenseTensor(f"{name}.weight", "U8", (*shape[:-1], row), words, 0, str(storage)),)
    if not storage.has_scales:
        return (DenseTensor(f"{name}.weight", storage.element, shape, words),)
    in_words = storage.element == "U32"
    stored = columns * storage.bits // 32 if in_words else columns
    weight = DenseTensor(
        f"{name}.weight", storage.element, (*shape[:-1], stored), words, storage.bits if in_words else 0
    )
    if storage.has_float_codes:
        kind = storage.scale_type if storage.scale_type in FLOAT_BYTES and storage.scale_type != "F8_E4M3" else "U8"
        size = storage.scale_row_bytes(columns)
        each = (*shape[:-1], size // (1 if kind == "U8" else FLOAT_BYTES[kind]))
        return weight, DenseTensor(f"{name}.scales", kind, each, size * rows)
    groups = (*shape[:-1], columns // storage.group_size)
    scales = storage.scale_row_bytes(columns) * rows
    return (
        weight,
        DenseTensor(f"{name}.scales", storage.scale_type, groups, scales),
        DenseTensor(f"{name}.biases", storage.scale_type, groups, scales),
    )
