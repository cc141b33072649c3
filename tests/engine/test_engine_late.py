"""Positions up to the models' context. Sessions that begin late, with an invented state, go on as the oracle does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import moeflux
from golden.checkpoint import Checkpoint, safetensors_bytes
from golden.checkpoints import qwen3_moe
from golden.deepseek import deepseek_v3
from moeflux.conversion.convert import convert
from moeflux.models.variants import MAX_CONTEXT
from moeflux.runtime.snapshot import Snapshot
from moeflux.stores.storage import ConvertFormat
from moeflux.stores.store import open_store
from support.engine import oracle_at, steps, tokens
from support.metal import needs_device

LARGEST_ERROR = 1e-5  # of the range of the logits
ON_METAL = 5e-5  # spans are added up in f32: of a hundred thousand keys that are alike, roundings are alike too
SHARP = 64  # rows that are looked at, of a million

ROWS = {"num_hidden_layers": 1, "num_key_value_heads": 1, "num_attention_heads": 2, "head_dim": 32}
LATENT = {
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "max_position_embeddings": MAX_CONTEXT,
}  # fmt: skip
"""YaRN as the checkpoint has it: its frequencies at a million are those that f32 angles would get wrong by radians."""


def checkpoint(kind: str) -> Checkpoint:
    if kind == "rows":
        return qwen3_moe("late_rows", **ROWS, max_position_embeddings=MAX_CONTEXT)
    return deepseek_v3("late_latent", **LATENT)


@pytest.fixture(scope="module", params=("rows", "latent"))
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, root = checkpoint(request.param), tmp_path_factory.mktemp("late")
    (root / "hf").mkdir()
    (root / "hf" / "config.json").write_text(json.dumps(made.config))
    (root / "hf" / "model.safetensors").write_bytes(safetensors_bytes(made.tensors))
    convert(root / "hf", root / "store", format=ConvertFormat.asked("bf16"), check="none")
    return root / "store"


def late_state(model: moeflux.Model, position: int) -> Snapshot:
    """Zeros, except some rows here and there that are strong enough to matter among a million."""
    random = np.random.default_rng(position)
    at = np.unique([*random.integers(0, position, SHARP), *range(position - SHARP, position)])
    tensors: dict[tuple[int, str], np.ndarray] = {}
    for key, shape in model.variant.state(position).items():
        tensors[key] = np.zeros(shape, np.float32)
        strength = 5.0 if key[1] in ("k", "rope_k") else 1.0
        tensors[key][at] = strength * random.standard_normal((len(at), *shape[1:]))
    return Snapshot(model.variant, position, tensors)


@pytest.mark.parametrize(
    ("backend", "position"),
    [("cpu", 131_100), ("cpu", 1_000_000), pytest.param("metal", 131_100, marks=needs_device)],
    indirect=["backend"],
)
def test_late_positions(store: Path, backend: str, position: int) -> None:
    model = moeflux.load(store, threads=2)
    session = model.session(max_context=position + 16)
    state = late_state(model, position)
    session.restore(state)
    ids = tokens(4 if position < 200_000 else 2)
    found = np.concatenate([session.prefill(ids[:-1], logits="all"), steps(session, ids[-1:])])
    assert session.position == position + len(ids)
    with open_store(store) as weights:
        expected = oracle_at(weights, state).prefill(ids)
    limit = LARGEST_ERROR if backend == "cpu" else ON_METAL
    assert np.abs(found - expected).max() <= limit * np.ptp(expected)


def test_one_position_further_is_another_answer(store: Path) -> None:
    """The comparison above would see it."""
    model = moeflux.load(store, threads=2)
    state = late_state(model, 131_100)
    with open_store(store) as weights:
        right, shifted = oracle_at(weights, state), oracle_at(weights, state)
        shifted.position += 1
        expected, found = right.step(1), shifted.step(1)
    assert np.abs(found - expected).max() > 1000 * LARGEST_ERROR * np.ptp(expected)


def test_the_very_last_position(store: Path) -> None:
    model = moeflux.load(store, threads=2)
    session = model.session(max_context=MAX_CONTEXT)
    session.restore(late_state(model, MAX_CONTEXT - 1))
    session.step(1)
    assert session.position == MAX_CONTEXT
    with pytest.raises(moeflux.StateError, match=rf"expected at most {MAX_CONTEXT} tokens \(max_context\)"):
        session.step(1)
