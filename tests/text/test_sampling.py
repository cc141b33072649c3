"""Choosing tokens: the distribution is that of a plain definition, the draws are those of the distribution."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux import ArgumentError, FormatError
from moeflux.text.sampling import Sampler, Sampling, log_probabilities


def definition(logits: np.ndarray, asked: Sampling, prompt: list[int], answer: list[int]) -> dict[int, float]:
    """Probabilities as the words of `Sampling` say, one token after the other."""
    values = {id: float(value) for id, value in enumerate(logits.astype(np.float32))}
    for id, bias in asked.logit_bias.items():
        values[id] += bias
    for id in set(prompt) | set(answer):
        scale = asked.repetition_penalty
        values[id] = values[id] / scale if values[id] > 0 else values[id] * scale
    for id, times in Counter(answer).items():
        values[id] -= asked.presence_penalty + asked.frequency_penalty * times
    best_first = sorted(values, key=lambda id: (-values[id], id))
    if asked.temperature == 0:
        return {best_first[0]: 1.0}
    if asked.top_k:
        best_first = best_first[: asked.top_k]
    weight = {id: math.exp((values[id] - values[best_first[0]]) / asked.temperature) for id in best_first}
    total, kept = sum(weight.values()), []
    for id in best_first:
        kept.append(id)
        if sum(weight[id] for id in kept) >= asked.top_p * total * (1 - 1e-12):
            break
    kept = [id for id in kept if weight[id] >= asked.min_p * weight[kept[0]]]
    total = sum(weight[id] for id in kept)
    return {id: weight[id] / total for id in kept}


def drawn(logits: np.ndarray, asked: Sampling, count: int, prompt: list[int] = []) -> list[int]:  # noqa: B006
    sampler = Sampler(asked, len(logits), prompt)
    return [sampler.choose(logits.astype(np.float32)).token for _ in range(count)]


def uniform(seed: int, count: int) -> list[float]:
    """NumPy's own doubles of the generator."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count).tolist()


def by_definition(logits: np.ndarray, asked: Sampling, count: int, prompt: list[int]) -> list[int]:
    """The first token, in the order of ids, at which the sum of probabilities exceeds the random number."""
    answer: list[int] = []
    assert asked.seed is not None
    for number in uniform(asked.seed, count):
        chances = definition(logits, asked, prompt, answer)
        total, token = 0.0, max(chances)
        for id in sorted(chances):
            total += chances[id]
            if total > number:
                token = id
                break
        answer.append(token)
    return answer


LOGITS = np.random.default_rng(5).normal(0, 2, 300)

ASKED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 1.0, "presence_penalty": -0.5, "repetition_penalty": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "logit_bias": {3: 9.0, 5: 8.5, 200: -math.inf}},
    {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.2},
    {"temperature": 0.0, "logit_bias": {17: 50.0}},
    {"temperature": 0.0},
    {"temperature": 1e-300},
    {"temperature": 1e300, "top_k": 1000},
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_tokens_are_those_of_the_definition(asked: dict[str, Any]) -> None:
    sampling, prompt = Sampling(seed=11, **asked), [1, 2, 3, 250]
    assert drawn(LOGITS, sampling, 60, prompt) == by_definition(LOGITS, sampling, 60, prompt)


@pytest.mark.parametrize("asked", [asked for asked in ASKED if 0.1 < asked["temperature"] < 1e9], ids=str)
def test_draws_follow_the_distribution(asked: dict[str, Any]) -> None:
    """Chi-square over the first tokens of 4000 seeds. Five standard deviations of it have a chance of one in a
    million."""
    chances = definition(LOGITS, Sampling(**asked), [], [])
    found = Counter(drawn(LOGITS, Sampling(seed=seed, **asked), 1)[0] for seed in range(4000))
    assert found.keys() <= chances.keys()
    rare = [id for id in chances if 4000 * chances[id] < 5]
    cells = [(4000 * chances[id], found[id]) for id in chances if id not in rare]
    cells.append((4000 * sum(chances[id] for id in rare), sum(found[id] for id in rare)))
    square = sum((seen - expected) ** 2 / expected for expected, seen in cells if expected > 0)
    degrees = max(len(cells) - 1, 1)
    assert square < degrees + 5 * math.sqrt(2 * degrees) + 5


