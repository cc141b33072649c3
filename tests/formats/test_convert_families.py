"""Conversion of MiniMax-M2 as it is published: matrices in fp8 with block scales, under Mixtral's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from golden import checkpoints
from golden.elements import fp8_blocks, fp8_values, from_bf16, to_bf16
from moeflux.conversion.convert import ConvertFormat, convert
from support.checkpoint_folder import edit_config, rewrite
from support.published_configs import MINIMAX_M2

STAY = (".gate.weight", "lm_head.weight", "embed_tokens.weight", "norm.weight")


def test_fp8_under_mixtrals_names(tmp_path: Path) -> None:
    """The same store as of a checkpoint in bf16 that holds what the codes and scales stand for."""
    fp8, plain = (checkpoints.write("minimax_m2", tmp_path / name) for name in ("fp8", "plain"))
    meant: dict[str, np.ndarray] = {}

    def narrow(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(".weight") and not name.endswith(STAY)]:
            codes, scales = fp8_blocks(from_bf16(tensors[name][1]).astype(np.float64))
            tensors[name], tensors[f"{name}_scale_inv"] = ("F8_E4M3", codes), ("F32", scales)
            size = fp8_values()[codes & 127] * np.where(codes & 128, -1, 1)
            spread = scales.repeat(128, axis=0).repeat(128, axis=1)[: codes.shape[0], : codes.shape[1]]
            meant[name] = to_bf16(size.astype(np.float32) * spread)

    rewrite(fp8, narrow)
    rewrite(plain, lambda tensors: tensors.update({name: ("BF16", bits) for name, bits in meant.items()}))
    assert len(meant) == 3 * (4 + 16 * 3)
    edit_config(fp8, quantization_config=MINIMAX_M2["quantization_config"])
    stores = [
        convert(each, tmp_path / f"{each.name}-store", format=ConvertFormat.asked("bf16")) for each in (fp8, plain)
    ]
    assert stores[0].fingerprint == stores[1].fingerprint
