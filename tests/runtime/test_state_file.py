"""States pass between sessions and files in parts: the same files as those of snapshots, and never a copy in memory."""

from __future__ import annotations

import dataclasses
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import moeflux
from moeflux import ArgumentError, BudgetError, FormatError, StateError, _core
from moeflux.conversion.convert import ConvertFormat
from moeflux.conversion.synth import synth
from moeflux.runtime import state_file
from moeflux.runtime.state_file import PASSING_BYTES, load_state, save_state, state_file_bytes
from support.engine import Folder, folders, load_faulty, tokens

NAMES = ("qwen3_5_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, folder: Folder) -> moeflux.Model:
    return load_faulty(folder(request.param))


def save(session: moeflux.Session, path: Path) -> Path:
    save_state(session._core, session.model.variant, session.model.fingerprint, path)
    return path


def load(session: moeflux.Session, path: Path, ids: list[int]) -> None:
    load_state(session._core, session.model.variant, session.model.fingerprint, path, np.asarray(ids, np.int32))


@pytest.mark.parametrize("part", [1 << 20, 192, 68])
@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "q8"])
def test_it_is_the_file_of_a_snapshot(
    model: moeflux.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str, part: int
) -> None:
    """However small the parts are: rows of 300 tokens lie in two blocks."""
    monkeypatch.setattr(state_file, "PART", part)
    ids = tokens(300)
    with model.session(max_context=512, kv_dtype=kv_dtype) as session, model.session(512, kv_dtype) as other:
        session.prefill(ids)
        path = save(session, tmp_path / "state")
        session.snapshot().save(tmp_path / "snapshot")
        assert path.read_bytes() == (tmp_path / "snapshot").read_bytes()
        assert path.stat().st_size == state_file_bytes(model.variant, model.fingerprint, kv_dtype, 300)
        other.prefill([1, 2, 3])
        load(other, path, ids)
        assert other.tokens == ids
        assert other.step(5).numpy().tobytes() == session.step(5).numpy().tobytes()


def test_a_copy_is_never_in_memory(folder: Folder, tmp_path: Path) -> None:
    """Of 30 MB and more. What the engine holds is no matter of Python's, and does not grow."""
    small = load_faulty(folder("qwen3_moe")).variant
    positions, rows = 32_000, {}
    synth(tmp_path / "long", dataclasses.replace(small, max_context=positions), format=ConvertFormat.asked(4, 64))
    model = load_faulty(tmp_path / "long")
    with model.session(positions) as session, model.session(positions) as other:
        for key, shape in model.variant.state(positions).items():
            rows[key] = np.ones(shape, np.float32)
        ids = tuple(tokens(positions))
        session.restore(moeflux.Snapshot(model.variant, positions, rows, ids, model.fingerprint))
        del rows
        other._core.make_room(positions)
        held = model._engine.held
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            path = save(session, tmp_path / "state")
            load(other, path, list(ids))
            peak = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        assert model._engine.held == held
        assert path.stat().st_size > 4 * PASSING_BYTES > 4 * peak


@pytest.mark.parametrize("kind", ["other tokens", "other rows", "a flipped bit", "cut", "fewer tokens"])
def test_what_it_does_not_want_is_refused(model: moeflux.Model, tmp_path: Path, kind: str) -> None:
    ids = tokens(40)
    with model.session(max_context=64) as session:
        session.prefill(ids)
        path = save(session, tmp_path / "state")
    data = bytearray(path.read_bytes())
    if kind == "a flipped bit":
        data[-200] ^= 1
    path.write_bytes(data[:-100] if kind == "cut" else data)
    wanted = {"other tokens": [*ids[:-1], ids[-1] ^ 1], "fewer tokens": ids[:-1]}.get(kind, ids)
    with (
        model.session(max_context=64, kv_dtype="bf16" if kind == "other rows" else "f32") as session,
        pytest.raises(FormatError, match="state: "),
    ):
        load(session, path, wanted)


def test_a_disk_that_is_full_leaves_nothing(model: moeflux.Model, tmp_path: Path) -> None:
    with model.session(max_context=64) as session:
        session.prefill(tokens(10))
        with pytest.raises(moeflux.NotFoundError):
            save(session, tmp_path / "no folder" / "state")
        assert session.step(1) is not None


