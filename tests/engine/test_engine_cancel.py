"""Calls that are given up, by a Cancel that another thread sets or by Ctrl-C. They end between layers and reads. The
session is then where the chunk began, and goes on to the same bits. A call waits for a read that the test holds."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import Cancel, Cancelled, _core
from support.engine import FIRST, NEXT, Folder, folders, load_faulty, steps, tokens

LONG = tokens(12, seed=5)
RECURRENT = "qwen3_5_moe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("cancel"))


def load(path: Path, **options: Any) -> moeflux.Model:
    """What is read does not depend on what was read before."""
    return load_faulty(path, **options, look_ahead="off")


@contextmanager
def at_a_read(plan: _core.FaultPlan, call: int, act: Callable[[], object]) -> Iterator[None]:
    """While read number `call` is held, another thread acts; then the read goes on."""

    def work() -> None:
        while plan.calls < call:
            time.sleep(0.001)
        act()
        plan.release()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join()


def reads_of(folder: Path, prompts: list[list[int]], **options: Any) -> int:
    plan = _core.FaultPlan("error", 0)
    session = load(folder, fault=plan, **options).session()
    for prompt in prompts:
        session.prefill(prompt)
    return plan.calls


def expected_behind(folder: Path, prompts: list[list[int]], **options: Any) -> np.ndarray:
    session = load(folder, **options).session()
    for prompt in prompts:
        session.prefill(prompt)
    return steps(session, NEXT)


def give_up(path: Path, before: list[int], *, reads_all: bool = False, **options: Any) -> None:
    """`reads_all`: experts that nobody asked for are read too, so that the number of reads says nothing."""
    expected = expected_behind(path, [before, LONG])
    begun, all_reads = reads_of(path, [before], **options), reads_of(path, [before, LONG], **options)
    for call in (begun + 1, begun + (all_reads - begun) // 2):  # the last layer's may all be on their way
        plan, cancel = _core.FaultPlan("hold", call), Cancel()
        session = load(path, fault=plan, **options).session()
        if before:
            session.prefill(before)
        with at_a_read(plan, call, cancel.set), pytest.raises(Cancelled):
            session.prefill(LONG, cancel=cancel)
        assert session.position == len(before)
        assert plan.calls < all_reads or reads_all
        with pytest.raises(Cancelled):  # it stays set
            session.prefill(LONG, cancel=cancel)
        session.prefill(LONG)
        assert np.array_equal(steps(session, NEXT), expected)


@pytest.mark.parametrize("before", ([], FIRST), ids=("from nothing", "behind a prompt"))
@pytest.mark.parametrize(("slots", "device"), ((4, {}), (4, {"deferred": True}), (4, {"apart": True}), (0, {})))
@pytest.mark.parametrize("name", (RECURRENT, "qwen3_moe", "deepseek_v3"))
def test_a_prefill_is_given_up(
    folder: Folder,
    name: str,
    slots: int,
    device: dict[str, bool],
    before: list[int],
    on_metal: bool,
    on_cuda: str | None,
) -> None:
    reads_all = slots == 0 and (on_metal or on_cuda is not None)
    give_up(folder(name), before, reads_all=reads_all, expert_slots=slots, **device)


@pytest.mark.parametrize("name", (RECURRENT, "qwen3_moe"))
def test_a_step_is_given_up_where_it_can_be_taken_back(folder: Folder, name: str) -> None:
    expected = expected_behind(folder(name), [FIRST])
    for has_checkpoint in (True, False):
        begun = reads_of(folder(name), [FIRST], expert_slots=4)
        plan, cancel = _core.FaultPlan("hold", begun + 2), Cancel()
        session = load(folder(name), fault=plan, expert_slots=4).session()
        logits = session.prefill(FIRST)
        assert logits is not None
        before = logits.numpy()
        if has_checkpoint:
            session.checkpoint()
        whole = name == RECURRENT and not has_checkpoint
        with at_a_read(plan, begun + 2, cancel.set):
            if whole:
                found = [session.step(NEXT[0], cancel=cancel).numpy()]
            else:
                with pytest.raises(Cancelled):
                    session.step(NEXT[0], cancel=cancel)
                assert np.array_equal(logits.numpy(), before)  # as if it had never been asked for
                found = [session.step(NEXT[0]).numpy()]
        with pytest.raises(Cancelled):
            session.step(NEXT[1], cancel=cancel)
        found.append(session.step(NEXT[1]).numpy())
        assert np.array_equal(found, expected)


def test_without_a_way_back_a_chunk_comes_to_its_end(folder: Folder) -> None:
    """A session with as many checkpoints as there may be, none of them at the present position."""
    options = {"expert_slots": 4, "chunk": len(LONG)}
    call = reads_of(folder(RECURRENT), [FIRST[:1], FIRST[1:]], **options) + 2
    plan, cancel = _core.FaultPlan("hold", call), Cancel()
    session = load(folder(RECURRENT), fault=plan, **options).session()
    session.set_max_checkpoints(1)
    session.prefill(FIRST[:1])
    session.checkpoint()
    session.prefill(FIRST[1:])
    with at_a_read(plan, call, cancel.set), pytest.raises(Cancelled):
        session.prefill(LONG + LONG, cancel=cancel)
    assert session.position == len(FIRST + LONG)
    session.prefill(LONG)
    assert np.array_equal(steps(session, NEXT), expected_behind(folder(RECURRENT), [FIRST, LONG, LONG]))


def test_a_call_that_waits_for_its_turn_is_given_up(folder: Folder) -> None:
    plan, cancel = _core.FaultPlan("hold", 1), Cancel()
    model = load(folder("qwen3_moe"), fault=plan)
    sessions = [model.session(), model.session()]
    first = threading.Thread(target=sessions[0].prefill, args=(LONG,))
    first.start()
    while plan.calls < 1:
        time.sleep(0.001)
    threading.Timer(0.1, cancel.set).start()
    with pytest.raises(Cancelled):
        sessions[1].prefill(LONG, cancel=cancel)
    assert (sessions[0].position, sessions[1].position) == (0, 0)  # the first one waits still
    plan.release()
    first.join()
    sessions[1].prefill(LONG)
    assert np.array_equal(steps(sessions[0], NEXT), steps(sessions[1], NEXT))


CONTROL_C = """
    import os, signal, sys, threading, time
    from pathlib import Path
    import numpy as np
    from moeflux import _core
    from support.engine import FIRST, NEXT, load_faulty, steps, tokens

    name, what, call = sys.argv[1], sys.argv[2], int(sys.argv[3])
    plan = _core.FaultPlan("hold", call)
    session = load_faulty(Path(name), fault=plan, backend="cpu", expert_slots=4, look_ahead="off").session()
    session.prefill(FIRST)
    other = session.model.session()

    def interrupt():
        while plan.calls < call:
            time.sleep(0.001)
        time.sleep(0.2)  # Ctrl-C is looked for ten times a second
        os.kill(os.getpid(), signal.SIGINT)
        if what == "turn":
            main.wait()
        plan.release()

    main = threading.Event()
    threading.Thread(target=interrupt).start()
    if what == "turn":
        threading.Thread(target=other.prefill, args=(FIRST,)).start()
        while plan.calls < call:
            time.sleep(0.001)
    try:
        if what == "prefill":
            session.prefill(tokens(12, seed=5))
        else:
            session.step(NEXT[0])
        print("finished")
    except KeyboardInterrupt:
        print("interrupted at", session.position)
    main.set()
    if session.position == len(FIRST):
        sys.stdout.write(steps(session, NEXT).tobytes().hex())
