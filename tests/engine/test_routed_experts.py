"""Routed experts in all their flavours, whether a published model has them together or not: biases of the experts and
of the router, clamped SwiGLU, GeGLU, factors, frames, and experts in MXFP4."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import FormatError, QuantFormat, Variant, _core, oracle
from moeflux.models.layers import ClampedSwiglu, RoutedExperts, Router, SharedExpert
from moeflux.stores.spans import SpanReader
from moeflux.stores.store import Store
from support.engine import steps, tokens
from support.engine_logits import LARGEST_INT16_ERROR, LARGEST_ORACLE_ERROR, assert_meets
from support.numbered_tensors import tensors, vector
from support.tiny_stores import MlxFolder, Raw, gemma4, hybrid

LAYERS = {"layer_kinds": ("linear", "full"), "mlp_kinds": ("moe",) * 2, "linear_value_heads": 4, "head_dim": 32}
PLAIN = hybrid("qwen3_5_moe", **LAYERS, vocab_size=384)
CLAMPED = ClampedSwiglu(alpha=1.5, limit=0.6)
FLAVOURS: list[dict[str, Any]] = [
    {"bias": bias, "clamped": clamped, "router": Router(scoring="softmax", bias=of_router)}
    for bias, clamped, of_router in itertools.product((False, True), (None, CLAMPED), (False, True))
]
ALL = FLAVOURS[-1]
FACTORS = Router(scoring="softmax", bias=True, factors=True)
FLAVOURS += [
    {"bias": False, "clamped": None, "router": FLAVOURS[0]["router"], "geglu": True},
    {"bias": True, "clamped": None, "router": FACTORS, "geglu": True},
]
MXFP4 = QuantFormat.mxfp4()
BIASES = [f"model.layers.1.mlp.switch_mlp.{part}_proj.bias" for part in ("gate", "up", "down")]


def flavoured(**changes: Any) -> Variant:
    return PLAIN.with_parts(RoutedExperts, **changes)


def store(folder: Path, variant: Variant, stored: dict[str, Raw], config: dict[str, Any] | None = None) -> Store:
    """A folder with exactly this variant, which no config.json of its family can describe."""
    MlxFolder(stored, shards=1, **({"config": config} if config else {})).write(folder)
    directory = _core.open_mlx(folder, variant.to_json())
    return Store(folder, "mlx", variant, directory, None, SpanReader(directory.files))


def in_mxfp4(variant: Variant) -> dict[str, Raw]:
    """Experts in MXFP4, all else in F32."""
    experts = {name: raw for name, raw in tensors(variant, format=MXFP4).items() if ".mlp.switch_mlp." in name}
    return {name: raw for name, raw in tensors(variant).items() if ".mlp.switch_mlp." not in name} | experts


def session(opened: Store, **options: Any) -> moeflux.Session:
    engine = _core.Engine(opened.directory, **{"threads": 1, "precision": "exact"} | options)
    return moeflux.Model(opened, engine).session(max_context=64)


def names(flavour: dict[str, Any]) -> str:
    said = {**flavour, "router": flavour["router"].bias, "factors": flavour["router"].factors}
    return " ".join(name for name, here in said.items() if here) or "plain"


def logits_that_meet_the_oracle(folder: Path, variant: Variant, expert_slots: int) -> np.ndarray:
    """Of a prefill in chunks and steps behind it, streamed; a resident prefill gives the same bits."""
    ids = tokens(20)
    with store(folder, variant, tensors(variant)) as opened:
        expected = oracle.Session(variant, opened).prefill(ids)
        one = session(opened, chunk=7, expert_slots=expert_slots)
        found = np.concatenate([one.prefill(ids[:16], logits="all"), steps(one, ids[16:])])
        at_once = session(opened).prefill(ids, logits="all")
    assert_meets(found, expected, LARGEST_ORACLE_ERROR)
    assert np.array_equal(found, at_once)
    return found


@pytest.mark.parametrize("flavour", FLAVOURS, ids=names)
def test_prefill_and_steps_meet_the_oracle(tmp_path: Path, flavour: dict[str, Any]) -> None:
    logits_that_meet_the_oracle(tmp_path / "mlx", flavoured(**flavour), expert_slots=3)


FRAMED = gemma4(vocab_size=384)
FRAME = (
    "post_attention_layernorm.weight", "pre_feedforward_layernorm.weight", "pre_feedforward_layernorm_2.weight",
    "post_feedforward_layernorm.weight", "post_feedforward_layernorm_1.weight", "post_feedforward_layernorm_2.weight",
    "router.scale", "router.per_expert_scale", "layer_scalar", "self_attn.q_norm.weight",
)  # fmt: skip


def test_a_framed_mixture_meets_the_oracle(tmp_path: Path) -> None:
    """With heads of two sizes, a scaled embedding and capped logits."""
    found = logits_that_meet_the_oracle(tmp_path / "mlx", FRAMED, expert_slots=2)
    assert 1 < np.abs(found).max() <= 5


def test_every_vector_of_a_frame_counts(tmp_path: Path) -> None:
    ids, stored, seen = tokens(6), tensors(FRAMED), []
    for i, name in enumerate([None, *FRAME]):
        whole = f"model.layers.1.{name}"
        other = {} if name is None else {whole: vector(f"another {name}", stored[whole].shape, "F32").popitem()[1]}
        with store(tmp_path / str(i), FRAMED, stored | other) as opened:
            seen.append(session(opened).prefill(ids, logits="all").tobytes())
    assert len(set(seen)) == len(FRAME) + 1


@pytest.mark.parametrize("element", ["F16", "BF16"])
def test_the_number_of_a_layer_may_be_of_any_type(tmp_path: Path, element: str) -> None:
    name = "model.layers.1.layer_scalar"
    with store(tmp_path / "mlx", FRAMED, tensors(FRAMED) | vector(name, (1,), element)) as opened:
        assert opened.directory.tensors[name].dtype == element
        found = session(opened).prefill(tokens(6), logits="all")
        assert_meets(found, oracle.Session(FRAMED, opened).prefill(tokens(6)), LARGEST_ORACLE_ERROR)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"geglu": True, "clamped": CLAMPED}, "geglu: expected false with clamped, found true"),
        ({"framed": True, "shared": None}, "framed: expected false without a shared expert that has no gate"),
        ({"framed": True, "shared": SharedExpert(intermediate=32)}, "out_norm: expected true, as framed, found false"),
        (
            {"router": Router(scoring="noaux_tc", groups=1, groups_kept=1, factors=True)},
            r"router\.factors: expected false without softmax, found true",
        ),
    ],
)
def test_flavours_that_exclude_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=f"layer 0: {message}"):
        flavoured(**changes)


def test_scales_and_caps_of_a_model_are_positive() -> None:
    with pytest.raises(FormatError, match="embedding_scale: expected a positive number, found 0"):
        dataclasses.replace(FRAMED, embedding_scale=0.0)
    with pytest.raises(FormatError, match="logit_cap: expected 0 or a positive number, found -1"):
        dataclasses.replace(FRAMED, logit_cap=-1.0)


def test_experts_in_mxfp4_meet_the_oracle(tmp_path: Path) -> None:
    variant, ids = flavoured(**ALL), tokens(20)
    with store(tmp_path / "mlx", variant, in_mxfp4(variant), {"quantization": {"mode": "mxfp4"}}) as opened:
        formats = opened.directory.experts.formats
        assert [str(each) for each in (formats.gate, formats.up, formats.down)] == ["MXFP4"] * 3
        expected = oracle.Session(variant, opened).prefill(ids)
        for precision, largest in (("exact", LARGEST_ORACLE_ERROR), ("auto", LARGEST_INT16_ERROR)):
            one = session(opened, chunk=7, precision=precision, expert_slots=3)
            found = np.concatenate([one.prefill(ids[:16], logits="all"), steps(one, ids[16:])])
            assert_meets(found, expected, largest)
            assert np.array_equal(found, session(opened, precision=precision).prefill(ids, logits="all"))


def test_every_vector_of_a_flavour_counts(tmp_path: Path) -> None:
    """Another value of any of them gives other logits."""
    variant, ids = flavoured(**ALL), tokens(6)
    stored = tensors(variant)
    seen = []
    for i, name in enumerate([None, *BIASES, "model.layers.1.mlp.gate.bias"]):
        other = {} if name is None else {name: vector(f"another {name}", stored[name].shape, "F32").popitem()[1]}
        with store(tmp_path / str(i), variant, stored | other) as opened:
            seen.append(session(opened).prefill(ids, logits="all").tobytes())
    assert len(set(seen)) == 5


@pytest.mark.parametrize("missing", [*BIASES, "model.layers.1.mlp.gate.bias"])
def test_tensors_of_a_flavour_are_needed_and_belong_to_it(tmp_path: Path, missing: str) -> None:
    variant = flavoured(**ALL)
    stored = {name: tensor for name, tensor in tensors(variant).items() if name != missing}
    with pytest.raises(FormatError, match=f'expected a tensor "{missing}"'):
        store(tmp_path / "missing", variant, stored)
    stored[missing] = Raw("F32", (3,), bytes(12))
    with pytest.raises(FormatError, match=rf'"{missing}".*expected .*found F32 \[3\]'):
        store(tmp_path / "short", variant, stored)
    with pytest.raises(FormatError, match=r"expected only tensors|that it does not have"):
        store(tmp_path / "besides", PLAIN, tensors(PLAIN) | {missing: tensors(variant)[missing]})


UP = "model.layers.0.mlp.switch_mlp.up_proj"
DAMAGE = [
    (
        {f"{UP}.scales": ("U8", (4, 32, 3))},
        r"up_proj\.scales.*expected \[4, 32, 2\] of a \[4, 32, 64\] matrix in MXFP4",
    ),
    ({f"{UP}.weight": ("U32", (4, 32, 9))}, r"up_proj\.weight.*expected \[4, 32, 8\] of a .*found U32 \[4, 32, 9\]"),
    ({f"{UP}.biases": ("U8", (4, 32, 2))}, r'"model.layers.0.mlp.switch_mlp.up_proj.biases": expected only tensors'),
    ({f"{UP}.scales": ("I8", (4, 32, 2))}, r"unknown|expected"),
]


@pytest.mark.parametrize(("changes", "message"), DAMAGE)
def test_damaged_mxfp4_is_refused(
    tmp_path: Path, changes: dict[str, tuple[str, tuple[int, ...]]], message: str
) -> None:
    sizes = {"U8": 1, "I8": 1, "U32": 4}
    damage = {n: Raw(t, shape, bytes(int(np.prod(shape)) * sizes[t])) for n, (t, shape) in changes.items()}
    with pytest.raises(FormatError, match=message):
        store(tmp_path / "mlx", PLAIN, in_mxfp4(PLAIN) | damage, {"quantization": {"mode": "mxfp4"}})


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"mode": "affine"}, "expected the mode affine as declared in .*, found MXFP4"),
        ({"mode": "mxfp6"}, 'mode: expected "affine", "mxfp4", "mxfp8" or "nvfp4", found the string "mxfp6"'),
        ({"mode": "mxfp4", "group_size": 64}, "expected groups of 64 as declared in .*, found MXFP4"),
        ({"mode": "mxfp4", "bits": 8}, "expected 8 bits as declared in .*, found MXFP4"),
    ],
)
def test_what_is_declared_of_mxfp4_must_be_true(tmp_path: Path, declared: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        store(tmp_path / "mlx", PLAIN, in_mxfp4(PLAIN), {"quantization": declared})


def test_a_flavour_is_another_model_and_the_default_is_what_it_was() -> None:
    identities = [flavoured(**flavour).identity() for flavour in FLAVOURS]
    assert all(a != b for a, b in itertools.combinations(identities, 2))
    said = flavoured(**ALL).to_dict()
    [experts] = said["feed_forwards"]
    assert (experts["bias"], experts["clamped"], experts["router"]["bias"]) == (True, dataclasses.asdict(CLAMPED), True)
    assert Variant.from_dict(said) == flavoured(**ALL)
    assert not any(key in PLAIN.to_dict()["feed_forwards"][0] for key in ("bias", "clamped"))


@pytest.mark.parametrize("changes", [{"alpha": 0.0, "limit": 1.0}, {"alpha": 1.0, "limit": -1.0}])
def test_a_limit_is_positive(changes: dict[str, float]) -> None:
    with pytest.raises(FormatError, match=r"layer 0: clamped\.(alpha|limit): expected a positive number, found"):
        flavoured(clamped=ClampedSwiglu(**changes))
