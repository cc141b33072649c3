"""Failures and ends: whom they concern, what they leave, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import pytest

import moeflux
from moeflux import ArgumentError, Refused, Sampling, StateError
from moeflux.serving import Request, Scheduler
from support.engine import Folder, load_faulty
from support.evaluated import plant_nan
from support.served import Alone, Gate, ask, text, until

NAMES = ("qwen3_5_moe", "qwen3_moe", "deepseek_v3")


# ---- Failures ---------------------------------------------------------------------------------------------------


def test_a_failure_ends_no_answer_that_can_be_made_again(
    folder: Folder, alone: Alone, caplog: pytest.LogCaptureFixture
) -> None:
    """The step has left the recurrent state of all who ran in pieces. It is made again, from where some was kept."""
    with caplog.at_level(logging.WARNING, "moeflux"):
        for number in range(300, 2400, 300):
            model = load_faulty(folder("qwen3_5_moe"), fail_at_op=number)
            with Scheduler(model, running=3) as scheduler:
                answers = [scheduler.submit(ask(seed, max_tokens=30)) for seed in range(5)]
                for seed, answer in enumerate(answers):
                    assert (answer.wait().tokens, answer.finish) == alone(ask(seed, max_tokens=30))
                assert scheduler.stats.failed == 0
    assert "an answer is made again from where its state is kept: " in caplog.text


def test_who_is_at_fault_fails_and_is_told_once(
    folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A token whose weights are no numbers breaks the session of whoever says it, as often as it is tried."""
    store = Path(shutil.copytree(folder("qwen3_5_moe"), tmp_path / "damaged"))
    bad = text(30, seed=2)[20]
    plant_nan(store, bad)
    others = [request for request in (ask(seed, 12) for seed in range(3, 20)) if bad not in request.prompt][:3]
    model = load_faulty(store)
    expected = Alone(model)
    with caplog.at_level(logging.WARNING, "moeflux"), Scheduler(model, running=4, rows=16) as scheduler:
        answers = [scheduler.submit(request) for request in others]
        failing = scheduler.submit(ask(2, 30))
        with pytest.raises(moeflux.Error, match="expected a finite number"):
            failing.wait()
        assert list(failing) == [] and failing.finish == "failed"
        for request, answer in zip(others, answers, strict=True):
            assert (answer.wait().tokens, answer.finish) == expected(request)
        assert scheduler.stats.failed == 1
    assert 1 <= caplog.text.count("an answer is made again") <= 2


def test_a_step_that_fails_fails_those_that_it_was_for(model: moeflux.Model, alone: Alone) -> None:
    gate = Gate()
    with Scheduler(model, decoder=gate, running=2) as scheduler:
        answers = [scheduler.submit(ask(seed)) for seed in (1, 2, 3)]
        gate.let(1)  # the first may have been alone in that step
        gate.failures.append(moeflux.DeviceError("the device is gone"))
        gate.open()
        for answer in answers[:2]:
            with pytest.raises(moeflux.DeviceError, match="the device is gone"):
                answer.wait()
        assert answers[2].wait().tokens == alone(ask(3))[0]


