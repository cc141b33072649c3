"""The core's choice of a token: that of `moeflux.oracle.sampling`, from any logits, with every instruction set."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moeflux import ArgumentError, StateError
from moeflux.ops import isas
from moeflux.oracle import sampling as oracle
from moeflux.text.sampling import Choice, Sampler, Sampling

BLOCK = 2048  # of csrc/kernels/cpu/choice.h
SOME_BLOCKS = 9 * BLOCK + 700
VOCABULARY = 248_320
LOG_PROBABILITY = 1e-9  # weights that are added up for it are rough: rough_choice_error

Rng = np.random.Generator


def chosen(rows: list[np.ndarray], asked: Sampling, prompt: list[int], **options: Any) -> list[int]:
    sampler = Sampler(asked, len(rows[0]), prompt, **options)
    return [sampler.choose(row.astype(np.float32)).token for row in rows]


# ---- Logits of all kinds ----------------------------------------------------------------------------------------


def peaked(rng: Rng, size: int) -> np.ndarray:
    """Logits like those of a language model: a few likely tokens, far above a floor."""
    logits = rng.normal(0, 1.5, size)
    places = rng.permutation(size)[: max(size // 100, 1)]
    logits[places] = 18 - rng.uniform(0.5, 3) * np.log1p(np.arange(len(places))) + rng.normal(0, 0.3, len(places))
    return logits


def in_one_column(rng: Rng, size: int) -> np.ndarray:
    """The likely tokens lie where the samples for the guesses miss them."""
    return rng.normal(0, 0.3, size) + np.where(np.arange(size) % 16 == 5, 4.0, 0.0)


def in_one_block(rng: Rng, size: int) -> np.ndarray:
    return rng.normal(0, 0.3, size) + np.where(np.arange(size) // BLOCK == 1, 5.0, 0.0)


def some_forbidden(rng: Rng, size: int) -> np.ndarray:
    logits = np.where(rng.random(size) < rng.choice([0.01, 0.5, 0.99]), -np.inf, rng.normal(0, 2, size))
    logits[rng.integers(size)] = 1.0
    return logits


KINDS: dict[str, Callable[[Rng, int], np.ndarray]] = {
    "flat": lambda rng, size: rng.normal(0, rng.choice([0.01, 0.1, 1.0, 3.0, 10.0]), size),
    "equal": lambda rng, size: np.full(size, rng.normal()),
    "few values": lambda rng, size: rng.choice(rng.normal(0, 3, rng.integers(1, 5)), size),
    "zeros": lambda rng, size: rng.choice([0.0, -0.0, -5.0], size),  # both zeros are one number
    "16 bits": lambda rng, size: np.round(rng.normal(0, 3, size) * 32) / 32,
    "peaked": peaked,
    "in one column": in_one_column,
    "in one block": in_one_block,
    "ascending": lambda rng, size: np.sort(rng.normal(0, 2, size)),
    "descending": lambda rng, size: -np.sort(rng.normal(0, 2, size)),
    "outliers": lambda rng, size: np.where(rng.random(size) < 0.02, -1e30, rng.normal(0, 1, size)),
    "forbidden": some_forbidden,
}


def some_settings(rng: Rng, size: int) -> Sampling:
    def mostly(neutral: Any, other: Any) -> Any:
        return neutral if rng.random() < 0.6 else other

    biased = rng.integers(size, size=rng.choice([0, 4, 199])).tolist()
    biases = dict(zip(biased, rng.choice([-math.inf, -2.0, 0.5, 1e4], len(biased)).tolist(), strict=True))
    return Sampling(
        temperature=float(rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.0, 2.0, 50.0])),
        top_k=int(mostly(0, rng.choice([1, 2, 20, 1000, 4096, 4097, 9000, 16385, size - 1 if size > 1 else 1]))),
        top_p=float(mostly(1.0, rng.choice([1e-6, 0.1, 0.5, 0.8, 0.95, 0.999, 1 - 1e-12]))),
        min_p=float(mostly(0.0, rng.choice([1e-9, 0.01, 0.05, 0.5, 1.0]))),
        repetition_penalty=float(mostly(1.0, rng.choice([0.5, 1.1, 2.0]))),
        presence_penalty=float(mostly(0.0, rng.choice([-1.0, 0.5, 3.0]))),
        frequency_penalty=float(mostly(0.0, rng.choice([-0.5, 0.3]))),
        logit_bias=mostly({}, biases),
        seed=int(rng.integers(1 << 60)),
    )


def check(seed: int, size: int, tokens: int) -> None:
    rng = np.random.default_rng(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    rows = [KINDS[kind](rng, size).astype(np.float32) for _ in range(tokens)]
    asked = some_settings(rng, size)
    biases = np.zeros(size)
    biases[list(asked.logit_bias)] = list(asked.logit_bias.values())
    if any(np.isneginf(row + biases).all() for row in rows):
        return  # nothing is left
    prompt = rng.integers(size, size=rng.choice([0, 1, 50, 3000])).tolist()
    assert chosen(rows, asked, prompt) == oracle.choose_tokens(rows, asked, prompt), f"seed {seed}, {kind}: {asked}"


@pytest.mark.parametrize("part", range(4))
def test_random_settings_and_logits(part: int) -> None:
    rng = np.random.default_rng(part)
    for seed in range(part * 600, (part + 1) * 600):
        check(seed, int(rng.choice([1, 2, 3, 31, 64, 300, 1000, BLOCK, BLOCK + 1, 2 * BLOCK])), 3)


@pytest.mark.parametrize("part", range(4))
def test_random_settings_and_logits_of_many_blocks(part: int) -> None:
    for seed in range(part * 110, (part + 1) * 110):
        check(seed, SOME_BLOCKS, 2)


@pytest.mark.parametrize("part", range(4))
def test_long_answers(part: int) -> None:
    """Penalties of more and more tokens, from a few to most of the vocabulary, with masks and log probabilities. Flat
    and few values make ties between tokens with a penalty and others."""
    for seed in range(part * 12, (part + 1) * 12):
        rng = np.random.default_rng(seed)
        size, tokens = int(rng.choice([700, SOME_BLOCKS])), 12
        rows = [KINDS[rng.choice(["flat", "few values", "16 bits", "peaked"])](rng, size) for _ in range(tokens)]
        rows = [row.astype(np.float32) for row in rows]
        asked = dataclasses.replace(
            some_settings(rng, size),
            repetition_penalty=float(rng.choice([0.5, 1.0, 2.0])),
            presence_penalty=float(rng.choice([0.0, 0.5])),
            frequency_penalty=float(rng.choice([0.0, 1.0])),
        )
        prompt = rng.integers(size, size=rng.choice([0, 30, size, 4 * size])).tolist()
        masks = [rng.random(size) < rng.choice([0.1, 0.9]) for _ in range(tokens)]
        sampler, numbers = Sampler(asked, size, prompt), oracle.random_numbers(asked.seed or 0, tokens)
        answer: list[int] = []
        for row, mask, number in zip(rows, masks, numbers, strict=True):
            allowed = mask if rng.random() < 0.5 else None
            values = oracle.changed_logits(row, asked, prompt, answer, allowed)
            wanted = oracle.choose_token(values, asked, number)
            count = 5 if rng.random() < 0.3 else None
            bits = None if allowed is None else as_bits(allowed)
            found = sampler.choose(row, allowed=bits, logprobs=count)
            assert found.token == wanted, f"seed {seed}, token {len(answer)}: {asked}"
            if found.logprob is not None:
                expected = oracle.log_probability(row, wanted)
                assert math.isclose(found.logprob, expected, rel_tol=0, abs_tol=LOG_PROBABILITY)
                assert [id for id, _ in found.top] == np.argsort(-row, kind="stable")[:5].tolist()
            answer.append(wanted)


def test_a_tie_of_a_penalised_token_and_others() -> None:
    """The cut goes through tokens of one value: some have it from a penalty, and the lower id stays."""
    for top_k in (5, 4096, 4097, 10_000, SOME_BLOCKS - 3):
        logits = np.full(SOME_BLOCKS, 2.0, np.float32)
        changed = np.random.default_rng(top_k).permutation(SOME_BLOCKS)[:3000].tolist()
        logits[changed] = 4.0
        asked = Sampling(temperature=1.0, top_k=top_k, repetition_penalty=2.0, seed=3)
        assert chosen([logits] * 6, asked, changed) == oracle.choose_tokens([logits] * 6, asked, changed)


@pytest.mark.parametrize("count", [10, SOME_BLOCKS // 2])
def test_more_are_asked_for_than_can_be_chosen(count: int) -> None:
    """Ten flat ones are drawn alike often, so one more or one less of them shows."""
    rng = np.random.default_rng(6)
    logits = np.full(SOME_BLOCKS, -np.inf, np.float32)
    logits[rng.permutation(SOME_BLOCKS)[:count]] = rng.normal(0, 0.1, count)
    for top_k in (count - 2, count - 1, count, count + 1, SOME_BLOCKS - 1):
        for top_p in (0.9, 1.0):
            asked = Sampling(temperature=1.0, top_k=top_k, top_p=top_p, seed=top_k)
            assert chosen([logits] * 40, asked, []) == oracle.choose_tokens([logits] * 40, asked)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 0.8, "top_p": 0.5, "min_p": 1e-3},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 100_000, "top_p": 0.9},
        {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
        {"temperature": 0.0, "presence_penalty": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["flat", "peaked", "equal"])
def test_a_large_vocabulary(kind: str, asked: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    rows = [KINDS[kind](rng, VOCABULARY).astype(np.float32) for _ in range(2)]
    prompt = rng.integers(VOCABULARY, size=5000).tolist()
    sampling = Sampling(seed=5, **asked)
    assert chosen(rows, sampling, prompt) == oracle.choose_tokens(rows, sampling, prompt)


def test_a_choice_in_doubt_is_made_with_exact_weights() -> None:
    """The first of two tokens has just more than the share that the random number asks for, or just less: by a
    hundredth of what rough weights may be off."""
    logits = np.full(SOME_BLOCKS, -np.inf, np.float32)
    logits[[5, SOME_BLOCKS - 1]] = 0
    for seed in range(200):
        (number,) = oracle.random_numbers(seed, 1)
        for more, token in ((1e-12, 5), (-1e-12, SOME_BLOCKS - 1)):
            bias = math.log(number / (1 - number)) + more
            asked = Sampling(temperature=1.0, logit_bias={5: bias}, seed=seed)
            assert chosen([logits], asked, []) == oracle.choose_tokens([logits], asked) == [token]


@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_set_gives_the_same_bits(kind: str) -> None:
    """Tokens, and log probabilities: sums over all weights, to the last bit."""
    rng = np.random.default_rng(3)
    rows = [KINDS[kind](rng, SOME_BLOCKS).astype(np.float32) for _ in range(3)]
    for case in range(4):
        asked = some_settings(np.random.default_rng(case), SOME_BLOCKS)
        found = []
        for isa in isas():
            sampler = Sampler(asked, SOME_BLOCKS, [5, 6, 7], isa=isa)
            found.append([sampler.choose(row, logprobs=30) for row in rows])
        assert all(each == found[0] for each in found), asked


@pytest.mark.parametrize("seed", range(48))
def test_every_instruction_set_gives_the_same_bits_behind_a_long_prompt(seed: int) -> None:
    """Penalties of many tokens beside other changes, with a mask or without; most of a block is left, or little."""
    rng = np.random.default_rng(seed)
    rows = [rng.normal(0, rng.choice([0.5, 3.0]), SOME_BLOCKS).astype(np.float32) for _ in range(3)]
    asked = dataclasses.replace(
        some_settings(rng, SOME_BLOCKS),
        temperature=float(rng.choice([0.7, 1.0])),
        top_k=int(rng.choice([0, 0, 9000, 17_000])),
        top_p=float(rng.choice([0.9, 1.0])),
        repetition_penalty=float(rng.choice([0.7, 1.1, 1.3])),
    )
    prompt = rng.integers(SOME_BLOCKS, size=rng.choice([500, SOME_BLOCKS // 2])).tolist()
    allowed = None if rng.random() < 0.5 else rng.random(SOME_BLOCKS) < rng.choice([0.3, 0.95])
    bits = None if allowed is None else as_bits(allowed)
    samplers = [Sampler(asked, SOME_BLOCKS, prompt, isa=isa) for isa in isas()]
    answer: list[int] = []
    for row, number in zip(rows, oracle.random_numbers(asked.seed or 0, len(rows)), strict=True):
        first, *others = [sampler.choose(row, allowed=bits, logprobs=30) for sampler in samplers]
        values = oracle.changed_logits(row, asked, prompt, answer, allowed)
        assert first.token == oracle.choose_token(values, asked, number), asked
        assert all(each == first for each in others), asked
        answer.append(first.token)


# ---- What is allowed --------------------------------------------------------------------------------------------


def as_bits(allowed: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-len(allowed) // 32) * 32, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)


@pytest.mark.parametrize("size", [1, 33, 700, SOME_BLOCKS])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_only_what_is_allowed_is_chosen(size: int, share: float) -> None:
    rng = np.random.default_rng(size)
    for seed in range(20):
        logits = KINDS[list(KINDS)[seed % 6]](rng, size).astype(np.float32)
        allowed = rng.random(size) < share
        allowed[rng.integers(size)] = True
        asked = some_settings(np.random.default_rng(seed), size)
        values = oracle.changed_logits(logits, asked, [0], [], allowed)
        if np.all(np.isneginf(values)):
            continue
        (number,) = oracle.random_numbers(asked.seed or 0, 1)
        sampler = Sampler(asked, size, [0])
        assert sampler.choose(logits, allowed=as_bits(allowed)).token == oracle.choose_token(values, asked, number)


def test_what_is_allowed_is_so_once() -> None:
    logits = np.array([0.0, 9.0, 0.0], np.float32)
    sampler = Sampler(Sampling(), 3, [])
    assert sampler.choose(logits, allowed=as_bits(np.array([False, False, True]))).token == 2
    assert sampler.choose(logits).token == 1


def test_bits_behind_the_vocabulary_count_for_nothing() -> None:
    logits = np.zeros(40, np.float32)
    bits = np.array([0, 0xFFFFFF02], np.uint32)
    assert Sampler(Sampling(temperature=1.0, seed=1), 40, []).choose(logits, allowed=bits).token == 33


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (np.zeros(2, np.uint32), "at least one token, found all of them forbidden"),
        (np.zeros(3, np.uint32), "allowed: expected 2 words of 32 bits, found 3"),
        (np.zeros(2, np.int64), "allowed: expected a contiguous array of uint32"),
        (np.zeros((1, 2), np.uint32), "allowed: expected a contiguous array of uint32"),
    ],
)
def test_masks_that_cannot_be(allowed: np.ndarray, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Sampler(Sampling(), 40, []).choose(np.zeros(40, np.float32), allowed=allowed)


# ---- Logits that are no numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 17, BLOCK - 1, BLOCK, SOME_BLOCKS - 1])
@pytest.mark.parametrize("bias", [{}, {3: 1.0}])
def test_a_logit_that_is_no_number_is_named(bad: float, place: int, bias: dict[int, float]) -> None:
    logits = np.zeros(SOME_BLOCKS, np.float32)
    logits[place] = bad
    sampler = Sampler(Sampling(temperature=1.0, logit_bias=bias, seed=1), SOME_BLOCKS, [])
    with pytest.raises(ArgumentError, match=rf"logits\[{place}\]: expected a number or -inf, found {bad}"):
        sampler.choose(logits)
    with pytest.raises(ArgumentError, match="at least one token"):
        sampler.choose(np.full(SOME_BLOCKS, -np.inf, np.float32))
    logits[place] = 0
    expected = oracle.choose_tokens([logits], Sampling(temperature=1.0, logit_bias=bias, seed=1))
    assert [sampler.choose(logits).token] == expected, "what was refused took a random number"


@pytest.mark.parametrize(
    ("asked", "logit", "found"),
    [
        ({"repetition_penalty": 1e-300}, 1e20, "inf"),
        ({"frequency_penalty": -1e308, "presence_penalty": -1e308}, 0.0, "inf"),
    ],
)
def test_penalties_beyond_all_numbers_are_refused(asked: dict[str, Any], logit: float, found: str) -> None:
    logits = np.zeros(100, np.float32)
    logits[7] = logit
    sampler = Sampler(Sampling(**asked, logit_bias={7: 1.0}), 100, [7])
    with pytest.raises(ArgumentError, match=rf"penalties: expected numbers, found {found} made of logits\[7\]"):
        for _ in range(3):
            sampler.choose(logits)


def largest_below(number: float) -> float:
    return float(np.nextafter(number, -np.inf))


def smallest_above(number: float) -> float:
    return float(np.nextafter(number, np.inf))


@pytest.mark.parametrize("kind", ["everyday", "any", "far"])
def test_a_penalty_divides_as_ieee_says(kind: str) -> None:
    """To the last bit: beside a token whose value is the quotient, and beside the numbers next to that."""
    rng = np.random.default_rng(4)
    for _ in range(400):
        logit = np.float32(rng.uniform(1e-3, 40))
        penalty = float(round(rng.uniform(1.01, 2), 2))
        if kind != "everyday":
            logit = np.float32(np.ldexp(rng.uniform(1, 2), int(rng.integers(-140, 127))))
            penalty = float(np.ldexp(rng.uniform(1, 2), int(rng.integers(-30, 30))))
        if kind == "far":
            penalty = float(np.ldexp(penalty, int(rng.choice([-400, 400]))))
        quotient = float(logit) / penalty
        for rival, winner in ((largest_below(quotient), 0), (quotient, 0), (smallest_above(quotient), 1)):
            asked = Sampling(repetition_penalty=penalty, logit_bias={1: rival})
            assert chosen([np.array([logit, 0.0])], asked, [0]) == [winner], (logit, penalty)


def test_a_bias_beyond_what_is_divided_quickly() -> None:
    for bias in (1e-250, 1e250):
        asked = Sampling(repetition_penalty=3.0, logit_bias={0: bias, 1: bias / 3.0})
        assert chosen([np.zeros(2)], asked, [0]) == [0]
        asked = Sampling(repetition_penalty=3.0, logit_bias={0: bias, 1: smallest_above(bias / 3.0)})
        assert chosen([np.zeros(2)], asked, [0]) == [1]


def test_values_beyond_all_f32_numbers() -> None:
    """The greatest are looked for among f32 numbers near the values, as far as there are any."""
    logits = np.random.default_rng(2).normal(0, 1, SOME_BLOCKS)
    for greatest in (1e30, 1e39, 1e300):
        others = dict.fromkeys(range(100, SOME_BLOCKS, 1000), greatest * (1 - 1e-09))
        for asked in ({}, {"temperature": 1e-3 * greatest, "min_p": 1.0}, {"temperature": greatest, "top_k": 2}):
            sampling = Sampling(**asked, logit_bias=others | {9 * BLOCK + 5: greatest}, seed=1)
            assert chosen([logits] * 5, sampling, []) == oracle.choose_tokens([logits.astype(np.float32)] * 5, sampling)
    logits[7] = 3e38  # multiplied by the reciprocal of this penalty it has no f32 number near it
    asked = Sampling(temperature=0.0, repetition_penalty=1e-10, logit_bias={5000: 3e47})
    assert chosen([logits], asked, [7, 8]) == oracle.choose_tokens([logits.astype(np.float32)], asked, [7, 8]) == [7]


def test_huge_biases() -> None:
    logits = np.random.default_rng(1).normal(0, 1, 500)
    for bias in (1e30, 1e300, -1e300, -math.inf):
        asked = Sampling(temperature=1.0, logit_bias=dict.fromkeys(range(200, 400), bias), top_p=0.9, seed=9)
        assert chosen([logits] * 5, asked, []) == oracle.choose_tokens([logits.astype(np.float32)] * 5, asked)


# ---- Log probabilities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 300, SOME_BLOCKS])
def test_log_probabilities(kind: str, size: int) -> None:
    rng = np.random.default_rng(size)
    logits = KINDS[kind](rng, size).astype(np.float32)
    sampler = Sampler(Sampling(temperature=0.5, top_k=3, logit_bias={0: 5.0}, seed=2), size, [0])
    for count in (min(40, size), min(5, size)):  # more than there are blocks, and fewer
        token, logprob, top = sampler.choose(logits, logprobs=count)
        assert logprob is not None
        finite = min(count, int(np.isfinite(logits).sum()))
        assert [id for id, _ in top] == np.argsort(-logits, kind="stable")[:finite].tolist()
        for id, value in [(token, logprob), *top]:
            assert math.isclose(value, oracle.log_probability(logits, id), rel_tol=0, abs_tol=LOG_PROBABILITY)


@pytest.mark.parametrize("scale", [1e6, 1e12, 1e30])
def test_logits_far_from_0(scale: float) -> None:
    """Rough weights are made of logits times a factor, while that is moderate."""
    rng = np.random.default_rng(5)
    rows = [(scale + rng.normal(0, 1, SOME_BLOCKS) * scale / 1e4).astype(np.float32) for _ in range(3)]
    asked = Sampling(temperature=scale / 1e4, top_p=0.9, seed=3)
    assert chosen(rows, asked, []) == oracle.choose_tokens(rows, asked)
    for row in rows:
        choice = Sampler(Sampling(temperature=0.5, seed=4), SOME_BLOCKS, []).choose(row, logprobs=0)
        assert choice.logprob is not None
        assert math.isclose(choice.logprob, oracle.log_probability(row, choice.token), rel_tol=0, abs_tol=1e-9)


@pytest.mark.parametrize("far", [1e15, -1e15, 1e100])
def test_values_too_far_from_0_for_rough_weights(far: float) -> None:
    """Biases are f64 numbers: those next to each other differ by about the temperature."""
    step, size, rng = math.ulp(far), 3 * BLOCK, np.random.default_rng(8)
    biases = {id: far + step * int(rng.integers(4)) for id in range(size)}
    rows = [np.zeros(size, np.float32)] * 20
    for more in ({}, {"top_p": 0.9}):
        asked = Sampling(temperature=step, logit_bias=biases, seed=7, **more)
        assert chosen(rows, asked, []) == oracle.choose_tokens(rows, asked)


@pytest.mark.parametrize("first", [-1e30, -900.0, -490.0, -10.0, -np.inf])
def test_log_probabilities_of_logits_that_begin_far_below(first: float) -> None:
    """Weights are added up before the greatest logit is known."""
    logits = KINDS["flat"](np.random.default_rng(3), SOME_BLOCKS).astype(np.float32)
    logits[: 2 * BLOCK] = first
    for temperature in (0.0, 0.5, 1.0):
        sampler = Sampler(Sampling(temperature=temperature, seed=1), SOME_BLOCKS, [])
        token, logprob, _ = sampler.choose(logits, logprobs=0)
        assert logprob is not None
        assert math.isclose(logprob, oracle.log_probability(logits, token), rel_tol=0, abs_tol=LOG_PROBABILITY)


def test_none_are_given_unasked() -> None:
    logits = np.zeros(5, np.float32)
    assert Sampler(Sampling(), 5, []).choose(logits) == Choice(0, None, [])
    assert Sampler(Sampling(), 5, []).choose(logits, logprobs=0) == Choice(0, -math.log(5), [])
    for wrong in (-1, 6, 1025):
        with pytest.raises(ArgumentError, match="log_probabilit"):
            Sampler(Sampling(), 5, []).choose(logits, logprobs=wrong)


# ---- Callers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        (np.zeros(4, np.float32), "logits: expected 5, found 4"),
        (np.zeros(5), "logits: expected a contiguous array of float32"),
        (np.zeros(10, np.float32)[::2], "logits: expected a contiguous array of float32"),
    ],
)
def test_arrays_that_cannot_be(logits: np.ndarray, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Sampler(Sampling(), 5, []).choose(logits)


def test_tokens_of_the_prompt_are_of_the_vocabulary() -> None:
    for token in (-1, 5):
        with pytest.raises(ArgumentError, match=f"prompt: expected tokens 0 to 4, found {token}"):
            Sampler(Sampling(), 5, [token])


def test_two_threads_do_not_share_a_sampler() -> None:
    """Either one of them gets an error, or they took turns: never anything else."""
    logits = np.random.default_rng(1).normal(0, 1, VOCABULARY).astype(np.float32)
    sampler = Sampler(Sampling(temperature=1.0, seed=1), VOCABULARY, [])
    expected = {choice.token for choice in [sampler.choose(logits) for _ in range(60)]}
    sampler = Sampler(Sampling(temperature=1.0, seed=1), VOCABULARY, [])
    tokens: list[int] = []
    errors: list[Exception] = []

    def work() -> None:
        for _ in range(30):
            try:
                tokens.append(sampler.choose(logits).token)
            except StateError as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tokens) + len(errors) == 60
    assert set(tokens) <= expected
    assert all("one caller at a time" in str(error) for error in errors)
