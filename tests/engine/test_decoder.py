"""Requests that are answered side by side. Each gets the answer that it would have got alone, to the last bit of its
log probabilities, whatever its company, and whatever becomes of that."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moeflux
from moeflux import ArgumentError, Cancel, Cancelled, StateError, _core
from moeflux.text.sampling import Sampler, Sampling
from support.decoded import CONTEXT, VOCAB, WISHES, Answer, Company, Wish, answer_alone
from support.engine import Folder, folders, load_faulty, tokens

NAMES = ("qwen3_5_moe", "qwen3_moe", "deepseek_v3")
DEVICES: dict[str, dict[str, Any]] = {
    "resident": {"threads": 2},
    "streamed": {"expert_slots": 5, "chunk": 5},
    "deferred": {"deferred": True, "expert_slots": 9, "look_ahead": "on"},
    "apart": {"apart": True, "expert_slots": 6, "cache": "none", "chunk": 9},
    "drafting": {"speculate": "lookup", "chunk": 24},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("decoder"))


Expect = Callable[[str], list[Answer]]


@pytest.fixture(scope="module")
def alone(folder: Folder) -> Expect:
    known: dict[str, list[Answer]] = {}

    def of(name: str) -> list[Answer]:
        if name not in known:
            known[name] = [answer_alone(load_faulty(folder(name)), wish) for wish in WISHES]
        return known[name]

    return of


# ---- Answers ------------------------------------------------------------------------------------------------------

SCHEDULES = st.lists(
    st.tuples(st.integers(0, len(WISHES) - 1), st.integers(0, 4), st.sampled_from((None, None, None, 0, 1, 3))),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_company_changes_no_answer(folder: Folder, alone: Expect, on_metal: bool, name: str, device: str) -> None:
    """Requests come at random steps, some are removed at random ones, and steps have few rows or many."""
    model, expected = load_faulty(folder(name), **DEVICES[device]), alone(name)

    @settings(max_examples=1 if on_metal else 6, database=None)
    @given(SCHEDULES, st.sampled_from((0, 2, 3, 7)), st.sampled_from((1, 4, 64)))
    def holds(schedule: list[tuple[int, int, int | None]], rows: int, prompt_rows: int) -> None:
        company = Company(model, rows, prompt_rows)
        which: dict[int, int] = {}
        leaves: list[tuple[int, int]] = []
        for place, wait, steps_to_live in schedule:
            for _ in range(wait):
                company.step()
                leaves = [(id, left - 1) for id, left in leaves]
                for id, left in leaves:
                    if left < 0:
                        assert company.decoder.remove(id)
            which[company.add(WISHES[place])] = place
            if steps_to_live is not None:
                leaves.append((max(which), steps_to_live))
        for id, _ in leaves:
            assert company.decoder.remove(id)
        company.finish()
        gone = {id for id, _ in leaves}
        for id, place in which.items():
            answer, whole = company.answers[id], expected[place]
            if id in gone and not answer.finish:
                count = len(answer.tokens)
                assert (answer.tokens, answer.said) == (whole.tokens[:count], whole.said[:count])
                go_on(company.sessions[id], model, WISHES[place], answer)
            else:
                assert answer == whole

    holds()


def go_on(session: moeflux.Session, model: moeflux.Model, wish: Wish, answer: Answer) -> None:
    """A session that was taken away holds the beginning of prompt and answer, and goes on as one that was alone."""
    text = [*wish.prompt, *answer.tokens]
    assert session.tokens == text[: session.position]
    assert len(text) - session.position <= 1 or not answer.tokens
    if session.position < CONTEXT:
        other = model.session(max_context=CONTEXT)
        assert np.array_equal(session.step(1).numpy(), other.prefill([*session.tokens[:-1], 1]).numpy())


def test_the_last_token_is_not_evaluated(folder: Folder) -> None:
    company = Company(load_faulty(folder("qwen3_moe")))
    ids = [company.add(wish) for wish in WISHES]
    company.finish()
    for id in ids:
        session, answer = company.sessions[id], company.answers[id]
        assert session.tokens == [*company.wishes[id].prompt, *answer.tokens[:-1]]
    assert {company.answers[id].finish for id in ids} == {"end", "length", "context"}


def test_a_step_gives_each_request_a_token(folder: Folder) -> None:
    company = Company(load_faulty(folder("qwen3_moe"), chunk=64))
    ids = [company.add(replace(WISHES[1], prompt=tuple(tokens(4, seed)), max_tokens=3)) for seed in range(5)]
    for place in range(3):
        assert [event.id for event in company.step()] == ids
        assert all(len(company.answers[id].tokens) == place + 1 for id in ids)
    assert company.step() == []


def test_prompts_are_read_beside_answers(folder: Folder) -> None:
    """As many tokens of them as may be, the oldest prompt first, and nobody who answers waits."""
    company = Company(load_faulty(folder("qwen3_moe"), chunk=32), prompt_rows=3)
    talks = company.add(replace(WISHES[1], max_tokens=30))
    company.step()
    first = company.add(replace(WISHES[2], prompt=tuple(tokens(7))))
    second = company.add(replace(WISHES[2], prompt=tuple(tokens(4))))
    evaluated = []
    for _ in range(5):
        events = {event.id: event for event in company.step()}
        assert events[talks].token is not None
        evaluated.append([events[id].evaluated if id in events else None for id in (first, second)])
    assert evaluated == [[3, None], [3, None], [1, 2], [0, 2], [0, 0]]
    company.decoder.remove(talks)
    whole = company.add(replace(WISHES[2], prompt=tuple(tokens(20))))
    company.decoder.remove(first)
    company.decoder.remove(second)
    assert [(event.id, event.evaluated) for event in company.step()] == [(whole, 20)], "nobody else waits"


def test_too_many_for_a_step_take_turns(folder: Folder) -> None:
    company = Company(load_faulty(folder("qwen3_moe")), rows=3)
    ids = [company.add(replace(WISHES[1], prompt=(seed,), max_tokens=40)) for seed in range(1, 8)]
    while not all(company.answers[id].tokens for id in ids):
        company.step()
    before = [len(company.answers[id].tokens) for id in ids]
    for _ in range(7 * 4):
        assert len(company.step()) == 3
    assert [len(company.answers[id].tokens) for id in ids] == [count + 3 * 4 for count in before]


def test_borders_of_a_prompt_become_checkpoints(folder: Folder) -> None:
    company = Company(load_faulty(folder("qwen3_5_moe")))
    id = company.add(WISHES[3])
    company.finish()
    assert company.sessions[id].checkpoints == [4, 5, 13]


def test_a_prompt_that_is_known_already(folder: Folder, alone: Expect) -> None:
    """In part or whole: then the session has logits to choose from."""
    model = load_faulty(folder("qwen3_5_moe"))
    for known in (4, len(WISHES[0].prompt)):
        company, session = Company(model), model.session(max_context=CONTEXT)
        session.prefill(WISHES[0].prompt[:known])
        company.add(WISHES[1])
        id = company.add(WISHES[0], session, known)
        company.finish()
        answer = company.answers[id]
        assert answer.evaluated == len(WISHES[0].prompt) - known
        assert replace(answer, evaluated=len(WISHES[0].prompt)) == alone("qwen3_5_moe")[0]


def test_who_waits_for_a_mask_takes_no_part(folder: Folder, alone: Expect) -> None:
    model = load_faulty(folder("qwen3_moe"))
    company = Company(model)
    wish = WISHES[4]
    sampler = Sampler(wish.sampling, VOCAB, wish.prompt)
    session = model.session(max_context=CONTEXT)
    decoder = company.decoder
    waits = decoder.add(
        *(session._core, np.asarray(wish.prompt, np.int32), sampler._core, (), wish.max_tokens),
        logprobs=1,
        masked=True,
    )
    found = []
    assert [(event.id, event.token, event.evaluated) for event in decoder.step()] == [(waits, None, 5)]
    for place in range(wish.max_tokens):
        assert decoder.step() == []
        assert decoder.step() == []
        decoder.set_mask(waits, wish.mask(place))
        [event] = decoder.step()
        found.append(event.token)
    assert event.finish == "length"
    assert found == alone("qwen3_moe")[4].tokens


# ---- What goes wrong ----------------------------------------------------------------------------------------------


def test_whose_session_was_used_fails_alone(folder: Folder, alone: Expect) -> None:
    company = Company(load_faulty(folder("qwen3_moe")))
    ids = [company.add(WISHES[place]) for place in (0, 1, 2)]
    company.step()
    company.sessions[ids[1]].step(5)
    company.finish()
    assert company.errors == {
        ids[1]: f"request {ids[1]}: expected its session as the last step left it, found it used otherwise"
    }
    assert [company.answers[ids[i]] for i in (0, 2)] == [alone("qwen3_moe")[i] for i in (0, 2)]


def test_many_choose_at_the_same_time(folder: Folder, alone: Expect) -> None:
    """On several threads, and one of them in vain."""
    company = Company(load_faulty(folder("qwen3_moe"), threads=3, chunk=256))
    ids = {company.add(wish): place for _ in range(3) for place, wish in enumerate(WISHES)}
    stuck = company.add(WISHES[4])
    company.decoder.set_mask(stuck, np.zeros(VOCAB // 32, np.uint32))
    company.finish()
    assert {id: company.answers[id] for id in ids} == {id: alone("qwen3_moe")[place] for id, place in ids.items()}
    assert company.answers[stuck].finish == "failed" and "all of them forbidden" in company.errors[stuck]


def test_a_mask_that_leaves_nothing_fails_alone(folder: Folder, alone: Expect) -> None:
    company = Company(load_faulty(folder("qwen3_moe")))
    bad, good = company.add(WISHES[4]), company.add(WISHES[0])
    company.decoder.set_mask(bad, np.zeros(VOCAB // 32, np.uint32))
    company.finish()
    assert company.answers[bad].finish == "failed" and "at least one token" in company.errors[bad]
    assert company.answers[good] == alone("qwen3_moe")[0]


def test_a_session_of_another_model_fails_alone(folder: Folder, alone: Expect) -> None:
    company = Company(load_faulty(folder("qwen3_moe")))
    other = load_faulty(folder("qwen3_moe"))
    bad = company.add(WISHES[1], other.session(max_context=CONTEXT))
    good = company.add(WISHES[0])
    company.finish()
    assert company.answers[bad].finish == "failed" and "found one of another" in company.errors[bad]
    assert company.answers[good] == alone("qwen3_moe")[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_failing_op_fails_only_whom_it_concerns(folder: Folder, alone: Expect, name: str) -> None:
    """Those who were lost, or met it alone. The others have their answers, and so have the next requests."""
    expected, failed = alone(name), 0
    for number in range(40, 1400, 97):
        company = Company(load_faulty(folder(name), fail_at_op=number))
        asked = {company.add(WISHES[place]): place for place in (0, 1, 4)}
        company.finish()
        asked[company.add(WISHES[0])] = 0
        company.finish()
        failures = 0
        for id, place in asked.items():
            answer, whole = company.answers[id], expected[place]
            if answer.finish == "failed":
                failures += 1
                assert answer.tokens == whole.tokens[: len(answer.tokens)] and "op" in company.errors[id]
            else:
                assert answer == whole
        assert failures < len(asked)
        failed += failures
    assert failed


def test_who_finds_no_memory_is_tried_again(folder: Folder, alone: Expect) -> None:
    """Two conversations of which one fits: the other goes on when the first has given its memory back."""
    with_room = load_faulty(folder("qwen3_moe"))
    session = with_room.session(max_context=CONTEXT)
    session.prefill([1])
    held = sum(getattr(with_room._engine.memory, part) for part in ("rows", "recurrent", "checkpoints", "tokens"))
    tokens_alone = with_room._engine.memory.tokens
    model = load_faulty(folder("qwen3_moe"), session_bytes=held + tokens_alone)
    company = Company(model)
    first, second = company.add(WISHES[0]), company.add(WISHES[2])
    company.step()
    short = [id for id in (first, second) if company.errors.get(id) == "budget"]
    assert len(short) == 1 and company.answers[short[0]].finish == ""
    rich = first + second - short[0]
    while not company.answers[rich].finish:
        company.step()
    company.sessions[rich].clear()
    company.finish()
    for id, place in ((first, 0), (second, 2)):
        assert company.answers[id] == alone("qwen3_moe")[place]


def test_a_step_that_is_given_up_loses_nothing(folder: Folder, alone: Expect) -> None:
    """Also what was chosen before its evaluation was given up: the next step tells of it."""
    model = load_faulty(folder("qwen3_moe"))
    company, session = Company(model), model.session(max_context=CONTEXT)
    session.prefill(WISHES[0].prompt)
    ids = {company.add(WISHES[0], session, len(WISHES[0].prompt)): 0, company.add(WISHES[1]): 1}
    cancel = Cancel()
    cancel.set()
    for _ in range(3):
        with pytest.raises(Cancelled):
            company.step(cancel)
    company.finish()
    for id, place in ids.items():
        whole = alone("qwen3_moe")[place]
        assert (company.answers[id].tokens, company.answers[id].said) == (whole.tokens, whole.said)


# ---- Threads and memory -------------------------------------------------------------------------------------------


def test_requests_come_and_go_while_others_step(folder: Folder, alone: Expect) -> None:
    model, expected = load_faulty(folder("qwen3_moe"), threads=2), alone("qwen3_moe")
    decoder = _core.Decoder(model._engine, 0)
    found: dict[int, list[int]] = {}
    ended: set[int] = set()
    over = threading.Event()

    def steps() -> None:
        while not over.is_set():
            for event in decoder.step():
                if event.token is not None:
                    found.setdefault(event.id, []).append(event.token)
                if event.finish:
                    ended.add(event.id)

    thread = threading.Thread(target=steps)
    thread.start()
    chance, asked, removed = random.Random(1), {}, set()
    try:
        for _ in range(60):
            place = chance.choice((0, 1, 2, 6))
            wish = WISHES[place]
            sampler, session = Sampler(wish.sampling, VOCAB, wish.prompt), model.session(max_context=CONTEXT)
            prompt = np.asarray(wish.prompt, np.int32)
            id = decoder.add(session._core, prompt, sampler._core, wish.stop_tokens, wish.max_tokens, wish.logprobs)
            asked[id] = place
            if chance.random() < 0.3:
                decoder.remove(id)
                removed.add(id)
        while not ended >= asked.keys() - removed:
            assert thread.is_alive()
    finally:
        over.set()
        thread.join()
    for id, place in asked.items():
        whole = expected[place].tokens
        assert found.get(id, []) == (whole[: len(found.get(id, []))] if id in removed else whole)


def test_sessions_go_with_their_requests(folder: Folder) -> None:
    model = load_faulty(folder("qwen3_moe"))
    company = Company(model)
    ids = [company.add(WISHES[place]) for place in (0, 1, 2)]
    sessions = [weakref.ref(company.sessions.pop(id)) for id in ids]
    assert model._engine.sessions == 3
    company.step()
    gc.collect()
    assert model._engine.sessions == 3, "the decoder holds them"
    company.decoder.remove(ids[0])
    assert model._engine.sessions == 2
    company.finish()
    assert model._engine.sessions == 0 and all(session() is None for session in sessions)
    company.add(WISHES[0])
    company.sessions.clear()
    company.decoder = _core.Decoder(model._engine)
    gc.collect()
    assert model._engine.sessions == 0


# ---- Bad use ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_asked_for(folder: Folder) -> None:
    model = load_faulty(folder("qwen3_moe"))
    company = Company(model)
    company.add(WISHES[0])
    session = model.session(max_context=8)
    core, sampler = session._core, Sampler(Sampling(), VOCAB, [])._core
    one = np.asarray([1], np.int32)

    def ask(tokens: Any = one, max_tokens: int = 1, **options: Any) -> Callable[[], object]:
        given: dict[str, Any] = {"session": core, "sampler": sampler} | options
        return lambda: company.decoder.add(tokens=tokens, stop_tokens=(), max_tokens=max_tokens, **given)

    cases: list[tuple[Callable[[], object], type[moeflux.Error], str]] = [
        (ask(max_tokens=0), ArgumentError, "max_tokens: expected 1 or more, found 0"),
        (ask(logprobs=385), ArgumentError, "log_probabilities: expected 0 to 384, found 385"),
        (ask(np.asarray([1, 384], np.int32)), ArgumentError, "tokens: expected 0 to 383, found 384"),
        (ask(np.ones(9, np.int32)), ArgumentError, "expected at most 8 more in a context of 8, found 9"),
        (ask(np.ones((1, 2), np.int32)), ArgumentError, "tokens: expected one dimension, found 2"),
        (ask(np.zeros(0, np.int32)), StateError, "expected a token evaluated since it was made"),
        (ask(session=company.sessions[1]._core), ArgumentError, "of its own, found one of request 1"),
        (lambda: company.decoder.set_mask(7, None), ArgumentError, "expected the id of a masked request, found 7"),
        (lambda: company.decoder.set_mask(1, None), ArgumentError, "expected the id of a masked request, found 1"),
        (lambda: company.decoder.set_mask(1, np.zeros(3, np.uint32)), ArgumentError, "expected 12 words"),
        (lambda: company.decoder.set_mask(1, np.zeros(12)), ArgumentError, "contiguous array of uint32"),
        (lambda: setattr(company.decoder, "prompt_rows", -1), ArgumentError, "prompt_rows: expected 0 or more"),
        (lambda: _core.Decoder(model._engine, 1), ArgumentError, "rows: expected 0, or 2 or more, found 1"),
    ]
    for call, error, words in cases:
        with pytest.raises(error, match=words):
            call()
    assert company.decoder.remove(99), "it is over"
    assert ask()() == 2, "what was refused took no id"
