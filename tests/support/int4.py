"""Matrices of four bits as they are published, and the numbers that they stand for, straight from the formats."""

from __future__ import annotations

from typing import Any

import numpy as np

from golden.elements import from_bf16, to_bf16

Tensors = dict[str, tuple[str, np.ndarray]]

AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight numbers each four bits of a word hold, from the lowest."""

KINDS: dict[str, dict[str, Any]] = {
    "symmetric": {"format": "pack-quantized", "quant_method": "compressed-tensors"},
    "zeros": {"format": "pack-quantized", "quant_method": "compressed-tensors"},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True},
    "gptq_zeros": {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False, "checkpoint_format": "gptq"},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False, "checkpoint_format": "gptq_v2"},
}


def quantisation(kind: str, group: int) -> dict[str, Any]:
    """What config.json says."""
    found = dict(KINDS[kind])
    if found["quant_method"] != "compressed-tensors":
        return {**found, "group_size": group}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": kind == "symmetric"}
    return {**found, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def packed(codes: np.ndarray, places: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Eight numbers of a row to a word."""
    eight = codes.reshape(len(codes), -1, 8).astype(np.uint32)
    return sum(eight[..., number] << np.uint32(4 * i) for i, number in enumerate(places)).view(np.int32)


def in_codes(rng: np.random.Generator, name: str, shape: tuple[int, int], kind: str, group: int, dtype: str) -> tuple[
    Tensors, np.ndarray
]:  # fmt: skip
    """The tensors of a matrix called `name`, and its numbers, float64."""
    rows, columns = shape
    codes = rng.integers(0, 16, shape)
    scales = rng.standard_normal((rows, columns // group)).astype(np.float32) / np.float32(64)
    bits = to_bf16(scales) if dtype == "BF16" else scales.astype(np.float16 if dtype == "F16" else np.float32)
    exact_scales = (from_bf16(bits) if dtype == "BF16" else bits).astype(np.float64)
    zeros = np.full(scales.shape, 8) if kind in ("symmetric", "gptq") else rng.integers(0, 16, scales.shape)
    if kind == "gptq_zeros":
        zeros = np.maximum(zeros, 1)
    numbers = (codes - zeros.repeat(group, axis=1)) * exact_scales.repeat(group, axis=1)
    base = name.removesuffix(".weight")
    if kind in ("symmetric", "zeros"):
        tensors: Tensors = {
            f"{name}_packed": ("I32", packed(codes)),
            f"{name}_scale": (dtype, bits),
            f"{name}_shape": ("I32", np.array(shape, np.int32)),
        }
        if kind == "zeros":
            filled = np.vstack([zeros, np.full((-rows % 8, zeros.shape[1]), 8)])
            tensors[f"{name}_zero_point"] = ("I32", np.ascontiguousarray(packed(filled.T).T))
        return tensors, numbers
    places = AWQ_PLACES if kind == "awq" else tuple(range(8))
    less = 1 if kind in ("gptq", "gptq_zeros") else 0
    tensors = {
        f"{base}.scales": (dtype, np.ascontiguousarray(bits.T)),
        f"{base}.qzeros": ("I32", packed(np.ascontiguousarray(zeros.T - less), places)),
    }
    if kind == "awq":
        tensors[f"{base}.qweight"] = ("I32", packed(np.ascontiguousarray(codes.T), places))
    else:
        tensors[f"{base}.qweight"] = ("I32", np.ascontiguousarray(packed(codes).T))
        tensors[f"{base}.g_idx"] = ("I32", (np.arange(columns) // group).astype(np.int32))
    return tensors, numbers
