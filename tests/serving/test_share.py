"""What prompts get of a step, on machines whose steps take what a function says."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

import moeflux
from moeflux.serving import Scheduler
from moeflux.serving.share import PromptShare
from support.served import Alone, Gate, ask

Cost = Callable[[int, int], float]
"""The seconds of a step with so many answers and so many rows of prompts."""


def experts(rows: int, count: int = 256, picked: int = 8) -> float:
    """How many of a layer are needed for so many rows, if the router picks evenly."""
    return count * (1 - (1 - picked / count) ** rows)


MACHINES: dict[str, Cost] = {
    "bound by experts": lambda answers, rows: 0.01 + 0.002 * experts(answers + rows),
    "bound by work": lambda answers, rows: 0.05 + 0.004 * (answers + rows),
    "rows cost nothing": lambda answers, rows: 0.02,
    "one row is too much": lambda answers, rows: 0.01 * answers + 0.05 * rows,
}

ENDLESS = [1 << 20]
"""What a prompt without end still needs."""


def served(cost: Cost, answers: int, steps: int, chunk: int = 512) -> list[tuple[int, float]]:
    """(rows, how much longer than without them) of each step, while a prompt without end is read."""
    share, found = PromptShare(chunk), []
    for _ in range(steps):
        rows = min(share.rows(ENDLESS), chunk)
        found.append((rows, cost(answers, rows) / cost(answers, 0)))
        share.note(cost(answers, rows), answers, rows)
    return found


@pytest.mark.parametrize("answers", [1, 4, 32])
@pytest.mark.parametrize("machine", ["bound by experts", "bound by work", "rows cost nothing"])
def test_no_step_takes_twice_as_long(machine: str, answers: int) -> None:
    found = served(MACHINES[machine], answers, 300)
    assert all(ratio < 2 for _, ratio in found)
    # And little of what may be had is left.
    cost = MACHINES[machine]
    best = max(rows for rows in range(1, 513) if cost(answers, rows) <= 1.7 * cost(answers, 0))
    assert sum(rows for rows, _ in found[50:]) / 250 > 0.7 * best


@pytest.mark.parametrize("answers", [1, 8])
@pytest.mark.parametrize("machine", ["bound by experts", "bound by work"])
@pytest.mark.parametrize("others", [False, True])
def test_few_steps_take_twice_as_long_where_steps_vary(machine: str, answers: int, others: bool) -> None:
    """By a tenth, or by more, and now and then another program takes the processor. What counts is how long they would
    have taken without that."""
    drawn, share, cost, ratios = random.Random(7), PromptShare(512), MACHINES[machine], []
    rows_read = 0
    for _ in range(4000):
        rows = min(share.rows(ENDLESS), 512)
        ratios.append(cost(answers, rows) / cost(answers, 0))
        seconds = cost(answers, rows) * drawn.lognormvariate(0, 0.2 if others else 0.1)
        if others and drawn.random() < 0.05:
            seconds += drawn.expovariate(1 / (2 * cost(answers, 0)))
        share.note(seconds, answers, rows)
        rows_read += rows
    assert np.percentile(ratios, 99) < 2
    best = max(rows for rows in range(1, 513) if cost(answers, rows) <= 1.7 * cost(answers, 0))
    assert rows_read / 4000 > 0.4 * best


def test_a_prompt_is_read_whatever_it_costs() -> None:
    found = served(MACHINES["one row is too much"], 1, 100)
    assert sum(rows for rows, _ in found) > 80


def test_a_change_of_the_machine_is_noticed() -> None:
    """It becomes three times as slow, or answers come and go."""
    share = PromptShare(512)
    cost = MACHINES["bound by experts"]
    ratios = []
    for answers, slower in ((4, 1), (4, 3), (16, 3), (1, 3), (1, 1)):
        for _ in range(100):
            rows = share.rows(ENDLESS)
            seconds = slower * cost(answers, rows)
            share.note(seconds, answers, rows)
            ratios.append(seconds / (slower * cost(answers, 0)))
    assert sum(ratio > 2 for ratio in ratios) < len(ratios) / 20
    assert max(ratios[300:400]) < 3, "nobody is left alone with what sixteen had together"
    assert max(ratios) < 6
    assert all(ratio < 2 for ratio in ratios[250:300] + ratios[350:400] + ratios[450:])


def test_steps_without_answers_say_nothing() -> None:
    """And the first answer's first step is one without prompts."""
    share = PromptShare(512)
    for _ in range(10):
        share.note(5.0, 0, 512)
        assert share.rows(ENDLESS) == 0
    share.note(0.1, 1, 0)
    assert share.rows(ENDLESS) == 1


# ---- Short prompts ----------------------------------------------------------------------------------------------


def after_a_read(rows: int, seconds: float, plain: float = 0.02) -> PromptShare:
    """Its prompts wait, and a step without them takes so long."""
    share = PromptShare(512)
    share.note(seconds, 0, rows)
    share.note(plain, 1, 0)
    return share


