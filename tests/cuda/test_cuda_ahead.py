"""The step to come, recorded while the emulated GPU computes the present one. It saves time and changes nothing:
whatever comes in its place, and whatever fails, every bit, counter and error is what it is without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from emulator import cuda_gpu
from moeflux import ArgumentError, Cancel, Cancelled, DeviceError, _core
from moeflux.text.sampling import Sampler, Sampling
from support.engine import load_faulty, tokens
from support.made_stores import Stores, stores_in
from support.metal import needs_device
from support.tiny_stores import gpt_oss, hybrid

pytestmark = [needs_device, pytest.mark.usefixtures("emulated_gpu")]

VOCAB = 384
VARIANTS = {
    "hybrid": hybrid(layer_kinds=("linear", "full"), mlp_kinds=("moe",) * 2, vocab_size=VOCAB, num_experts=6),
    "windows": gpt_oss(vocab_size=VOCAB),
    "deep": hybrid(layer_kinds=("linear", "full") * 2, mlp_kinds=("moe",) * 4, vocab_size=VOCAB, num_experts=6),
    # A step of which is one batch.
    "dense first": hybrid(layer_kinds=("full",) * 2, mlp_kinds=("dense", "moe"), vocab_size=VOCAB, num_experts=6,
                    head_dim=32, rotary_dim=32, dense_intermediate=64),
}  # fmt: skip
START, BEFORE, BEHIND = tokens(7, vocab=VOCAB), tokens(3, seed=11, vocab=VOCAB), tokens(4, seed=23, vocab=VOCAB)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    return stores_in(tmp_path_factory.mktemp("ahead"), VARIANTS)


def load(folder: Path, **options: Any) -> moeflux.Model:
    """With all experts in their slots, which is when steps are recorded ahead."""
    model = load_faulty(folder, **{"backend": "cuda", "look_ahead": "off", "chunk": 32} | options)
    with model.session(max_context=64) as session:
        while not _core.testing.steps_ahead(model._engine)[0]:
            session.prefill(tokens(60, vocab=VOCAB))
            session.step(1)
            session.clear()
    return model


def ahead(model: moeflux.Model) -> np.ndarray:
    """Steps that were recorded ahead so far, and how many of these came."""
    return np.array(_core.testing.steps_ahead(model._engine))


def step(session: moeflux.Session, token: int) -> np.ndarray:
    """The logits, which are read after the likeliest token was asked for, so that this is what the next step leaves."""
    logits = session.step(token)
    best, row = logits.argmax(), logits.numpy()
    assert best == row.argmax()
    return row


def rows_behind(model: moeflux.Model, history: list[int], ids: list[int]) -> np.ndarray:
    """What these tokens yield, in one prefill."""
    with model.session(max_context=1024) as session:
        return session.prefill(history + ids, logits="all")[len(history) :]


def test_a_step_is_not_recorded_again(store: Stores) -> None:
    model = load(store("hybrid"))
    session = model.session(max_context=64)
    session.prefill(START).argmax()
    before = ahead(model)
    ids = tokens(9, seed=5, vocab=VOCAB)
    with cuda_gpu.emulating(delay=200):
        found = [step(session, token) for token in ids]
        assert cuda_gpu.graph_launches() > 0
    assert list(ahead(model) - before) == [9, 8]
    assert np.array_equal(found, rows_behind(model, START, ids))
    assert session.stats.submissions == 2 - (model.variant.num_layers < 4)
    assert session.stats.expert_hits == 2 * model.variant.experts.per_token


Used = tuple[moeflux.Session, list[int]]
"""A session to go on with, and the tokens that it has."""


def another_steps(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    other.step(3).argmax()
    return session, history


def another_takes_its_place(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    """At the same position."""
    model = session.model
    session.close()
    again = model.session(max_context=1024)
    mine = tokens(len(history), seed=31, vocab=VOCAB)
    again.prefill(mine).argmax()
    return again, mine


def both_step(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    for logits in session.model.evaluate([(session, [5]), (other, [6])]):
        logits.argmax()
    return session, [*history, 5]


def a_prefill(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    session.prefill([9, 8]).argmax()
    return session, [*history, 9, 8]


def a_rewind(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    session.rewind(len(START))
    return session, history[: len(START)]


def cleared(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    session.clear()
    mine = tokens(len(history), seed=32, vocab=VOCAB)
    session.prefill(mine).argmax()
    return session, mine


def restored(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    """To the same position, behind other tokens."""
    mine = tokens(len(history), seed=33, vocab=VOCAB)
    other.clear()
    other.prefill(mine)
    session.restore(other.snapshot())
    return session, mine


def restored_to_itself(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    """Other bytes in the same places would do, too."""
    session.restore(session.snapshot())
    return session, history


def forked(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    session.fork().close()
    return session, history


def a_fork_steps(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    session.fork().step(3)
    return session, history


def a_fork_goes_on(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    return session.fork(), history


def cancelled(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    cancel = Cancel()
    cancel.set()
    with pytest.raises(Cancelled):
        session.step(3, cancel=cancel)
    return session, history


def refused(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    with pytest.raises(ArgumentError):
        session.step(VOCAB)
    return session, history


def recorded(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    """The host looks at what routers pick."""
    with session.model.trace() as trace:
        session.step(5).argmax()
    assert trace.tokens == 1
    return session, [*history, 5]


def all_logits(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    session.model.evaluate([(session, [5])], logits="all")
    return session, [*history, 5]


def no_logits(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    session.model.evaluate([(session, [5])], logits="none")
    return session, [*history, 5]


def logits_are_read(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    logits = session._logits()
    logits.top_k(5)
    logits.numpy()
    return session, history


def a_list_is_drawn_from(session: moeflux.Session, history: list[int], other: moeflux.Session) -> Used:
    """The next step is to leave a list."""
    Sampler(Sampling(temperature=0.8, top_k=5, seed=1), VOCAB, []).choose(session._logits())
    return session, history


TAKEN = (restored_to_itself, forked, cancelled, refused, logits_are_read)
FORGOTTEN = (another_steps, another_takes_its_place, both_step, a_prefill, a_rewind, cleared, restored, a_fork_steps,
             a_fork_goes_on, recorded, all_logits, no_logits, a_list_is_drawn_from)  # fmt: skip


@pytest.mark.parametrize("way", [*TAKEN, *FORGOTTEN], ids=lambda way: way.__name__)
def test_something_comes_between(store: Stores, way: Callable[..., Used]) -> None:
    model = load(store("hybrid"))
    session, other = model.session(max_context=1024), model.session(max_context=1024)
    other.prefill(tokens(5, seed=40, vocab=VOCAB)).argmax()
    session.prefill(START).argmax()
    session.checkpoint()
    for token in BEFORE:
        step(session, token)
    session, history = way(session, START + BEFORE, other)
    before = ahead(model)
    first = step(session, BEHIND[0])
    assert list(ahead(model) - before) == [1, way in TAKEN]
    found = [first, *(step(session, token) for token in BEHIND[1:])]
    assert np.array_equal(found, rows_behind(model, history, BEHIND))


def test_several_sessions(store: Stores) -> None:
    """The same set goes on as it was recorded; another set, another order and one that has gone further do not."""
    model = load(store("deep"))
    sessions = [model.session(max_context=64) for _ in range(3)]
    histories = [tokens(5 + place, seed=60 + place, vocab=VOCAB) for place in range(3)]
    for session, history in zip(sessions, histories, strict=True):
        session.prefill(history).argmax()
    starts = [list(history) for history in histories]
    found: list[list[np.ndarray]] = [[], [], []]
    turns = [(0, 1, 2)] * 4 + [(0, 2)] * 3 + [(2, 0)] * 2 + [(0, 1, 2)] * 3
    came = []
    for turn, order in enumerate(turns):
        if turn == 11:
            found[1].append(step(sessions[1], 2))
            histories[1].append(2)
        before = ahead(model)
        work = [(sessions[place], [turn + place]) for place in order]
        for place, logits in zip(order, model.evaluate(work), strict=True):
            logits.argmax()
            found[place].append(logits.numpy())
            histories[place].append(turn + place)
        came.append(int((ahead(model) - before)[1]))
    assert came == [0, 1, 1, 1, 0, 1, 1, 0, 1, 0, 1, 0]
    for rows, start, history in zip(found, starts, histories, strict=True):
        assert np.array_equal(rows, rows_behind(model, start, history[len(start) :]))


def test_angles_stay_as_they_are_until_the_device_has_them(store: Stores) -> None:
    """Those of so many rows are copied while the host records the step to come, which has others."""
    model = load(store("dense first"), chunk=64)
    histories = [tokens(1 + place % 5, seed=place, vocab=VOCAB) for place in range(40)]
    sessions = [model.session(max_context=32) for _ in histories]
    for session, history in zip(sessions, histories, strict=True):
        session.prefill(history)
    for turn in range(2):
        with cuda_gpu.emulating(delay=2000):
            found = [logits.numpy() for logits in model.evaluate([(session, [turn]) for session in sessions])]
        for history, row in zip(histories, found, strict=True):
            assert np.array_equal([row], rows_behind(model, history, [turn]))
            history.append(turn)


@pytest.mark.parametrize("name", ["hybrid", "windows"])
def test_rows_come_to_other_blocks(store: Stores, name: str) -> None:
    """At 256 positions there is another; where a window has passed, one goes."""
    model = load(store(name))
    session = model.session(max_context=1024)
    text = tokens(345, vocab=VOCAB)
    expected = rows_behind(model, [], text)
    for begin, end in ((250, 262), (320, 345)):
        session.prefill(text[session.position : begin]).argmax()
        before = ahead(model)
        found = [step(session, token) for token in text[begin:end]]
        recorded, came = ahead(model) - before
        assert recorded - 2 <= came < end - begin - 1 + (begin > 256)
        assert np.array_equal(found, expected[begin:end])


def test_the_plan_is_what_is_held(store: Stores) -> None:
    """Also with a step that is recorded."""
    model = load(store("hybrid"))
    sessions = [model.session(max_context=64) for _ in range(4)]
    for session in sessions:
        session.prefill(START).argmax()
    held = model._engine.held
    for turn in range(6):
        some = sessions[: 1 + 3 * (turn % 3 > 0)]
        for logits in model.evaluate([(session, [turn]) for session in some]):
            logits.argmax()
        assert model._engine.held == model._engine.memory.total == held


CALLS = ("cuLaunchKernel", "cuGraphLaunch", "cuGraphAddKernelNode", "cuGraphInstantiateWithFlags",
         "cuGraphExecKernelNodeSetParams", "cuEventRecord", "cuEventCreate", "cuEventSynchronize",
         "cuCtxPushCurrent_v2", "cuMemAlloc_v2", "cuMemHostAlloc")  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_leaves_nothing_wrong(store: Stores, call: str) -> None:
    """Of the driver, in a step that was recorded ahead or while one is."""
    model = load(store("hybrid"))
    ids = tokens(6, seed=3, vocab=VOCAB)
    expected = rows_behind(model, START, ids)
    session = model.session(max_context=64)
    for number in (0, 1, 2, 3, 5, 8):
        session.clear()
        session.prefill(START).argmax()
        found: list[np.ndarray] = []
        with cuda_gpu.emulating(fail_at=number, fail_in=call.encode(), delay=50):
            while len(found) < len(ids):
                try:
                    found.append(step(session, ids[len(found)]))
                except DeviceError:
                    session.clear()
                    session.prefill(START + ids[: len(found)]).argmax()
        assert np.array_equal(found, expected)
    assert model._engine.held == model._engine.memory.total


def test_an_op_that_fails_leaves_nothing_wrong(store: Stores) -> None:
    """One that is recorded ahead is recorded again when it is wanted."""
    ids = tokens(6, seed=3, vocab=VOCAB)
    expected = rows_behind(load(store("hybrid")), START, ids)
    failures = 0
    numbers = range(0, 360, 19)
    for number in numbers:
        model = load_faulty(store("hybrid"), backend="cuda", look_ahead="off", chunk=32, fail_at_op=number)
        session = model.session(max_context=64)
        found: list[np.ndarray] = []
        while len(found) < len(ids):
            try:
                if session.position == 0:
                    session.prefill(START + ids[: len(found)]).argmax()
                found.append(step(session, ids[len(found)]))
            except DeviceError as error:
                assert "was told to fail" in str(error)
                failures += 1
                session.clear()
        assert np.array_equal(found, expected)
    assert 0 < failures < len(numbers)


def test_what_was_recorded_goes_with_the_model(store: Stores) -> None:
    model = load(store("hybrid"))
    session = model.session(max_context=64)
    session.prefill(START).argmax()
    step(session, 1)
    with cuda_gpu.emulating(delay=2000):
        step(session, 2)
        model.close()
        del session, model
        assert cuda_gpu.live_objects() == 0
