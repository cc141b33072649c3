"""Layers with a window keep the rows that the next one sees, and little more. Nobody can go back to what is gone,
unless a checkpoint kept it. None of it changes a bit: a session whose tokens all go through one pass has every row to
its end, and all others are held to that one."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import BudgetError, DeviceError, FormatError, StateError
from moeflux.runtime.snapshot import Snapshot
from moeflux.runtime.state_file import load_state, save_state, state_file_bytes
from moeflux.stores.store import open_store
from support.engine import Folder, folders, load_faulty, oracle_at, steps, tokens

KINDS = (("gpt_oss", "f32"), ("gpt_oss", "q8"), ("gemma4", "bf16"))
WINDOW, BLOCK, SPARE = 24, 256, 64
TEXT = tokens(1000)
END = len(TEXT)
LAST = END + 1 - WINDOW - SPARE  # the first row that a session at the end keeps
FROM = LAST // BLOCK * BLOCK + WINDOW - 1  # the first place to go on from, without a checkpoint

Whole = Callable[..., np.ndarray]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def whole(folder: Folder) -> Whole:
    """The logits of all of TEXT, of one pass."""
    known: dict[tuple[str, str, str], np.ndarray] = {}

    def of(name: str, kv_dtype: str, backend: str = "auto") -> np.ndarray:
        key = name, kv_dtype, backend
        if key not in known:
            session = load_faulty(folder(name), backend=backend, chunk=END, threads=2).session(kv_dtype=kv_dtype)
            known[key] = session.prefill(TEXT, logits="all")
        return known[key]

    return of


def block_bytes(model: moeflux.Model) -> tuple[int, int]:
    """Of f32: of the layers that see everything, and of those with a window."""
    variant = model.variant
    few, many = variant.state(BLOCK), variant.state(BLOCK, all_rows=True)
    sizes = [
        4 * sum(np.prod(many[key]) for key in many if (few[key] != many[key]) is windowed) for windowed in (False, True)
    ]
    seen, window = (-(-int(size) // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)
    return seen, window


# ---- Bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device",
    ({"chunk": 100}, {"chunk": 37, "apart": True, "backend": "cpu"}, {"chunk": 300, "deferred": True}),
)
@pytest.mark.parametrize(("name", "kv_dtype"), KINDS)
def test_rows_that_are_gone_change_no_bit(
    folder: Folder, whole: Whole, name: str, kv_dtype: str, device: dict[str, Any]
) -> None:
    expected = whole(name, kv_dtype, device.get("backend", "auto"))
    session = load_faulty(folder(name), **device).session(kv_dtype=kv_dtype)
    found = [session.prefill(TEXT[:600], logits="all"), steps(session, TEXT[600:610])]
    found.append(session.prefill(TEXT[610:], logits="all"))
    assert np.array_equal(np.concatenate(found), expected)
    assert session.exact_from == FROM


@pytest.mark.parametrize(("name", "kv_dtype"), KINDS)
def test_company_changes_no_bit(folder: Folder, whole: Whole, name: str, kv_dtype: str) -> None:
    """Also in a call of several passes, which keeps what it may have to go back to."""
    model, expected = load_faulty(folder(name), chunk=90), whole(name, kv_dtype)
    one, two, three = (model.session(kv_dtype=kv_dtype) for _ in range(3))
    one.prefill(TEXT[:500])
    found = model.evaluate([(one, TEXT[500:990]), (two, TEXT[:700]), (three, TEXT[:1])])
    for logits, count in zip(found, (990, 700, 1), strict=True):
        assert np.array_equal(logits.numpy(), expected[count - 1])
    found = model.evaluate([(one, TEXT[990:]), (two, TEXT[700:701])])
    assert np.array_equal(found[0].numpy(), expected[-1]) and np.array_equal(found[1].numpy(), expected[700])


def test_rows_are_those_that_the_oracle_needs(folder: Folder) -> None:
    """Far beyond the first rows, against NumPy."""
    for name in ("gpt_oss", "gemma4"):
        session = load_faulty(folder(name), chunk=128).session()
        session.prefill(TEXT[:700])
        with open_store(folder(name)) as store:
            truth = oracle_at(store, session.snapshot()).prefill(TEXT[700:704])
        assert np.abs(steps(session, TEXT[700:704]) - truth).max() < 5e-4 * np.ptp(truth)


# ---- Memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("gpt_oss", "gemma4"))
def test_memory_is_bounded(folder: Folder, by_the_block: dict[str, Any], name: str) -> None:
    model = load_faulty(folder(name), chunk=64, **by_the_block)
    (seen, window), session = block_bytes(model), model.session()
    most = []
    for begin in range(0, END, 50):
        session.prefill(TEXT[begin : begin + 50], lambda *_: most.append(model._engine.memory.rows) or True)
        kept = -(-session.position // BLOCK) - max(0, session.position + 1 - WINDOW - SPARE) // BLOCK
        assert kept <= 2 and model._engine.memory.rows == -(-session.position // BLOCK) * seen + kept * window
    assert max(most) <= 4 * seen + 2 * window
    session.clear()
    assert model._engine.memory.rows == 0
    session.prefill(TEXT, lambda *_: most.append(model._engine.memory.rows) or True)
    assert max(most) <= 4 * seen + 3 * window, "however long a call is"
    session.close()
    assert model._engine.held == model._engine.memory.engine


def test_a_plan_counts_windows(by_the_block: dict[str, Any]) -> None:
    """Beyond some context, only layers that see everything need more."""
    name = "gpt-oss-20b"
    rows = {
        context: moeflux.plan(name, context=context, chunk=512, kv_dtype="bf16").parts["keys and values"]
        for context in (4096, 32768, 65536)
    }
    block = BLOCK * 12 * 2 * 8 * 64 * 2
    assert rows[65536] - rows[32768] == 128 * block
    # The rows of a chunk and those that they see; those of five places.
    assert rows[32768] == (128 + 4 + 5 * 2) * block and rows[4096] == (16 + 14) * block


def test_a_session_that_finds_no_block_loses_nothing(
    folder: Folder, whole: Whole, by_the_block: dict[str, Any]
) -> None:
    expected = whole("gpt_oss", "f32", **by_the_block)
    seen, window = block_bytes(load_faulty(folder("gpt_oss"), **by_the_block))
    idle = load_faulty(folder("gpt_oss"), **by_the_block)
    session = idle.session(max_context=600)
    limit = 2 * idle._engine.memory.sessions + 5 * seen + 2 * window
    session.close()
    model = load_faulty(folder("gpt_oss"), session_bytes=limit, chunk=64, **by_the_block)
    one, two = (model.session(max_context=600) for _ in range(2))
    one.prefill(TEXT[:500])
    two.prefill(TEXT[:500])
    held = model._engine.memory.rows
    for evaluate in (lambda: one.prefill(TEXT[500:600]), lambda: model.evaluate([(one, TEXT[500:520])]), one.fork):
        with pytest.raises(BudgetError, match="close a session, ask for less") as error:
            evaluate()
        assert error.value.missing == window or evaluate == one.fork
        assert (one.position, model._engine.memory.rows) == (500, held)
        assert np.array_equal(one._logits().numpy(), expected[499])
    two.close()
    assert np.array_equal(one.prefill(TEXT[500:600]).numpy(), expected[599])


# ---- Going back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", (False, True))
@pytest.mark.parametrize(("name", "kv_dtype"), KINDS)
def test_going_back_is_exact_or_refused(folder: Folder, whole: Whole, name: str, kv_dtype: str, apart: bool) -> None:
    expected = whole(name, kv_dtype)

    def goes_on(session: moeflux.Session) -> bool:
        at = session.position
        return np.array_equal(steps(session, TEXT[at : at + 3]), expected[at : at + 3])

    session = load_faulty(folder(name), chunk=64, apart=apart).session(kv_dtype=kv_dtype)
    session.prefill(TEXT[:300])
    assert session.exact_from == 0
    session.checkpoint()
    session.prefill(TEXT[300:400])
    session.checkpoint()
    session.prefill(TEXT[400:997])
    assert (session.exact_from, session.checkpoints) == (FROM, [300, 400])
    for refused in (FROM - 1, 401, 399, 299, 1):
        for call in (session.rewind, session.fork):
            with pytest.raises(StateError, match=rf"at position {refused}, or a position from {FROM} on \(windows"):
                call(refused)
    for place in (997, 900, FROM, 400, 300):
        fork = session.fork(place)
        assert fork.position == place and goes_on(fork)
        fork.rewind(place)
        assert goes_on(fork)
    assert goes_on(session)
    assert session.rewind(FROM) == FROM and goes_on(session)
    assert session.rewind(FROM - 1, exact=False) == 400 and goes_on(session)
    assert session.exact_from == BLOCK + WINDOW - 1, "the block that the checkpoints had"
    assert session.rewind(300) == 300 and goes_on(session)
    session.prefill(TEXT[303:])
    assert session.rewind(299, exact=False) == 0 and goes_on(session)


def test_checkpoints_keep_their_rows_alone(folder: Folder, by_the_block: dict[str, Any]) -> None:
    model = load_faulty(folder("gpt_oss"), chunk=64, **by_the_block)
    (seen, window), session = block_bytes(model), model.session()
    for place, blocks in ((256, 1), (270, 2), (700, 3)):
        session.prefill(TEXT[session.position : place])
        session.checkpoint()
        assert model._engine.memory.rows == -(-place // BLOCK) * seen + blocks * window
    session.prefill(TEXT[700:])
    rows = model._engine.memory.rows
    assert rows == 4 * (seen + window), "blocks 0 and 1 for 256 and 270, block 2 for 700, block 3"
    fork = session.fork()
    assert model._engine.memory.rows == rows + seen + window, "a copy of the block that is not full"
    fork.close()
    session.set_max_checkpoints(1)
    assert session.checkpoints == [700] and model._engine.memory.rows == 4 * seen + 2 * window
    session.rewind(700)
    assert model._engine.memory.rows == 3 * seen + window


@pytest.mark.parametrize("number", (120, 250, 500))
def test_a_call_that_fails_goes_back(folder: Folder, whole: Whole, number: int) -> None:
    """In a later pass, when the call has gone beyond what the session sees from where it stood."""
    expected = whole("gpt_oss", "f32")
    base = load_faulty(folder("gpt_oss")).session()
    base.prefill(TEXT[:500])
    model = load_faulty(folder("gpt_oss"), chunk=64, fail_at_op=number)
    session = model.session()
    session.restore(base.snapshot())
    with pytest.raises(DeviceError):
        model.evaluate([(session, TEXT[500:990])])
    assert session.position == 500
    found = model.evaluate([(session, TEXT[500:])])
    assert np.array_equal(found[0].numpy(), expected[-1])


# ---- Saving -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kv_dtype"), KINDS)
def test_a_saved_session_has_what_the_next_token_sees(
    folder: Folder, whole: Whole, tmp_path: Path, name: str, kv_dtype: str
) -> None:
    expected, model = whole(name, kv_dtype), load_faulty(folder(name), chunk=64)
    session, other = model.session(kv_dtype=kv_dtype), model.session(kv_dtype=kv_dtype)
    session.prefill(TEXT[:900])
    snapshot = session.snapshot()
    counts = {array.shape[1 if key[1].endswith("_scale") else 0] for key, array in snapshot.tensors.items()}
    assert counts == {900, WINDOW - 1}
    path, ids = tmp_path / "state", np.asarray(TEXT[:900], np.int32)
    save_state(session._core, model.variant, model.fingerprint, path)
    assert path.read_bytes() == snapshot.to_bytes() and b'"version":"4"' in path.read_bytes()
    assert path.stat().st_size == state_file_bytes(model.variant, model.fingerprint, kv_dtype, 900)
    for restore in (
        lambda: other.restore(snapshot),
        lambda: other.restore(path),
        lambda: load_state(other._core, model.variant, model.fingerprint, path, ids),
    ):
        other.clear()
        other.prefill(TEXT[:600])
        restore()
        assert (other.position, other.exact_from) == (900, 900)
        assert other.rewind(899, exact=False) == 0
        restore()
        assert np.array_equal(steps(other, TEXT[900:990]), expected[900:990])
        assert other.exact_from == 900, "rows before those are not known"
        fork = other.fork(900)
        with pytest.raises(StateError):
            fork.rewind(899)
        assert np.array_equal(steps(fork, TEXT[900:903]), expected[900:903])


def test_a_file_says_which_rows_it_has(folder: Folder) -> None:
    model = load_faulty(folder("gpt_oss"))
    session = model.session()
    session.prefill(TEXT[: WINDOW - 1])
    data = session.snapshot().to_bytes()
    Snapshot.from_bytes(data.replace(b'"version":"4"', b'"version":"1"'), model.variant)  # nothing is missing yet
    session.step(1)
    data = session.snapshot().to_bytes()
    with pytest.raises(FormatError, match=rf'layers.0.k": expected F32 or BF16 \({WINDOW},'):
        Snapshot.from_bytes(data.replace(b'"version":"4"', b'"version":"1"'), model.variant)