def test_a_session_that_cannot_be_made_fails_its_request_alone(
    folder: Folder, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_faulty(folder("qwen3_5_moe"))
    with Scheduler(model, running=1) as scheduler:
        first = ask(1)
        said = [*first.prompt, *scheduler.submit(first).wait().tokens]
        fork = moeflux.Session.fork

        def failing(session: moeflux.Session, position: int | None = None) -> moeflux.Session:
            monkeypatch.setattr(moeflux.Session, "fork", fork)
            raise moeflux.IoError("the system has no memory")

        monkeypatch.setattr(moeflux.Session, "fork", failing)
        second = Request([*said, 1, 2, 3], max_tokens=4, sampling=Sampling(1.0, seed=1))
        with pytest.raises(moeflux.IoError, match="the system has no memory"):
            scheduler.submit(second).wait()
        answer = scheduler.submit(second).wait()
        assert answer.tokens == alone(second)[0] and answer.stats.reused_tokens == len(said) - 1


def test_a_turn_that_fails_is_told_in_event_loops_too(
    model: moeflux.Model, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else asks meanwhile, whose turn would tell of it."""

    async def answered(scheduler: Scheduler) -> None:
        async for _ in scheduler.submit(ask(1)):
            pass

    with Scheduler(model) as scheduler:
        admission = scheduler._loop._admission
        tidy = admission.tidy

        def failing(now: float) -> float | None:
            monkeypatch.setattr(admission, "tidy", tidy)
            raise moeflux.IoError("the system has no memory")

        monkeypatch.setattr(admission, "tidy", failing)
        with pytest.raises(moeflux.IoError, match="the system has no memory"):
            asyncio.run(asyncio.wait_for(answered(scheduler), 60))
        assert scheduler.submit(ask(1)).wait().tokens == alone(ask(1))[0]


def test_an_error_in_the_scheduler_itself_ends_all_and_hangs_nobody(model: moeflux.Model) -> None:
    gate = Gate()
    scheduler = Scheduler(model, decoder=gate, running=1)
    answers = [scheduler.submit(ask(seed)) for seed in (1, 2)]
    gate.wait()
    gate.failures.append(ZeroDivisionError("a defect"))
    gate.open()
    for answer in answers:
        with pytest.raises(ZeroDivisionError, match="a defect"):
            answer.wait()
    with pytest.raises(Refused, match="closing or closed"):
        scheduler.submit(ask(3))
    scheduler.close()
    assert scheduler.closed


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([]), "prompt: expected at least one token, found none"),
        (Request([1, 384]), "prompt: expected tokens 0 to 383, found 384"),
        (Request([1.5]), "tokens: expected whole numbers"),  # type: ignore[list-item]
        (Request([1], max_tokens=0), "max_tokens: expected at least 1"),
        (Request([1], logprobs=-1), "logprobs: expected 0 to"),
        (Request([1], deadline=-1), "timeout: expected seconds"),
        (Request([1], tenant=3), "tenant: expected a name, found 3"),  # type: ignore[arg-type]
        (Request([1], priority=1.5), "priority: expected a whole number, found 1.5"),  # type: ignore[arg-type]
        (Request([1], borders=[1.5]), "tokens: expected whole numbers"),  # type: ignore[list-item]
        ([1, 2], "submit: expected a Request, found list"),
    ],
)
def test_wrong_requests(model: moeflux.Model, request_: Request, message: str) -> None:
    with Scheduler(model) as scheduler, pytest.raises(ArgumentError, match=message):
        scheduler.submit(request_)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"running": 0}, "running: expected a whole number of at least 1"),
        ({"waiting": -1}, "waiting: expected"),
        ({"rows": -1}, "rows: expected"),
        ({"prompt_rows": 0}, "prompt_rows: expected"),
        ({"checkpoints": 0}, "checkpoints: expected"),
        ({"idle_seconds": -1}, "idle_seconds: expected seconds"),
        ({"disk_quota": "much"}, "disk_quota: expected bytes"),
    ],
)
def test_wrong_options(model: moeflux.Model, options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Scheduler(model, **options)  # type: ignore[arg-type]


def test_an_answer_goes_with_its_handle(model: moeflux.Model) -> None:
    """When nobody has that any more. What waits for the collector of cycles instead is memory that grows for thousands
    of requests."""
    gc.collect()
    gc.disable()
    try:
        with Scheduler(model, running=2) as scheduler:
            answers = [scheduler.submit(ask(seed, 12)) for seed in range(4)]
            answers[1].cancel()
            gone = [weakref.ref(answer) for answer in answers]
            while answers:
                answers.pop().wait()
            until(lambda: all(answer() is None for answer in gone))
    finally:
        gc.enable()


# ---- The end ----------------------------------------------------------------------------------------------------


def test_it_drains(model: moeflux.Model, alone: Alone) -> None:
    gate = Gate()
    scheduler = Scheduler(model, decoder=gate, running=1)
    answers = [scheduler.submit(ask(seed)) for seed in range(4)]
    gate.wait()
    closer = threading.Thread(target=scheduler.close)
    closer.start()
    until(lambda: scheduler._loop._closing == "drain")
    with pytest.raises(Refused, match="expected a scheduler that is open, found it closing or closed"):
        scheduler.submit(ask(9))
    gate.open()
    closer.join()
    assert scheduler.closed
    assert [answer.tokens for answer in answers] == [alone(ask(seed))[0] for seed in range(4)]
    scheduler.close()


def test_it_ends_at_once(model: moeflux.Model) -> None:
    gate = Gate()
    scheduler = Scheduler(model, decoder=gate, running=1)
    answers = [scheduler.submit(ask(seed, max_tokens=500)) for seed in range(3)]
    gate.wait()
    scheduler.close(drain=False)
    assert [answer.wait().finish for answer in answers] == ["cancelled"] * 3


def test_an_exception_in_its_with_ends_it_at_once(model: moeflux.Model) -> None:
    gate = Gate()
    with pytest.raises(ZeroDivisionError), Scheduler(model, decoder=gate) as scheduler:
        answer = scheduler.submit(ask(1, max_tokens=500))
        gate.wait()
        raise ZeroDivisionError
    assert answer.finish == "cancelled"


def test_memory_comes_back(folder: Folder) -> None:
    model = load_faulty(folder("qwen3_5_moe"))
    with Scheduler(model, running=3) as scheduler:
        for answer in [scheduler.submit(ask(seed)) for seed in range(8)]:
            answer.wait()
        assert model._engine.sessions == scheduler.stats.idle > 0
    assert (model._engine.sessions, model._engine.memory.sessions) == (0, 0)


def test_a_scheduler_that_nobody_has_ends(model: moeflux.Model) -> None:
    scheduler = Scheduler(model)
    thread = scheduler._thread
    scheduler.submit(ask(1)).wait()
    del scheduler
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_model_that_was_closed(folder: Folder) -> None:
    model = load_faulty(folder("qwen3_5_moe"))
    with Scheduler(model) as scheduler:
        scheduler.submit(ask(1)).wait()
        model.close()
        with pytest.raises(StateError, match="submit: expected a model that is open, found it closed"):
            scheduler.submit(ask(2))


def test_a_model_that_is_closed_meanwhile(folder: Folder) -> None:
    """Nobody hangs."""
    model, gate = load_faulty(folder("qwen3_5_moe")), Gate()
    with Scheduler(model, decoder=gate, running=1) as scheduler:
        answers = [scheduler.submit(ask(seed)) for seed in (1, 2)]
        gate.wait()
        model.close()
        gate.open()
        for answer in answers:
            with pytest.raises(StateError, match="closed"):
                answer.wait()


def test_a_model_that_is_closed_before(folder: Folder) -> None:
    model, gate = load_faulty(folder("qwen3_5_moe")), Gate()
    scheduler = Scheduler(model, decoder=gate, running=1)
    answer = scheduler.submit(ask(1))
    gate.wait()
    model.close()
    scheduler.close(drain=False)
    assert answer.wait().finish == "cancelled" and scheduler.closed


CHILD = """
    import os, signal, sys, threading
    from pathlib import Path
    from moeflux.serving import Request, Scheduler
    from support.engine import load_faulty

    signal.signal(signal.SIGINT, signal.default_int_handler)
    told = threading.Event()

    def mask(said):
        if len(said) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            told.wait()

    model = load_faulty(Path(sys.argv[1]))
"""
AT_THE_END = {
    "nobody closes it": """
        scheduler = Scheduler(model)
        next(scheduler.submit(Request([1, 2, 3], max_tokens=900, ignore_end=True)))
        print("the end")
    """,
    "Ctrl-C": """
        try:
            with Scheduler(model) as scheduler:
                answer = scheduler.submit(Request([1, 2, 3], max_tokens=900, ignore_end=True, mask=mask))
                try:
                    answer.wait()
                finally:
                    told.set()
        except KeyboardInterrupt:
            print("the end" if answer.finish == "cancelled" and len(answer.tokens) < 10 else answer)
    """,
}


@pytest.mark.parametrize("kind", AT_THE_END)
def test_the_process_ends(folder: Folder, kind: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD) + textwrap.dedent(AT_THE_END[kind]), folder("qwen3_5_moe")],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "the end\n", "")
