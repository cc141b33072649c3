"""Answers of a model that drafts the tokens that follow, beside those of one that does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux.serving import Request, Scheduler
from moeflux.text.generate import Completion

PROMPT = "One day"
FEW: dict[int, float] = dict.fromkeys(range(300, 303), 100.0)
"""Only these are ever chosen, so that what comes next has often come before, and often not."""
ASKED: list[dict[str, Any]] = [
    {"max_tokens": 24, "sampling": moeflux.Sampling(logit_bias=FEW)},
    {"max_tokens": 24, "logprobs": 2, "sampling": moeflux.Sampling(temperature=5.0, seed=3, logit_bias=FEW)},
    {"max_tokens": 24, "sampling": moeflux.Sampling(temperature=9.0, seed=5, frequency_penalty=0.3, logit_bias=FEW)},
    {"max_tokens": 200, "stop": ["om" * 9], "sampling": moeflux.Sampling(logit_bias=FEW)},
    {"max_tokens": 9, "sampling": moeflux.Sampling()},
]


@pytest.fixture(scope="module")
def plain() -> Iterator[list[Completion]]:
    with moeflux.load(memory=None, context=256, threads=1) as model:
        yield [complete(model.session(), each) for each in ASKED]


def complete(session: moeflux.Session, asked: dict[str, Any]) -> Completion:
    return session.complete(PROMPT, **asked)


def said(answer: Completion) -> tuple[Any, ...]:
    return str(answer), answer.tokens, answer.finish, [(piece.logprob, piece.top) for piece in answer.pieces]


@pytest.fixture(scope="module")
def drafting() -> Iterator[moeflux.Model]:
    with moeflux.load(memory=None, context=256, threads=1, speculate="lookup") as model:
        yield model


def test_a_session_gives_the_same_answers(drafting: moeflux.Model, plain: list[Completion]) -> None:
    answers = []
    for asked, expected in zip(ASKED, plain, strict=True):
        session = drafting.session()
        answer = complete(session, asked)
        assert said(answer) == said(expected)
        assert session.tokens == [*drafting.tokenizer.encode(PROMPT), *answer.tokens[:-1]]
        answers.append(answer)
    assert all(0 < each.stats.accepted <= each.stats.drafted for each in answers[:4])
    assert 0 < answers[1].stats.acceptance < 1
    stats = answers[1].stats
    assert f"{stats.accepted} of {stats.drafted} drafted tokens came" in str(stats)
    assert stats.to_dict()["acceptance"] == stats.accepted / stats.drafted


def test_a_scheduler_does_too(drafting: moeflux.Model, plain: list[Completion]) -> None:
    """Side by side, and each session stands where its answer ends: so later prompts go on from there."""
    with Scheduler(drafting, running=4) as scheduler:
        handles = [scheduler.submit(Request(PROMPT, **asked)) for asked in ASKED]
        answers = [handle.completion() for handle in handles]
        assert [said(answer) for answer in answers] == [said(each) for each in plain]
        stats = scheduler.stats
        assert stats.drafted_tokens >= stats.drafts_accepted == sum(each.stats.accepted for each in answers) > 0
        stopped = answers[3]
        assert stopped.finish == "stop"
        prompt = [*drafting.tokenizer.encode(PROMPT), *stopped.tokens]
        again = scheduler.submit(Request(prompt, max_tokens=1))
        again.completion()
        assert again.stats.reused_tokens == len(prompt) - 1


def test_masks_see_every_token(drafting: moeflux.Model, plain: list[Completion]) -> None:
    """A mask is asked before each choice, with all tokens before it."""
    seen: list[int] = []
    vocab = drafting.variant.vocab_size

    def mask(tokens: Any) -> np.ndarray | None:
        seen.append(len(tokens))
        bits = np.full((vocab + 31) // 32, 0xFFFFFFFF, np.uint32)
        return None if len(tokens) % 2 else bits

    with Scheduler(drafting) as scheduler:
        answer = scheduler.submit(Request(PROMPT, mask=mask, **ASKED[1])).completion()
    assert seen == list(range(len(answer.tokens)))
    assert said(answer) == said(plain[1])
    assert answer.stats.accepted > 0
