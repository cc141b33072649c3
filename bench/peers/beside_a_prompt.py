"""How long answers wait for their next token while a long prompt is read: python bench/peers/beside_a_prompt.py FOLDER

Makes the A3B model of the peers' comparison in FOLDER (4 GB) unless it is there. Answers are under way through one
scheduler. Turn by turn, a prompt is read beside them, in eight stretches, each of which goes on from the one before.
Before and behind each stretch they are alone: an answer that is longer takes longer, and other programs come and go.
Time between two tokens of an answer is counted in both: the middle, and the 99th percentile. There is a ratio for each
stretch, and the middle one counts.

Where other programs take the processors, the time of this process says more: with one thread, it is what a step takes
on a machine of its own. The scheduler goes by the clock all the same.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from models import MODELS

import moeflux
from moeflux import Sampling
from moeflux.conversion.synth import synth
from moeflux.runtime.tokens import random_prompt
from moeflux.serving import Handle, Request, Scheduler

STRETCHES = 8
"""Of a prompt."""

Clock = Callable[[], float]


class Listener:
    """Notes when each token of an answer comes."""

    def __init__(self, handle: Handle, clock: Clock) -> None:
        self.handle = handle
        self.clock = clock
        self.times: list[float] = []
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()

    def listen(self) -> None:
        for piece in self.handle:
            if piece.token is not None:
                self.times.append(self.clock())

    def between(self, begin: float, end: float) -> list[float]:
        """Seconds between two tokens, of those that came then."""
        return [after - before for before, after in pairwise(self.times) if begin <= before and after <= end]


def answers(scheduler: Scheduler, vocab: int, count: int, tokens: int, clock: Clock) -> list[Listener]:
    requests = [
        Request(
            random_prompt(64, vocab, seed=place),
            max_tokens=tokens,
            ignore_end=True,
            sampling=Sampling(1.0, top_p=0.95, seed=place),
        )
        for place in range(count)
    ]
    return [Listener(scheduler.submit(request), clock) for request in requests]


@dataclass(frozen=True)
class Waits:
    """Seconds between two tokens of an answer: for each stretch of a prompt, around it and beside it."""

    alone: list[list[float]] = field(default_factory=list)
    beside: list[list[float]] = field(default_factory=list)
    prompts: list[float] = field(default_factory=list)  # seconds of each

    def ratio(self, percent: int) -> float:
        both = zip(self.alone, self.beside, strict=True)
        return float(
            np.median([np.percentile(beside, percent) / np.percentile(alone, percent) for alone, beside in both])
        )

    def __str__(self) -> str:
        words = (
            f"{name} {percentile(times, 50) * 1e3:.2f} (p99 {percentile(times, 99) * 1e3:.2f}) ms"
            for name, times in (("alone", self.alone), ("beside a prompt", self.beside))
        )
        return f"{', '.join(words)}, {sum(map(len, self.beside))} tokens in {sum(self.prompts):.0f} s"


def percentile(times: Sequence[list[float]], percent: int) -> float:
    """Of all of them together."""
    return float(np.percentile(np.concatenate(times), percent))


def context_for(prompt: int, quiet: int) -> int:
    """Beside one answer, most steps have one row of the prompt, and every ninth none."""
    return 2 * prompt + 10 * quiet + 128


def measured(
    model: moeflux.Model,
    count: int,
    *,
    prompt: int,
    quiet: int,
    turns: int = 1,
    prompt_rows: int | None = None,
    clock: Clock = time.perf_counter,
) -> Waits:
    """`quiet`: tokens of each answer between two stretches. The context must be that of `context_for`."""
    vocab = model.variant.vocab_size
    waits = Waits()
    with Scheduler(model, running=count + 1, prompt_rows=prompt_rows) as scheduler:
        for turn in range(turns):
            listeners = answers(scheduler, vocab, count, context_for(prompt, quiet) - 64, clock)
            seconds = one_turn(scheduler, listeners, random_prompt(prompt, vocab, seed=1000 + turn), quiet, waits)
            waits.prompts.append(seconds)
            print(f"{count} answers, turn {turn + 1}: {seconds:.0f} s", file=sys.stderr, flush=True)
            for each in listeners:
                each.handle.close()
    return waits


def one_turn(scheduler: Scheduler, listeners: list[Listener], ids: list[int], quiet: int, waits: Waits) -> float:
    """Returns the seconds for the prompt."""
    clock, total = listeners[0].clock, 0.0

    def between(began: float, ended: float) -> list[float]:
        return [seconds for each in listeners for seconds in each.between(began, ended)]

    def wait_quietly() -> list[float]:
        began = clock()
        while any(len(each.between(began, clock())) < quiet for each in listeners):
            if any(each.handle.finish for each in listeners):
                raise SystemExit("expected answers that go on, found one at its end")
            time.sleep(0.05)
        return between(began, clock())

    while not all(len(each.times) > 8 for each in listeners):
        time.sleep(0.01)
    alone = wait_quietly()
    for end in range(len(ids) // STRETCHES, len(ids) + 1, len(ids) // STRETCHES):
        asked = clock()
        scheduler.submit(Request(ids[:end], max_tokens=1)).wait()
        done = clock()
        after = wait_quietly()
        waits.alone.append(alone + after)
        waits.beside.append(between(asked, done))
        total, alone = total + done - asked, after
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--answers", default="1,4,8", help="numbers of answers under way; 1,4,8")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens; 8192")
    parser.add_argument("--prompt-rows", type=int, help="the scheduler's option; by default it adapts")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument(
        "--quiet", type=int, default=100, help="tokens of each answer before a prompt, and behind it; 100"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--process-time", action="store_true", help="count the time of this process alone")
    arguments = parser.parse_args()
    if not (arguments.folder / "moeflux.json").exists():
        synth(arguments.folder, MODELS["a3b"], force=True)
    counts = [int(count) for count in arguments.answers.split(",")]
    with moeflux.load(
        arguments.folder,
        context=context_for(arguments.prompt, arguments.quiet),
        sessions=max(counts) + 1,
        threads=arguments.threads,
    ) as model:
        for count in counts:
            waits = measured(
                model,
                count,
                prompt=arguments.prompt,
                quiet=arguments.quiet,
                turns=arguments.turns,
                prompt_rows=arguments.prompt_rows,
                clock=time.process_time if arguments.process_time else time.perf_counter,
            )
            print(f"{count} answers: {waits}; ratios {waits.ratio(50):.2f} (p99 {waits.ratio(99):.2f})", flush=True)


if __name__ == "__main__":
    main()
