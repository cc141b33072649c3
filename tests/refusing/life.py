"""A model's life in a process of its own, where each call of one kind is refused once. Prints how many were, by stage.

A stage is gone through again and again, with its first call refused, its second, ... until it makes no more. What fails
then is a moeflux error. A session is where it was, or says that it is not; what was to be done is then done, with the
same bits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from refusing import System

LIBRARY, FOLDER, OPTIONS, KIND, STRIDE = sys.argv[1:]
system = System(Path(LIBRARY))

import moeflux  # noqa: E402
from moeflux import StateError  # noqa: E402
from moeflux.models.layers import GatedDelta  # noqa: E402
from support.engine import FIRST, NEXT, SECOND, evaluate, load_faulty  # noqa: E402

refused: dict[str, int] = {}


def each(stage: str, call: Callable[[], Any], then: Callable[[Any], None], before: Callable[[], None]) -> None:
    """`then` is given what the call returned, or None when it failed. Nothing is refused `before`."""
    at, last = 0, False
    while not last:
        before()
        result = None
        with system.refusing(KIND, at) as calls, suppress(moeflux.Error):
            result = call()
        last = calls.made <= at
        assert result is not None or not last
        then(result)
        at += int(STRIDE)
    refused[stage] = calls.made


def load() -> moeflux.Model:
    return load_faulty(Path(FOLDER), **json.loads(OPTIONS))


class Calls:
    """Of one session: on a model that has long been in use, or on one that was just loaded."""

    def __init__(self, expected: np.ndarray, fresh: bool) -> None:
        self.expected, self.fresh = expected, fresh
        self.name = "fresh" if fresh else "used"
        self.take(load())

    def take(self, model: moeflux.Model) -> None:
        self.model = model
        self.session = model.session(max_context=64)

    def bring(self, prompts: list[list[int]]) -> None:
        if self.fresh:
            self.take(load())
        self.session.clear()
        for prompt in prompts:
            self.session.prefill(prompt)

    def evaluated(self, name: str, prompts: list[list[int]], call: Callable[[], Any]) -> None:
        """`call` evaluates behind the prompts."""
        start = sum(map(len, prompts))

        def then(found: Any) -> None:
            if found is None:
                assert self.session.position == start
                try:
                    found = call()
                except StateError as error:
                    assert self.model.variant.layers_with(GatedDelta) and start and "clear it or restore" in str(error)
                    self.session.clear()
                    for prompt in prompts:
                        self.session.prefill(prompt)
                    found = call()
            rows = np.atleast_2d(found)
            assert np.array_equal(rows, self.expected[start : start + len(rows)])
            self.session.clear()
            assert np.array_equal(evaluate(self.session), self.expected)

        each(f"{self.name}: {name}", call, then, lambda: self.bring(prompts))

    def all(self) -> None:
        held = self.model._engine.held
        self.evaluated("first step", [], lambda: self.session.step(FIRST[0]))
        self.evaluated("prefill", [], lambda: self.session.prefill(FIRST, logits="all"))
        self.evaluated("prefill behind", [FIRST], lambda: self.session.prefill(SECOND, logits="all"))
        self.evaluated("step", [FIRST, SECOND], lambda: self.session.step(NEXT[0]))
        assert self.model._engine.held == held


def main() -> None:
    expected = evaluate(load().session(max_context=64))
    for fresh in (True, False):
        Calls(expected, fresh).all()


if __name__ == "__main__":
    main()
    print(json.dumps(refused))
