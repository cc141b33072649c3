"""Tensors as a store presents them, and the numbers they stand for: plain values, or codes with scales and biases."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from moeflux.variants import QuantFormat

Array = np.ndarray


class Matrix(Protocol):
    """A matrix, or a stack of them. Affine: `weight` u32 [..., rows, columns * bits / 32], `scales` and `biases` f32
    [..., rows, columns / group_size]. Plain: `weight` f32 [..., rows, columns], and the others are not looked at."""

    @property
    def format(self) -> QuantFormat: ...
    @property
    def weight(self) -> Array: ...
    @property
    def scales(self) -> Array: ...
    @property
    def biases(self) -> Array: ...


class Weights(Protocol):
    """What the oracle asks of a store. Names are the canonical ones: the whole name of a vector
    ("model.norm.weight"), the base name of a matrix ("model.layers.0.mlp.gate")."""

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str) -> Array | Matrix:
        """A vector as f32, or a matrix."""
        ...

    def expert(self, layer: int, expert: int) -> tuple[Matrix, Matrix, Matrix]:
        """gate [m, h], up [m, h], down [h, m] of one routed expert."""
        ...


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


def dequantize(words: Array, scales: Array, biases: Array, bits: int, group_size: int) -> Array:
    """weight = code * scale + bias, one scale and bias to `group_size` columns. -> float64 [..., rows, columns]"""
    codes = unpack_codes(words, bits)
    groups = codes.reshape(*codes.shape[:-1], -1, group_size)
    return (groups * scales.astype(np.float64)[..., None] + biases.astype(np.float64)[..., None]).reshape(codes.shape)


def quantize(values: Array, bits: int, group_size: int) -> tuple[Array, Array, Array]:
    """MLX's affine algorithm, for values exact in f32 -> u32 words, and scales and biases still in f32.

    In f32, unlike all else here, because every rounding is part of the format. The end of the range that is larger
    in size is met exactly, so the scale is negative where that is the maximum; codes are taken before the scale and
    the bias are rounded to the type they are stored in.
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


def widen(stored: Array | Matrix) -> Array:
    """Any tensor of a store as float64."""
    if isinstance(stored, np.ndarray):
        return stored.astype(np.float64)
    if stored.format.is_affine:
        return dequantize(stored.weight, stored.scales, stored.biases, stored.format.bits, stored.format.group_size)
    return stored.weight.astype(np.float64)
