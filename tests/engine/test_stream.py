"""Experts that come from the disk while the rest computes: not one bit depends on how many have room, which goes first,
how and by how many threads they are read, what is guessed, where they lie, when the device does its work, or whether it
has memory of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux.conversion.synth import synth
from moeflux.models.presets import preset
from support.engine import folders, load_faulty, steps, tokens
from support.flat import changed
from support.mlx_folder import write_mlx_folder

NAMES = ("qwen3_5_moe", "qwen3_next", "qwen3_moe", "deepseek_v3", "kimi")
A3B = changed(preset("a3b").with_layers(4), vocab_size=512, num_experts=16)

SETTINGS: dict[str, tuple[Any, ...]] = {
    "slots": ("least", "third", "all"),
    "cache": ("lru", "lfu", "none"),
    "look_ahead": ("off", "on", "auto"),
    "reads": ("direct", "buffered"),
    "readers": (1, 3),
    "store": ("packed", "mlx"),
    "device": ("deferred", "apart", "prompt"),
    "ring_depth": (1, 2, 4),
    "threads": (1, 2),
}

Settings = dict[str, Any]
Stores = Callable[[str, str], Path]


def covering() -> list[Settings]:
    """Few combinations in which every two values of different settings meet."""

    def pairs(choice: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
        return {(i, choice[i], j, choice[j]) for i, j in itertools.combinations(range(len(choice)), 2)}

    every = list(itertools.product(*SETTINGS.values()))
    met = [(choice, pairs(choice)) for choice in every]
    missing = set().union(*(found for _, found in met))
    chosen = []
    while missing:
        best, found = max(met, key=lambda candidate: len(candidate[1] & missing))
        chosen.append(dict(zip(SETTINGS, best, strict=True)))
        missing -= found
    return chosen


COVERING = covering()


def name_of(settings: Settings) -> str:
    return "-".join(str(value) for value in settings.values())


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    """A model as a packed store, or as the MLX folder of the same bytes; each made when it is first asked for."""
    root = tmp_path_factory.mktemp("stream")
    folder = folders(root)

    def packed(name: str) -> Path:
        if name != "a3b":
            return folder(name)
        if not (root / "a3b").exists():
            synth(root / "a3b", A3B)
        return root / "a3b"

    def make(name: str, kind: str) -> Path:
        if kind == "packed":
            return packed(name)
        mlx = root / f"mlx-{name}"
        if not mlx.exists():
            write_mlx_folder(packed(name), mlx)
        return mlx

    return make


def load(stores: Stores, name: str, settings: Settings) -> moeflux.Model:
    folder = stores(name, settings["store"])
    variant = moeflux.open_store(folder).variant
    every = len(variant.moe_layers) * variant.experts.count
    slots = {"least": variant.experts.per_token, "third": every // 3, "all": every}[settings["slots"]]
    engine = {key: value for key, value in settings.items() if key not in ("slots", "store", "device")}
    if (device := settings.get("device", "prompt")) != "prompt":
        engine[device] = True
    return load_faulty(folder, expert_slots=slots, **engine)


def evaluate(model: moeflux.Model, prompt: int, count: int) -> np.ndarray:
    """Every logit of a prefill in two chunks, and of so many steps."""
    session = model.session(max_context=256)
    vocab = model.variant.vocab_size
    rows = session.prefill(tokens(prompt, vocab=vocab), logits="all")
    return np.concatenate([rows, steps(session, tokens(count, seed=5, vocab=vocab))])


@pytest.mark.parametrize("name", NAMES)
def test_settings_change_no_bit(stores: Stores, name: str) -> None:
    plain = {"slots": "all", "store": "packed", "look_ahead": "off"}
    expected = evaluate(load(stores, name, plain), 24, 12)
    for settings in COVERING:
        assert np.array_equal(evaluate(load(stores, name, settings), 24, 12), expected), name_of(settings)


SMALL_CHUNKS = {"chunk": 4}  # of whose experts few slots still have room for a part


@pytest.fixture(scope="module")
def of_a3b(stores: Stores) -> np.ndarray:
    plain = {"slots": "all", "store": "packed", "look_ahead": "off", "threads": 2}
    return evaluate(load(stores, "a3b", plain | SMALL_CHUNKS), 6, 2)


@pytest.mark.parametrize("settings", COVERING, ids=name_of)
def test_settings_change_no_bit_of_a_large_one(stores: Stores, of_a3b: np.ndarray, settings: Settings) -> None:
    """Experts of 1.8 MB, as Qwen3.6-35B-A3B has: reads that take their time, and parts of them by several readers."""
    assert np.array_equal(evaluate(load(stores, "a3b", settings | SMALL_CHUNKS), 6, 2), of_a3b)


def test_the_settings_are_all_there() -> None:
    for key, values in SETTINGS.items():
        assert {settings[key] for settings in COVERING} == set(values)
    assert len(COVERING) < 16