@settings(max_examples=60)
@given(data=st.data())
def test_ties_and_cuts_as_defined(data: st.DataObject) -> None:
    """Few different values, so that every cut goes through a tie: the lower id stays."""
    logits = np.array(data.draw(st.lists(st.sampled_from([-3.0, 0.0, 0.5, 2.0]), min_size=1, max_size=12)))
    asked = Sampling(
        temperature=1.0,
        top_k=data.draw(st.integers(0, 13)),
        top_p=data.draw(st.sampled_from([0.2, 0.55, 0.8, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.3])),
        seed=data.draw(st.integers(0, 1000)),
    )
    assert drawn(logits, asked, 8) == by_definition(logits, asked, 8, [])


def test_a_nucleus_larger_than_what_is_sorted_first() -> None:
    logits = np.random.default_rng(2).normal(0, 0.1, 5000)
    asked = Sampling(temperature=1.0, top_p=0.9, seed=3)
    assert drawn(logits, asked, 5) == by_definition(logits, asked, 5, [])


def test_changes_that_change_nothing() -> None:
    """Logits that are changed are read in another way."""
    quick, slow = (
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "seed": 8, **more} for more in ({}, {"logit_bias": {0: 0.0}})
    )
    assert drawn(LOGITS, Sampling(**quick), 40) == drawn(LOGITS, Sampling(**slow), 40)


def test_a_seed_is_a_text_and_none_is_a_new_one() -> None:
    assert drawn(LOGITS, Sampling(temperature=1, seed=4), 30) == drawn(LOGITS, Sampling(temperature=1, seed=4), 30)
    assert drawn(LOGITS, Sampling(temperature=1, seed=4), 30) != drawn(LOGITS, Sampling(temperature=1, seed=5), 30)
    resolved = Sampling(temperature=1).resolved()
    assert resolved.seed is not None and resolved.resolved() == resolved
    assert resolved != Sampling(temperature=1).resolved()


def test_log_probabilities_are_of_the_model_alone() -> None:
    found = log_probabilities(LOGITS.astype(np.float32))
    expected = LOGITS.astype(np.float32).astype(np.float64)
    assert np.allclose(found, expected - math.log(sum(math.exp(value) for value in expected)), atol=1e-12)


# ---- What callers give ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"temperature": -0.1}, "temperature: expected at least 0, found -0.1"),
        ({"temperature": math.nan}, "temperature: expected a number, found nan"),
        ({"temperature": "hot"}, "temperature: expected a number"),
        ({"top_k": -1}, "top_k: expected a whole number from 0"),
        ({"top_k": 1.5}, "top_k: expected a whole number from 0"),
        ({"top_p": 0}, "top_p: expected more than 0 to 1, found 0"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -1}, "min_p: expected 0 to 1, found -1"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected more than 0, found 0"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias: token"),
        ({"logit_bias": {1: math.inf}}, r"logit_bias\[1\]"),
        ({"seed": -1}, "seed"),
        ({"seed": True}, "seed"),
    ],
)
def test_what_cannot_be(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Sampling(**asked)


def test_biases_must_leave_something() -> None:
    with pytest.raises(ArgumentError, match="at least one token"):
        drawn(np.zeros(3), Sampling(logit_bias=dict.fromkeys(range(3), -math.inf)), 1)
    with pytest.raises(ArgumentError, match="expected tokens 0 to 2, found 3"):
        drawn(np.zeros(3), Sampling(logit_bias={3: 1.0}), 1)


def test_what_a_model_wants(tmp_path: Path) -> None:
    assert Sampling.default(tmp_path) == Sampling()
    config = tmp_path / "generation_config.json"
    config.write_text(json.dumps({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": None}))
    assert Sampling.default(tmp_path) == Sampling(temperature=0.7, top_p=0.8, top_k=20)
    config.write_text(json.dumps({"temperature": 0.7, "repetition_penalty": 1.1}))
    assert Sampling.default(tmp_path) == Sampling(repetition_penalty=1.1)
    config.write_text(json.dumps({"do_sample": True}))
    assert Sampling.default(tmp_path) == Sampling(temperature=1.0)
    config.write_text(json.dumps({"do_sample": True, "top_p": 3}))
    with pytest.raises(FormatError, match=r"generation_config.json: top_p: expected more than 0 to 1, found 3"):
        Sampling.default(tmp_path)
