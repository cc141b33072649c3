"""What the engine says that matrices were multiplied with: the oracle's own inputs, and the same bits in every way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import DeviceError, StateError, oracle
from moeflux.oracle import model as definition
from moeflux.stores.store import open_store
from support.engine import Folder, folders, load_faulty, tokens

NAMES = ["qwen3_5_moe", "qwen3_next", "deepseek_v3", "gpt_oss", "gemma4"]
IDS = tokens(37)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("stores"))


def observed(model: moeflux.Model, cuts: tuple[int, ...] = (37,)) -> tuple[dict[str, Any], dict[int, Any]]:
    session = model.session(max_context=64)
    with model.observe_activations() as seen:
        start = 0
        for end in cuts:
            session.prefill(IDS[start:end], logits="all")
            start = end
    return seen.dense(), seen.experts()


class Inputs:
    """What the oracle multiplies each matrix with: squares a column."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dense: dict[str, np.ndarray] = {}
        self.experts: dict[tuple[int, int], tuple[int, np.ndarray, np.ndarray]] = {}
        names: dict[int, str] = {}
        matmul, ffn = definition.matmul, definition.expert_ffn
        call, expert = definition.Widened.__call__, definition.Widened.expert
        kept: list[Any] = []  # so that no two matrices have the same id

        def named(w: Any, name: str) -> np.ndarray:
            array = call(w, name)
            names[id(array)] = name
            kept.append(array)
            return array

        def expert_named(w: Any, layer: int, number: int) -> Any:
            parts = expert(w, layer, number)
            names[id(parts[2])] = f"{layer} {number}"
            kept.append(parts)
            return parts

        def multiplied(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
            if id(matrix) in names:
                name = names[id(matrix)]
                self.dense[name] = self.dense.get(name, 0) + (x.astype(np.float64) ** 2).sum(axis=0)
            return matmul(x, matrix)

        def through(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, **beside: Any) -> np.ndarray:
            name = names[id(down)]
            if name.endswith("down_proj"):  # of a shared expert, or a dense layer
                return ffn(x, gate, up, down, **beside)
            layer, number = map(int, name.split())
            one = np.eye(down.shape[1])
            bias = {key: value for key, value in beside.items() if key != "biases"}
            if "biases" in beside and beside["biases"] is not None:
                bias["biases"] = (*beside["biases"][:2], np.zeros(down.shape[1]))
            inner = ffn(x, gate, up, one, **bias)
            self.experts[layer, number] = (len(x), (x**2).sum(axis=0), (inner**2).sum(axis=0))
            return ffn(x, gate, up, down, **beside)

        monkeypatch.setattr(definition, "matmul", multiplied)
        monkeypatch.setattr(definition, "expert_ffn", through)
        monkeypatch.setattr(definition.Widened, "__call__", named)
        monkeypatch.setattr(definition.Widened, "expert", expert_named)
        with open_store(path) as store:
            oracle.Session(store.variant, store).prefill(IDS)


@pytest.mark.parametrize("name", NAMES)
def test_moments_are_those_of_the_oracle(folder: Folder, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with moeflux.load(folder(name), backend="cpu", threads=2, precision="exact", look_ahead="off") as model:
        dense, experts = observed(model)
        variant = model.variant
    wanted = Inputs(folder(name), monkeypatch)
    # The engine scales a router of gemma4 where the oracle scales what it reads.
    scaled = ".mlp.gate" if name == "gemma4" else "-"
    compared = [key for key in wanted.dense if key in dense and not key.endswith(scaled)]
    assert len(compared) >= 3 * variant.num_layers, "attention at least"
    for key in compared:
        np.testing.assert_allclose(dense[key][1], wanted.dense[key], rtol=2e-3, atol=1e-6 * wanted.dense[key].max())
    for layer in variant.moe_layers:
        rows, _, met, inner = experts[layer]
        assert rows == len(IDS) and met.sum() == len(IDS) * variant.experts.per_token
        for number in range(variant.experts.count):
            count, _, squares = wanted.experts.get((layer, number), (0, None, np.zeros(inner.shape[1])))
            assert met[number] == count
            np.testing.assert_allclose(inner[number], squares, rtol=2e-3, atol=1e-5 * max(squares.max(), 1e-3))
    layer = variant.moe_layers[-1]
    per_token = sum(each[1] for key, each in wanted.experts.items() if key[0] == layer) / variant.experts.per_token
    np.testing.assert_allclose(experts[layer][1], per_token, rtol=2e-3)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "deepseek_v3"])
def test_no_cut_no_cache_and_no_thread_changes_a_bit(folder: Folder, name: str) -> None:
    found = []
    for options, cuts in (
        ({"threads": 1}, (37,)),
        ({"threads": 3, "chunk": 8}, (1, 20, 37)),
        ({"threads": 1, "expert_slots": 9, "chunk": 16, "cache": "none"}, (36, 37)),
    ):
        with moeflux.load(folder(name), backend="cpu", look_ahead="off", **options) as model:
            found.append(observed(model, cuts))
    for dense, experts in found[1:]:
        assert dense.keys() == found[0][0].keys()
        for key, (rows, squares) in dense.items():
            assert rows == found[0][0][key][0] and np.array_equal(squares, found[0][0][key][1]), key
        for layer, parts in experts.items():
            assert all(np.array_equal(a, b) for a, b in zip(parts, found[0][1][layer], strict=True)), layer


def test_what_is_evaluated_outside_is_not_counted_and_changes_no_logits(folder: Folder) -> None:
    with moeflux.load(folder("qwen3_5_moe"), backend="cpu", threads=1, look_ahead="off") as model:
        session = model.session(max_context=128)
        before = session.prefill(IDS).numpy()
        taken = pytest.raises(StateError, match="found another recording under way")
        with model.observe_activations() as seen, taken, model.trace():
            pass
        assert seen.dense() == {} and seen.experts() == {}
        session.clear()
        with seen:
            assert np.array_equal(session.prefill(IDS).numpy(), before)
        rows = seen.dense()["model.layers.0.mlp.gate"][0]
        session.prefill(IDS)
        with seen:  # goes on from there
            session.prefill(IDS)
        assert rows == len(IDS) and seen.dense()["model.layers.0.mlp.gate"][0] == 2 * len(IDS)


def test_a_device_that_runs_later_shows_nothing(folder: Folder) -> None:
    model = load_faulty(folder("qwen3_5_moe"), deferred=True)
    with pytest.raises(DeviceError, match="observe: expected ops that run while they are recorded"):
        model.observe_activations().__enter__()
    with model.trace():  # whoever is refused stands in nobody's way
        pass
