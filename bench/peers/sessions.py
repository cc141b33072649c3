"""What several sessions cost beside one: python bench/peers/sessions.py FOLDER [--rounds 3] [--rows NAME,...]

bench/peers/prepare.sh makes FOLDER (`make bench-sessions` does both). Everything is a ratio of what was measured in
turns, A-B-B-A, on the A3B-shaped model of the peers' comparison. Its weights are random, and so are the tokens: they
are drawn at temperature 1, from a prompt of its own for each session. Routers pick experts nearly evenly then, which
shares the fewest: the program prints how many different ones a step of eight picks. Text of one subject shares more.

rows: together   tokens a second of 8 sessions that decode together, over those of one in the same process, and over
                 those of 8 sequences in llama.cpp's batched bench, which chooses no tokens
      streamed   the same beside one, with slots for a quarter of the experts; and the bytes read a token beside one's
      decoder    the time of a step of one request through the decoder, over that of `session.step` and a choice:
                 the least of the steps of a turn, because other programs only add to it
      prefix     the time to the first token of a prompt of 8000 of which 7500 are known to the scheduler, over that of
                 a prompt from nothing. The known part ends at a border, as a message does
      beside     the time between two tokens of an answer while a prompt of 8192 is read, over that without one: the
                 middle and the 99th percentile, with one answer and with eight. On a model in the built-in one's shape,
                 because beside answers the large one takes minutes for such a prompt. With one thread, it is the time
                 of the process that counts, whatever other programs do

How memory behaves with many sessions is measured by `make soak` and tests/runtime/test_memory_contract.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from beside_a_prompt import context_for, measured
from models import small
from turns import run, take_turns

import moeflux
from moeflux import _core
from moeflux.conversion.synth import synth
from moeflux.runtime.tokens import random_prompt
from moeflux.serving import Request, Scheduler
from moeflux.text.sampling import Sampler, Sampling

SESSIONS = 8
STEPS = 16  # of a turn of the row `decoder`
PROMPT, KNOWN = 8000, 7500
LONG_PROMPT = 8192
QUIET = 400  # tokens of all answers together between two stretches of a long prompt

Ratios = dict[str, list[float]]


@dataclass(frozen=True)
class Target:
    least: float | None = None
    most: float | None = None

    def __str__(self) -> str:
        return f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"

    def met(self, ratio: float) -> bool:
        return ratio >= self.least if self.least is not None else ratio <= (self.most or 0)


TARGETS = {
    "together, beside one": Target(least=2.2),
    "together, beside llama.cpp": Target(least=1.3),
    "streamed, beside one": Target(least=1.8),
    "streamed, bytes read a token": Target(most=0.5),
    "decoder, time of a step": Target(most=1.02),
    "prefix, time to the first token": Target(most=0.125),
    "beside a prompt, 1 answer, p50": Target(most=2),
    "beside a prompt, 1 answer, p99": Target(most=2),
    "beside a prompt, 8 answers, p50": Target(most=2),
    "beside a prompt, 8 answers, p99": Target(most=2),
}


# ---- Decoding together ------------------------------------------------------------------------------------------


def ours(arguments: argparse.Namespace, *options: str) -> dict[int, dict[str, Any]]:
    """The measurement of each number of sessions, in a process of its own."""
    command = [sys.executable, "-m", "moeflux", "bench", str(arguments.folder / "a3b"), "--json", "--temperature", "1"]
    command += ["--sessions", f"1,{SESSIONS}", "--threads", str(arguments.threads), "--kv-dtype", "bf16", *options]
    command += ["--prefill", str(arguments.prefill), "--decode", str(arguments.decode)]
    return {row["sessions"]: row for row in map(json.loads, run(command).text.splitlines())}


def theirs(arguments: argparse.Namespace) -> float:
    """Tokens a second of all sequences."""
    folder, room = arguments.folder, 2 * SESSIONS * (arguments.prefill + arguments.decode)
    command = [str(folder / "llama" / "bin" / "llama-batched-bench"), "-m", str(folder / "a3b.gguf"), "-c", str(room)]
    command += ["-t", str(arguments.threads), "-tb", str(arguments.threads), "--output-format", "jsonl"]
    command += ["-npp", str(arguments.prefill), "-ntg", str(arguments.decode), "-npl", str(SESSIONS)]
    [line] = [json.loads(line) for line in run(command).text.splitlines() if line.startswith("{")]
    return float(line["speed_tg"])


def speedup(rows: dict[int, dict[str, Any]]) -> float:
    return float(rows[SESSIONS]["tokens_per_second"] / rows[1]["tokens_per_second"])


def picked(rows: dict[int, dict[str, Any]]) -> float:
    """Different experts of a step of all sessions, over those of one."""
    each = {count: (row["hits"] + row["misses"]) * count / row["tokens"] for count, row in rows.items()}
    return each[SESSIONS] / each[1]


def together(arguments: argparse.Namespace) -> Ratios:
    ratios: Ratios = {"together, beside one": [], "together, beside llama.cpp": []}
    samples: dict[str, list[Any]] = {"moeflux": [], "llama.cpp": []}
    runs: dict[str, Callable[[], Any]] = {"moeflux": lambda: ours(arguments), "llama.cpp": lambda: theirs(arguments)}
    for name, sample in take_turns(runs, arguments.rounds):
        samples[name].append(sample)
    for rows, speed in zip(samples["moeflux"], samples["llama.cpp"], strict=True):
        one, all_ = (rows[count]["tokens_per_second"] for count in (1, SESSIONS))
        print(f"one {one:.1f}, {SESSIONS} {all_:.1f}, llama.cpp {speed:.1f} tokens/s; experts x {picked(rows):.2f}")
        ratios["together, beside one"].append(speedup(rows))
        ratios["together, beside llama.cpp"].append(all_ / speed)
    return ratios


def streamed(arguments: argparse.Namespace) -> Ratios:
    with moeflux.open_store(arguments.folder / "a3b") as store:
        slots = len(store.variant.moe_layers) * store.variant.experts.count // 4
    ratios: Ratios = {"streamed, beside one": [], "streamed, bytes read a token": []}
    for _ in range(arguments.rounds):
        rows = ours(arguments, "--expert-slots", str(slots))
        read = {count: row["bytes_read"] / row["tokens"] for count, row in rows.items()}
        words = ", ".join(
            f"{row['tokens_per_second']:.1f} tokens/s and {read[count] / 1e6:.1f} MB read a token with {count}"
            for count, row in rows.items()
        )
        print(f"{slots} slots: {words}")
        ratios["streamed, beside one"].append(speedup(rows))
        ratios["streamed, bytes read a token"].append(read[SESSIONS] / read[1])
    return ratios


# ---- One request ------------------------------------------------------------------------------------------------


def decoder(arguments: argparse.Namespace) -> Ratios:
    turns = 2 * arguments.rounds
    room = arguments.prefill + (turns + 1) * STEPS
    with moeflux.load(arguments.folder / "a3b", threads=arguments.threads, context=room, sessions=2) as model:
        prompt, vocab = random_prompt(arguments.prefill, model.variant.vocab_size, seed=0), model.variant.vocab_size
        samplers = [Sampler(Sampling(seed=0), vocab, []) for _ in range(2)]
        session, asked = model.session(), model.session()
        logits = session.prefill(prompt)
        asked.prefill(prompt[:-1])
        requests = _core.Decoder(model._engine)
        requests.add(asked._core, np.asarray(prompt[-1:], np.int32), samplers[1]._core, (), room)

        def steps() -> Iterator[float]:
            nonlocal logits
            for _ in range(STEPS):
                began = time.perf_counter()
                logits = session.step(samplers[0].choose(logits).token)
                yield time.perf_counter() - began

        def decoded() -> Iterator[float]:
            for _ in range(STEPS):
                began = time.perf_counter()
                [event] = requests.step()
                yield time.perf_counter() - began
                assert event.token is not None, event.error

        list(steps()), list(decoded())
        times: dict[str, list[list[float]]] = {"step": [], "decoder": []}
        runs = {"step": lambda: list(steps()), "decoder": lambda: list(decoded())}
        for name, taken in take_turns(runs, turns):
            times[name].append(taken)
    pairs = zip(times["decoder"], times["step"], strict=True)
    return {"decoder, time of a step": [min(each) / min(other) for each, other in pairs]}


def prefix(arguments: argparse.Namespace) -> Ratios:
    ratios = []
    with (
        moeflux.load(arguments.folder / "a3b", threads=arguments.threads, context=8192, sessions=2) as model,
        Scheduler(model) as scheduler,
    ):

        def first_token(prompt: list[int]) -> float:
            began = time.perf_counter()
            scheduler.submit(Request(prompt, max_tokens=1, ignore_end=True, borders=(KNOWN,))).wait()
            return time.perf_counter() - began

        first_token(random_prompt(512, model.variant.vocab_size, seed=0))  # reads experts
        for seed in range(1, arguments.rounds + 1):
            prompt = random_prompt(PROMPT, model.variant.vocab_size, seed=seed)
            rest = random_prompt(PROMPT - KNOWN, model.variant.vocab_size, seed=arguments.rounds + seed)
            before = scheduler.stats.reused_tokens
            nothing, known = first_token(prompt), first_token(prompt[:KNOWN] + rest)
            reused = scheduler.stats.reused_tokens - before
            print(f"first token after {nothing:.2f} s from nothing, {known:.2f} s with {reused} tokens reused")
            ratios.append(known / nothing)
    return {"prefix, time to the first token": ratios}


def beside(arguments: argparse.Namespace) -> Ratios:
    folder = arguments.folder / "small"
    synth(folder, small(), force=True)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    ratios: Ratios = {}
    with moeflux.load(
        folder, threads=arguments.threads, context=context_for(LONG_PROMPT, QUIET), sessions=SESSIONS + 1
    ) as model:
        for _ in range(arguments.rounds):
            for count, answers in ((1, "1 answer"), (SESSIONS, f"{SESSIONS} answers")):
                waits = measured(model, count, prompt=LONG_PROMPT, quiet=QUIET // count, clock=clock)
                print(f"{answers}: between two tokens {waits}")
                for percent in (50, 99):
                    name = f"beside a prompt, {answers}, p{percent}"
                    ratios.setdefault(name, []).append(waits.ratio(percent))
    return ratios


# ---- Command line -----------------------------------------------------------------------------------------------

ROWS: dict[str, Callable[[argparse.Namespace], Ratios]] = {
    row.__name__: row for row in (together, streamed, decoder, prefix, beside)
}


def row_names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in ROWS:
            raise argparse.ArgumentTypeError(f"expected rows among {', '.join(ROWS)}, found {name!r}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=row_names, default=list(ROWS), metavar="NAME,...", help="default: all")
    parser.add_argument("--prefill", type=int, default=128, help="tokens of each session before; default: 128")
    parser.add_argument("--decode", type=int, default=32, help="steps that are timed; default: 32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    ratios: Ratios = {}
    for name in arguments.rows:
        ratios |= ROWS[name](arguments)
    print(f"\nmedians of {arguments.rounds} rounds")
    for what, found in ratios.items():
        middle, target = statistics.median(found), TARGETS[what]
        words = " ".join(f"{ratio:.3f}" for ratio in found)
        print(f"{what:<32} {middle:6.3f}   target {target}: {'met' if target.met(middle) else 'missed'}   ({words})")


if __name__ == "__main__":
    main()
