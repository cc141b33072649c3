"""A model with residual streams, n-gram rows and attention to what an index of units selects, on both GPUs, emulated:
near the CPU's numbers, and the same bits in every way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import moeflux
from golden.checkpoint import safetensors_bytes
from golden.qwen4 import qwen4_exp_text
from moeflux.conversion.convert import convert
from moeflux.stores.storage import ConvertFormat
from support.engine import load_faulty, steps, tokens
from support.metal import needs_device

pytestmark = needs_device

PROMPT, TAIL, OTHER = tokens(14), tokens(3, seed=9), tokens(6, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A row selects two units of four rows."""
    checkpoint = qwen4_exp_text(
        indexer_budget=8, layer_types=["linear_attention", "full_attention"], num_hidden_layers=2,
        full_attention_interval=2, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    source, path = tmp_path_factory.mktemp("checkpoint"), tmp_path_factory.mktemp("store") / "store"
    (source / "config.json").write_text(json.dumps(checkpoint.config))
    (source / "model.safetensors").write_bytes(safetensors_bytes(checkpoint.tensors))
    convert(source, path, format=ConvertFormat.asked("bf16"), check="none")
    return path


def everything(model: moeflux.Model) -> np.ndarray:
    session = model.session(max_context=64)
    return np.concatenate([session.prefill(PROMPT, logits="all"), steps(session, TAIL)])


def test_every_way_gives_the_same_bits(folder: Path, gpu_name: str) -> None:
    near = everything(load_faulty(folder, precision="exact"))
    found = everything(model := load_faulty(folder, backend=gpu_name, look_ahead="off"))
    assert np.abs(found - near).max() < 1e-4 * np.abs(near).max()
    assert np.array_equal(everything(load_faulty(folder, backend=gpu_name, chunk=5, expert_slots=2)), found)
    one, two = (model.session(max_context=64) for _ in range(2))
    both = model.evaluate([(one, PROMPT), (two, OTHER)])
    assert np.array_equal(both[0].numpy(), found[len(PROMPT) - 1])
    one.checkpoint()
    two.restore(one.snapshot())
    for each in (one, two):
        assert np.array_equal(steps(each, TAIL), found[len(PROMPT) :])
    one.rewind(len(PROMPT))
    assert np.array_equal(steps(one, TAIL), found[len(PROMPT) :])
