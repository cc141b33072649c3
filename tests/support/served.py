"""What the tests of serving share: decoders whose steps can be held back, and answers as they are without company."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import moeflux
from moeflux import Sampling, _core
from moeflux._core import Decoder
from moeflux.serving import Handle, Request
from moeflux.serving.protocols import Event
from support.engine import tokens

PATIENCE = 120.0
"""Seconds until a test that waits for what should come at once gives up."""


def until(holds: Callable[[], object]) -> None:
    """Waits for another thread."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "expected it to hold soon, found that it does not"
        time.sleep(0.001)


class Gate:
    """Makes decoders, and lets so many of their steps happen. Open: all of them."""

    def __init__(self, opened: bool = False) -> None:
        self.opened = opened
        self.done = 0  # steps
        self.rows: list[dict[int, int]] = []  # of prompts, of each step: evaluated, by the request's number
        self.failures: list[Exception] = []  # of the next steps
        self._left = 0
        self._waiting = False
        self._changed = threading.Condition()

    def __call__(self, engine: _core.Engine, rows: int) -> GatedDecoder:
        return GatedDecoder(self, engine, rows)

    def open(self) -> None:
        with self._changed:
            self.opened = True
            self._changed.notify_all()

    def let(self, steps: int) -> None:
        """Lets so many more steps happen, and waits until they have, and the next one is about to begin."""
        with self._changed:
            after = self.done + steps
            self._left += steps
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.done >= after and self._waiting, PATIENCE)

    def wait(self) -> None:
        """Until a step is about to begin."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._waiting, PATIENCE)

    def let_one(self, answers: Sequence[Handle]) -> None:
        """Lets one step happen, unless there is nothing to do any more."""
        with self._changed:
            while any(answer.finish is None for answer in answers):
                if self._changed.wait_for(lambda: self._waiting, 0.001):
                    self._left, self._waiting = self._left + 1, False
                    self._changed.notify_all()
                    return

    def enter(self, cancel: _core.Cancel | None) -> None:
        with self._changed:
            self._waiting = not (self.opened or self._left)
            self._changed.notify_all()
            while not self._changed.wait_for(lambda: self.opened or self._left > 0, 0.01):
                if cancel is not None and cancel.is_set():
                    break
            self._waiting = False
            self._left = max(self._left - 1, 0)

    def leave(self, events: Sequence[Event]) -> None:
        with self._changed:
            self.done += 1
            self.rows.append({event.id: event.evaluated for event in events if event.evaluated})
            self._changed.notify_all()


class GatedDecoder:
    """The decoder that there is, behind a gate."""

    def __init__(self, gate: Gate, engine: _core.Engine, rows: int) -> None:
        self._gate = gate
        self._decoder = Decoder(engine, rows)
        self.add, self.set_mask, self.remove = self._decoder.add, self._decoder.set_mask, self._decoder.remove
        self.rows = self._decoder.rows

    @property
    def prompt_rows(self) -> int:
        return self._decoder.prompt_rows

    @prompt_rows.setter
    def prompt_rows(self, rows: int) -> None:
        self._decoder.prompt_rows = rows

    def step(self, cancel: _core.Cancel | None = None) -> Sequence[Event]:
        self._gate.enter(cancel)
        if self._gate.failures:
            raise self._gate.failures.pop(0)
        events = self._decoder.step(cancel)
        self._gate.leave(events)
        return events

    def go_ahead(self) -> bool:
        """Each of its steps is let happen by itself."""
        return False

    def end_ahead(self, at_once: bool = False) -> None:
        pass

    @property
    def is_ahead(self) -> bool:
        return False


class Alone:
    """Answers of sessions that nobody else uses; each is made once."""

    def __init__(self, model: moeflux.Model) -> None:
        self._model = model
        self._known: dict[Any, tuple[list[int], str]] = {}

    def __call__(self, request: Request) -> tuple[list[int], str]:
        """Its tokens, and why it ended."""
        ids = tuple(np.asarray(request.prompt).tolist())
        key = (ids, request.max_tokens, repr(request.sampling), tuple(request.stop_tokens))
        if key not in self._known:
            with self._model.session() as session:
                answer = session.generate(
                    list(ids),
                    max_tokens=request.max_tokens,
                    stop_tokens=request.stop_tokens,
                    sampling=request.sampling,
                ).wait()
            assert answer.finish is not None
            self._known[key] = answer.tokens, answer.finish
        return self._known[key]


def text(count: int, seed: int = 1) -> list[int]:
    """Tokens for tiny models; those of two seeds differ from the first on."""
    return tokens(count, seed)


def ask(seed: int, prompt: int = 20, max_tokens: int = 8, **options: object) -> Request:
    return Request(text(prompt, seed), max_tokens=max_tokens, sampling=Sampling(1.0, seed=seed), **options)  # type: ignore[arg-type]
