"""Steps that a decoder makes before they are asked for. They change no bit of an answer, end when somebody wants them
to, and leave sessions where what was told says that they are."""

from __future__ import annotations

import gc
import random
import threading
from dataclasses import replace

import pytest

import moeflux
from moeflux import Cancelled, _core
from support.decoded import CONTEXT, WISHES, Answer, Company, answer_alone
from support.engine import Folder, folders, load_faulty, tokens
from support.served import until

MOST = 8
"""Steps that nobody has taken."""
LONG = replace(WISHES[1], prompt=tuple(tokens(2, 6)), max_tokens=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("ahead"))


@pytest.fixture(scope="module")
def model(folder: Folder) -> moeflux.Model:
    return load_faulty(folder("qwen3_5_moe"), threads=2)


def begun(model: moeflux.Model, wishes: list[int]) -> tuple[Company, list[int]]:
    """Prompts are read, and steps are made ahead."""
    company = Company(model)
    ids = [company.add(replace(LONG, sampling=replace(LONG.sampling, seed=seed))) for seed in wishes]
    company.step()
    assert company.decoder.go_ahead() and company.decoder.is_ahead
    return company, ids


def drain(company: Company) -> None:
    while company.decoder.is_ahead:
        company.step_ahead()


@pytest.mark.parametrize("name", ("qwen3_5_moe", "qwen3_moe"))
@pytest.mark.parametrize("options", ({"threads": 2}, {"expert_slots": 5}, {"speculate": "lookup", "chunk": 24}))
def test_answers_are_those_that_sessions_give(folder: Folder, name: str, options: dict[str, object]) -> None:
    """Some come while others are ahead, and steps ahead are ended at any moment."""
    model = load_faulty(folder(name), **options)
    expected = [answer_alone(model, wish) for wish in WISHES]
    chance, company = random.Random(1), Company(model)
    which: dict[int, int] = {}
    left, ahead = [place for place, wish in enumerate(WISHES) if wish.masks is None] * 3, 0
    chance.shuffle(left)
    while left or any(not company.answers[id].finish for id in which):
        if not company.decoder.is_ahead:
            for place in [left.pop() for _ in range(min(len(left), chance.choice((0, 0, 1, 3))))]:
                which[company.add(WISHES[place])] = place
            ahead += company.decoder.go_ahead()
        elif chance.random() < 0.2:
            company.decoder.end_ahead()
        company.step_ahead()
    assert ahead
    for id, place in which.items():
        assert company.answers[id] == expected[place]


def test_a_session_is_where_what_was_told_says(model: moeflux.Model) -> None:
    """When steps ahead were ended, and all that came of them was taken. Steps that are asked for go on from there."""
    company, ids = begun(model, [1, 2])
    wishes = [company.wishes[id] for id in ids]
    until(lambda: company.sessions[ids[0]].position > 5)
    company.decoder.end_ahead()
    drain(company)
    for id, wish in zip(ids, wishes, strict=True):
        told = company.answers[id].tokens
        assert company.sessions[id].tokens == [*wish.prompt, *told[:-1]] and len(told) > 4
    company.finish()
    assert [company.answers[id] for id in ids] == [answer_alone(model, wish) for wish in wishes]


def test_steps_wait_for_whoever_takes_what_came_of_them(model: moeflux.Model) -> None:
    company, (id,) = begun(model, [1])
    until(lambda: company.sessions[id].position == len(LONG.prompt) + MOST)
    told = 1
    while told < 1 + MOST:
        told += len(company.step_ahead())
    until(lambda: company.sessions[id].position == len(LONG.prompt) + 2 * MOST)
    drain(company)
    assert company.answers[id].finish == "length" and len(company.answers[id].tokens) == LONG.max_tokens


