"""Results are bit-equal, whoever else is there: calls made twice, sessions in turn and in threads, engines side by
side, and the same tokens cut into calls and chunks of any size."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import StateError, _core
from moeflux.ops import isas
from support.engine import Folder, folders, load_faulty, steps, tokens

NAMES = ("qwen3_5_moe", "qwen3_moe", "deepseek_v3")
PROMPTS = [tokens(count, seed) for count, seed in ((30, 1), (7, 5), (19, 11), (1, 3))]
NEXT = tokens(8, seed=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("sharing"))


def evaluate(session: moeflux.Session, prompt: list[int]) -> np.ndarray:
    return np.concatenate([session.prefill(prompt, logits="all"), steps(session, NEXT)])


@pytest.mark.parametrize("name", NAMES)
def test_the_same_call_twice(folder: Folder, name: str) -> None:
    """In another session, in the same one cleared, and by an engine that reads everything again."""
    model = moeflux.load(folder(name), threads=2, expert_slots=6)
    session = model.session()
    first = evaluate(session, PROMPTS[0])
    assert np.array_equal(evaluate(model.session(), PROMPTS[0]), first)
    session.clear()
    assert np.array_equal(evaluate(session, PROMPTS[0]), first)
    assert np.array_equal(evaluate(moeflux.load(folder(name), threads=2).session(), PROMPTS[0]), first)


@pytest.mark.parametrize("name", NAMES)
def test_interleaved_is_alone(folder: Folder, name: str) -> None:
    model = moeflux.load(folder(name), threads=2, expert_slots=6)
    alone = [evaluate(model.session(), prompt) for prompt in PROMPTS]
    sessions = [model.session() for _ in PROMPTS]
    found = [[session.prefill(prompt, logits="all")] for session, prompt in zip(sessions, PROMPTS, strict=True)]
    for token in NEXT:
        for session, rows in zip(sessions, found, strict=True):
            rows.append(session.step(token).numpy()[None])
    for rows, expected in zip(found, alone, strict=True):
        assert np.array_equal(np.concatenate(rows), expected)


@pytest.mark.parametrize("name", NAMES)
def test_threads_are_one_by_one(folder: Folder, name: str) -> None:
    """Sessions of one engine, and of two, all at once."""
    models = [moeflux.load(folder(name), threads=2, expert_slots=slots) for slots in (6, 9)]
    alone = [evaluate(models[0].session(), prompt) for prompt in PROMPTS]
    jobs = [(model, prompt) for prompt in PROMPTS for model in models]
    with ThreadPoolExecutor(len(jobs)) as threads:
        found = list(threads.map(lambda job: evaluate(job[0].session(), job[1]), jobs))
    for (_, prompt), logits in zip(jobs, found, strict=True):
        assert np.array_equal(logits, alone[PROMPTS.index(prompt)])


def test_engines_of_other_models_side_by_side(folder: Folder) -> None:
    models = {name: moeflux.load(folder(name), threads=2) for name in NAMES}
    alone = {name: evaluate(model.session(), PROMPTS[0]) for name, model in models.items()}
    with ThreadPoolExecutor(len(NAMES)) as threads:
        found = dict(zip(NAMES, threads.map(lambda n: evaluate(models[n].session(), PROMPTS[0]), NAMES), strict=True))
    for name in NAMES:
        assert np.array_equal(found[name], alone[name])


# ---- However the tokens are cut ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_calls_and_chunks_change_no_bit(folder: Folder, name: str) -> None:
    """Chunks and calls of any size, steps, a prefill that was stopped and goes on; under every set of kernels. Long
    enough for attention to go through more than one span of its context."""
    ids = (PROMPTS[0] * 23)[:540]
    for isa in isas() if _core.chosen_backend("auto") == "cpu" else [""]:
        whole = moeflux.load(folder(name), threads=2, isa=isa).session()
        logits = whole.prefill(ids, logits="all")
        expected = steps(whole, NEXT)
        for chunk, calls in ((3, (29, 100)), (64, (1, 2, 520, 540)), (511, (511, 513, 540))):
            cut = moeflux.load(folder(name), threads=2, isa=isa, chunk=chunk).session()
            rows = [cut.prefill(ids[cut.position : end], logits="all") for end in calls]
            assert np.array_equal(np.concatenate(rows), logits[: calls[-1]])
            if calls[-1] == len(ids):
                assert np.array_equal(steps(cut, NEXT), expected)
        stopped = moeflux.load(folder(name), threads=2, isa=isa, chunk=8).session()
        stopped.prefill(ids, lambda done, total: done < 16)
        assert stopped.position == 16
        stopped.prefill(ids[16:])
        assert np.array_equal(np.concatenate([stopped.prefill([token], logits="all") for token in NEXT]), expected)


# ---- Who may, and when ------------------------------------------------------------------------------------------


@pytest.fixture
def held(folder: Folder) -> Iterator[tuple[moeflux.Session, Callable[[], np.ndarray]]]:
    """A session whose prefill stands still in its first expert read, in another thread, until the result is asked."""
    fault = _core.FaultPlan("hold", 1)
    session = load_faulty(folder("qwen3_moe"), fault=fault).session()
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(evaluate, session, PROMPTS[0])
        while not fault.calls:
            time.sleep(0.001)

        def release() -> np.ndarray:
            fault.release()
            return result.result(timeout=60)

        yield session, release
        fault.release()


@pytest.mark.usefixtures("backend")
def test_a_second_caller_is_refused(folder: Folder, held: tuple[moeflux.Session, Callable[[], np.ndarray]]) -> None:
    session, release = held
    assert session.position == 0
    calls: list[Callable[[], object]] = [
        lambda: session.step(1),
        lambda: session.prefill([1]),
        session.clear,
        session.checkpoint,
        session.snapshot,
        lambda: session.rewind(0),
        lambda: session.checkpoints,
        lambda: session.tokens,
        lambda: session.stats,
        lambda: session.set_max_checkpoints(2),
        lambda: session._core.argmax(),
        lambda: session._core.logits(None, 384),
    ]
    for call in calls:
        with pytest.raises(StateError, match="expected one caller at a time, found a call under way in another thread"):
            call()
    expected = evaluate(moeflux.load(folder("qwen3_moe"), threads=1, chunk=16).session(), PROMPTS[0])
    assert np.array_equal(release(), expected)
    assert session.position == len(PROMPTS[0]) + len(NEXT)


@pytest.mark.usefixtures("backend")
class Slipping:
    """A session of the engine that another thread evaluates with, just before anything is read of it."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        if name in ("argmax", "top_k", "logits"):
            self._core.step(NEXT[1])
        return getattr(self._core, name)


