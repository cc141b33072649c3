"""How long answers wait for their next token while a long prompt is read: python bench/peers/beside_a_prompt.py FOLDER

Makes the A3B model of the peers' comparison in FOLDER (4 GB) unless it is there. Answers are under way through one
scheduler. Turn by turn, they are alone, and then a prompt is read beside them. Time between two tokens of an answer is
counted in both, and the ratios are of one run: the middle, and the 99th percentile.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from models import MODELS

import moeflux
from moeflux import Sampling
from moeflux.conversion.synth import synth
from moeflux.runtime.tokens import random_prompt
from moeflux.serving import Handle, Request, Scheduler


class Listener:
    """Notes when each token of an answer comes."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.times: list[float] = []
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()

    def listen(self) -> None:
        for piece in self.handle:
            if piece.token is not None:
                self.times.append(time.perf_counter())

    def between(self, begin: float, end: float) -> list[float]:
        """Seconds between two tokens, of those that came then."""
        return [after - before for before, after in pairwise(self.times) if begin <= before and after <= end]


def answers(scheduler: Scheduler, vocab: int, count: int, tokens: int) -> list[Listener]:
    requests = [
        Request(
            random_prompt(64, vocab, seed=place),
            max_tokens=tokens,
            ignore_end=True,
            sampling=Sampling(1.0, top_p=0.95, seed=place),
        )
        for place in range(count)
    ]
    return [Listener(scheduler.submit(request)) for request in requests]


def measured(model: moeflux.Model, arguments: argparse.Namespace, count: int) -> dict[str, object]:
    vocab = model.variant.vocab_size
    with Scheduler(model, running=count + 1, prompt_rows=arguments.prompt_rows) as scheduler:
        listeners = answers(scheduler, vocab, count, arguments.context - 64)
        while not all(len(each.times) > 8 for each in listeners):
            time.sleep(0.01)
        alone: list[float] = []
        beside: list[float] = []
        seconds = []
        for turn in range(arguments.turns):
            began = time.perf_counter()
            while any(len(each.between(began, time.perf_counter())) < arguments.quiet for each in listeners):
                time.sleep(0.05)
            asked = time.perf_counter()
            prompt = random_prompt(arguments.prompt, vocab, seed=1000 + turn)
            scheduler.submit(Request(prompt, max_tokens=1)).wait()
            done = time.perf_counter()
            for each in listeners:
                alone += each.between(began, asked)
                beside += each.between(asked, done)
            seconds.append(done - asked)
            print(f"{count} answers, turn {turn + 1}: {done - asked:.0f} s", file=sys.stderr, flush=True)
        for each in listeners:
            each.handle.cancel()
    row: dict[str, object] = {"answers": count, "prompt": arguments.prompt, "prompt_rows": arguments.prompt_rows}
    row |= {"prompt_seconds": round(float(np.median(seconds)), 2), "tokens_beside": len(beside)}
    for percent in (50, 99):
        quiet, busy = (float(np.percentile(times, percent)) for times in (alone, beside))
        row |= {f"alone_p{percent}": quiet, f"beside_p{percent}": busy, f"ratio_p{percent}": busy / quiet}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--answers", default="1,4,8", help="numbers of answers under way; 1,4,8")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens; 8192")
    parser.add_argument("--prompt-rows", type=int, help="the scheduler's option; by default it adapts")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--quiet", type=int, default=100, help="tokens of each answer before the prompt; 100")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if not (arguments.folder / "moeflux.json").exists():
        synth(arguments.folder, MODELS["a3b"], force=True)
    counts = [int(count) for count in arguments.answers.split(",")]
    arguments.context = 2 * arguments.prompt
    with moeflux.load(
        arguments.folder, context=arguments.context, sessions=max(counts) + 1, threads=arguments.threads
    ) as model:
        for count in counts:
            print(json.dumps(measured(model, arguments, count)), flush=True)


if __name__ == "__main__":
    main()
