"""An engine and its sessions hold exactly the memory that was planned for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import moeflux
from golden.checkpoints import CHECKPOINTS
from moeflux import BudgetError, _core
from moeflux.stores.store import open_store
from support.engine import Folder, folders, load_faulty, tokens

PARTS = (
    "dense_weights",
    "expert_slots",
    "scratch",
    "tables",
    "ngram_rows",
    "rows",
    "recurrent",
    "checkpoints",
    "tokens",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("footprint"))


def parts(footprint: _core.Footprint) -> dict[str, int]:
    return {part: getattr(footprint, part) for part in PARTS}


def said(path: Path, **options: object) -> _core.Footprint:
    with open_store(path) as store:
        return _core.footprint(store.directory, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize(
    ("slots", "chunk", "kv_dtype", "depth"), [(None, None, "f32", 2), (8, 16, "bf16", 3), (8, 16, "q8", 2)]
)
def test_said_and_held(
    folder: Folder, name: str, slots: int | None, chunk: int | None, kv_dtype: str, depth: int
) -> None:
    path = folder(name)
    model = moeflux.load(path, expert_slots=slots, ring_depth=depth, chunk=chunk, readers=4)
    expected = said(
        path,
        expert_slots=slots or 0,
        ring_depth=depth,
        chunk=model.plan.chunk,  # a device that holds all experts has larger ones
        max_context=100,
        kv_dtype=kv_dtype,
        readers=4,
    )
    engine = model._engine
    assert model.plan.parts["tables"] == engine.memory.tables
    assert engine.held == engine.memory.total == engine.memory.engine
    session = model.session(max_context=100, kv_dtype=kv_dtype)
    assert parts(engine.memory) == parts(expected) | {"rows": 0}, "rows are taken as they are used"
    session.step(1)
    session.clear()
    assert engine.memory.rows == 0
    session.step(1)
    session.rewind(0)
    assert engine.memory.rows == 0
    session.step(1)
    assert parts(engine.memory) == parts(expected)
    assert engine.memory.read_buffers <= expected.read_buffers  # where reads turn out to be buffered, none
    assert engine.held == engine.memory.total == model.memory.total

    # Evaluating, going back and saving take no more.
    before = engine.held
    session.prefill(tokens(40))
    session.checkpoint()
    session.step(1)
    session.rewind(41)
    session.restore(session.snapshot())
    assert engine.held == before

    del session
    assert engine.sessions == 0 and engine.memory.sessions == 0 and engine.held == engine.memory.engine


def test_staging_while_loading_is_planned(folder: Folder) -> None:
    """Eight threads read, each the largest piece, where host and device do not share memory. It is given back then."""
    path = folder("qwen3_5_moe")
    with open_store(path) as store:
        tensors = store.directory.tensors.values()
        largest = max(sum(span[2] for span in tensor.spans) for tensor in tensors)
        apart = _core.testing.footprint(_core.testing.Faults(apart=True), store.directory, backend="cpu")
        shared = _core.testing.footprint(_core.testing.Faults(apart=False), store.directory, backend="cpu")
    assert 8 * largest <= apart.loading < 9 * largest
    assert apart.engine - apart.loading == apart.total - apart.sessions - apart.loading
    assert load_faulty(path, apart=True)._engine.memory.loading == 0
    assert shared.loading == 0


def test_sessions_draw_from_a_limit(folder: Folder) -> None:
    path = folder("qwen3_5_moe")
    one = said(path, max_context=100).sessions
    with open_store(path) as store:
        engine = _core.Engine(store.directory, session_bytes=2 * one)
    held = [engine.session(100, "f32") for _ in range(2)]
    for session in held:
        evaluate(session, tokens(8))
    with pytest.raises(BudgetError, match="session"):
        engine.session(100, "f32")
    assert engine.sessions == 2
    session = held.pop()
    del session
    held.append(engine.session(100, "f32"))
    evaluate(held[1], tokens(8))
    with pytest.raises(BudgetError):
        held[0].set_max_checkpoints(50)
    assert engine.memory.sessions == 2 * one


def evaluate(session: _core.Session, ids: Sequence[int]) -> bytes:
    """The logits of the last token."""
    session.prefill(np.asarray(ids, np.int32), None, None, 0)
    best, values = session.top_k(8)
    return best.tobytes() + values.tobytes()
