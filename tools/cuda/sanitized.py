"""A little of everything on the NVIDIA GPU of this machine, for compute-sanitizer, which makes kernels hundreds of
times slower: each op in each format, and a small model's prefill, steps, steps of three sessions and a snapshot. The
first run compiles the kernels, which no sanitizer should watch.

    moeflux synth STORE --variant a3b --layers 4 --experts 16 --vocab 512
    python tools/cuda/sanitized.py STORE
    compute-sanitizer --tool racecheck python tools/cuda/sanitized.py STORE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import moeflux
from moeflux.measure.gpu_check import cases
from moeflux.ops import Ops

PROMPT = 40
SESSIONS = 3
STEPS = 3


def main() -> None:
    store = Path(sys.argv[1])
    started = time.perf_counter()

    def tell(what: str) -> None:
        print(f"{time.perf_counter() - started:6.1f} s: {what}", flush=True)

    gpu = Ops("cuda")
    count = 0
    for _, run in cases(np.random.default_rng(1), "cuda"):
        run(gpu)
        count += 1
    tell(f"{count} ops")
    with moeflux.load(store, backend="cuda", memory=None, context=256) as model:
        tell("the model is loaded")
        sessions = [model.session() for _ in range(SESSIONS)]
        for place, session in enumerate(sessions):
            session.prefill([(7 * i + place) % 512 for i in range(PROMPT if place == 0 else 2)])
        tell("prompts")
        for _ in range(STEPS):
            sessions[0].step(3)
            tell("a step")
            model.evaluate([(session, [5]) for session in sessions])
            tell("a step of all sessions")
        sessions[1].prefill([3] * PROMPT)
        sessions[2].snapshot()
        model.evaluate([(session, [5]) for session in sessions])
        tell("a prompt behind other tokens, a snapshot, and a step of all sessions")


if __name__ == "__main__":
    main()