def test_short_prompts_that_come_together_are_read_at_once() -> None:
    share = after_a_read(30, 0.04)
    assert share.rows([25, 25]) == 50
    assert share.rows([25, 25, 25, 25]) == 60, "twice as many as took 0.04 s, for a step of 0.1 s"
    assert share.rows([61]) == share.rows([61, 1]) == 1, "the first one is too long"
    assert share.rows([1]) == 1 and share.rows([]) == 1


@pytest.mark.parametrize(
    ("read", "prompt"), [((512, 0.09), 512), ((16, 0.09), 16), ((512, 0.11), None), ((4, 0.11), None)]
)
def test_what_would_take_too_long_is_read_in_pieces(read: tuple[int, float], prompt: int | None) -> None:
    """As long as few rows took, so long may fewer take."""
    share = after_a_read(*read)
    assert share.rows([512]) == (512 if prompt == 512 else 1)
    assert share.rows([16]) == (16 if prompt else 1)


def test_pauses_are_few() -> None:
    """However many short prompts come: at most one step in a hundred is one, but for the first four."""
    share, cost = PromptShare(512), lambda answers, rows: 0.01 + 0.001 * rows
    share.note(cost(0, 40), 0, 40)
    long, total = 0, 0.0
    for step in range(2000):
        rows = share.rows([40, 40, 40])
        long += rows >= 40
        assert rows < 40 or step < 20 or long <= 5 + step / 100
        share.note(cost(4, rows), 4, rows)
        total += cost(4, rows)
    assert 20 <= long <= 25
    assert total < 2 * 2000 * cost(4, 0)


def test_no_pause_is_longer_than_the_steps_that_are_its_due() -> None:
    share = after_a_read(32, 0.06, plain=0.0005)
    assert share.rows([32]) == 1, "a hundred steps take 0.05 s"
    assert after_a_read(32, 0.06, plain=0.0007).rows([32]) == 32


def test_a_step_has_only_so_many_rows() -> None:
    share = PromptShare(16)
    share.note(0.01, 0, 16)
    share.note(0.01, 1, 0)
    assert share.rows([16, 16]) == 16
    assert share.rows([17]) == 1


def test_a_scheduler_reads_short_prompts_at_once(model: moeflux.Model, alone: Alone) -> None:
    """Up to four times, whose steps have nothing else of prompts; then in pieces."""
    gate = Gate()
    asked = [ask(number, 8, max_tokens=60) for number in range(1, 8)]
    with Scheduler(model, decoder=gate, running=8) as scheduler:
        answers = [scheduler.submit(asked[0])]
        gate.wait()
        gate.let(3)
        for request in asked[1:]:
            answers.append(scheduler.submit(request))
            gate.let(2)
        read = [max(step.get(number, 0) for step in gate.rows) for number in range(2, 8)]
        gate.open()
        for request, answer in zip(asked, answers, strict=True):
            assert (answer.wait().tokens, answer.finish) == alone(request)
    assert read[:4] == [8] * 4 and max(read[4:]) < 8


def test_a_scheduler_goes_by_it(model: moeflux.Model, alone: Alone) -> None:
    """Whatever steps take: prompts wait for the first step beside an answer, and for every ninth. They begin with one
    row, and have at most twice as many in the next step."""
    gate = Gate()
    first, second = ask(1, 20, max_tokens=200), ask(2, 150, max_tokens=4)
    with Scheduler(model, decoder=gate, running=2) as scheduler:
        answer = scheduler.submit(first)
        gate.wait()
        gate.let(2)
        prompt = scheduler.submit(second)
        gate.let(1)
        before = len(gate.rows)
        gate.let(20)
        rows = [sum(step.values()) for step in gate.rows[before - 1 :]]
        gate.open()
        assert (prompt.wait().tokens, prompt.finish) == alone(second)
        assert (answer.wait().tokens, answer.finish) == alone(first)
    read = rows[rows.index(1) :]
    assert rows.index(1) <= 2 and sum(read) > 5
    assert all(later <= 2 * max(read[:place]) for place, later in enumerate(read) if place)
    assert all(0 in read[place : place + 9] for place in range(len(read) - 9))


def test_a_number_of_rows_is_kept_to(model: moeflux.Model, alone: Alone) -> None:
    gate = Gate()
    with Scheduler(model, decoder=gate, running=2, prompt_rows=5) as scheduler:
        answer = scheduler.submit(ask(1, 20, max_tokens=100))
        gate.wait()
        gate.let(2)
        prompt = scheduler.submit(ask(2, 40, max_tokens=4))
        gate.let(12)
        assert [sum(step.values()) for step in gate.rows if 2 in step] == [5] * 8
        gate.open()
        assert (prompt.wait().tokens, prompt.finish) == alone(ask(2, 40, max_tokens=4))
        answer.cancel()
