"""Wire format 1 from its definition alone: a file packed here with struct, which no writer of moeflux has touched, goes
into a session, whose logits are then those of the oracle in that state. No two numbers are alike, so keys for values,
one state for another, and heads, positions or channels in another order would all be other logits."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

import moeflux
from moeflux import oracle
from moeflux.oracle.model import KeyValueState, LinearState
from moeflux.runtime.snapshot import Snapshot
from moeflux.stores.store import open_store
from support.engine import folders, steps, tokens
from support.engine_logits import LARGEST_ORACLE_ERROR, assert_meets

POSITIONS = 5
LAYERS, INTERVAL = 4, 4  # three linear layers, one full
KV_HEADS, HEAD_DIM = 2, 64
TAPS, KEY_HEADS, KEY_DIM, VALUE_HEADS, VALUE_DIM = 4, 2, 32, 4, 64
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
CONV, RECURRENT = (TAPS - 1, CHANNELS), (VALUE_HEADS, VALUE_DIM, KEY_DIM)
ROWS = (POSITIONS, KV_HEADS, HEAD_DIM)

State = tuple[np.ndarray, np.ndarray]


def numbers(layer: int, piece: int, shape: tuple[int, ...], size: float) -> np.ndarray:
    return (size * np.random.default_rng([layer, piece]).standard_normal(shape)).astype("<f4")


def states() -> list[State]:
    """Of each layer: k and v, or conv (the oldest row first) and recurrent."""
    linear = [(numbers(layer, 0, CONV, 1.0), numbers(layer, 1, RECURRENT, 0.3)) for layer in range(3)]
    return [*linear, (numbers(3, 0, ROWS, 1.0), numbers(3, 1, ROWS, 1.0))]


def packed() -> bytes:
    """Eight u32, then each layer: an i32 of positions before k and v, nothing before conv and recurrent."""
    conv_bytes, recurrent_bytes = (4 * int(np.prod(shape)) for shape in (CONV, RECURRENT))
    out = struct.pack("<8I", 0x4D464C58, 1, LAYERS, INTERVAL, KV_HEADS, HEAD_DIM, conv_bytes, recurrent_bytes)
    for layer, pieces in enumerate(states()):
        out += struct.pack("<i", POSITIONS) if layer % INTERVAL == INTERVAL - 1 else b""
        for piece in pieces:
            out += struct.pack(f"<{piece.size}f", *piece.reshape(-1).tolist())
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders(tmp_path_factory.mktemp("wire"))("qwen3_5_moe")


def test_the_file_is_read_as_it_is_defined(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "saved.bin").write_bytes(packed())
    variant = moeflux.load(folder, threads=1).variant
    assert len(packed()) == 32 + 3 * 4 * (3 * CHANNELS + 4 * 64 * 32) + 4 + 2 * 4 * POSITIONS * KV_HEADS * HEAD_DIM
    found = Snapshot.load(tmp_path / "saved.bin", variant)
    names = [("conv", "recurrent")] * 3 + [("k", "v")]
    expected = {
        (i, n): a
        for i, (pair, state) in enumerate(zip(names, states(), strict=True))
        for n, a in zip(pair, state, strict=True)
    }
    assert found.position == POSITIONS and found.tensors.keys() == expected.keys()
    assert all(np.array_equal(found.tensors[key], array) for key, array in expected.items())


def test_a_session_goes_on_from_it_as_the_oracle_does(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "saved.bin").write_bytes(packed())
    session = moeflux.load(folder, threads=1, precision="exact").session(max_context=32)
    session.restore(tmp_path / "saved.bin")
    assert session.position == POSITIONS
    assert session.snapshot().to_bytes("wire-1") == packed()
    with open_store(folder) as store:
        truth = oracle.Session(store.variant, store)
        truth.position = POSITIONS
        truth.states = [LinearState(*map(np.float64, state)) for state in states()[:3]]
        truth.states.append(KeyValueState(*map(np.float64, states()[3])))
        expected = truth.prefill(tokens(4))
    assert_meets(steps(session, tokens(4)), expected, LARGEST_ORACLE_ERROR)
    if session.position:  # without that state, other logits
        session.clear()
        assert np.abs(steps(session, tokens(4)) - expected).max() > 0.1 * np.ptp(expected)
