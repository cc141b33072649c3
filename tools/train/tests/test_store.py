"""What moeflux runs is what was trained: the export, converted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import moeflux
from moeflux import _core
from moeflux.conversion.convert import convert
from moeflux.stores.storage import ConvertFormat
from moeflux.text.chat import ChatFormat
from moeflux.text.tokenizer import Tokenizer
from tools.train import checkpoint
from tools.train.export import read_folder
from tools.train.grid import on_grid
from tools.train.tests.tiny import GRID
from tools.train.windows import Data


@pytest.fixture(scope="module")
def store(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That folder after `moeflux convert --bits 4 --dense-bits bf16`."""
    packed = tmp_path_factory.mktemp("store") / "tiny"
    convert(folder, packed, format=ConvertFormat.asked(*GRID, dense_bits="bf16"))
    return packed


def test_converted_experts_are_to_the_bit_those_that_were_trained(trained: Path, store: Path) -> None:
    weights = checkpoint.load(trained, "cpu")["model"]
    with moeflux.open_store(store) as opened:
        for layer in opened.variant.moe_layers:
            at = f"model.layers.{layer}.mlp.experts"
            seen = [on_grid(weights[f"{at}.{matrix}"], *GRID).numpy() for matrix in ("gate_up_proj", "down_proj")]
            for expert in range(opened.variant.experts.count):
                gate, up = np.split(seen[0][expert], 2)
                for wanted, found in zip((gate, up, seen[1][expert]), opened.expert(layer, expert), strict=True):
                    values = _core.dequantize(found.weight, found.scales, found.biases, found.format, wanted.shape[-1])
                    assert np.array_equal(values, wanted)


def test_logits_of_the_engine_are_those_of_the_model(folder: Path, store: Path, data: Data) -> None:
    model = read_folder(folder)
    model.quantise(GRID)
    engine = moeflux.load(store, threads=1)
    for kind in ("prose", "chat"):
        tokens = data.held_out(kind, 200, 1)[0]
        with torch.no_grad():
            wanted = model(torch.from_numpy(tokens)[None])[0][0].double().numpy()
        found = engine.session().prefill(tokens.astype(np.int32), logits="all").astype(np.float64)
        cosines = (wanted * found).sum(1) / np.linalg.norm(wanted, axis=1) / np.linalg.norm(found, axis=1)
        assert cosines.min() >= 0.99999, cosines.min()
        # And it is no matter of course: without the grid the model says something else.
    model.quantise(None)
    with torch.no_grad():
        other = model(torch.from_numpy(tokens)[None])[0][0].double().numpy()
    assert np.abs(other - found).max() > 10 * np.abs(wanted - found).max()


def test_the_store_can_chat(store: Path) -> None:
    """Template, ends and tokenizer came along."""
    tokenizer = Tokenizer.from_folder(store)
    prompt = ChatFormat.from_folder(store, tokenizer).encode([{"role": "user", "content": "Hello"}])
    with moeflux.open_store(store) as opened:
        assert opened.missing_extras() == []
        assert set(opened.variant.eos_ids) == {tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|endoftext|>")}
    session = moeflux.load(store, threads=1).session()
    token = session.prefill(prompt.tokens).argmax()
    assert 0 <= token < len(tokenizer)
