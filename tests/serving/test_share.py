"""What prompts get of a step, on machines whose steps take what a function says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moeflux.serving.share import PromptShare

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
    best = max(rows for rows in range(1, 513) if cost(answers, rows) <= 1.8 * cost(answers, 0))
    assert sum(rows for rows, _ in found[50:]) / 250 > 0.7 * best


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
    assert all(ratio < 2 for ratio in ratios[250:300] + ratios[350:400] + ratios[450:])


def test_steps_without_answers_say_nothing() -> None:
    """And the first answer's first step is one without prompts."""
    share = PromptShare()
    for _ in range(10):
        share.note(5.0, 0, 512)
        assert share.rows == 0
    share.note(0.1, 1, 0)
    assert share.rows == 1
