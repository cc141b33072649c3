"""Choosing a token beside the same in NumPy, a group for each setting: make bench-ops ARGS=bench/ops/test_choosing.py

The vocabulary is that of Qwen3.6-35B-A3B. The logits are flat, which is the worst case: a model that is sure of the
next token leaves less to look at. NumPy is the definition, `moeflux.oracle.sampling`, which is written to be read.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from moeflux.oracle import sampling as oracle
from moeflux.text.sampling import Sampler, Sampling

VOCABULARY = 248_320
RNG = np.random.default_rng(0)
LOGITS = [RNG.standard_normal(VOCABULARY, dtype=np.float32) for _ in range(8)]
LONG_PROMPT = RNG.integers(VOCABULARY, size=100_000).tolist()
PROMPT = LONG_PROMPT[:5000]
ALLOWED = RNG.integers(1 << 32, size=VOCABULARY // 32, dtype=np.uint32)  # half of them

PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
BIASES = {int(id): 0.1 * int(id % 30) - 1.5 for id in RNG.permutation(VOCABULARY)[:1000]}
EVERYTHING: dict[str, Any] = {"temperature": 0.9, "top_k": 200_000, "top_p": 0.95, "min_p": 1e-4, **PENALTIES}
CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "likeliest": ({}, []),
    "temperature": ({"temperature": 1.0}, []),
    "top_p": ({"temperature": 1.0, "top_p": 0.95}, []),
    "min_p": ({"temperature": 1.0, "min_p": 0.05}, []),
    "top_k of 20": ({"temperature": 1.0, "top_k": 20}, []),
    "top_k of 20, top_p": ({"temperature": 1.0, "top_k": 20, "top_p": 0.95}, []),
    "top_k of 200,000": ({"temperature": 1.0, "top_k": 200_000}, []),
    "top_k of 16,384, top_p": ({"temperature": 1.0, "top_k": 16_384, "top_p": 0.95}, []),
    "top_k of 100,000, top_p": ({"temperature": 1.0, "top_k": 100_000, "top_p": 0.95}, []),
    "top_p, min_p": ({"temperature": 1.0, "top_p": 0.95, "min_p": 0.01}, []),
    "1,000 biases, top_p": ({"temperature": 1.0, "top_p": 0.95, "logit_bias": BIASES}, []),
    "penalties": ({"temperature": 1.0, **PENALTIES}, []),
    "penalties of a prompt": ({"temperature": 1.0, **PENALTIES}, PROMPT),
    "penalties of a prompt, top_p": ({"temperature": 1.0, "top_p": 0.95, **PENALTIES}, PROMPT),
    "penalties of a long prompt": ({"temperature": 1.0, **PENALTIES}, LONG_PROMPT),
    "penalties of a long prompt, top_p": ({"temperature": 1.0, "top_p": 0.95, **PENALTIES}, LONG_PROMPT),
    "log probabilities, top_p": ({"temperature": 1.0, "top_p": 0.95}, []),
    "log probabilities, temperature of 0.7, top_p": ({"temperature": 0.7, "top_p": 0.95}, []),
    "log probabilities, temperature of 0.7, top_k of 100,000, top_p": (
        {"temperature": 0.7, "top_k": 100_000, "top_p": 0.95},
        [],
    ),
    "log probabilities, temperature of 0.7, top_p, penalties of a long prompt": (
        {"temperature": 0.7, "top_p": 0.95, **PENALTIES},
        LONG_PROMPT,
    ),
    "mask": ({"temperature": 1.0}, []),
    "mask, top_p": ({"temperature": 1.0, "top_p": 0.95}, []),
    "mask, penalties of a prompt, top_p": ({"temperature": 1.0, "top_p": 0.95, **PENALTIES}, PROMPT),
    "everything": (EVERYTHING, PROMPT),
    "everything, mask": (EVERYTHING, PROMPT),
    "everything, mask, log probabilities": (EVERYTHING, PROMPT),
    "everything, log probabilities": (EVERYTHING, PROMPT),
    "everything of a long prompt": (EVERYTHING, LONG_PROMPT),
    "everything of a long prompt, log probabilities": (EVERYTHING, LONG_PROMPT),
    "everything of a long prompt, mask, log probabilities": (EVERYTHING, LONG_PROMPT),
}


@pytest.mark.parametrize("case", CASES)
def test_ours(benchmark: Any, case: str) -> None:
    benchmark.group = case
    asked, prompt = CASES[case]
    sampler, rows = Sampler(Sampling(seed=1, **asked), VOCABULARY, prompt), itertools.cycle(LOGITS)
    allowed = ALLOWED if "mask" in case else None
    logprobs = 20 if "log prob" in case else None
    benchmark.pedantic(
        lambda: sampler.choose(next(rows), allowed=allowed, logprobs=logprobs), rounds=400, warmup_rounds=8
    )


@pytest.mark.parametrize("case", CASES)
def test_numpy(benchmark: Any, case: str) -> None:
    benchmark.group = case
    settings, prompt = CASES[case]
    asked, rows, answer = Sampling(seed=1, **settings), itertools.cycle(LOGITS), list[int]()
    numbers = itertools.cycle(oracle.random_numbers(1, 80))
    allowed = np.unpackbits(ALLOWED.view(np.uint8), bitorder="little").astype(bool) if "mask" in case else None

    def choose() -> None:
        values = oracle.changed_logits(next(rows), asked, prompt, answer, allowed)
        answer.append(oracle.choose_token(values, asked, next(numbers)))

    benchmark.pedantic(choose, rounds=5, warmup_rounds=1)
