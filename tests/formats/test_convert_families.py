"""Conversion of families as they are published in fp8 with block scales: MiniMax-M2 under Mixtral's names, and
DeepSeek-V3.2 with its index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden import checkpoints
from golden.elements import fp8_blocks, fp8_values, from_bf16, to_bf16
from moeflux.conversion.convert import ConvertFormat, convert
from support.checkpoint_folder import edit_config, rewrite
from support.published_configs import DEEPSEEK_V32, MINIMAX_M2

STAY = (".gate.weight", "lm_head.weight", "embed_tokens.weight", "norm.weight", "weights_proj.weight", "eh_proj.weight")

MATRICES = {"minimax_m2": 3 * (4 + 16 * 3), "deepseek_v32": 4 * (5 + 2) + 3 + 3 * (1 + 16) * 3}
"""Of a family: attention, its index, a dense part, and the experts, the shared one among them."""


@pytest.mark.parametrize("name", MATRICES)
def test_fp8_is_what_its_codes_and_scales_stand_for(tmp_path: Path, name: str) -> None:
    """The same store as of a checkpoint in bf16 that holds that."""
    fp8, plain = (checkpoints.write(name, tmp_path / kind) for kind in ("fp8", "plain"))
    meant: dict[str, np.ndarray] = {}

    def narrow(tensors: dict[str, Any]) -> None:
        for key in [key for key in tensors if key.endswith(".weight") and not key.endswith(STAY)]:
            codes, scales = fp8_blocks(from_bf16(tensors[key][1]).astype(np.float64))
            tensors[key], tensors[f"{key}_scale_inv"] = ("F8_E4M3", codes), ("F32", scales)
            size = fp8_values()[codes & 127] * np.where(codes & 128, -1, 1)
            spread = scales.repeat(128, axis=0).repeat(128, axis=1)[: codes.shape[0], : codes.shape[1]]
            meant[key] = to_bf16(size.astype(np.float32) * spread)

    rewrite(fp8, narrow)
    rewrite(plain, lambda tensors: tensors.update({key: ("BF16", bits) for key, bits in meant.items()}))
    assert len(meant) == MATRICES[name]
    published = {"minimax_m2": MINIMAX_M2, "deepseek_v32": DEEPSEEK_V32}[name]
    edit_config(fp8, quantization_config=published["quantization_config"])
    stores = [
        convert(each, tmp_path / f"{each.name}-store", format=ConvertFormat.asked("bf16")) for each in (fp8, plain)
    ]
    assert stores[0].fingerprint == stores[1].fingerprint