"""


@pytest.mark.parametrize("what", ("prefill", "step", "turn"))
@pytest.mark.parametrize("name", (RECURRENT, "qwen3_moe"))
def test_control_c(folder: Folder, name: str, what: str) -> None:
    """Ctrl-C takes effect between layers. In a step that cannot be taken back, it does so after the step, where Python
    itself looks. Another process has no emulated GPU, so both use the CPU."""
    begun = reads_of(folder(name), [FIRST], backend="cpu", expert_slots=4)
    command = [sys.executable, "-c", textwrap.dedent(CONTROL_C), folder(name), what, begun + 2]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [*map(str, command)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if name == RECURRENT and what == "step":
        assert done.stdout == f"interrupted at {len(FIRST) + 1}\n"
        return
    expected = expected_behind(folder(name), [FIRST], backend="cpu").tobytes().hex()
    assert done.stdout == f"interrupted at {len(FIRST)}\n{expected}"


@pytest.mark.parametrize("part", ("prompt", "answer"))
def test_a_generation_is_cancelled_in_the_midst(part: str) -> None:
    """From another thread, while the engine is at work: it ends as cancelled, and the session goes on."""
    text = "Once upon a time there was a little girl, and she had a dog."
    asked = {"prompt": text, "max_tokens": 8, "temperature": 0, "ignore_end": True}
    path = moeflux.builtin.path()
    expected = load(path, expert_slots=16).session().generate(**asked)
    pieces = [piece.token for piece in expected]
    begun = reads_of(path, [expected.prompt], expert_slots=16)
    plan = _core.FaultPlan("hold", 20 if part == "prompt" else begun + 5)
    session = load(path, fault=plan, expert_slots=16).session()
    answer = session.generate(**asked)
    with at_a_read(plan, 20 if part == "prompt" else begun + 5, answer.cancel):
        found = [piece.token for piece in answer if piece.token is not None]
    assert answer.finish == "cancelled" and found == pieces[: len(found)]
    assert bool(found) == (part == "answer") and len(found) < len(pieces)
    assert [piece.token for piece in session.generate(**asked)] == pieces


@pytest.mark.usefixtures("backend")
def test_a_prefill_is_given_up_on_any_device(folder: Folder) -> None:
    give_up(folder(RECURRENT), FIRST, expert_slots=4)
