"""Models and sessions that are closed: their memory goes, and whoever asks anything of them gets StateError."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import moeflux
from moeflux import StateError
from moeflux.runtime.plan import LOADED


def refuses(call: Callable[[], object], words: str) -> None:
    with pytest.raises(StateError, match=words):
        call()


def test_a_session_that_is_closed(tmp_path: Path) -> None:
    model = moeflux.load(threads=1)
    before = model.memory.total
    with model.session() as session:
        logits = session.prefill([5, 6])
        generation = session.generate([5, 6, 7], temperature=0)
        next(generation)
        assert model.memory.total > before and not session.closed
    assert session.closed and model.memory.total == before, "although logits and a generation still refer to it"
    session.close()
    for call in (
        lambda: session.prefill([5]),
        lambda: session.step(5),
        lambda: session.position,
        lambda: session.tokens,
        session.clear,
        session.checkpoint,
        session.snapshot,
        lambda: session.generate([5]),
        logits.argmax,
    ):
        refuses(call, "session: expected one that is open, found it closed")
    refuses(lambda: next(generation), "found it used otherwise")
    assert not logits.current and "closed" in repr(session) and "closed" in repr(logits)
    model.session().step(5)


def test_a_conversation_that_is_closed() -> None:
    model = moeflux.load(threads=1)
    before = model.memory.total
    with model.chat() as talk:
        reply = talk.ask("Who are you?", temperature=0)
        said = next(reply).text
        assert model.memory.total > before and not talk.closed
    assert talk.closed and model.memory.total == before
    assert (reply.finish, talk.messages[-1]["content"].startswith(said)) == ("cancelled", True)
    talk.close()
    refuses(lambda: talk.ask("And now?", temperature=0).wait(), "session: expected one that is open, found it closed")


def test_a_conversation_leaves_a_session_that_it_was_given() -> None:
    model = moeflux.load(threads=1)
    session = model.session()
    with moeflux.Conversation(model, session) as talk:
        talk.ask("Who are you?", temperature=0, max_tokens=2).wait()
    assert not session.closed and session.position > 2
    session.close()
    talk.close()


def test_a_model_that_is_closed() -> None:
    with moeflux.load(threads=1) as model:
        session, talk = model.session(), model.chat()
        session.step(5)
        engine = model._engine
        assert engine.held > 0 and not model.closed
        others = [other for other, _ in LOADED.items() if other is engine]
        assert len(others) == 1
        del engine, others
    gc.collect()
    assert model.closed and session.closed and talk.session.closed
    model.close()
    for call in (model.session, model.chat, model.trace, lambda: model.memory):
        refuses(call, "expected a model that is open, found it closed")
    refuses(lambda: session.step(5), "found it closed")
    refuses(lambda: talk.ask("Hello!"), "found it closed")
    assert "closed" in repr(model) and model.plan.total_bytes > 0 and model.tokenizer.encode("a")


def test_a_closed_model_leaves_its_budget_to_the_next() -> None:
    with moeflux.load(threads=1) as first:
        beside = moeflux.plan(first.path, threads=1).parts
        assert beside["other models"] >= first.plan.model_bytes
        mine = beside["other models"]
    after = moeflux.plan(first.path, threads=1).parts.get("other models", 0)
    assert mine - after == first.plan.model_bytes


def test_closing_while_another_thread_evaluates() -> None:
    model = moeflux.load(threads=1)
    session = model.session()
    begun, outcome = threading.Event(), []

    def evaluate() -> None:
        try:
            session.prefill([5] * 600, lambda done, total: begun.set())
            outcome.append("done")
        except moeflux.Error as error:
            outcome.append(str(error))

    thread = threading.Thread(target=evaluate)
    thread.start()
    begun.wait()
    model.close()
    thread.join()
    # What was under way came to its end; whether it could still say what came out depends on who was first.
    assert outcome[0] == "done" or "found it closed" in outcome[0]
    refuses(lambda: session.step(5), "found it closed")
