"""How long steps and prompts take with everything in memory: steps of one session, steps of several together, prompts
of several lengths. Made for a GPU, but any backend will do.

    python bench/steps.py STORE [--backend cuda] [--context 1000] [--sessions 1,2,8,16,32] [--prompts 512,4096]
        [--steps 80] [--kv-dtype f32]

A step ends when the likeliest token of each session is known. Of one session, that token is the next one. Of several,
random tokens are, because sessions that say the same pick the same experts. Before anything is measured, a long prompt
of random tokens brings every expert into its slot. Prints a line of JSON for each number of sessions and each length,
with the median and the least. Processes of one program differ, on a GPU by a tenth for one session: run it several
times, in turn with what it is compared with.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import moeflux

WARMING = 16_000  # tokens, after which hardly an expert has never been picked
PROMPTS = 6  # of each length, of which the first two do not count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--context", type=int, default=1000, help="tokens before the first step")
    parser.add_argument("--sessions", type=numbers, default=[1, 2, 8, 16, 32], help="how many at a time")
    parser.add_argument("--prompts", type=numbers, default=[512, 4096], help="how long they are")
    parser.add_argument("--steps", type=int, default=80, help="as many again are made before and do not count")
    parser.add_argument("--kv-dtype", choices=("f32", "bf16", "q8"), default="f32", help="type of keys and values")
    parser.add_argument("--warming", type=int, default=WARMING, help="tokens of the prompt before everything")
    arguments = parser.parse_args()
    each = arguments.context + 2 * arguments.steps * len(arguments.sessions)
    room = max(max(arguments.sessions, default=0) * each, arguments.warming, *arguments.prompts, 0) + 1
    options = {"backend": arguments.backend, "context": room, "kv_dtype": arguments.kv_dtype}
    with moeflux.load(arguments.store, memory=None, **options) as model:
        rng = np.random.default_rng(7)
        vocab = model.variant.vocab_size

        def random_tokens(count: int) -> list[int]:
            return [int(token) for token in rng.integers(0, vocab, count)]

        with model.session() as session:
            session.prefill(random_tokens(arguments.warming))
        for length in arguments.prompts:
            found = [seconds_of_prompt(model, random_tokens(length)) for _ in range(PROMPTS)][2:]
            tell({"prompt": length}, found, length)
        sessions = [model.session() for _ in range(max(arguments.sessions, default=0))]
        for session in sessions:
            session.prefill(random_tokens(arguments.context))
        for count in arguments.sessions:
            found = seconds_of_steps(model, sessions[:count], 2 * arguments.steps, random_tokens)[arguments.steps :]
            tell({"sessions": count, "context": arguments.context, "kv_dtype": arguments.kv_dtype}, found, count)


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def seconds_of_prompt(model: moeflux.Model, ids: list[int]) -> float:
    with model.session() as session:
        begun = time.perf_counter()
        session.prefill(ids).argmax()
        return time.perf_counter() - begun


def seconds_of_steps(
    model: moeflux.Model, sessions: list[moeflux.Session], steps: int, random_tokens: Callable[[int], list[int]]
) -> list[float]:
    found = []
    ids = random_tokens(len(sessions))
    for _ in range(steps):
        begun = time.perf_counter()
        if len(sessions) == 1:
            best = [sessions[0].step(ids[0]).argmax()]
        else:
            work = [(session, [token]) for session, token in zip(sessions, ids, strict=True)]
            best = [logits.argmax() for logits in model.evaluate(work)]
        found.append(time.perf_counter() - begun)
        ids = best if len(sessions) == 1 else random_tokens(len(sessions))
    return found


def tell(what: dict[str, Any], seconds: list[float], tokens: int) -> None:
    median = statistics.median(seconds)
    print(
        json.dumps(what | {"seconds": median, "least": min(seconds), "tokens_per_second": tokens / median}), flush=True
    )


if __name__ == "__main__":
    main()
