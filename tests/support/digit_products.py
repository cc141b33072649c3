"""What cuda/products.h says of products, in NumPy: the bits that kernels on GPUs and the CPU must have."""

from __future__ import annotations

import numpy as np

Array = np.ndarray
PART = 128  # columns


def fused(a: Array, b: Array | float, c: Array) -> Array:
    """a * b + c in float32, rounded once: the longer type holds the product and nearly every sum."""
    return (a.astype(np.longdouble) * b + c).astype(np.float32)


def whole_numbers(x: Array, group: int) -> tuple[Array, Array]:
    """x [n, columns] as whole numbers below 2^22, and the unit of each group."""
    groups = x.reshape(len(x), -1, group)
    most = np.abs(groups).max(axis=2).view(np.uint32)
    exponent = np.maximum(most >> 23, 22).astype(np.int64)
    unit = np.where(most < 0x7F800000, np.ldexp(1.0, exponent - 148), np.nan).astype(np.float32)
    up = np.where(most < 0x7F800000, np.ldexp(1.0, 148 - exponent), 0.0)
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.rint(groups * up[..., None])).astype(np.int64), unit


def product(x: Array, codes: Array, scales: Array, biases: Array, group: int) -> Array:
    """What cuda/products.h says, with [rows, columns] codes and [rows, groups] scales and biases of float32."""
    whole, unit = whole_numbers(x, group)
    by_group = codes.reshape(len(codes), -1, group).transpose(1, 2, 0).astype(np.float64)
    low = (whole + 128 & 255) - 128
    middle = ((whole - low >> 8) + 128 & 255) - 128
    high = whole - low - (middle << 8) >> 16
    # Sums of whole numbers that float64 has exactly.
    s0, s1, s2 = ((digit.swapaxes(0, 1) @ by_group).transpose(1, 2, 0) for digit in (low, middle, high))
    sums = whole.sum(axis=2).astype(np.float32)[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        total = fused(s2.astype(np.float32), 65536.0, (256 * s1 + s0).astype(np.float32))
        scaled = fused(total, scales[None], biases[None] * sums)
        out = np.zeros(total.shape[:2], np.float32)
        for begin in range(0, total.shape[2], max(1, PART // group)):
            part = np.zeros_like(out)
            for i in range(begin, min(begin + PART // group, total.shape[2])):
                part = fused(scaled[..., i], unit[:, None, i], part)
            out = out + part
    return out


def same_bits(found: Array, expected: Array) -> bool:
    both_nan = np.isnan(found) & np.isnan(expected)
    return bool(np.all(both_nan | (found.view(np.uint32) == expected.view(np.uint32))))