@pytest.mark.parametrize("read", ["argmax", "top_k", "numpy"])
def test_a_thread_that_comes_between_the_look_and_the_reading(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    session = moeflux.load(folder("qwen3_moe"), threads=1).session()
    logits = session.step(NEXT[0])
    monkeypatch.setattr(session, "_open", Slipping(session._core))
    with pytest.raises(StateError, match="logits: expected to be used before the session evaluates again, found used"):
        getattr(logits, read)(*([5] if read == "top_k" else []))


def test_another_session_waits_its_turn(folder: Folder, held: tuple[moeflux.Session, Callable[[], np.ndarray]]) -> None:
    session, release = held
    other = session.model.session()
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(evaluate, other, PROMPTS[0])
        assert np.array_equal(release(), result.result(timeout=60))


@pytest.mark.usefixtures("backend")
def test_dropped_in_any_order(folder: Folder) -> None:
    """The model before its sessions, sessions while others run, the last reference from another thread."""
    model = moeflux.load(folder("qwen3_5_moe"), threads=2, expert_slots=6)
    expected = evaluate(model.session(), PROMPTS[1])
    sessions = [model.session() for _ in range(4)]
    logits = sessions[3].prefill(PROMPTS[1])
    last = logits.numpy()
    del model
    del sessions[3]
    gc.collect()
    assert np.array_equal(logits.numpy(), last)  # logits keep their session, a session its model
    assert np.array_equal(evaluate(sessions[1], PROMPTS[1]), expected)
    del sessions[0]
    assert np.array_equal(evaluate(sessions.pop(), PROMPTS[1]), expected)
    thread = threading.Thread(target=sessions.clear)
    thread.start()
    thread.join()


def test_collected_by_another_thread(folder: Folder) -> None:
    """Sessions in reference cycles, collected by whoever comes along while an engine works."""

    class Cycle:
        def __init__(self, model: moeflux.Model) -> None:
            self.session, self.me = model.session(max_context=16), self
            self.session.prefill([1, 2, 3])

    model = moeflux.load(folder("qwen3_moe"), threads=2, expert_slots=6)
    expected = evaluate(model.session(), PROMPTS[0])
    stop = threading.Event()

    def collect() -> None:
        while not stop.wait(0.001):  # without a pause, nobody else would have the interpreter for long
            gc.collect()

    collector = threading.Thread(target=collect)
    gc.freeze()  # what was here before has no cycles of this test, and looking at it takes long
    collector.start()
    try:
        for _ in range(10):
            Cycle(model)
            Cycle(moeflux.load(folder("qwen3_moe"), threads=2, chunk=16))
            assert np.array_equal(evaluate(model.session(), PROMPTS[0]), expected)
    finally:
        stop.set()
        collector.join()
        gc.unfreeze()
