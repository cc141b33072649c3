"""A scheduler whose decoder goes ahead: what somebody wants meanwhile happens soon, and when no step is under way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import _core
from moeflux.serving import Handle, Request, Scheduler, loop
from support.engine import folders
from support.served import Alone, ask

FAR = 900
"""Tokens of an answer that nobody waits for."""
SOON = 300
"""More than come of the twenty calls of the decoder until something happens, and of those in which it does: each gives
eight at most."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[moeflux.Model]:
    folder = folders(tmp_path_factory.mktemp("going_ahead"))
    with moeflux.load(folder("qwen3_5_moe"), context=1024, sessions=4, threads=1) as model:
        yield model


class Watched:
    """The decoder that there is. Nobody comes while a step is under way."""

    def __init__(self, engine: _core.Engine, rows: int, look: Callable[[int], object]) -> None:
        self._decoder = _core.Decoder(engine, rows)
        self._look = look
        self.began = 0  # to go ahead
        self.steps = 0  # that were asked for

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    @property
    def prompt_rows(self) -> int:
        return self._decoder.prompt_rows

    @prompt_rows.setter
    def prompt_rows(self, rows: int) -> None:
        self._decoder.prompt_rows = rows

    def add(self, *given: Any, **named: Any) -> int:
        assert not self._decoder.is_ahead
        return self._decoder.add(*given, **named)

    def step(self, cancel: _core.Cancel | None = None) -> Sequence[_core.DecoderEvent]:
        self.steps += 1
        self._look(self.steps)
        return self._decoder.step(cancel)

    def go_ahead(self) -> bool:
        begins = self._decoder.go_ahead()
        self.began += begins
        return begins


class Watching:
    """Makes decoders, and has the last one. `look` is called in the scheduler's thread before each call of `step`, with
    its number, when the test has asked for what it looks at."""

    decoder: Watched

    def __init__(self, look: Callable[[int], object] = lambda number: None) -> None:
        self._look = look
        self.asked = threading.Event()

    def __call__(self, engine: _core.Engine, rows: int) -> Watched:
        self.decoder = Watched(engine, rows, self.look)
        return self.decoder

    def look(self, number: int) -> None:
        self.asked.wait()
        self._look(number)


def far(seed: int, **options: object) -> Request:
    return ask(seed, max_tokens=FAR, ignore_end=True, **options)


def test_no_answer_depends_on_it(model: moeflux.Model) -> None:
    alone, watching = Alone(model), Watching()
    with Scheduler(model, decoder=watching) as scheduler:
        asked = [ask(seed, max_tokens=40 + 7 * seed) for seed in range(9)]
        watching.asked.set()
        answers = [scheduler.submit(request) for request in asked]
        for request, answer in zip(asked, answers, strict=True):
            answer.wait()
            assert (answer.tokens, answer.finish) == alone(request)
        assert scheduler.stats.tokens == sum(len(answer.tokens) for answer in answers)
    assert watching.decoder.began > 5


def test_who_comes_meanwhile_begins_at_once(model: moeflux.Model) -> None:
    others, told = list[Handle](), list[int]()

    def look(number: int) -> None:
        if number == 20:
            assert watching.decoder.is_ahead
            others.append(scheduler.submit(ask(2)))
        if others and others[0].finish is not None:
            told.append(len(first.tokens))

    watching = Watching(look)
    with Scheduler(model, decoder=watching) as scheduler:
        first = scheduler.submit(far(1))
        watching.asked.set()
        assert len(first.wait().tokens) == FAR
        assert (others[0].wait().tokens, others[0].finish) == Alone(model)(ask(2))
    assert told[0] < SOON


class Clock:
    """Somebody sets it."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.mark.parametrize("how", ["cancel", "close", "deadline"])
def test_it_ends_soon(model: moeflux.Model, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """What is kept of the answer is what was told of it, so that a conversation goes on from there."""
    clock = Clock()
    monkeypatch.setattr(loop, "time", clock)

    def look(number: int) -> None:
        if number != 20:
            return
        assert watching.decoder.is_ahead
        if how == "cancel":
            answer.cancel()
        elif how == "close":
            scheduler._loop.close(drain=False)
        else:
            clock.ahead = 1000.0

    watching = Watching(look)
    with Scheduler(model, decoder=watching) as scheduler:
        answer = scheduler.submit(far(3, deadline=500.0))
        watching.asked.set()
        assert answer.wait().finish == ("timeout" if how == "deadline" else "cancelled")
        assert len(answer.tokens) < SOON
        if how != "close":
            again = scheduler.submit(Request([*answer.prompt, *answer.tokens[:-1], 5], max_tokens=4))
            assert again.wait().stats.reused_tokens == len(answer.prompt) + len(answer.tokens) - 1


def test_stop_strings_and_masks_are_asked_after_each_token(model: moeflux.Model) -> None:
    """So nobody goes ahead while such an answer is made."""
    watching, steps = Watching(), list[int]()

    def mask(said: Any) -> np.ndarray | None:
        steps.append(len(said))
        return None

    with Scheduler(model, decoder=watching) as scheduler:
        watching.asked.set()
        masked = scheduler.submit(ask(4, max_tokens=30, ignore_end=True, mask=mask)).wait()
        assert watching.decoder.began == 0 and steps == list(range(30)) and len(masked.tokens) == 30


def test_who_follows_in_an_event_loop_is_told_of_every_token(model: moeflux.Model) -> None:
    async def follow(scheduler: Scheduler) -> list[int | None]:
        return [piece.token async for piece in scheduler.submit(ask(5, max_tokens=200))]

    with Scheduler(model) as scheduler:
        assert asyncio.run(follow(scheduler)) == Alone(model)(ask(5, max_tokens=200))[0]
