"""Tensors of numbers that a model computes with, in every type in which a store may have them."""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np

from moeflux import QuantFormat, Variant
from moeflux.stores.floats import decode, encode
from support.tiny_stores import Raw, shapes

FLOATS = ("F32", "F16", "BF16")
F32 = QuantFormat.plain("F32")


def numbers(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return (centre + deviation * random.standard_normal(shape)).astype(np.float32)


def vector(name: str, shape: tuple[int, ...], element: str) -> dict[str, Raw]:
    return {name: Raw(element, shape, encode(numbers(name, shape, 0.5, 1.0), element).tobytes())}


def matrix(name: str, shape: tuple[int, ...], format: QuantFormat) -> dict[str, Raw]:
    """Its output is half as large again as its input."""
    *rows, columns = shape
    if format.is_mxfp4:
        random = np.random.default_rng(zlib.crc32(name.encode()))
        groups = (*rows, columns // 32)
        middle = round(np.log2(0.3 * columns**-0.5)) + 127
        scales = random.integers(middle - 1, middle + 2, groups).astype(np.uint8)
        return {
            f"{name}.weight": Raw("U32", (*rows, columns // 8), random.bytes(int(np.prod(shape)) // 2)),
            f"{name}.scales": Raw("U8", groups, scales.tobytes()),
        }
    if not format.is_affine:
        values = encode(numbers(name, shape, 1.5 * columns**-0.5), format.element)
        return {f"{name}.weight": Raw(format.element, shape, values.tobytes())}
    words = np.random.default_rng(zlib.crc32(name.encode())).bytes(int(np.prod(shape)) * format.bits // 8)
    groups = (*rows, columns // format.group_size)
    scales = encode(numbers(name, groups, 0.3 * columns**-0.5), format.scale_type)
    biases = encode(decode(scales, format.scale_type) * np.float32(-7.5), format.scale_type)
    return {
        f"{name}.weight": Raw("U32", (*rows, columns * format.bits // 32), words),
        f"{name}.scales": Raw(format.scale_type, groups, scales.tobytes()),
        f"{name}.biases": Raw(format.scale_type, groups, biases.tobytes()),
    }


@cache
def tensors(variant: Variant, split_kv: bool = False, format: QuantFormat = F32) -> dict[str, Raw]:
    """All of them: matrices and experts in that format, vectors in the type of its floats."""
    matrices, vectors = shapes(variant, split_kv)
    e, m, h = variant.experts.count, variant.experts.intermediate, variant.hidden_size
    for layer in variant.moe_layers:
        at = f"model.layers.{layer}.mlp.switch_mlp"
        matrices |= {f"{at}.gate_proj": (e, m, h), f"{at}.up_proj": (e, m, h), f"{at}.down_proj": (e, h, m)}
    element = "F32" if format.is_mxfp4 else format.scale_type if format.is_affine else format.element
    out: dict[str, Raw] = {}
    for name, shape in vectors.items():
        out |= vector(name, shape, element)
    for name, shape in matrices.items():
        out |= matrix(name, shape, format)
    return out
