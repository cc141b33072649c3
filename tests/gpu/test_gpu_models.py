"""Models in GGUF's blocks, NVFP4, FP8 and MXFP8 on both GPUs, emulated: close to the oracle, and the same bits whatever
the calls and the slots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moeflux import QuantFormat, oracle
from moeflux.conversion.convert import ConvertFormat, convert
from moeflux.conversion.synth import synth
from moeflux.stores.store import open_store
from support import gguf_files
from support.engine import load_faulty, steps, tokens
from support.engine_logits import LARGEST_ORACLE_ERROR, assert_meets
from support.flat import changed
from support.float_folders import fp8_checkpoint, mlx_folder, nvfp4_checkpoint
from support.metal import needs_device
from support.small_variants import QWEN

pytestmark = needs_device

WIDE = changed(QWEN, hidden_size=256, moe_intermediate=256, num_experts=6, vocab_size=384)


def of_blocks(experts: str, dense: str) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        synth(root / "store", WIDE, format=ConvertFormat(QuantFormat.blocks(experts), QuantFormat.blocks(dense)))
        return root / "store"

    return make


def of_gguf(root: Path) -> Path:
    """With experts of other types in some layers."""
    others = {"blk.1.ffn_down_exps.weight": "F16", "blk.3.ffn_up_exps.weight": "Q4_0"}
    return gguf_files.write("qwen3_moe", root / "m.gguf", type="Q8_0", others=others)


def packed(folder: Path, bits: int | str, **rest: str) -> Path:
    convert(folder, folder.parent / "packed", format=ConvertFormat.asked(bits, **rest), check="none")
    return folder.parent / "packed"


MAKERS: dict[str, Callable[[Path], Path]] = {
    "Q4_K, Q6_K": of_blocks("Q4_K", "Q6_K"),
    "GGUF_MXFP4, Q8_0": of_blocks("GGUF_MXFP4", "Q8_0"),
    "a GGUF file": of_gguf,
    "NVFP4": lambda root: packed(nvfp4_checkpoint(root / "hf", "modelopt"), 4, dense_bits="bf16"),
    "FP8": lambda root: packed(fp8_checkpoint(root / "hf", "F32"), "fp8"),
    "nvfp4 of MLX": lambda root: mlx_folder(root, "nvfp4"),
    "mxfp8 of MLX": lambda root: mlx_folder(root, "mxfp8"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_logits(gpu_name: str, tmp_path: Path, name: str) -> None:
    folder = MAKERS[name](tmp_path)
    with open_store(folder) as opened:
        ids = tokens(9, vocab=opened.variant.vocab_size)
        expected = oracle.Session(opened.variant, opened).prefill(ids)

    def found(**settings: object) -> np.ndarray:
        session = load_faulty(folder, backend=gpu_name, **settings).session(max_context=32)
        return np.concatenate([session.prefill(ids[:6], logits="all"), steps(session, ids[6:])])

    whole = found()
    assert_meets(whole, expected, LARGEST_ORACLE_ERROR)
    assert np.array_equal(found(expert_slots=8, look_ahead="on"), whole)
    assert np.array_equal(found(chunk=5), whole)
    assert np.array_equal(steps(load_faulty(folder, backend=gpu_name).session(max_context=32), ids), whole)
