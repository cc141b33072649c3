"""Many requests at once: each gets the answer that it would get alone, however it is read and whatever becomes of the
others."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moeflux
from moeflux import ArgumentError, Refused, Sampling
from moeflux.serving import Handle, Request, Scheduler
from moeflux.serving.handle import Bell
from moeflux.text.answer_text import AnswerText
from moeflux.text.generate import Piece
from support.engine import Folder, load_faulty
from support.served import Alone, Gate, ask, text, until

NAMES = ("qwen3_5_moe", "qwen3_moe", "deepseek_v3")


# ---- The same answers -------------------------------------------------------------------------------------------


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[Request, int]]:
    """Requests, and after how many steps each comes. Some share beginnings."""
    requests = []
    for _ in range(draw(st.integers(1, 7))):
        common, own = draw(st.sampled_from((0, 40, 70))), draw(st.integers(1, 60))
        prompt = text(common, 3) + text(own, draw(st.integers(1, 3)))
        request = Request(
            prompt,
            max_tokens=draw(st.integers(1, 12)),
            sampling=Sampling(draw(st.sampled_from((0.0, 1.0))), seed=draw(st.integers(0, 2))),
            stop_tokens=draw(st.sampled_from(((), (5, 6, 7)))),
            tenant=draw(st.sampled_from("ab")),
            priority=draw(st.integers(0, 1)),
            borders=draw(st.sampled_from(((), (40,), (70,), (40, 60, 70)))),
        )
        requests.append((request, draw(st.integers(0, 6))))
    return requests


@settings(max_examples=25)
@given(
    st.sampled_from(NAMES),
    schedules(),
    st.integers(1, 4),
    st.sampled_from((3, 16, 64)),
    st.sampled_from((2, 16)),
    st.integers(1, 4),
)
def test_company_and_order_change_no_answer(
    everybody_alone: dict[str, Alone],
    name: str,
    schedule: list[tuple[Request, int]],
    running: int,
    rows: int,
    prompt_rows: int,
    idle: int,
) -> None:
    alone = everybody_alone[name]
    gate = Gate()
    with Scheduler(
        alone._model, decoder=gate, running=running, rows=rows, prompt_rows=prompt_rows, idle=idle, checkpoint_every=32
    ) as scheduler:
        answers = []
        for request, steps in schedule:
            answers.append((request, scheduler.submit(request)))
            for _ in range(steps):
                gate.let_one([answer for _, answer in answers])
        gate.open()
        for request, answer in answers:
            assert (answer.wait().tokens, answer.finish) == alone(request)


def test_text_is_that_of_a_session(talker: moeflux.Model) -> None:
    """Pieces, stop strings, logprobs and what is held back at the end."""
    options = {"max_tokens": 30, "stop": [". She", "village by"], "logprobs": 2}
    prompts = ["Once upon a time, there was a fox", "Once upon a time", "The king", "🦊"]
    sampling = Sampling(0.8, seed=4)
    with Scheduler(talker, running=3) as scheduler:
        answers = [scheduler.submit(Request(prompt, sampling=sampling, **options)) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            expected = talker.session().complete(prompt, sampling=sampling, **options)
            found = answer.completion()
            assert (found, found.finish, found.stop_string) == (expected, expected.finish, expected.stop_string)
            assert found.tokens == expected.tokens
            for ours, theirs in zip(found.pieces, expected.pieces, strict=True):
                assert (ours.text, ours.logprob, ours.top) == (theirs.text, theirs.logprob, theirs.top)
            assert answer.stats.tokens == len(found.tokens) and answer.stats.prompt_tokens == len(answer.prompt)


def test_a_seed_that_nobody_gave_is_told(talker: moeflux.Model) -> None:
    with Scheduler(talker) as scheduler:
        answer = scheduler.submit(Request("Once", max_tokens=20, sampling=Sampling(1.0)))
        said = answer.completion()
    assert talker.session().complete("Once", max_tokens=20, sampling=answer.sampling) == said


def test_a_full_context_ends_an_answer(folder: Folder) -> None:
    model = load_faulty(folder("qwen3_moe"))
    model.session = lambda *_: moeflux.Model.session(model, 30)  # type: ignore[method-assign]
    with Scheduler(model) as scheduler:
        found = [scheduler.submit(Request(text(28), ignore_end=True, max_tokens=count)) for count in (None, 3, 2)]
        assert [(answer.wait().finish, len(answer.tokens)) for answer in found] == [
            ("context", 3),
            ("length", 3),
            ("length", 2),
        ]
        with pytest.raises(ArgumentError, match=r"prompt: expected at most 30 tokens \(the context\), found 31"):
            scheduler.submit(Request(text(31)))


def test_masks(model: moeflux.Model, alone: Alone) -> None:
    """Each choice is made within what its mask allows; who has none is not concerned."""
    vocab, allowed = model.variant.vocab_size, [3, 17, 40]
    asked: list[tuple[int, ...]] = []

    def mask(said: tuple[int, ...]) -> np.ndarray | None:
        asked.append(tuple(said))
        if len(said) == 2:
            return None
        bits = np.zeros(-(-vocab // 32), np.uint32)
        for token in allowed:
            bits[token // 32] |= np.uint32(1 << token % 32)
        return bits

    def broken(said: tuple[int, ...]) -> np.ndarray | None:
        if len(said) == 2:
            raise LookupError("a mask that fails")
        return None

    with Scheduler(model, running=3) as scheduler:
        free = scheduler.submit(ask(1))
        bound = scheduler.submit(ask(1, mask=mask))  # type: ignore[arg-type]
        failing = scheduler.submit(ask(1, mask=broken))  # type: ignore[arg-type]
        with pytest.raises(LookupError, match="a mask that fails"):
            failing.wait()
        assert (failing.finish, failing.tokens) == ("failed", alone(ask(1))[0][:2])
        assert all(token in allowed for place, token in enumerate(bound.wait().tokens) if place != 2)
        assert (free.wait().tokens, free.finish) == alone(ask(1))
    assert asked == [tuple(bound.tokens[:count]) for count in range(len(bound.tokens))]


# ---- Threads and event loops ------------------------------------------------------------------------------------


def test_requests_from_many_threads(model: moeflux.Model, alone: Alone) -> None:
    expected = [alone(ask(seed)) for seed in range(6)]
    found: dict[int, tuple[list[int], str | None]] = {}
    with Scheduler(model, running=3) as scheduler:

        def work(number: int) -> None:
            answer = scheduler.submit(ask(number % 6))
            pieces = [piece.token for piece in answer]
            assert pieces == answer.tokens
            found[number] = answer.tokens, answer.finish

        threads = [threading.Thread(target=work, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {number: expected[number % 6] for number in range(24)}


def test_many_answers_in_one_event_loop(model: moeflux.Model, alone: Alone) -> None:
    """None of them needs a thread."""

    async def one(scheduler: Scheduler, seed: int) -> list[int | None]:
        return [piece.token async for piece in scheduler.submit(ask(seed))]

    async def all_of_them(scheduler: Scheduler) -> list[list[int | None]]:
        found = await asyncio.gather(*(one(scheduler, seed % 6) for seed in range(50)))
        assert asyncio.get_running_loop()._default_executor is None  # type: ignore[attr-defined]
        return found

    with Scheduler(model, running=4) as scheduler:
        found = asyncio.run(all_of_them(scheduler))
    assert found == [alone(ask(seed % 6))[0] for seed in range(50)]


def test_a_task_that_is_cancelled_cancels_its_answer(model: moeflux.Model) -> None:
    gate = Gate()

    async def program(scheduler: Scheduler) -> Handle:
        answer = scheduler.submit(ask(1, max_tokens=500))
        task = asyncio.ensure_future(answer.__anext__())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return answer

    with Scheduler(model, decoder=gate, running=1) as scheduler:
        answer = asyncio.run(program(scheduler))
        gate.open()
        assert answer.wait().finish == "cancelled" and len(answer.tokens) < 500


def test_an_event_loop_that_has_ended_harms_nobody(model: moeflux.Model, alone: Alone) -> None:
    gate = Gate()
    with Scheduler(model, decoder=gate, running=2) as scheduler:
        answer = scheduler.submit(ask(1))
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(answer.__anext__())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        other = scheduler.submit(ask(2))
        gate.open()
        assert other.wait().tokens == alone(ask(2))[0] and not waiting.done()
        waiting._log_destroy_pending = False  # type: ignore[attr-defined]
        assert answer.wait().tokens == alone(ask(1))[0]


def test_who_follows_answers_has_all_of_them_with_one_wait(model: moeflux.Model, alone: Alone) -> None:
    async def program(scheduler: Scheduler) -> list[list[int | None]]:
        came, found = asyncio.Event(), [list[int | None]() for _ in range(4)]
        left = {number: scheduler.submit(ask(number)) for number in range(4)}
        until(lambda: left[3].finish)  # what came before is there, too
        for answer in left.values():
            answer.follow(came.set)
        while left:
            await came.wait()
            came.clear()
            for number, answer in list(left.items()):
                while pieces := answer.arrived():
                    found[number] += [piece.token for piece in pieces]
                if pieces is None:
                    del left[number]
        return found

    with Scheduler(model, running=2) as scheduler:
        found = asyncio.run(program(scheduler))
    assert found == [alone(ask(number))[0] for number in range(4)]


def test_who_follows_has_an_error_once_and_after_what_came() -> None:
    async def program() -> None:
        bell, told = Bell(), list[int]()
        answer = Handle([1], Sampling(0.0), lambda: None, bell)
        answer.follow(lambda: told.append(1))
        assert answer.arrived() == [] and not told
        answer.over("failed", ValueError("gone"))
        bell.ring()
        await asyncio.sleep(0)
        assert told == [1]
        with pytest.raises(ValueError, match="gone"):
            answer.arrived()
        assert answer.arrived() is None
        answer.follow(lambda: told.append(2))
        assert told == [1, 2]

    asyncio.run(program())


def test_who_follows_is_told_once_until_it_asks(model: moeflux.Model) -> None:
    """To tell takes a system call, and somebody may look less often than tokens come. The end is told even so."""

    async def program() -> None:
        bell, told = Bell(), list[int]()
        answer = Handle([1], Sampling(0.0), lambda: None, bell)
        text, stats = AnswerText(None), model.session().stats

        async def say(word: str) -> None:
            answer.say(Piece(word, 7, stats), text)
            bell.ring()
            await asyncio.sleep(0)

        answer.follow(lambda: told.append(len(told)))
        for word in "abc":
            await say(word)
        assert told == [0]
        pieces = answer.arrived()
        assert pieces is not None and [piece.text for piece in pieces] == ["a", "b", "c"]
        await say("d")
        answer.over("cancelled", None)
        bell.ring()
        await asyncio.sleep(0)
        assert told == [0, 1, 2] and answer.arrived() and answer.arrived() is None

    asyncio.run(program())


def test_who_awaits_is_woken_once_for_all_answers() -> None:
    """A call takes as long as a token of a small model."""

    async def program() -> list[object]:
        loop, calls, bell = asyncio.get_running_loop(), list[object](), Bell()
        answers = [Handle([1], Sampling(0.0), lambda: None, bell) for _ in range(5)]

        async def rest(answer: Handle) -> list[object]:
            return [piece async for piece in answer]

        waiting = [asyncio.ensure_future(rest(answer)) for answer in answers]
        await asyncio.sleep(0)
        really = loop.call_soon_threadsafe

        def counted(*call: Any) -> object:
            calls.append(call)
            return really(*call)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]
        for answer in answers:
            answer.over("cancelled", None)
        assert not calls
        bell.ring()
        bell.ring()
        assert await asyncio.gather(*waiting) == [[]] * 5
        return calls

    assert len(asyncio.run(program())) == 1


def test_how_much_of_a_prompt_is_read_is_told(model: moeflux.Model) -> None:
    gate = Gate()
    with Scheduler(model, decoder=gate, running=1, rows=16) as scheduler:
        long = scheduler.submit(ask(1, prompt=100, borders=(60,)))
        assert long.prompt_read == 0
        gate.wait()
        gate.let(3)
        assert 0 < long.prompt_read == sum(rows[1] for rows in gate.rows) <= 48
        gate.open()
        assert long.wait().prompt_read == 100
        gate.opened = False
        again = scheduler.submit(ask(1, prompt=100, borders=(60,)))
        gate.wait()
        assert 0 < again.prompt_read == again.stats.reused_tokens < 100
        again.read(again.prompt_read - 1)  # as after it was put aside
        assert again.prompt_read == again.stats.reused_tokens
        gate.open()


# ---- Ending early -----------------------------------------------------------------------------------------------


def test_cancel_in_the_midst_of_a_prompt(model: moeflux.Model, alone: Alone) -> None:
    gate = Gate()
    with Scheduler(model, decoder=gate, running=2, rows=16) as scheduler:
        long = scheduler.submit(ask(1, prompt=400))
        gate.wait()
        gate.let(3)
        long.cancel()
        short = scheduler.submit(ask(2))
        gate.open()
        assert long.wait().finish == "cancelled" and not long.tokens
        assert (short.wait().tokens, short.finish) == alone(ask(2))
        assert sum(rows.get(1, 0) for rows in gate.rows) <= 4 * 16, "at most the step that was about to begin"
        long.cancel()  # once more changes nothing


def test_cancel_while_it_waits(model: moeflux.Model) -> None:
    gate = Gate()
    with Scheduler(model, decoder=gate, running=1) as scheduler:
        first, second = scheduler.submit(ask(1)), scheduler.submit(ask(2))
        gate.wait()
        second.cancel()
        gate.let(1)
        assert second.wait().finish == "cancelled" and second.waited_seconds is None
        gate.open()
        assert first.wait().finish == "length"
        assert (scheduler.stats.cancelled, scheduler.stats.ended) == (1, 2)


def test_what_was_held_back_comes_at_the_end(talker: moeflux.Model) -> None:
    gate = Gate()
    options = {"stop": ["lived in a castle"], "max_tokens": 40, "sampling": Sampling()}
    whole = talker.session().complete("Once upon a time, there was a little fox who", **options)
    assert whole.startswith(" lived in a")
    with Scheduler(talker, decoder=gate, running=1) as scheduler:
        answer = scheduler.submit(Request("Once upon a time, there was a little fox who", **options))
        gate.wait()
        gate.let(2)
        answer.cancel()
        gate.open()
        pieces = list(answer)
        assert [piece.text for piece in pieces[:2]] == [" ", ""] and pieces[-1].token is None
        assert "".join(piece.text for piece in pieces) == answer.text == " lived in a"[: len(answer.text)]


def test_deadlines(model: moeflux.Model, alone: Alone) -> None:
    """Of one that runs, of one that waits, and of one that has time."""
    gate = Gate()
    with Scheduler(model, decoder=gate, running=1) as scheduler:
        running = scheduler.submit(ask(1, max_tokens=500, deadline=1e6))
        gate.wait()
        waiting = scheduler.submit(ask(2, deadline=1e-6))
        patient = scheduler.submit(ask(3, deadline=1e6))
        (job,) = scheduler._loop._running.values()
        job.deadline = job.arrived  # its time is over
        gate.open()
        assert running.wait().finish == "timeout" and len(running.tokens) < 500
        assert waiting.wait().finish == "timeout" and not waiting.tokens
        assert (patient.wait().tokens, patient.finish) == alone(ask(3))
        assert scheduler.stats.timed_out == 2


# ---- Refusal, priorities, fairness ------------------------------------------------------------------------------


def test_a_full_line_refuses_and_says_how_long(model: moeflux.Model, alone: Alone) -> None:
    gate = Gate(opened=True)
    with Scheduler(model, decoder=gate, running=1, waiting=2) as scheduler:
        scheduler.submit(ask(9)).wait()
        gate.opened = False
        running = scheduler.submit(ask(1))
        gate.wait()
        accepted = [scheduler.submit(ask(seed)) for seed in (2, 3)]
        with pytest.raises(
            Refused, match="expected fewer than 2 requests waiting, found 2, which should take"
        ) as error:
            scheduler.submit(ask(4))
        assert error.value.waiting == 2 and error.value.seconds is not None and error.value.seconds > 0
        assert scheduler.stats.refused == 1
        gate.open()
        for seed, answer in zip((1, 2, 3), (running, *accepted), strict=True):
            assert answer.wait().tokens == alone(ask(seed))[0]
        assert scheduler.submit(ask(4)).wait().tokens == alone(ask(4))[0]


def begun(answers: list[Handle]) -> list[int]:
    return [place for place, answer in enumerate(answers) if answer.waited_seconds is not None]


def test_a_higher_priority_comes_first_and_puts_aside(model: moeflux.Model, alone: Alone) -> None:
    gate = Gate()
    with Scheduler(model, decoder=gate, running=2) as scheduler:
        low = [scheduler.submit(ask(seed, max_tokens=30)) for seed in (1, 2, 3)]
        gate.wait()
        gate.let(4)
        assert begun(low) == [0, 1]
        high = scheduler.submit(ask(4, max_tokens=30, priority=1))
        gate.let(2)
        assert high.waited_seconds is not None and [answer.put_aside for answer in low] == [0, 1, 0]
        gate.open()
        for seed, answer in zip((1, 2, 3, 4), (*low, high), strict=True):
            assert (answer.wait().tokens, answer.finish) == alone(ask(seed, max_tokens=30))
        assert scheduler.stats.put_aside == 1


def test_a_tenant_with_many_requests_does_not_keep_out_another(model: moeflux.Model, alone: Alone) -> None:
    gate = Gate()
    with Scheduler(model, decoder=gate, running=2) as scheduler:
        many = [scheduler.submit(ask(seed, max_tokens=30, tenant="many")) for seed in range(6)]
        gate.wait()
        gate.let(3)
        assert begun(many) == [0, 1]
        one = scheduler.submit(ask(7, max_tokens=30, tenant="one"))
        gate.let(2)
        assert one.waited_seconds is not None, "it has a place at once, for the other had both"
        gate.open()
        for seed, answer in zip((*range(6), 7), (*many, one), strict=True):
            assert answer.wait().tokens == alone(ask(seed, max_tokens=30))[0]
