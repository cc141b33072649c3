"""Checkpoints, rewinding, snapshots: going back is exact or refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import moeflux
from moeflux import ArgumentError, FormatError, StateError, oracle
from moeflux.runtime.snapshot import Snapshot
from support.engine import folders, steps, tokens

NAMES = ("qwen3_5_moe", "qwen3_moe", "deepseek_v3", "glm4_moe")
ROWS = [
    *itertools.product(("qwen3_5_moe", "deepseek_v3"), ("f32", "bf16", "q8")),
    ("qwen3_moe", "bf16"),
    ("qwen3_moe", "q8"),
    ("glm4_moe", "f32"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, backend: str) -> Iterator[dict[str, moeflux.Model]]:
    folder, made = folders(tmp_path_factory.mktemp("state")), {}
    for name in NAMES:
        made[name] = moeflux.load(folder(name), threads=2)
        assert repr(made[name]).count(backend)
    yield made
    made.clear()


PROMPT, TAIL = tokens(20, vocab=256), tokens(3, vocab=256, seed=9)


@pytest.mark.parametrize(("name", "kv_dtype"), ROWS)
def test_checkpoint_rewind_replay(models: dict[str, moeflux.Model], name: str, kv_dtype: str) -> None:
    session = models[name].session(kv_dtype=kv_dtype)
    session.prefill(PROMPT)
    assert session.checkpoint() == 20
    first = steps(session, TAIL)
    assert session.position == 23 and session.tokens == PROMPT + TAIL
    assert session.rewind(20) == 20
    assert session.tokens == PROMPT
    assert np.array_equal(steps(session, TAIL), first)


@pytest.mark.parametrize(("name", "kv_dtype"), ROWS)
def test_snapshot_restore_continue(models: dict[str, moeflux.Model], tmp_path: Path, name: str, kv_dtype: str) -> None:
    session = models[name].session(kv_dtype=kv_dtype)
    session.prefill(PROMPT)
    path = tmp_path / "saved.moeflux"
    session.snapshot().save(path)
    expected = steps(session, TAIL)
    other = models[name].session(max_context=64, kv_dtype=kv_dtype)
    other.prefill([3, 4, 5])
    other.restore(path)
    assert (other.position, other.tokens) == (20, PROMPT)
    assert np.array_equal(steps(other, TAIL), expected)


@pytest.mark.parametrize(
    ("name", "version"),
    [("qwen3_5_moe", 1), ("qwen3_5_moe", 2), ("qwen3_moe", 2), ("deepseek_v3", 2), ("glm4_moe", 1), ("glm4_moe", 2)],
)
def test_wire_formats(models: dict[str, moeflux.Model], tmp_path: Path, name: str, version: int) -> None:
    session = models[name].session()
    session.prefill(PROMPT)
    path = tmp_path / "saved.bin"
    session.snapshot().save(path, format=f"wire-{version}")
    expected = steps(session, TAIL)
    other = models[name].session()
    other.restore(path)
    assert other.position == 20 and other.tokens == []
    assert np.array_equal(steps(other, TAIL), expected)
    again = tmp_path / "again.bin"
    restored = models[name].session()
    restored.restore(path)
    restored.snapshot().save(again, format=f"wire-{version}")
    assert again.read_bytes() == path.read_bytes()


def test_mla_has_no_wire_1(models: dict[str, moeflux.Model], tmp_path: Path) -> None:
    session = models["deepseek_v3"].session()
    session.prefill(PROMPT)
    with pytest.raises(FormatError):
        session.snapshot().save(tmp_path / "saved.bin", format="wire-1")
    assert not list(tmp_path.iterdir())


def test_recurrent_layers_cannot_be_cut_short(models: dict[str, moeflux.Model]) -> None:
    session = models["qwen3_5_moe"].session()
    session.prefill(PROMPT[:10])
    session.checkpoint()
    session.prefill(PROMPT[10:])
    with pytest.raises(StateError, match=r"expected a checkpoint at position 15 .* newest before it at 10"):
        session.rewind(15)
    assert session.position == 20
    assert session.rewind(15, exact=False) == 10
    first = steps(session, PROMPT[10:])
    fresh = models["qwen3_5_moe"].session()
    fresh.prefill(PROMPT[:10])
    assert np.array_equal(steps(fresh, PROMPT[10:]), first)
    assert session.rewind(0) == 0
    session.prefill(PROMPT[:10])


def test_rows_alone_can_be_cut_anywhere(models: dict[str, moeflux.Model]) -> None:
    session = models["qwen3_moe"].session()
    session.prefill(PROMPT)
    first = steps(session, TAIL)
    assert session.rewind(20) == 20
    assert np.array_equal(steps(session, TAIL), first)
    assert session.rewind(7) == 7
    assert session.tokens == PROMPT[:7]


def test_checkpoints_are_of_one_timeline(models: dict[str, moeflux.Model]) -> None:
    session = models["qwen3_5_moe"].session()
    for _ in range(3):
        session.prefill([1, 2])
        session.checkpoint()
    assert session.checkpoints == [2, 4, 6]
    session.rewind(4)
    assert session.checkpoints == [2, 4]


def test_checkpoint_eviction(models: dict[str, moeflux.Model]) -> None:
    session = models["qwen3_5_moe"].session()
    session.checkpoint()
    for _ in range(4):
        session.step(1)
        session.checkpoint()
    assert session.checkpoints == [0, 2, 3, 4]
    session.rewind(3)
    session.step(1)
    session.step(1)
    session.checkpoint()
    assert session.checkpoints == [0, 2, 3, 5]
    session.step(1)
    session.checkpoint()
    assert session.checkpoints == [0, 3, 5, 6]
    session.set_max_checkpoints(1)
    session.checkpoint()
    session.step(1)
    session.checkpoint()
    assert session.checkpoints == [0, 7]


def test_clear(models: dict[str, moeflux.Model]) -> None:
    session = models["qwen3_5_moe"].session()
    first = session.prefill(PROMPT, logits="all")
    session.checkpoint()
    session.clear()
    assert (session.position, session.checkpoints, session.tokens) == (0, [], [])
    assert np.array_equal(session.prefill(PROMPT, logits="all"), first)


def test_a_snapshot_of_another_model_is_refused(models: dict[str, moeflux.Model]) -> None:
    taken = models["qwen3_5_moe"].session()
    taken.prefill(PROMPT)
    session = models["qwen3_moe"].session()
    session.prefill(PROMPT)
    before = session.snapshot()
    with pytest.raises(ArgumentError, match="restore: expected a snapshot of the model"):
        session.restore(taken.snapshot())
    assert session.position == 20
    for key, array in session.snapshot().tensors.items():
        assert np.array_equal(array, before.tensors[key])


def test_a_snapshot_too_long_is_refused(models: dict[str, moeflux.Model]) -> None:
    taken = models["qwen3_5_moe"].session()
    taken.prefill(PROMPT)
    with pytest.raises(ArgumentError, match=r"expected at most 10 tokens \(max_context\), found 20"):
        models["qwen3_5_moe"].session(max_context=10).restore(taken.snapshot())


def test_damaged_files_are_refused_and_change_nothing(models: dict[str, moeflux.Model], tmp_path: Path) -> None:
    model = models["qwen3_5_moe"]
    session = model.session()
    session.prefill(PROMPT)
    path = tmp_path / "saved"
    session.snapshot().save(path)
    good = path.read_bytes()
    expected = steps(session, TAIL)
    session.rewind(0)
    session.restore(path)
    damaged = tmp_path / "damaged"
    for data, message in [
        (good[:-1], "damaged"),
        (good[: len(good) // 2], "damaged"),
        (good + b"x", "damaged"),
        (good[:-100] + bytes([good[-100] ^ 1]) + good[-99:], "expected xxh64"),
        (good.replace(b'"version":"4"', b'"version":"9"'), "version: expected '1' or '2' or '3' or '4', found '9'"),
        (good.replace(b'"position":"20"', b'"position":"21"'), r'tensor "layers\.3\.k": expected F32 or BF16 \(21'),
        (b"", "damaged"),
    ]:
        damaged.write_bytes(data)
        with pytest.raises(FormatError, match=message):
            session.restore(damaged)
    assert np.array_equal(steps(session, TAIL), expected)


def test_restoring_an_f32_snapshot_into_bf16_rows_rounds_them(models: dict[str, moeflux.Model]) -> None:
    wide, narrow = models["qwen3_moe"].session(), models["qwen3_moe"].session(kv_dtype="bf16")
    wide.prefill(PROMPT)
    narrow.restore(wide.snapshot())
    key = (0, "k")
    stored = narrow.snapshot().tensors[key].astype(np.uint32) << 16
    rounded = stored.view(np.float32)
    assert np.abs(rounded - wide.snapshot().tensors[key]).max() <= np.abs(rounded).max() / 256


def test_restoring_into_codes_and_out_of_them_rounds_once(models: dict[str, moeflux.Model]) -> None:
    for name, key in (("qwen3_moe", (0, "k")), ("deepseek_v3", (0, "latent"))):
        model = models[name]
        wide = model.session()
        wide.prefill(PROMPT)
        coded, back, again = (model.session(kv_dtype=kv_dtype) for kv_dtype in ("q8", "f32", "q8"))
        coded.restore(wide.snapshot())
        taken = coded.snapshot()
        exact = wide.snapshot().tensors[key]
        heads = exact.reshape(len(exact), -1, exact.shape[-1])
        codes, scales = oracle.quantize_rows(heads)
        assert np.array_equal(taken.tensors[key].reshape(codes.shape), codes)
        assert np.array_equal(taken.tensors[key[0], key[1] + "_scale"], scales.T)
        back.restore(taken)
        assert np.array_equal(back.snapshot().tensors[key].reshape(codes.shape), oracle.rows_of_codes(codes, scales))
        again.restore(back.snapshot())
        assert np.array_equal(steps(again, TAIL), steps(coded, TAIL))


def test_codes_are_saved_as_such(models: dict[str, moeflux.Model], tmp_path: Path) -> None:
    """Which files of the first version never had."""
    session = models["qwen3_5_moe"].session(kv_dtype="q8")
    session.prefill(PROMPT)
    snapshot = session.snapshot()
    snapshot.save(tmp_path / "good")
    with pytest.raises(ArgumentError, match=r"3, k: expected float32 or uint16 \(20, 2, 64\), found int8"):
        session.restore(
            dataclasses.replace(
                snapshot, tensors={key: array for key, array in snapshot.tensors.items() if key != (3, "k_scale")}
            )
        )
    scales = snapshot.tensors[3, "k_scale"]
    with pytest.raises(ArgumentError, match=r"layer 3, k_scale: expected uint16 \(2, 20\), found uint16 \(20, 2\)"):
        session.restore(dataclasses.replace(snapshot, tensors=snapshot.tensors | {(3, "k_scale"): scales.T}))
    good = (tmp_path / "good").read_bytes()
    for data, message in [
        (
            good.replace(b'"version":"4"', b'"version":"1"'),
            r'tensor "layers\.3\.k": expected F32 or BF16 \(20.*found I8',
        ),
        (good.replace(b"layers.3.k_scale", b"layers.3.k_scalf"), r"k_scale\" is missing"),
    ]:
        (tmp_path / "damaged").write_bytes(data)
        with pytest.raises(FormatError, match=message):
            session.restore(tmp_path / "damaged")


def test_snapshots_are_plain_values(models: dict[str, moeflux.Model]) -> None:
    session = models["qwen3_5_moe"].session()
    session.prefill(PROMPT)
    snapshot = session.snapshot()
    assert isinstance(snapshot, Snapshot) and snapshot.position == 20
    before = snapshot.tensors[0, "recurrent"].copy()
    session.step(1)
    assert np.array_equal(snapshot.tensors[0, "recurrent"], before)
