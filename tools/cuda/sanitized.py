"""A little of everything on the NVIDIA GPU of this machine, for compute-sanitizer, which makes kernels hundreds of
times slower: each op in each format, and with a small model prompts, steps of one session, and steps of three. The
first run compiles the kernels, which no sanitizer should watch.

    moeflux synth STORE --variant a3b --layers 4 --experts 16 --vocab 512
    python tools/cuda/sanitized.py STORE
    compute-sanitizer --tool memcheck python tools/cuda/sanitized.py STORE

Parts may be named behind STORE: ops, prompts, steps, sessions. racecheck takes more of the host's memory with each
launch, so give it one part at a time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import moeflux
from moeflux.measure.gpu_check import cases
from moeflux.ops import Ops

PROMPT = 40
SESSIONS = 3
STEPS = 3

started = time.perf_counter()


def tell(what: str) -> None:
    print(f"{time.perf_counter() - started:6.1f} s: {what}", flush=True)


def ops() -> None:
    gpu = Ops("cuda")
    count = 0
    for _, run in cases(np.random.default_rng(1), "cuda"):
        run(gpu)
        count += 1
    tell(f"{count} ops")


def prompts(model: moeflux.Model) -> None:
    """Of many tokens, at the beginning and behind others; and what a snapshot reads."""
    session = model.session()
    for _ in range(2):
        session.prefill([7 * i % 512 for i in range(PROMPT)])
        tell(f"a prompt of {PROMPT} tokens")
    session.snapshot()
    tell("a snapshot")


def steps(model: moeflux.Model) -> None:
    """The second is a graph, and the third may have been recorded ahead."""
    session = model.session()
    for _ in range(STEPS):
        session.step(3)
        tell("a step")


def sessions(model: moeflux.Model) -> None:
    all_sessions = [model.session() for _ in range(SESSIONS)]
    for _ in range(STEPS):
        model.evaluate([(session, [5]) for session in all_sessions])
        tell(f"a step of {SESSIONS} sessions")


OF_A_MODEL: dict[str, Callable[[moeflux.Model], None]] = {"prompts": prompts, "steps": steps, "sessions": sessions}


def main() -> None:
    store, wanted = Path(sys.argv[1]), sys.argv[2:] or ["ops", *OF_A_MODEL]
    if unknown := set(wanted) - {"ops", *OF_A_MODEL}:
        sys.exit(f"expected ops, {', '.join(OF_A_MODEL)}, found {', '.join(sorted(unknown))}")
    if "ops" in wanted:
        ops()
    parts = [OF_A_MODEL[name] for name in wanted if name != "ops"]
    if not parts:
        return
    with moeflux.load(store, backend="cuda", memory=None, context=256) as model:
        tell("the model is loaded")
        for part in parts:
            part(model)


if __name__ == "__main__":
    main()
