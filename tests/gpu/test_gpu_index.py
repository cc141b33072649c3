"""A model whose rows attend to what an index selects, on both GPUs, emulated: near the CPU's numbers, and the same bits
in every way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import moeflux
from moeflux.conversion.synth import synth
from support.engine import load_faulty, steps, tokens
from support.metal import needs_device
from support.tiny_stores import deepseek_v32

pytestmark = needs_device

PROMPT, TAIL, OTHER = tokens(12), tokens(3, seed=9), tokens(6, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A row selects five of those before it."""
    path = tmp_path_factory.mktemp("indexed") / "store"
    synth(path, deepseek_v32(5, vocab_size=384, layer_kinds=("full",) * 2, mlp_kinds=("dense", "moe")))
    return path


def everything(model: moeflux.Model, rows: str) -> np.ndarray:
    session = model.session(max_context=64, kv_dtype=rows)
    return np.concatenate([session.prefill(PROMPT, logits="all"), steps(session, TAIL)])


@pytest.mark.parametrize("rows", ["f32", "bf16", "q8"])
def test_every_way_gives_the_same_bits(folder: Path, gpu_name: str, rows: str) -> None:
    near = everything(load_faulty(folder, precision="exact"), rows)
    model = load_faulty(folder, backend=gpu_name, look_ahead="off")
    found = everything(model, rows)
    assert np.abs(found - near).max() < 1e-4 * np.abs(near).max()
    assert np.array_equal(everything(load_faulty(folder, backend=gpu_name, chunk=5, expert_slots=2), rows), found)
    one, two = (model.session(max_context=64, kv_dtype=rows) for _ in range(2))
    both = model.evaluate([(one, PROMPT), (two, OTHER)])
    assert np.array_equal(both[0].numpy(), found[len(PROMPT) - 1])
    two.restore(one.snapshot())
    for each in (one, two):
        assert np.array_equal(steps(each, TAIL), found[len(PROMPT) :])
    one.rewind(8)
    assert np.array_equal(one.prefill(PROMPT[8:], logits="all"), found[8 : len(PROMPT)])
