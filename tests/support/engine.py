"""What the engine's tests share: stores of tiny checkpoints, engines that fail on purpose, the oracle at any state."""

from __future__ import annotations

import atexit
import itertools
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from golden import checkpoints
from moeflux import StateError, _core, oracle
from moeflux.conversion.convert import convert
from moeflux.models.layers import GatedDelta
from moeflux.oracle.model import KeyValueState, LatentState, LinearState
from moeflux.runtime.snapshot import Snapshot
from moeflux.stores.store import Store, open_store

Folder = Callable[[str], Path]


def folders(root: Path) -> Folder:
    """Packed 4-bit stores of tiny checkpoints with room for 1024 tokens, each there when it is first asked for."""
    return partial(_folder, root)


def _folder(root: Path, name: str) -> Path:
    packed = root / name
    if not packed.exists():
        shutil.copytree(_made(name), packed)
    return packed


@cache
def _made(name: str) -> Path:
    """Made once in a process; each root has a copy of its own, for there are tests that damage theirs."""
    hf = checkpoints.write(name, _root() / f"hf-{name}")
    config = (hf / "config.json").read_text()
    (hf / "config.json").write_text(
        re.sub(r'"max_position_embeddings": \d+', '"max_position_embeddings": 1024', config)
    )
    convert(hf, packed := _root() / name, check="none")
    shutil.rmtree(hf)
    return packed


@cache
def _root() -> Path:
    root = tempfile.mkdtemp(prefix="moeflux-stores-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return Path(root)


FAULTS = ("fail_at_op", "fault", "deferred", "apart", "fail_at_copy", "text", "right")


def engine_with(faults: dict[str, Any], store: Store, **options: Any) -> _core.Engine:
    """The engine of users, unless something is to go wrong."""
    if not faults:
        return _core.Engine(store.directory, **options)
    return _core.testing.engine(_core.testing.Faults(**faults), store.directory, **options)


def load_faulty(folder: Path, **options: Any) -> moeflux.Model:
    """As moeflux.load, with FAULTS; small, for there are many of them."""
    faults = {name: options.pop(name) for name in FAULTS if name in options}
    with open_store(folder) as store:
        if options.pop("verify_reads", False):
            options["checksums"] = store.description.expert_sha256
        options = {"threads": 1, "readers": 1, "chunk": 16} | options
        return moeflux.Model(store, engine_with(faults, store, **options))


def tokens(count: int, seed: int = 1, vocab: int = 384) -> list[int]:
    """A fixed walk through the vocabulary."""
    ids, token = [], seed % vocab
    for _ in range(count):
        ids.append(token)
        token = (31 * token + 7) % vocab
    return ids


def steps(session: moeflux.Session, ids: list[int]) -> np.ndarray:
    return np.stack([session.step(token).numpy() for token in ids])


FIRST, SECOND, NEXT = tokens(5), tokens(3, seed=7), tokens(2, seed=9)


def evaluate(session: moeflux.Session) -> np.ndarray:
    """Everything that FIRST, SECOND and NEXT yield, in calls that each may fail."""
    return np.concatenate(
        [session.prefill(FIRST, logits="all"), session.prefill(SECOND, logits="all"), steps(session, NEXT)]
    )


def survive(model: moeflux.Model, error: type[Exception], expected: np.ndarray) -> bool:
    """Evaluates through one failure, and returns whether there was one. Afterwards everything is right, in every
    session."""
    recurrent = bool(model.variant.layers_with(GatedDelta))
    session = model.session(max_context=32)
    found, failed = [], False

    def stepped(token: int) -> np.ndarray:
        nonlocal failed
        logits = session.step(token)
        try:
            return logits.numpy()[None]
        except error:  # memory of a device: they come when they are read, and then the step is done
            failed = True
            return logits.numpy()[None]

    calls: list[Callable[[], np.ndarray]] = [
        lambda: session.prefill(FIRST, logits="all"),
        lambda: session.prefill(SECOND, logits="all"),
        *(partial(stepped, token) for token in NEXT),
    ]
    counts = [len(FIRST), len(SECOND), 1, 1]
    for call, count, start in zip(calls, counts, itertools.accumulate(counts, initial=0), strict=False):
        try:
            found.append(call())
            continue
        except error:
            failed = True
        assert session.position == start
        if recurrent and start and count == 1:  # of several tokens there is a copy of the state before them
            with pytest.raises(StateError, match=r"evaluation failed half-way .*; clear it or restore a state"):
                session.step(1)
            with pytest.raises(StateError, match="clear it or restore"):
                session.snapshot()
            session.clear()
            found = [evaluate(session)]
            break
        found.append(call())
    assert np.array_equal(np.concatenate(found), expected)
    if failed:  # from experts that are still in slots
        assert np.array_equal(evaluate(model.session(max_context=32)), expected)
    return failed


def oracle_at(store: Store, snapshot: Snapshot) -> oracle.Session:
    """The oracle where a session was saved."""
    session = oracle.Session(store.variant, store)
    session.position = snapshot.position
    for layer in range(store.variant.num_layers):
        piece = {name: array.astype(np.float64) for (at, name), array in snapshot.tensors.items() if at == layer}
        if "conv" in piece:
            session.states[layer] = LinearState(piece["conv"], piece["recurrent"])
        elif "latent" in piece:
            session.states[layer] = LatentState(piece["latent"], piece["rope_k"], piece.get("index_k"))
        else:
            session.states[layer] = KeyValueState(piece["k"], piece["v"])
    return session
