"""A token drawn by what a device lists of the logits: the one that all logits give, or none at all."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux.ops import Ops
from moeflux.oracle import sampling as oracle
from moeflux.text.sampling import Sampler, Sampling
from text.test_choosing import KINDS

ops = Ops()
SIZES = (1, 2, 31, 300, 2048, 2049, 5000, 9 * 2048 + 700)
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {}}


def drawn(row: np.ndarray, asked: Sampling) -> tuple[int | None, Sampler]:
    sampler = Sampler(asked, len(row), [])
    _, _, *found = ops.shortlist(row[None], sampler._core.shortlist_factor)[0]
    return sampler._core.choose_listed(row, *found), sampler


def some_logits(rng: np.random.Generator, kind: str) -> np.ndarray:
    """All of them finite: others are refused before anybody draws."""
    row = KINDS[kind](rng, int(rng.choice(SIZES))).astype(np.float32)
    return np.where(np.isfinite(row), row, -50.0).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=75, deadline=None)
@given(
    seed=st.integers(0, 1 << 40),
    temperature=st.sampled_from([1e-3, 0.3, 0.7, 1.0, 1.5, 50.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 20, 1000, 2047, 2048, 2049]),
    top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.1, 0.5, 0.95, 0.999, 1 - 1e-12]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.01, 0.5, 1.0]),
)
def test_the_token_is_that_of_all_logits(
    kind: str, seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = some_logits(np.random.default_rng(seed), kind)
    asked = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    token, sampler = drawn(row, asked)
    whole = Sampler(asked, len(row), [])
    if token is None:
        assert sampler.choose(row).token == whole.choose(row).token  # the random number was not used
    else:
        assert token == whole.choose(row).token == oracle.choose_tokens([row], asked)[0]


@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": 20},
        {"top_k": 20, "top_p": 0.8},
        {"top_p": 0.95, "temperature": 0.6},
        {"min_p": 0.05},
        {"top_p": 0.9, "min_p": 0.01, "temperature": 1.5},
        {},
    ],
    ids=str,
)
def test_usual_settings_need_no_logits(asked: dict[str, Any]) -> None:
    """Of a large vocabulary, with logits as models have them. Nothing but a block of them is looked at, and that only
    where nothing is cut."""
    rng = np.random.default_rng(3)
    settings = Sampling(**{"temperature": 1.0, "seed": 4, **asked})
    sampler, whole = (Sampler(settings, 248_320, []) for _ in range(2))
    for _ in range(20):
        row = rng.normal(0, 1.5, 248_320)
        likely = rng.permutation(len(row))[:2000]
        row[likely] = 28 - 2.2 * np.log1p(np.arange(2000)) + rng.normal(0, 0.3, 2000)
        row = row.astype(np.float32)
        _, _, *found = ops.shortlist(row[None], sampler._core.shortlist_factor)[0]
        blind = np.full_like(row, np.nan) if asked else row
        assert sampler._core.choose_listed(blind, *found) == whole.choose(row).token
    assert sampler._core.chosen_from_shortlists == 20


def test_a_list_that_may_lack_something_is_not_enough() -> None:
    rng = np.random.default_rng(5)
    row = rng.normal(0, 0.2, 40_000).astype(np.float32)  # so flat that the likeliest 2048 are a small part
    for asked in ({"top_p": 0.9}, {"top_k": 3000}, {"min_p": 0.3}):
        token, sampler = drawn(row, Sampling(temperature=1.0, seed=1, **asked))
        assert token is None and sampler._core.chosen_from_shortlists == 0
    # Sums so near each other that their order might matter.
    for row, asked in (
        (np.zeros(40, np.float32), {"top_p": 0.5}),
        (np.zeros(5000, np.float32), {"min_p": 1.0}),
    ):
        assert drawn(row, Sampling(temperature=1.0, seed=1, **asked))[0] is None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 40),
    top_k=st.sampled_from([1, 2, 20, 300, 2048]),
    top_p=st.sampled_from([1.0, 0.1, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition=st.sampled_from([1.0, 1.1, 3.0]),
    presence=st.sampled_from([0.0, 0.5, 20.0]),
    frequency=st.sampled_from([0.0, 0.3]),
)
def test_penalties_of_a_number_of_tokens(
    kind: str, seed: int, top_k: int, top_p: float, min_p: float, repetition: float, presence: float, frequency: float
) -> None:
    """Token by token, so that what was taken before has them. With a great penalty, others than those that are listed
    may be the likeliest."""
    rng = np.random.default_rng(seed)
    row = some_logits(rng, kind)
    cuts = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    penalties = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    asked = Sampling(temperature=0.8, seed=seed, **cuts, **penalties)
    prompt = rng.integers(len(row), size=rng.choice([0, 5, 3000])).tolist()
    sampler, whole = (Sampler(asked, len(row), prompt) for _ in range(2))
    if sampler._core.shortlist_factor == 0:
        return
    _, _, *found = ops.shortlist(row[None], sampler._core.shortlist_factor)[0]
    for _ in range(6):
        token = sampler._core.choose_listed(row, *found)
        wanted = whole.choose(row).token
        assert (sampler.choose(row).token if token is None else token) == wanted


def test_penalties_need_no_logits_where_tokens_are_counted() -> None:
    row = np.random.default_rng(1).normal(0, 3, 50_000).astype(np.float32)
    row[7] = 30.0
    asked = Sampling(temperature=1.0, top_k=20, presence_penalty=1.5, repetition_penalty=1.1, seed=4)
    sampler, whole = (Sampler(asked, len(row), [1, 2, 3, 7]) for _ in range(2))
    _, _, *found = ops.shortlist(row[None], sampler._core.shortlist_factor)[0]
    for _ in range(60):
        assert sampler._core.choose_listed(np.full_like(row, np.nan), *found) == whole.choose(row).token
    heavy = dataclasses.replace(asked, presence_penalty=100.0, top_k=1)
    sampler = Sampler(heavy, len(row), [])
    taken = [sampler._core.choose_listed(row, *found) for _ in range(len(found[2]) + 1)]
    assert len({*taken[:-1]}) == len(found[2]) and taken[-1] is None  # all that are listed were taken


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_changes_logits_needs_all_of_them(name: str) -> None:
    other = {"logit_bias": {3: 1.0}, "presence_penalty": -0.5}.get(name, 0.5)
    raised = Sampling(temperature=0.7, top_k=20, **{name: other})
    if name != "frequency_penalty":  # the others make some values greater than their logits
        assert Sampler(raised, 300, [])._core.shortlist_factor == 0
    for asked in (Sampling(temperature=0.7, **{name: other}), Sampling(temperature=0.0)):
        assert Sampler(asked, 300, [])._core.shortlist_factor == 0
    assert Sampler(dataclasses.replace(asked, temperature=0.5), 300, [])._core.shortlist_factor == pytest.approx(
        2 / np.log(2)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_list_is_that_of_the_oracle(kind: str) -> None:
    for seed in range(8):
        row = some_logits(np.random.default_rng(seed), kind)
        same_list(ops.shortlist(row[None], 1.7)[0], oracle.shortlist(row, 1.7))


def same_list(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-12)
    for i in (0, 1, 3, 4, 5):
        assert np.array_equal(found[i], expected[i])
