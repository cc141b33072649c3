"""Sessions saved long ago open, go on as they did then, and are written again: byte for byte what they were, or what is
written now in place of their version."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import moeflux
from golden.make_snapshots import CHECKPOINTS, FOLDER, NEXT, SNAPSHOTS, TOKENS, write_store
from moeflux.runtime.snapshot import Snapshot
from support.engine import steps

# Of the range of the logits. A row whose last f32 bit differs may be rounded to the other of two neighbours.
LARGEST_ERROR = {"f32": 1e-5, "bf16": 1e-3, "q8": 2e-3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, moeflux.Model]:
    root = tmp_path_factory.mktemp("stores")
    return {name: moeflux.load(write_store(name, root), threads=2) for name in CHECKPOINTS}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_it_goes_on(models: dict[str, moeflux.Model], name: str) -> None:
    saved = SNAPSHOTS[name]
    session = models[saved.checkpoint].session(max_context=32, kv_dtype=saved.kv_dtype)
    session.restore(FOLDER / name)
    assert session.position == len(TOKENS)
    assert session.tokens == ([] if saved.format.startswith("wire") else TOKENS)
    with np.load(FOLDER / "logits.npz") as stored:
        expected = stored[name]
    found = steps(session, NEXT)
    assert np.abs(found - expected).max() <= LARGEST_ERROR[saved.kv_dtype] * np.ptp(expected)
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_it_is_written_again(models: dict[str, moeflux.Model], tmp_path: Path, name: str) -> None:
    """From the file as it was read, and from a session that it was restored into. Rows that nobody sees are not."""
    saved = SNAPSHOTS[name]
    model = models[saved.checkpoint]
    Snapshot.load(FOLDER / name, model.variant).save(tmp_path / "read", format=saved.format)
    session = model.session(kv_dtype=saved.kv_dtype)
    session.restore(FOLDER / name)
    session.snapshot().save(tmp_path / "restored", format=saved.format)
    expected = (FOLDER / (name if "wire" in name else re.sub(r"\d$", "4", name))).read_bytes()
    assert (tmp_path / "read").read_bytes() == expected
    assert (tmp_path / "restored").read_bytes() == expected


def test_nothing_else_lies_there() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*SNAPSHOTS, "logits.npz"}
