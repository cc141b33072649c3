"""Grouped attention in all its flavours, whether a published model has them together or not: with and without a norm of
each head or of all heads as one, biases, sinks, a window and a gate."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import FormatError, Variant, _core, oracle
from moeflux.models.layers import GroupedAttention, LatentAttention, Rope, Yarn
from moeflux.stores.spans import SpanReader
from moeflux.stores.store import Store
from support.engine import steps, tokens
from support.engine_logits import LARGEST_ORACLE_ERROR, assert_meets
from support.numbered_tensors import FLOATS, tensors, vector
from support.tiny_stores import MlxFolder, Raw, hybrid, latent

LAYERS = {"layer_kinds": ("linear", "full"), "mlp_kinds": ("moe",) * 2, "linear_value_heads": 4, "head_dim": 32}
PLAIN = hybrid("qwen3_5_moe", **LAYERS, vocab_size=384)
FLAVOURS: list[dict[str, bool | float]] = [
    dict(zip(("qk_norm", "bias", "gate"), each, strict=True)) for each in itertools.product((False, True), repeat=3)
]
FLAVOURS += [{"out_bias": True}, {"sinks": True}, {"window": 1}, {"window": 5}]
FLAVOURS += [{"qk_norm": False, "bias": True, "out_bias": True, "sinks": True, "window": window} for window in (0, 6)]
YARN = Yarn(factor=4.0, original_context=8, beta_fast=32.0, beta_slow=1.0)
JOINT: dict[str, bool | float] = {"joint_norm": True, "gate": False}
FLAVOURS += [{"scale": 0.5}, {"value_norm": True}, {"keys_as_values": True}]
FLAVOURS += [{"keys_as_values": True, "value_norm": True, "bias": True, "scale": 1.0, "window": 6, "gate": False}]
FLAVOURS += [JOINT, JOINT | {"bias": True, "out_bias": True, "sinks": True, "window": 6}]
BIASES = [f"model.layers.1.self_attn.{name}_proj.bias" for name in "qkvo"]
SINKS = "model.layers.1.self_attn.sinks"
ALL = {"bias": True, "out_bias": True, "sinks": True, "window": 5}


def flavoured(**changes: bool | float) -> Variant:
    return PLAIN.with_parts(GroupedAttention, **changes)


def store(folder: Path, variant: Variant, stored: dict[str, Raw]) -> Store:
    """A folder with exactly this variant, which no config.json of its family can describe."""
    MlxFolder(stored, shards=1).write(folder)
    directory = _core.open_mlx(folder, variant.to_json())
    return Store(folder, "mlx", variant, directory, None, SpanReader(directory.files))


def session(opened: Store, **options: int) -> moeflux.Session:
    engine = _core.Engine(opened.directory, **{"threads": 1, "precision": "exact"} | options)
    return moeflux.Model(opened, engine).session(max_context=64)


def names(flavour: dict[str, bool | float]) -> str:
    return " ".join(name if here is True else f"{name}={here}" for name, here in flavour.items() if here) or "plain"


@pytest.mark.parametrize("flavour", FLAVOURS, ids=names)
def test_prefill_and_steps_meet_the_oracle(tmp_path: Path, flavour: dict[str, bool | float]) -> None:
    variant, ids = flavoured(**flavour), tokens(20)
    with store(tmp_path / "mlx", variant, tensors(variant)) as opened:
        expected = oracle.Session(variant, opened).prefill(ids)
        one = session(opened, chunk=7)
        found = np.concatenate([one.prefill(ids[:16], logits="all"), steps(one, ids[16:])])
        at_once = session(opened).prefill(ids, logits="all")
    assert_meets(found, expected, LARGEST_ORACLE_ERROR)
    assert np.array_equal(found, at_once)


@pytest.mark.parametrize("turning", [1, 5])
def test_a_rope_of_which_some_pairs_turn(tmp_path: Path, turning: int) -> None:
    """Those that stand still are the last ones, and count for the frequencies of the others."""
    variant, ids = PLAIN.with_parts(Rope, dim=32, turning=turning), tokens(12)
    with store(tmp_path / "mlx", variant, tensors(variant)) as opened:
        found = session(opened).prefill(ids, logits="all")
        assert_meets(found, oracle.Session(variant, opened).prefill(ids), LARGEST_ORACLE_ERROR)
    assert variant.identity() != PLAIN.with_parts(Rope, dim=32).identity()
    assert Variant.from_dict(variant.to_dict()) == variant


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turning": 3}, r"rope\.turning: expected 0 to 2, found 3"),
        ({"turning": 1, "yarn": YARN}, r"rope\.turning: expected 0 with YaRN, found 1"),
    ],
)
def test_what_may_turn(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        PLAIN.with_parts(Rope, **changes)


def test_what_attention_yields_is_normed_in_frames_alone() -> None:
    with pytest.raises(FormatError, match=r"layer 1: out_norm: expected false, as framed, found true"):
        flavoured(out_norm=True)


@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize("name", [*BIASES, SINKS])
def test_vectors_of_every_type_meet_the_oracle(tmp_path: Path, name: str, element: str) -> None:
    variant, ids = flavoured(**ALL), tokens(6)
    stored = tensors(variant)
    with store(tmp_path / "mlx", variant, stored | vector(name, stored[name].shape, element)) as opened:
        assert opened.directory.tensors[name].dtype == element
        expected = oracle.Session(variant, opened).prefill(ids)
        assert_meets(session(opened).prefill(ids, logits="all"), expected, LARGEST_ORACLE_ERROR)


def test_every_vector_of_a_flavour_counts(tmp_path: Path) -> None:
    """Another value of any of them gives other logits."""
    variant, ids = flavoured(**ALL), tokens(6)
    stored = tensors(variant)
    seen = []
    for i, name in enumerate([None, *BIASES, SINKS, *(f"model.layers.1.self_attn.{x}_norm.weight" for x in "qk")]):
        other = {} if name is None else {name: vector(f"another {name}", stored[name].shape, "F32").popitem()[1]}
        with store(tmp_path / str(i), variant, stored | other) as opened:
            seen.append(session(opened).prefill(ids, logits="all").tobytes())
    assert len(set(seen)) == 8


def test_a_session_goes_on_from_a_snapshot(tmp_path: Path) -> None:
    variant, ids = flavoured(**ALL, qk_norm=False), tokens(12)
    with store(tmp_path / "mlx", variant, tensors(variant)) as opened:
        one = session(opened)
        one.prefill(ids)
        other = session(opened)
        other.restore(one.snapshot())
        assert np.array_equal(steps(one, ids[:4]), steps(other, ids[:4]))


@pytest.mark.parametrize(
    ("flavour", "missing"),
    [(ALL, name) for name in (*BIASES, SINKS)] + [({}, f"model.layers.1.self_attn.{x}_norm.weight") for x in "qk"],
)
def test_tensors_of_a_flavour_are_needed_and_belong_to_it(
    tmp_path: Path, flavour: dict[str, bool | float], missing: str
) -> None:
    variant = flavoured(**flavour)
    stored = {name: tensor for name, tensor in tensors(variant).items() if name != missing}
    with pytest.raises(FormatError, match=f'expected a tensor "{missing}"'):
        store(tmp_path / "missing", variant, stored)
    stored[missing] = Raw("F32", (3,), bytes(12))
    with pytest.raises(FormatError, match=rf'"{missing}".*expected .*found F32 \[3\]'):
        store(tmp_path / "short", variant, stored)
    without = flavoured(bias=False, qk_norm=False)
    with pytest.raises(FormatError, match=r"expected only tensors|that it does not have"):
        store(tmp_path / "besides", without, tensors(without) | {missing: tensors(variant)[missing]})


def test_a_flavour_is_another_model_and_the_default_is_what_it_was() -> None:
    """Version 1 of moeflux.json has no word for it, so fingerprints are made of what version 2 says."""
    identities = [flavoured(**flavour).identity() for flavour in FLAVOURS]
    assert all(a != b for a, b in itertools.combinations(identities, 2))
    assert PLAIN.identity() == flavoured(qk_norm=True, bias=False).identity()
    assert "layer_kinds" in PLAIN.identity() and "layer_kinds" not in flavoured(bias=True).identity()
    said = flavoured(bias=True, qk_norm=False).to_dict()
    [full] = [mixer for mixer in said["mixers"] if mixer["kind"] == "grouped_attention"]
    assert (full["bias"], full["qk_norm"]) == (True, False)
    assert Variant.from_dict(said) == flavoured(bias=True, qk_norm=False)
    assert not any("bias" in mixer or "qk_norm" in mixer for mixer in PLAIN.to_dict()["mixers"])


def test_latent_attention_has_no_such_flavours() -> None:
    fields = latent().to_dict()
    with pytest.raises(FormatError, match='unknown field "bias"'):
        Variant.from_dict(fields | {"mixers": [fields["mixers"][0] | {"bias": True}]})
    with pytest.raises(TypeError, match="bias"):
        latent().with_parts(LatentAttention, bias=True)
