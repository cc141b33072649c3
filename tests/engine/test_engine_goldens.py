"""The engine itself gives the logits of transformers and mlx-lm, and every width and group meets the oracle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import moeflux
from golden.checkpoints import CHECKPOINTS, token_ids, write
from moeflux import oracle
from moeflux.conversion.convert import convert
from moeflux.stores.storage import ConvertFormat
from moeflux.stores.store import open_store
from support import reference_weights
from support.agreement import FULL_PRECISION, golden_logits
from support.engine_logits import LARGEST_DIGIT_ERROR, LARGEST_ORACLE_ERROR, assert_meets


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write(name, root / name) for name in CHECKPOINTS}


def engine_logits(store: Path, name: str) -> np.ndarray:
    return moeflux.load(store, threads=2, precision="exact").session().prefill(token_ids(name), logits="all")


def put_whole_norms(store: Path, name: str) -> None:
    """The norms of a store in f32 as the reference weights have them, 1 + w unrounded."""
    _, weights = reference_weights.load(name)
    tensors = json.loads((store / "model_weights.json").read_text())["tensors"]
    with (store / "model_weights.bin").open("r+b") as data:
        for tensor in [tensor for tensor in tensors if tensor.endswith(("norm.weight", "layernorm.weight"))]:
            assert tensors[tensor]["dtype"] == "F32"
            data.seek(tensors[tensor]["offset"])
            data.write(weights.tensor(tensor).weight.astype("<f4").tobytes())


@pytest.mark.parametrize("name", FULL_PRECISION)
def test_plain_weights_are_transformers(checkpoint: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Nothing is quantised. Stored in the checkpoint's own type, but where norms are folded: conversion rounds 1 + w to
    bf16, as mlx-lm does, and these sharp models answer with other experts. There the store is f32 with whole norms."""
    config = CHECKPOINTS[name]().config
    folded = "linear_num_value_heads" in (config.get("text_config") or config)
    element = "f32" if folded else {"float16": "f16", "bfloat16": "bf16"}[config["torch_dtype"]]
    convert(checkpoint[name], tmp_path / "plain", format=ConvertFormat.asked(element), check="none")
    if folded:
        put_whole_norms(tmp_path / "plain", name)
    found = engine_logits(tmp_path / "plain", name)
    with open_store(tmp_path / "plain") as store:
        assert_meets(found, oracle.Session(store.variant, store).prefill(token_ids(name)), LARGEST_ORACLE_ERROR)
    assert_meets(found, golden_logits(f"{name}/hf"))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_four_bits_are_mlx(checkpoint: dict[str, Path], tmp_path: Path, name: str) -> None:
    convert(checkpoint[name], tmp_path / "packed", check="none")
    assert_meets(engine_logits(tmp_path / "packed", name), golden_logits(f"{name}/mlx"))


@pytest.mark.parametrize("group_size", (32, 64, 128))
@pytest.mark.parametrize("bits", (2, 3, 4, 5, 6, 8))
def test_every_width_and_group_meets_the_oracle(
    checkpoint: dict[str, Path], tmp_path: Path, bits: int, group_size: int
) -> None:
    """Prefill and step: they have kernels of their own. The model's experts are 128 wide, so every group fits."""
    convert(checkpoint["qwen3_next"], tmp_path / "q", format=ConvertFormat.asked(bits, group_size), check="none")
    ids = token_ids("qwen3_next")[:24]
    with open_store(tmp_path / "q") as store:
        gate = store.directory.experts.formats.gate
        assert (gate.bits, gate.group_size) == (bits, group_size)
        expected = oracle.Session(store.variant, store).prefill(ids)
    for precision, largest in (("exact", LARGEST_ORACLE_ERROR), ("auto", LARGEST_DIGIT_ERROR)):
        session = moeflux.load(tmp_path / "q", threads=2, precision=precision).session()
        found = session.prefill(ids[:20], logits="all")
        found = np.concatenate([found, np.stack([session.step(token).numpy() for token in ids[20:]])])
        assert_meets(found, expected, largest)
