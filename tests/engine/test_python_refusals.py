"""Python that gets no memory, or no thread, on the way into the engine or out of it: an error of ours that says for
what, and everything goes on. What the engine itself asks for is refused in test_refusals.py."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import moeflux
from golden import checkpoints
from moeflux import IoError, builtin, model, session
from moeflux.conversion.convert import convert
from moeflux.conversion.verify import verify
from moeflux.runtime.snapshot import Snapshot
from moeflux.stores import store
from moeflux.text.awaiting import in_thread
from support.engine import FIRST, NEXT, SECOND


@pytest.fixture(scope="module")
def loaded() -> moeflux.Model:
    return moeflux.load(builtin.path(), threads=2, context=64)


def none_left(*_: object, **__: object) -> NoReturn:
    raise MemoryError


class Core:
    """A session of the engine that does everything except return it."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return none_left if name in ("read_state", "logits", "top_k") else getattr(self._core, name)


TOKEN: Any = np.int32(1)  # which is converted, while a plain int is taken as it is
Call = Callable[[moeflux.Session, Snapshot], object]
CALLS: dict[str, tuple[Call, object, str, str]] = {
    "tokens": (lambda s, _: s.prefill(SECOND), session, "token_array", "prefill"),
    "a step": (lambda s, _: s.step(TOKEN), session, "token_array", "step"),
    "all logits": (lambda s, _: s.prefill(SECOND, logits="all"), np, "empty", "prefill: logits of 3 tokens x 8192"),
    "snapshot": (lambda s, _: s.snapshot(), None, "", "snapshot at position 5"),
    "restore": (lambda s, taken: s.restore(taken), np, "ascontiguousarray", "restore"),
    "logits": (lambda s, _: s._logits().numpy(), None, "", "logits: a copy of 8192"),
    "the best": (lambda s, _: s._logits().top_k(5), None, "", "logits: the 5 best"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_session(loaded: moeflux.Model, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    call, owner, function, words = CALLS[name]
    used, other = loaded.session(), loaded.session()
    for each in (used, other):
        each.prefill(FIRST)
    taken = used.snapshot()
    with monkeypatch.context() as patch:
        if owner is None:
            patch.setattr(used, "_open", Core(used._core))
        else:
            patch.setattr(owner, function, none_left)
        with pytest.raises(IoError, match=f"^{words}: expected memory for it, found too little$") as caught:
            call(used, taken)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert used.tokens == FIRST
    found, expected = (np.stack([each.step(id).numpy() for id in NEXT]) for each in (used, other))
    assert np.array_equal(found, expected)


def test_plain_ints_need_no_memory(loaded: moeflux.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step of one session and of several. Their conversion would be a part of every step."""
    sessions = [loaded.session() for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(session, "token_array", none_left)
        patch.setattr(model, "token_array", none_left)
        for each in sessions:
            each.step(1)
        rows = loaded.evaluate([(each, [2]) for each in sessions[:2]])
    expected = sessions[2].step(2).numpy()
    assert all(np.array_equal(row.numpy(), expected) for row in rows)


def test_a_new_session(loaded: moeflux.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(model, "Session", none_left)
        with pytest.raises(IoError, match=r"^session of 64 tokens: expected memory for it, found too little$"):
            loaded.session()
    assert loaded.session().step(1).argmax() >= 0


def test_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(builtin.path())
    with monkeypatch.context() as patch:
        patch.setattr(store, "read_description", none_left)
        with pytest.raises(IoError, match=f"^opening {path}: expected memory for it, found too little$"):
            moeflux.open_store(path)
    assert moeflux.open_store(path).variant.num_layers > 0


@pytest.mark.parametrize("function", ["open_store", "make_plan"])
def test_loading(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    path = Path(builtin.path())
    with monkeypatch.context() as patch:
        patch.setattr(model, function, none_left)
        with pytest.raises(IoError, match=f"^loading {path}: expected memory for it, found too little$"):
            moeflux.load(path)
    assert moeflux.load(path, threads=1, context=64).session().step(1).argmax() >= 0


def no_thread(_: object) -> NoReturn:
    raise RuntimeError("can't start new thread")


def awaited() -> None:
    with closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(in_thread(int, int))


def test_threads(loaded: moeflux.Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    snapshot = loaded.session().snapshot()
    hf = checkpoints.write("qwen3_moe", tmp_path / "hf")
    calls: dict[str, Callable[[], object]] = {
        "checksums": lambda: snapshot.save(tmp_path / "snapshot"),
        f"verifying {builtin.path()}": lambda: verify(builtin.path()),
        f"writing {tmp_path / 'packed.partial'}": lambda: convert(hf, tmp_path / "packed", check="none"),
        "a call that is awaited": awaited,
    }
    for words, call in calls.items():
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(IoError, match=f"^{words}: expected a thread for it from the system, found none$"):
                call()
        call()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "packed", "snapshot"]
