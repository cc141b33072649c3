"""Requests to a decoder: what they ask for, what each gets alone, and what was heard of them in company."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import moeflux
from moeflux import Cancel, _core
from moeflux.text.sampling import Sampler, Sampling
from support.engine import tokens

VOCAB = 384
CONTEXT = 48


@dataclass(frozen=True)
class Wish:
    """What a request asks for."""

    prompt: tuple[int, ...]
    sampling: Sampling
    stop_tokens: tuple[int, ...] = ()
    max_tokens: int = 8
    logprobs: int | None = None
    borders: tuple[int, ...] = ()
    masks: int | None = None  # the seed of a mask for each choice

    def mask(self, place: int) -> np.ndarray | None:
        """For the choice at that place of the answer; every third is none."""
        if self.masks is None or place % 3 == 2:
            return None
        return np.random.default_rng([self.masks, place]).integers(1, 1 << 32, size=VOCAB // 32, dtype=np.uint32)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    said: list[tuple[float | None, list[tuple[int, float]]]] = field(default_factory=list)
    finish: str = ""
    evaluated: int = 0


WISHES = [
    Wish(tuple(tokens(9, 3)), Sampling(), max_tokens=7, logprobs=3),
    Wish(tuple(tokens(1, 5)), Sampling(temperature=1.0, seed=1), max_tokens=12),
    Wish(tuple(tokens(21, 8)), Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.3, seed=2), logprobs=0),
    Wish(tuple(tokens(13, 9)), Sampling(temperature=1.5, top_k=9, seed=3), borders=(4, 5, 13), max_tokens=5),
    Wish(tuple(tokens(5, 14)), Sampling(temperature=2.0, seed=4), masks=1, max_tokens=9, logprobs=1),
    Wish(tuple(tokens(40, 23)), Sampling(temperature=1.0, min_p=0.01, presence_penalty=0.4, seed=5), max_tokens=99),
    Wish(tuple(tokens(3, 31)), Sampling(temperature=3.0, seed=6), stop_tokens=tuple(range(0, VOCAB, 6)), max_tokens=40),
    Wish(tuple(tokens(2, 44)), Sampling(), masks=2, max_tokens=4),
]


def answer_alone(model: moeflux.Model, wish: Wish) -> Answer:
    """By `prefill`, `Sampler.choose` and `step`."""
    session, answer = model.session(max_context=CONTEXT), Answer(evaluated=len(wish.prompt))
    sampler = Sampler(wish.sampling, VOCAB, wish.prompt)
    logits = session.prefill(wish.prompt)
    for place in itertools.count():
        token, logprob, top = sampler.choose(logits, allowed=wish.mask(place), logprobs=wish.logprobs)
        answer.tokens.append(token)
        answer.said.append((logprob, top))
        if token in wish.stop_tokens:
            answer.finish = "end"
        elif place + 1 == wish.max_tokens:
            answer.finish = "length"
        elif session.position == CONTEXT:
            answer.finish = "context"
        if answer.finish:
            return answer
        logits = session.step(token)
    raise AssertionError


class Company:
    """Requests in a decoder, and what was heard of them."""

    def __init__(self, model: moeflux.Model, rows: int = 0, prompt_rows: int = 64) -> None:
        self.model, self.decoder = model, _core.Decoder(model._engine, rows)
        self.decoder.prompt_rows = prompt_rows
        self.wishes: dict[int, Wish] = {}
        self.sessions: dict[int, moeflux.Session] = {}
        self.answers: dict[int, Answer] = {}
        self.errors: dict[int, str] = {}

    def add(self, wish: Wish, session: moeflux.Session | None = None, known: int = 0) -> int:
        """`known` tokens of the prompt are in the session."""
        session = session or self.model.session(max_context=CONTEXT)
        sampler = Sampler(wish.sampling, VOCAB, wish.prompt)
        id = self.decoder.add(
            *(session._core, np.asarray(wish.prompt[known:], np.int32), sampler._core, wish.stop_tokens),
            *(wish.max_tokens, wish.logprobs, wish.borders, wish.masks is not None),
        )
        self.wishes[id], self.sessions[id], self.answers[id] = wish, session, Answer()
        if wish.masks is not None:
            self.decoder.set_mask(id, wish.mask(0))
        return id

    def step(self, cancel: Cancel | None = None) -> Sequence[_core.DecoderEvent]:
        events = self.decoder.step(cancel)
        ids = [event.id for event in events]
        assert ids == sorted(ids)
        self.hear(events)
        return events

    def step_ahead(self) -> Sequence[_core.DecoderEvent]:
        """Events of several steps, one after the other."""
        events = self.decoder.step()
        self.hear(events)
        return events

    def hear(self, events: Sequence[_core.DecoderEvent]) -> None:
        for event in events:
            answer, wish = self.answers[event.id], self.wishes[event.id]
            assert not answer.finish, "it was over"
            answer.evaluated += event.evaluated
            answer.finish = event.finish
            if event.error:
                self.errors[event.id] = event.error
            if event.token is not None:
                answer.tokens.append(event.token)
                answer.said.append((event.logprob, event.top))
                if wish.masks is not None and not event.finish:
                    self.decoder.set_mask(event.id, wish.mask(len(answer.tokens)))

    def finish(self) -> None:
        while self.step():
            pass
