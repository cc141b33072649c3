"""Checkpoints and folders whose codes are floats: NVFP4 and FP8 as they are published, and the modes of MLX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from golden import checkpoints
from golden.elements import fp8_blocks, fp8_values, from_bf16, to_bf16
from moeflux.conversion.convert import ConvertFormat, convert
from moeflux.oracle.stored import E2M1, E4M3, pack_codes
from support.checkpoint_folder import edit_config, rewrite
from support.mlx_folder import write_mlx_folder

STAY = (".gate.weight", "norm.weight", "layernorm.weight", "lm_head.weight", "conv1d.weight", "_expert_gate.weight")
Tensors = dict[str, tuple[str, np.ndarray]]

LAYOUTS: dict[str, dict[str, Any]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "tensor_group",
                    "group_size": 16,
                    "symmetric": True,
                },
            }
        },
    },
}


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return ".layers." in name and name.endswith(".weight") and not name.endswith(STAY) and len(shape) == 2


def nvfp4_of(values: np.ndarray, layout: str, name: str) -> tuple[Tensors, np.ndarray]:
    """A matrix as tensors of that layout, and the numbers that they stand for, f32."""
    rows, columns = values.shape
    groups = values.reshape(rows, -1, 16)
    whole = np.float32(np.abs(values).max() / (448 * 6))
    scales = np.searchsorted(fp8_values(), np.abs(groups).max(-1) / 6 / whole).clip(1, 126).astype(np.uint8)
    stored = whole if layout == "modelopt" else np.float32(1) / whole
    of_groups = E4M3[scales].astype(np.float32) * (stored if layout == "modelopt" else np.float32(1) / stored)
    codes = np.abs(groups[..., None] / of_groups[..., None, None] - E2M1).argmin(-1).reshape(rows, columns)
    numbers = E2M1.astype(np.float32)[codes] * of_groups.repeat(16, axis=1)
    both = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    base = name.removesuffix(".weight")
    if layout == "modelopt":
        tensors: Tensors = {name: ("U8", both), f"{name}_scale_2": ("F32", np.array(stored))}
        tensors[f"{base}.input_scale"] = ("F32", np.array(np.float32(0.5)))
    else:
        tensors = {f"{name}_packed": ("U8", both), f"{name}_global_scale": ("F32", np.array([stored]))}
        tensors[f"{base}.input_global_scale"] = ("F32", np.array([0.5], np.float32))
    tensors[f"{name}_scale"] = ("F8_E4M3", scales)
    return tensors, numbers


def nvfp4_checkpoint(folder: Path, layout: str, meant: Tensors | None = None, name: str = "qwen3_moe") -> Path:
    checkpoints.write(name, folder)

    def encode(tensors: Tensors) -> None:
        for key in [key for key in sorted(tensors) if is_matrix(key, tensors[key][1].shape)]:
            parts, numbers = nvfp4_of(from_bf16(tensors.pop(key)[1]), layout, key)
            tensors.update(parts)
            if meant is not None:
                meant[key] = ("F32", numbers)

    rewrite(folder, encode)
    edit_config(folder, quantization_config=LAYOUTS[layout])
    return folder


def fp8_checkpoint(
    folder: Path, dtype: str, meant: dict[str, np.ndarray] | None = None, name: str = "qwen3_moe"
) -> Path:
    """Scales of that type for blocks of 128 x 128; experts of their own, or stacks."""
    checkpoints.write(name, folder)

    def narrow(tensors: Tensors) -> None:
        stacks = [key for key in tensors if key.endswith((".gate_up_proj", ".down_proj"))]
        for key in [key for key in sorted(tensors) if is_matrix(key, tensors[key][1].shape)] + stacks:
            values = from_bf16(tensors[key][1]).astype(np.float64)
            each = [fp8_blocks(matrix) for matrix in values.reshape(-1, *values.shape[-2:])]
            codes, scales = (
                np.stack(parts).reshape(*values.shape[:-2], *parts[0].shape) for parts in zip(*each, strict=True)
            )
            stored = to_bf16(scales) if dtype == "BF16" else scales
            tensors[key], tensors[f"{key}_scale_inv"] = ("F8_E4M3", codes), (dtype, stored)
            wide = from_bf16(stored) if dtype == "BF16" else stored
            spread = wide.repeat(128, axis=-2).repeat(128, axis=-1)[..., : values.shape[-2], : values.shape[-1]]
            if meant is not None:
                meant[key] = E4M3.astype(np.float32)[codes] * spread

    rewrite(folder, narrow)
    edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    return folder


MODES = {"mxfp4": ("MXFP4", 4, 32), "mxfp8": ("MXFP8", 8, 32), "nvfp4": ("MLX_NVFP4", 4, 16)}


def mlx_folder(root: Path, mode: str, name: str = "qwen3_moe") -> Path:
    """All that MLX quantises is in that mode, but for the router, which is affine."""
    checkpoints.write(name, root / "hf")
    convert(root / "hf", root / "affine", format=ConvertFormat.asked(4), check="none")
    folder = write_mlx_folder(root / "affine", root / "mlx")
    _, bits, group = MODES[mode]
    rng = np.random.default_rng(bits + group)

    def encode(tensors: Tensors) -> None:
        for base in [key.removesuffix(".scales") for key in sorted(tensors) if key.endswith(".scales")]:
            words = tensors[f"{base}.weight"][1]
            if base.endswith(".gate"):
                continue
            columns = words.shape[-1] * 8
            codes = rng.integers(0, 1 << bits, (*words.shape[:-1], columns)).astype(np.uint8)
            codes[codes & 127 == 127] = 0
            scales = rng.integers(*((24, 40) if mode == "nvfp4" else (113, 116)), (*words.shape[:-1], columns // group))
            del tensors[f"{base}.biases"]
            tensors[f"{base}.weight"] = ("U32", np.ascontiguousarray(pack_codes(codes, bits)))
            tensors[f"{base}.scales"] = ("U8", scales.astype(np.uint8) - np.uint8(6 if mode == "mxfp8" else 0))

    rewrite(folder, encode)
    said = {"group_size": group, "bits": bits, "mode": mode}
    for layer in range(4):
        said[f"model.layers.{layer}.mlp.gate"] = {"group_size": 64, "bits": 8, "mode": "affine"}
    edit_config(folder, quantization=said, quantization_config=said)
    return folder