def test_who_has_to_be_asked_between_steps_keeps_all_from_going_ahead(model: moeflux.Model) -> None:
    company = Company(model)
    assert not company.decoder.go_ahead(), "nobody is there"
    company.add(LONG)
    assert not company.decoder.go_ahead(), "a prompt is not read"
    company.step()
    masked = company.add(replace(LONG, masks=3, max_tokens=3))
    company.step()
    assert not company.decoder.go_ahead(), "a mask is missing"
    company.decoder.remove(masked)
    sampler = moeflux.text.sampling.Sampler(LONG.sampling, 384, LONG.prompt)
    session = model.session(max_context=CONTEXT)
    session.prefill(LONG.prompt)
    stepwise = company.decoder.add(session._core, [], sampler._core, (), 9, stepwise=True)
    company.answers[stepwise], company.wishes[stepwise] = Answer(), LONG
    company.step()
    assert not company.decoder.go_ahead(), "somebody may end after any token"
    company.decoder.remove(stepwise)
    assert company.decoder.go_ahead()
    drain(company)
    assert company.answers[1] == answer_alone(model, LONG)


def test_they_end_with_an_answer(model: moeflux.Model) -> None:
    """The others go on when they are asked to."""
    company, ids = begun(model, [1, 2])
    short = replace(LONG, max_tokens=5)
    company.decoder.end_ahead()
    drain(company)
    third = company.add(short)
    company.step()
    assert company.decoder.go_ahead()
    drain(company)
    assert company.answers[third] == answer_alone(model, short)
    assert not any(company.answers[id].finish for id in ids)
    assert company.decoder.go_ahead()
    drain(company)
    assert all(company.answers[id].finish == "length" for id in ids)


def test_who_leaves_meanwhile_is_told_of_no_more(model: moeflux.Model) -> None:
    company, (first, second) = begun(model, [1, 2])
    company.decoder.remove(first)
    while company.decoder.is_ahead:
        company.step_ahead()
        if not company.decoder.is_ahead and not company.answers[second].finish:
            company.decoder.go_ahead()
    assert company.answers[second] == answer_alone(model, company.wishes[second])
    whole = answer_alone(model, company.wishes[first]).tokens
    assert company.answers[first].tokens == whole[: len(company.answers[first].tokens)]


def test_a_step_ahead_that_is_given_up_loses_nothing(folder: Folder) -> None:
    """It waits for a read that the test holds."""

    def first_step(kind: str, call: int) -> tuple[_core.FaultPlan, Company, int]:
        plan = _core.FaultPlan(kind, call)
        company = Company(load_faulty(folder("qwen3_moe"), expert_slots=4, look_ahead="off", fault=plan))
        id = company.add(LONG)
        company.step()
        return plan, company, id

    reads = first_step("error", 0)[0].calls
    plan, company, id = first_step("hold", reads + 3)
    assert company.decoder.go_ahead()
    until(lambda: plan.calls >= reads + 3)
    company.decoder.end_ahead(at_once=True)
    plan.release()
    with pytest.raises(Cancelled):
        drain(company)
    assert not company.decoder.is_ahead
    company.finish()
    assert company.answers[id] == answer_alone(load_faulty(folder("qwen3_moe")), LONG)


def test_a_decoder_that_is_ahead_can_be_let_go(folder: Folder) -> None:
    model = load_faulty(folder("qwen3_moe"))
    company, _ = begun(model, [1, 2, 3])
    company.sessions.clear()
    company.decoder = _core.Decoder(model._engine)
    gc.collect()
    assert model._engine.sessions == 0


def test_others_use_the_engine_while_a_decoder_is_ahead(model: moeflux.Model) -> None:
    """They have their turn: else this would last until the answers are over."""
    company, ids = begun(model, [1])
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            if not company.decoder.is_ahead:
                if company.answers[ids[-1]].finish:
                    ids.append(company.add(LONG))
                company.step()
                company.decoder.go_ahead()
            company.step_ahead()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        with model.session(max_context=CONTEXT) as session:
            alone = session.generate(list(LONG.prompt), max_tokens=LONG.max_tokens, sampling=LONG.sampling).wait()
    finally:
        over.set()
        thread.join()
    assert alone.tokens == answer_alone(model, LONG).tokens
