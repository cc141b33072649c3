"""Tensors as they lie in a store, and the numbers they stand for: bf16, and codes, whole numbers or floats, with scales
and biases."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from moeflux.models.variants import QuantFormat
from moeflux.oracle.blocks import block_numbers

Array = np.ndarray


class Stored(Protocol):
    """One matrix or vector as it lies in a store, unconverted.

    Affine: `weight` u32 [..., rows, columns * bits / 32], `scales` and `biases` [..., rows, columns / group_size].
    MXFP4, MXFP8, NVFP4: the same with `scales` u8 and no `biases`.
    FP8: `weight` u8 [..., rows, columns], `scales` [..., rows, columns / 128] and no `biases`.
    Blocks: `weight` u8 [..., rows, bytes of a row] alone.
    Plain: `weight` [...] alone. BF16 is u16 bits throughout, in `weight` as in `scales` and `biases`.
    """

    @property
    def format(self) -> QuantFormat: ...
    @property
    def weight(self) -> Array: ...
    @property
    def scales(self) -> Array | None: ...
    @property
    def biases(self) -> Array | None: ...


class Weights(Protocol):
    """What the oracle asks of a store. Names are the canonical ones: the whole name of a vector
    ("model.norm.weight"), the base name of a matrix ("model.layers.0.mlp.gate")."""

    def has(self, name: str) -> bool: ...

    def tensor(self, name: str) -> Stored: ...

    def expert(self, layer: int, expert: int) -> tuple[Stored, Stored, Stored]:
        """gate [m, h], up [m, h], down [h, m] of one routed expert."""
        ...


def bf16_to_float(bits: Array) -> Array:
    """u16 bits of bf16 -> f32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bf16(values: Array) -> Array:
    """f32 -> the nearest bf16, ties to even, as u16 bits. Finite values only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def plain_to_float(raw: Array, element: str) -> Array:
    """BF16 as u16 bits, F16 (as u16 bits or float16) or F32 -> float64, exactly."""
    if element == "BF16":
        return bf16_to_float(raw).astype(np.float64)
    return (raw.view(np.float16) if element == "F16" else raw).astype(np.float64)


def unpack_codes(words: Array, bits: int) -> Array:
    """u32 [..., w] -> the codes [..., w * 32 / bits]. Code c occupies bits c*bits ... of the row, lowest bit first."""
    row_bytes = np.ascontiguousarray(words, "<u4").view(np.uint8)
    row_bits = np.unpackbits(row_bytes, axis=-1, bitorder="little")
    places = np.left_shift(1, np.arange(bits))
    return row_bits.reshape(*words.shape[:-1], -1, bits) @ places


def pack_codes(codes: Array, bits: int) -> Array:
    """Inverse of `unpack_codes`."""
    row_bits = (codes[..., None] >> np.arange(bits)) & 1
    row_bytes = np.packbits(row_bits.astype(np.uint8).reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return row_bytes.view("<u4")


def dequantize(words: Array, scales: Array, biases: Array, format: QuantFormat) -> Array:
    """weight = code * scale + bias, one scale and bias to `group_size` columns. -> float64 [..., rows, columns]"""
    codes = unpack_codes(words, format.bits)
    groups = codes.reshape(*codes.shape[:-1], -1, format.group_size)
    scale = plain_to_float(scales, format.scale_type)[..., None]
    bias = plain_to_float(biases, format.scale_type)[..., None]
    return np.asarray(groups * scale + bias).reshape(codes.shape)


E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""What a code of four bits stands for: a sign, two bits of exponent, one of mantissa."""


def mxfp4_numbers(words: Array, scales: Array) -> Array:
    """weight = E2M1[code] * 2^(scale - 127), one scale u8 to 32 columns. 255 is no scale: NaN.
    -> float64 [..., rows, columns]"""
    return _in_groups(E2M1[unpack_codes(words, 4)], powers_of_two(scales))


def nvfp4_numbers(words: Array, scales: Array, row_scales: bool) -> Array:
    """weight = E2M1[code] * (E4M3[scale] * scale of the row), one scale u8 to 16 columns. That of the row is f32, in
    the first four bytes of its scales, or 1. Each product is rounded to f32, as the tools do it that made the weights.
    -> float64 [..., rows, columns]"""
    each = E4M3[scales[..., 4:] if row_scales else scales]
    of_row = np.ascontiguousarray(scales[..., :4]).view("<f4") if row_scales else np.float32(1)
    groups = each.astype(np.float32) * of_row
    return _in_groups(E2M1[unpack_codes(words, 4)].astype(np.float32), groups).astype(np.float64)


def mxfp8_numbers(words: Array, scales: Array) -> Array:
    """weight = E4M3[code] * 2^(scale - 127), one scale u8 to 32 columns. -> float64 [..., rows, columns]"""
    return _in_groups(E4M3[np.ascontiguousarray(words).view(np.uint8)], powers_of_two(scales))


