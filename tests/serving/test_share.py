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


def served(cost: Cost, answers: int, steps: int, chunk: int = 512) -> list[tuple[int, float]]:
    """(rows, how much longer than without them) of each step, while a prompt without end is read."""
    share, found = PromptShare(), []
    for _ in range(steps):
        rows = min(share.rows, chunk)
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
    drawn, share, cost, ratios = random.Random(7), PromptShare(), MACHINES[machine], []
    rows_read = 0
    for _ in range(4000):
        rows = min(share.rows, 512)
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
    share = PromptShare()
    cost = MACHINES["bound by experts"]
    ratios = []
    for answers, slower in ((4, 1), (4, 3), (16, 3), (1, 3), (1, 1)):
        for _ in range(100):
            rows = share.rows
            seconds = slower * cost(answers, rows)
            share.note(seconds, answers, rows)
            ratios.append(seconds / (slower * cost(answers, 0)))
    assert sum(ratio > 2 for ratio in ratios) < len(ratios) / 20
    assert max(ratios[300:400]) < 3, "nobody is left alone with what sixteen had together"
    assert max(ratios) < 6
    assert all(ratio < 2 for ratio in ratios[250:300] + ratios[350:400] + ratios[450:])


def test_steps_without_answers_say_nothing() -> None:
    """And the first answer's first step is one without prompts."""
    share = PromptShare()
    for _ in range(10):
        share.note(5.0, 0, 512)
        assert share.rows == 0
    share.note(0.1, 1, 0)
    assert share.rows == 1


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