@pytest.mark.parametrize("piece", range(8))
def test_a_bit_of_any_piece_is_noticed(model: moeflux.Model, tmp_path: Path, piece: int) -> None:
    """Each is held to its own sum."""
    ids = tokens(40)
    with model.session(max_context=64) as session:
        session.prefill(ids)
        path = save(session, tmp_path / "state")
    file = _core.SafetensorsFile(path)
    name = sorted(name for name in file.tensors if name != "tokens")[piece % (len(file.tensors) - 1)]
    data = bytearray(path.read_bytes())
    data[file.tensors[name].offset + file.tensors[name].bytes - 1] ^= 1
    path.write_bytes(data)
    with model.session(max_context=64) as session, pytest.raises(FormatError, match=f'"{name}": expected xxh64'):
        load(session, path, ids)


# ---- What is lent to Python -------------------------------------------------------------------------------------


def test_pieces_are_lent_for_the_length_of_a_call(model: moeflux.Model) -> None:
    kept: list[_core.StatePieces] = []
    with model.session(max_context=64) as session:
        session.prefill(tokens(10))

        def show(pieces: _core.StatePieces) -> None:
            kept.append(pieces)
            count = len(pieces.list())
            room = bytearray(4)
            pieces.read(0, 0, room)
            for index, begin in ((count, 0), (-1, 0), (0, -1), (0, 1 << 40), (0, 2**63 - 1)):
                with pytest.raises(ArgumentError, match="state: expected"):
                    pieces.read(index, begin, room)
            with pytest.raises(BufferError):
                pieces.read(0, 0, b"1234")
            with pytest.raises(StateError, match="one caller"):
                session.step(1)

        session._core.show_state(show)
        for use in (
            lambda: kept[0].list(),
            lambda: kept[0].read(0, 0, bytearray(1)),
            lambda: kept[0].write(0, 0, b"1"),
        ):
            with pytest.raises(StateError, match="found the call over"):
                use()


def test_a_call_waits_for_those_who_still_use_them(model: moeflux.Model) -> None:
    """They get an error or what they asked for, and never memory that is gone."""
    wrong: list[BaseException] = []
    with model.session(max_context=64) as session:
        session.prefill(tokens(10))

        def use(pieces: _core.StatePieces) -> None:
            room = bytearray(16)
            try:
                while True:
                    pieces.read(0, 0, room)
            except StateError:
                return
            except BaseException as error:
                wrong.append(error)

        threads: list[threading.Thread] = []

        def show(pieces: _core.StatePieces) -> None:
            threads.extend(threading.Thread(target=use, args=(pieces,)) for _ in range(3))
            for thread in threads:
                thread.start()

        session._core.show_state(show)
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_filling_that_fails_leaves_no_session_in_pieces(model: moeflux.Model) -> None:
    with model.session(max_context=64) as session:
        session.prefill(tokens(10))

        def fail(pieces: _core.StatePieces) -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            session._core.fill_state(3, np.zeros(3, np.int32), fail)
        with pytest.raises(StateError, match="a restore failed half-way"):
            session.step(1)
        session.clear()
        session.prefill(tokens(10))


# ---- Room -------------------------------------------------------------------------------------------------------


def test_room_is_taken_and_given_back(folder: Folder) -> None:
    model = load_faulty(folder("qwen3_moe"))
    with model.session(max_context=1024) as session:
        empty = model._engine.memory.rows
        session._core.make_room(600)
        assert model._engine.memory.rows > empty
        session.prefill(tokens(3))
        session.clear()
        assert model._engine.memory.rows == empty
        for count in (-1, 1025):
            with pytest.raises(ArgumentError, match="make_room: expected 0 to 1024"):
                session._core.make_room(count)


def test_no_room_is_a_budget_error(folder: Folder) -> None:
    probe = load_faulty(folder("qwen3_moe"))
    with probe.session(max_context=512) as session:
        session._core.make_room(512)
        held = probe._engine.memory
    model = load_faulty(folder("qwen3_moe"), session_bytes=2 * held.sessions - held.rows // 2)
    with model.session(max_context=512) as session, model.session(max_context=512) as other:
        session.prefill(tokens(300))
        with pytest.raises(BudgetError):
            other._core.make_room(512)
        other.prefill([1])