def fp8_numbers(codes: Array, scales: Array, scale_type: str) -> Array:
    """weight = E4M3[code] * scale, rounded to f32. -> float64 [..., rows, columns]"""
    groups = plain_to_float(scales, scale_type).astype(np.float32)
    return _in_groups(E4M3[codes].astype(np.float32), groups).astype(np.float64)


def float_numbers(weight: Array, scales: Array, format: QuantFormat) -> Array:
    """Of any format whose codes are floats. -> float64 [..., rows, columns]"""
    match str(format):
        case "MXFP4":
            return mxfp4_numbers(weight, scales)
        case "MXFP8":
            return mxfp8_numbers(weight, scales)
        case "NVFP4" | "MLX_NVFP4" as name:
            return nvfp4_numbers(weight, scales, name == "NVFP4")
        case _:
            return fp8_numbers(weight, scales, format.scale_type)


def powers_of_two(exponents: Array) -> Array:
    return np.where(exponents < 255, np.exp2(exponents.astype(np.float64) - 127), np.nan)


def _in_groups(numbers: Array, scales: Array) -> Array:
    """Numbers times the scales of their groups."""
    return np.asarray(numbers.reshape(*scales.shape, -1) * scales[..., None]).reshape(numbers.shape)


def _e4m3() -> Array:
    """What a code of eight bits stands for: a sign, four bits of exponent, three of mantissa. The codes that stand for
    no number have that which comes next: 480."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, (code & 7) / 8
    sizes = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    return np.concatenate([sizes, -sizes])


E4M3 = _e4m3()


def quantize(values: Array, bits: int, group_size: int) -> tuple[Array, Array, Array]:
    """MLX's affine algorithm, for values exact in f32 -> u32 words, and scales and biases still in f32.

    This is in f32, unlike all else here, because every rounding is part of the format. The end of the range that is
    larger in size is met exactly, so the scale is negative where that end is the maximum. Codes are taken before the
    scale and the bias are rounded to the type that they are stored in.
    """
    groups = values.astype(np.float32).reshape(*values.shape[:-1], -1, group_size)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    largest_code = np.float32((1 << bits) - 1)
    from_low = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / largest_code, np.float32(1e-7))
    scale = np.where(from_low, scale, -scale)
    edge = np.where(from_low, low, high)
    edge_code = np.rint(edge / scale)
    moved = edge_code != 0
    scale = np.where(moved, edge / np.where(moved, edge_code, np.float32(1)), scale)
    bias = np.where(moved, edge, np.float32(0))
    codes = np.clip(np.rint((groups - bias) / scale), 0, largest_code).astype(np.int64)
    return pack_codes(codes.reshape(values.shape), bits), scale[..., 0], bias[..., 0]


def quantize_rows(heads: Array) -> tuple[Array, Array]:
    """Rows as a session keeps them in 8 bits, for values exact in f32 [..., dim] -> int8 codes [..., dim], and u16 bits
    of bf16 scales [...]. A number is its code times the scale of its head.

    This is in f32, because every rounding is part of the format. The scale is the bf16 that is nearest to a 127th of
    the largest number. So the largest gets code 127 in size, none gets more, a code times its scale is exact in f32,
    and numbers that are such products give the same codes and scale again. Where the scale would be
    below 2^-100, all count as zeros; so neither a scale nor a product is subnormal. Where a number is not finite, the
    scale is NaN, and so is whatever meets the head.
    """
    heads = np.ascontiguousarray(heads, np.float32)
    largest = np.abs(heads).max(axis=-1, keepdims=True)
    finite = np.isfinite(largest)
    scales = float_to_bf16(np.where(finite, largest, np.float32(0)) / np.float32(127))
    coded = finite & (bf16_to_float(scales) >= np.float32(2.0**-100))
    inverse = np.float32(1) / np.where(coded, bf16_to_float(scales), np.float32(1))
    codes = np.rint(np.where(coded, heads, np.float32(0)) * inverse).astype(np.int8)
    scales = np.where(coded, scales, np.where(finite, 0, 0x7FC0)).astype(np.uint16)
    return codes, scales[..., 0]


def rows_of_codes(codes: Array, scales: Array) -> Array:
    """What `quantize_rows` made codes and scales of, rounded -> f32 [..., dim], exactly."""
    return np.asarray(codes.astype(np.float32) * bf16_to_float(scales)[..., None])


def widen(stored: Stored) -> Array:
    """Any stored tensor as float64."""
    if stored.format.is_blocks:
        return block_numbers(stored.weight, str(stored.format)).astype(np.float64)
    if stored.format.has_float_codes and stored.scales is not None:
        return float_numbers(stored.weight, stored.scales, stored.format)
    if stored.format.is_affine and stored.scales is not None and stored.biases is not None:
        return dequantize(stored.weight, stored.scales, stored.biases, stored.format)
    return plain_to_float(stored.weight, stored.format.element)
