"""Makes compressed.npz: small matrices in codes, and the numbers that the owners of the formats make of them.

    pip install compressed-tensors==0.20.0 torch==2.13.0 numpy
    pip download --no-deps --no-binary :all: autoawq==0.2.9    # which cannot be installed, but one file of it runs
    python tests/golden/make_compressed.py tests/golden/compressed.npz autoawq-0.2.9/awq/utils/packing_utils.py

Ordinary tests need none of the two packages. bf16 is kept as its u16 bits.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

ROWS, COLUMNS = 9, 128
TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def array(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def compressed(group: int, dtype: str, symmetric: bool) -> dict[str, np.ndarray]:
    made = torch.Generator().manual_seed(group)
    weight = torch.randn(ROWS, COLUMNS, generator=made).to(TYPES[dtype])
    low, high = (getattr(weight.float().reshape(ROWS, -1, group), end)(-1) for end in ("amin", "amax"))
    scales = ((high - low) / 15).to(TYPES[dtype])
    zeros = torch.round(-8 - low / scales.float()).clamp(-8, 7).to(torch.int8)
    options: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(symmetric=symmetric, **options))
    state = {"weight": weight, "weight_scale": scales}
    if not symmetric:
        state["weight_zero_point"] = zeros
    packed = PackedQuantizationCompressor.compress(state, scheme)
    numbers = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    parts = {"packed": packed["weight_packed"], "scale": scales, "numbers": numbers}
    if not symmetric:
        parts["zero_point"] = packed["weight_zero_point"]
    kind = "symmetric" if symmetric else "zeros"
    return {f"compressed/{kind}/{group}/{dtype}/{part}": array(tensor) for part, tensor in parts.items()}


def awq(group: int, packing: Any) -> dict[str, np.ndarray]:
    made = torch.Generator().manual_seed(group)
    words = torch.iinfo(torch.int32)
    qweight = torch.randint(words.min, words.max, (COLUMNS, 2), generator=made, dtype=torch.int32)
    qzeros = torch.randint(words.min, words.max, (COLUMNS // group, 2), generator=made, dtype=torch.int32)
    scales = (torch.randn(COLUMNS // group, 16, generator=made) / 16).half()
    numbers = packing.dequantize_gemm(qweight, qzeros, scales, 4, group)
    parts = {"qweight": qweight, "qzeros": qzeros, "scales": scales, "numbers": numbers}
    return {f"awq/{group}/{part}": array(tensor) for part, tensor in parts.items()}


def nvfp4() -> dict[str, np.ndarray]:
    """Every code with every scale of e4m3 that is a number, and a scale of the tensor that is no power of two."""
    made = torch.Generator().manual_seed(16)
    codes = torch.randint(0, 256, (16, 128), generator=made, dtype=torch.uint8).repeat_interleave(8, dim=1)
    codes += (torch.arange(8, dtype=torch.uint8) * 37).repeat(128)
    scales = torch.arange(128, dtype=torch.uint8).remainder(127).repeat(16, 1)
    whole = torch.tensor([2688 / 0.0731], dtype=torch.float32)
    weights = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    )
    state = {"weight_packed": codes, "weight_scale": scales.view(torch.float8_e4m3fn), "weight_global_scale": whole}
    numbers = NVFP4PackedCompressor.decompress(state, QuantizationScheme(targets=["Linear"], weights=weights))["weight"]
    parts = {"packed": codes, "scale": scales, "global_scale": whole, "numbers": numbers}
    e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return {"e4m3": array(e4m3), **{f"nvfp4/{part}": array(tensor) for part, tensor in parts.items()}}


def main(path: str, packing_utils: str) -> None:
    spec = importlib.util.spec_from_file_location("packing_utils", packing_utils)
    assert spec is not None and spec.loader is not None
    packing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packing)
    arrays = nvfp4()
    for group in (32, 64, 128):
        arrays |= awq(group, packing)
        for dtype in TYPES:
            for symmetric in (True, False):
                arrays |= compressed(group, dtype, symmetric)
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
