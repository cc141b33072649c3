"""GGUF files in every type that is read: dense matrices and experts in each type of blocks, and vectors in each plain
type. The package gguf says what numbers they have, and the oracle computes with those."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

import moeflux
from golden.checkpoints import CHECKPOINTS, qwen3_moe
from moeflux import QuantFormat, oracle
from moeflux.stores.store import open_store
from support import gguf_files
from support.engine_logits import LARGEST_INT16_ERROR, LARGEST_ORACLE_ERROR, assert_meets
from support.ops import random_matrix, softer

IDS = [1, 100, 50, 10, 42, 3, 77, 9]


def logits(file: Path, precision: str) -> np.ndarray:
    """Of a prompt, with few experts in memory, so that they are read where they lie."""
    with moeflux.load(file, threads=2, sessions=1, precision=precision, expert_slots=4) as model:
        return np.asarray(model.session().prefill(IDS, logits="all"))


def logits_of_the_oracle(file: Path) -> np.ndarray:
    with open_store(file) as store:
        return oracle.Session(store.variant, store).prefill(IDS)


@pytest.mark.parametrize("name", QuantFormat.block_types())
def test_matrices(name: str, tmp_path: Path) -> None:
    """Every matrix of a model but the routers. The numbers are to the last bit those of the package gguf."""
    changes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2, "num_experts": 4}
    checkpoint = qwen3_moe(f"all_{name}", num_experts_per_tok=2, **changes)
    rng = np.random.default_rng(31)
    types = {}

    def in_blocks(_: gguf.GGUFWriter, tensors: gguf_files.Tensors) -> None:
        for tensor, array in tensors.items():
            if gguf_files.is_narrow(tensor, array):
                continue
            rows, columns = array.size // array.shape[-1], array.shape[-1]
            weight = softer(random_matrix(rng, QuantFormat.blocks(name), rows, columns)).weight
            tensors[tensor] = weight.reshape(*array.shape[:-1], -1)
            types[tensor] = name.removeprefix("GGUF_")

    file = gguf_files.write(
        "qwen3_moe", tmp_path / "m.gguf", type="F32", others=types, change=in_blocks, checkpoint=checkpoint
    )
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    with open_store(file) as store:
        found = {"token_embd.weight": store.tensor("model.embed_tokens"), "output.weight": store.tensor("lm_head")}
        for own, stored in (("q_proj", "attn_q"), ("o_proj", "attn_output")):
            found[f"blk.1.{stored}.weight"] = store.tensor(f"model.layers.1.self_attn.{own}")
        for own, matrix in zip(("gate", "up", "down"), store.expert(1, 3), strict=True):
            found[f"blk.1.ffn_{own}_exps.weight"] = matrix
        for tensor, matrix in found.items():
            wanted = gguf.quants.dequantize(raw[tensor].data, raw[tensor].tensor_type)
            assert str(matrix.format) == name
            assert np.array_equal(oracle.widen(matrix), wanted[3] if "_exps" in tensor else wanted)
    wanted = logits_of_the_oracle(file)
    assert_meets(logits(file, "exact"), wanted, LARGEST_ORACLE_ERROR)
    assert_meets(logits(file, "auto"), wanted, LARGEST_INT16_ERROR)


@pytest.mark.parametrize("element", ["F16", "BF16"])
@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss", "deepseek_v3", "gemma4"])
def test_vectors(name: str, element: str, tmp_path: Path) -> None:
    """Vectors, routers and taps in 16 bits, which the converter writes in f32."""
    checkpoint = CHECKPOINTS[name]()
    types = {}

    def narrow(_: gguf.GGUFWriter, tensors: gguf_files.Tensors) -> None:
        names = [tensor for tensor, array in tensors.items() if gguf_files.is_narrow(tensor, array)]
        types.update({tensor: element for tensor in names if tensor != "rope_freqs.weight"})  # which no f16 can hold

    file = gguf_files.write(name, tmp_path / "m.gguf", type="F32", others=types, change=narrow, checkpoint=checkpoint)
    stored = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert sum(type == element for type in stored.values()) > 10
    assert_meets(logits(file, "exact"), logits_of_the_oracle(file), LARGEST_ORACLE_ERROR)
