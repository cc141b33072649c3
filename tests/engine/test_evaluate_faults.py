"""What goes wrong while several sessions evaluate together: an op, a copy, a read, weights that are not numbers, a call
that is given up. Each session is where it was, or the error names it; and everybody goes on to the same bits."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import Cancel, Cancelled, DeviceError, IoError, StateError, _core
from moeflux.models.layers import GatedDelta
from support.engine import Folder, folders, load_faulty, tokens
from support.evaluated import Expect, logits_alone, plant_nan

NAMES = ("qwen3_5_moe", "qwen3_moe", "deepseek_v3")
STREAMS = [tokens(32, seed) for seed in (1, 5, 9, 14, 23)]
STARTS = (0, 5, 5, 0, 6)
CUT = (3, 4, 1, 1, 1)
CHECKED, LONE = 2, 4  # a single token with a checkpoint to go back to, and one without
ORDERS = ((0, 1, 2, 3, 4), (3, 1, 2, 0), (4, 2, 0, 1, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("evaluate-faults"))


@pytest.fixture(scope="module")
def stride(on_metal: bool) -> int:
    """Of the numbers that fail: the emulated GPU takes long, and then some outcomes are missed."""
    return 6 if on_metal else 1


@pytest.fixture(scope="module")
def alone(folder: Folder) -> Expect:
    return logits_alone(folder, STREAMS)


class Company:
    """One session of each stream, each at its start: of a model that will fail."""

    def __init__(self, model: moeflux.Model, expected: list[np.ndarray]) -> None:
        self.model, self.expected = model, expected
        self.sessions = [model.session(max_context=40) for _ in STREAMS]
        for i in range(len(STREAMS)):
            self.bring(i)
        self.sessions[CHECKED].checkpoint()

    def bring(self, i: int) -> None:
        self.sessions[i].clear()
        if STARTS[i]:
            self.sessions[i].prefill(STREAMS[i][: STARTS[i]])

    def work(self, order: tuple[int, ...]) -> list[tuple[moeflux.Session, list[int]]]:
        return [(self.sessions[i], STREAMS[i][STARTS[i] : STARTS[i] + CUT[i]]) for i in order]

    def go(self, order: tuple[int, ...], cancel: Cancel | None = None) -> None:
        found = self.model.evaluate(self.work(order), "all", cancel=cancel)
        for rows, i in zip(found, order, strict=True):
            assert np.array_equal(rows, self.expected[i][STARTS[i] : STARTS[i] + CUT[i]])

    def stand(self) -> None:
        assert tuple(session.position for session in self.sessions) == STARTS

    def go_on(self, order: tuple[int, ...]) -> None:
        for i, session in enumerate(self.sessions):
            end = STARTS[i] + (CUT[i] if i in order else 0)
            assert session.tokens == STREAMS[i][:end]
            assert np.array_equal(session.step(STREAMS[i][end]).numpy(), self.expected[i][end])

    def survive(self, order: tuple[int, ...], error: type[moeflux.Error]) -> str | None:
        """Evaluates through one failure. Returns "lost" when it cost a session, "kept" when not; None: no failure."""
        try:
            self.go(order)
            return None  # what comes next may fail
        except error as failure:
            self.stand()
            lost = {i for i in order if f"the session of work[{order.index(i)}]" in str(failure)}
            assert lost <= {LONE} and ("cannot go back: clear them or restore a state" in str(failure)) == bool(lost)
            for i in lost:
                with pytest.raises(StateError, match=r"session: an evaluation failed half-way \(.*\); clear it"):
                    self.sessions[i].snapshot()
                with pytest.raises(StateError, match=rf"work\[{order.index(i)}\]: session: an evaluation failed"):
                    self.model.evaluate(self.work(order))
                self.stand()
                self.bring(i)
            self.go(order)
            outcome = "lost" if lost else "kept"
        self.go_on(order)
        return outcome


def sweep(
    folder: Path,
    expected: list[np.ndarray],
    error: type[moeflux.Error],
    options: Any,
    step: int,
    orders: tuple[tuple[int, ...], ...] = ORDERS,
    first: int = 1,
) -> list[str]:
    """The outcomes, with `options(number)` for every `step`-th number until nothing fails any more."""
    outcomes: list[str] = []
    for number in range(first, 10_000, step):
        company = None
        with suppress(error):  # before they are together
            company = Company(load_faulty(folder, **options(number)), expected)
        if company is None:
            continue
        outcome = company.survive(orders[number // step % len(orders)], error)
        if outcome is not None:
            outcomes.append(outcome)
        elif outcomes:
            return outcomes
        # Otherwise it was an op of a step that a GPU records ahead, which nobody misses. Their own ops come later.
    raise AssertionError(f"nothing fails, or it never ends: {outcomes}")


@pytest.mark.parametrize(
    ("name", "first", "device"),
    [
        ("qwen3_5_moe", 1, {"expert_slots": 5}),
        ("qwen3_5_moe", 6, {"chunk": 4}),
        ("qwen3_5_moe", 12, {"deferred": True, "expert_slots": 5, "chunk": 4}),
        ("qwen3_5_moe", 18, {"apart": True}),
        ("qwen3_moe", 1, {"expert_slots": 5}),
        ("qwen3_moe", 12, {"deferred": True, "chunk": 4}),
        ("deepseek_v3", 6, {"chunk": 4}),
        ("deepseek_v3", 18, {"apart": True, "expert_slots": 5}),
    ],
)
def test_every_op(folder: Folder, alone: Any, stride: int, name: str, first: int, device: dict[str, Any]) -> None:
    """Some of them, others on each device."""
    model = load_faulty(folder(name))
    recurrent = bool(model.variant.layers_with(GatedDelta))
    found = sweep(
        folder(name), alone(name), DeviceError, lambda n: {"fail_at_op": n, **device}, 23 * stride, first=first
    )
    assert set(found) == ({"kept", "lost"} if recurrent else {"kept"}) or stride > 1


def test_single_tokens_go_last(folder: Folder, alone: Any, stride: int, on_cuda: str | None) -> None:
    """Of three passes. A session without a copy of its state is in the last one, and what is not in it has a copy."""
    name = "qwen3_5_moe"

    def outcomes(order: tuple[int, ...]) -> list[str]:
        return sweep(
            folder(name), alone(name), DeviceError, lambda n: {"fail_at_op": n, "chunk": 4}, 9 * stride, (order,)
        )

    found = outcomes((LONE, 0, 1, 2, 3))
    assert set(found) == {"kept"}
    found = outcomes((0, 2, 3, LONE, 1))
    first_lost = found.index("lost")
    last_kept = len(found) - 1 - found[::-1].index("kept")
    # Experts that arrive together are one op, so the last pass begins some ops sooner or later from run to run, and by
    # more on a GPU, which computes them as fast as they arrive.
    assert last_kept - first_lost <= (8 if on_cuda == "real" else 2)
    assert first_lost > len(found) / 2


def test_every_copy(folder: Folder, alone: Any, stride: int) -> None:
    """Among them those that are made for the way back."""
    options = {"apart": True, "expert_slots": 5, "look_ahead": "off"}
    name = "qwen3_5_moe"
    found = sweep(folder(name), alone(name), DeviceError, lambda n: {"fail_at_copy": n, **options}, 7 * stride)
    assert set(found) == {"kept", "lost"} or stride > 1


@pytest.mark.parametrize("device", ({}, {"deferred": True}, {"chunk": 4, "readers": 3}))
@pytest.mark.parametrize("name", ("qwen3_5_moe", "deepseek_v3"))
def test_every_read(folder: Folder, alone: Any, stride: int, name: str, device: dict[str, Any]) -> None:
    options = {"expert_slots": 6, "look_ahead": "off", **device}
    found = sweep(
        folder(name), alone(name), IoError, lambda n: {"fault": _core.FaultPlan("error", n), **options}, 11 * stride
    )
    assert "kept" in found or stride > 1


@pytest.mark.parametrize("chunk", (16, 4))
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_breaks_its_session_alone(
    folder: Folder, alone: Any, tmp_path: Path, name: str, chunk: int
) -> None:
    expected, bad = alone(name), STREAMS[1][7]
    users = {i for i, ids in enumerate(STREAMS) if bad in ids[: STARTS[i] + CUT[i] + 1]}
    assert users == {1}
    store = Path(shutil.copytree(folder(name), tmp_path / name))
    plant_nan(store, bad)
    company = Company(load_faulty(store, chunk=chunk, expert_slots=6), expected)
    for kind in ("last", "all"):
        with pytest.raises(moeflux.Error, match=r"^work\[1\]: logits\[\d+\]: expected a finite .*; the other") as error:
            company.model.evaluate(company.work(ORDERS[0]), kind)
        assert type(error.value) is moeflux.Error
        assert [session.position for session in company.sessions] == [3, 5, 6, 1, 7]
        with pytest.raises(StateError, match="its logits were not finite; clear it or restore"):
            company.sessions[1].step(1)
        for i in (0, 2, 3, 4):
            end = STARTS[i] + CUT[i]
            assert np.array_equal(company.sessions[i].prefill([]).numpy(), expected[i][end - 1])
            assert company.sessions[i].tokens == STREAMS[i][:end]
        for i in range(len(STREAMS)):
            company.bring(i)


# ---- Given up -----------------------------------------------------------------------------------------------------


def held(folder: Path, expected: list[np.ndarray], call: int | None, **options: Any) -> tuple[Company, Any]:
    """A company whose read number `call`, counted from when it is together, waits."""
    plan = _core.FaultPlan("error", 0)
    Company(load_faulty(folder, fault=plan, look_ahead="off", **options), expected)
    if call is None:
        return held(folder, expected, 1 << 30, **options)
    plan = _core.FaultPlan("hold", plan.calls + call)
    return Company(load_faulty(folder, fault=plan, look_ahead="off", **options), expected), plan


@pytest.mark.parametrize("device", ({}, {"deferred": True}, {"chunk": 4}))
@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_is_given_up(folder: Folder, alone: Any, name: str, device: dict[str, Any]) -> None:
    """Nobody has moved. Without a way back for everybody, it comes to its end."""
    order, options = ORDERS[1], {"expert_slots": 5, **device}
    company, plan = held(folder(name), alone(name), None, **options)
    before = plan.calls
    company.model.evaluate(company.work(order))
    reads = plan.calls - before
    for call, order in ((2, ORDERS[1]), (reads * 3 // 4, ORDERS[1]), (2, ORDERS[0])):
        company, plan = held(folder(name), alone(name), call, **options)
        logits = [company.sessions[i]._logits() for i in (1, 2, 4)]
        start, cancel = plan.calls, Cancel()

        def act(plan: Any = plan, cancel: Cancel = cancel, at: int = start + call) -> None:
            while plan.calls < at:
                time.sleep(0.001)
            cancel.set()
            plan.release()

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        whole = LONE in order and name == "qwen3_5_moe" and "chunk" not in device
        if whole:
            company.go(order, cancel)
        else:
            with pytest.raises(Cancelled):
                company.go(order, cancel)
            company.stand()
            for i, each in zip((1, 2, 4), logits, strict=True):  # those that an earlier pass has replaced are gone
                assert each.current or "chunk" in device
                if each.current:
                    assert np.array_equal(each.numpy(), company.expected[i][STARTS[i] - 1])
            with pytest.raises(Cancelled):
                company.go(order, cancel)
            company.go(order)
        thread.join()
        company.go_on(order)


# ---- Several threads ----------------------------------------------------------------------------------------------


def test_a_session_that_somebody_else_uses(folder: Folder, alone: Any) -> None:
    expected = alone("qwen3_moe")
    company, plan = held(folder("qwen3_moe"), expected, 2, expert_slots=5)
    first, second = company.sessions[:2]
    thread = threading.Thread(target=first.prefill, args=(STREAMS[0][:3],))
    at = plan.calls + 2
    thread.start()
    while plan.calls < at:
        time.sleep(0.001)
    logits, memory = second._logits(), company.model._engine.memory.rows
    with pytest.raises(StateError, match=r"work\[1\]: session: expected one caller at a time, found a call under way"):
        company.model.evaluate([(second, STREAMS[1][5:9]), (first, [1])])
    assert (second.position, company.model._engine.memory.rows) == (5, memory) and logits.current
    plan.release()
    thread.join()
    assert np.array_equal(second.prefill(STREAMS[1][5:9], logits="all"), expected[1][5:9])
    assert np.array_equal(first.step(STREAMS[0][3]).numpy(), expected[0][3])


def test_threads_that_want_the_same_sessions(folder: Folder, alone: Any) -> None:
    """In other orders: each call gets all of its sessions or none, and nobody waits for ever."""
    expected, model = alone("qwen3_moe"), load_faulty(folder("qwen3_moe"))
    pair, own = [model.session() for _ in range(2)], [model.session() for _ in range(2)]
    done: list[list[int]] = [[], []]
    wrong: list[BaseException] = []

    def work(who: int) -> None:
        order = pair if who == 0 else pair[::-1]
        for token in STREAMS[0][:25]:
            mine = STREAMS[who][own[who].position]
            try:
                rows = model.evaluate([(own[who], [mine]), *((session, [token]) for session in order)])
            except StateError:
                continue
            except BaseException as error:
                wrong.append(error)
                return
            done[who].append(token)
            if not np.array_equal(rows[0].numpy(), expected[who][own[who].position - 1]):
                wrong.append(AssertionError(who))

    threads = [threading.Thread(target=work, args=(who,), daemon=True) for who in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not wrong
    assert [session.position for session in own] == [len(each) for each in done]
    assert pair[0].tokens == pair[1].tokens and len(pair[0].tokens) == sum(map(len, done)) > 0
    again = model.session().prefill(pair[0].tokens)
    for session in pair:
        assert np.array_equal(session.prefill([]).numpy(), again.numpy())
