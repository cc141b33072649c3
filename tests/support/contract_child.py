"""A process that loads models by a plan and works with them, for tests that measure it from outside.

Talks in lines. For each model it reads what to do as JSON, prints the plan's total, waits for a line, works, and prints
what it found as JSON. Then it waits for the next, so that its status can still be read.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import moeflux
from moeflux import BudgetError
from moeflux.runtime.plan import plan
from moeflux.runtime.plan_table import Plan
from moeflux.serving import Request, Scheduler
from moeflux.text.sampling import Sampler, Sampling
from moeflux.text.template import RENDERER

PLENTY = "1TB"


def budget_of(path: Path, share: str, options: dict[str, Any]) -> int:
    """floor; third: room for a third of the experts; all: room for everything."""
    whole = plan(path, memory=PLENTY, **options)
    if share == "all":
        return whole.total_bytes
    third = whole.experts // 3 * whole.slot_bytes if share == "third" else 0
    return whole.floor_bytes + third


def load(path: Path, budget: int, share: str, options: dict[str, Any]) -> moeflux.Model:
    """Loads the model at the floor. The floor moves by a step when the process grows over a border; then it asks
    again."""
    for _ in range(3):
        try:
            return moeflux.load(path, memory=budget, **options)
        except BudgetError:
            budget = budget_of(path, share, options)
    return moeflux.load(path, memory=budget, **options)


def work(model: moeflux.Model, tokens: int) -> int:
    """Everything that takes memory in a session's life; returns the last token."""
    plan = model.plan
    sessions = [model.session() for _ in range(plan.sessions)]
    vocab = model.variant.vocab_size
    asked = Sampling(temperature=2.0, top_p=0.999, repetition_penalty=1.1, frequency_penalty=0.1, seed=1)
    samplers = [Sampler(asked, vocab, []) for _ in sessions]
    for session, sampler in zip(sessions, samplers, strict=True):
        prompt = [(31 * i + 7) % vocab for i in range(max(1, plan.context - tokens - 1))]
        half = len(prompt) // 2
        session.prefill(prompt[:half])
        session.checkpoint()
        token = session.prefill(prompt[half:]).argmax()
        for _ in range(min(tokens, plan.context - session.position)):
            logits = session.step(token)
            token = sampler.choose(logits, logprobs=20).token
        logits.top_k(5)
        session.rewind(half)
        session.step(token)
    check_held(model, plan)
    return token


def serve(model: moeflux.Model) -> None:
    """A conversation that fills its context goes to the disk when the scheduler ends, and comes back with the next."""
    said, evaluated = [(17 * i + 3) % model.variant.vocab_size for i in range(model.plan.context - 4)], 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            with Scheduler(model, disk=folder) as scheduler:
                answer = scheduler.submit(Request(said, max_tokens=2, ignore_end=True)).wait()
            assert answer.stats.reused_tokens == evaluated
            said, evaluated = [*said, *answer.tokens], len(said) + 1


def check_held(model: moeflux.Model, plan: Plan) -> None:
    """With as many sessions as planned, what is held is the plan, to the byte, but for rows that are not used."""
    held = model.memory.held
    whole = plan.parts["keys and values"]
    unused = whole - held["keys and values"]
    assert 0 <= unused <= whole
    assert {name: plan.parts[name] for name in held} == held | {"keys and values": whole}, (plan.parts, held)
    later = sum(plan.parts[name] for name in ("text", "encoder", "choosing", "passing states"))
    assert model._engine.held == plan.model_bytes - later - unused


def peak_of(pid: int) -> int:
    """Bytes that a process had in physical memory at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[1])


def run(case: dict[str, Any]) -> dict[str, Any]:
    path, share, options = Path(case["path"]), case["budget"], case["options"]
    plan(path, memory=PLENTY, **options)  # what planning itself takes is there now
    budget = budget_of(path, share, options)
    print(budget, flush=True)
    sys.stdin.readline()
    with load(path, budget, share, options) as model:
        token = work(model, case["tokens"])
        serve(model)
        if model.plan.parts["text"]:
            model.tokenizer.decode(model.tokenizer.encode("how many bytes does a tokenizer take? " * 50))
        encoder = renderer = 0
        if model.plan.parts["encoder"]:
            encoder = peak_of(model.tokenizer._guard._sandbox.pid)
        if model.plan.parts["text"] and model.chat_format is not None:
            model.chat_format.render([{"role": "user", "content": "how much does a text take? " * 20_000}])
            renderer = peak_of(RENDERER.pid)
        excess = bytearray(case["excess"])
        excess[::4096] = b"x" * len(excess[::4096])
        return {
            "total": model.plan.total_bytes,
            "floor": model.plan.floor_bytes,
            "budget": model.plan.budget_bytes,
            "slots": model.plan.slots,
            "experts": model.plan.experts,
            "reads": model.plan.reads,
            "token": token,
            "encoder": encoder,
            "planned encoder": model.plan.parts["encoder"],
            "renderer": renderer,
            "planned renderer": model.plan.parts["renderer"],
        }


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
        gc.collect()  # else what a process has, and with it its floor, would depend on what it has done


if __name__ == "__main__":
    main()
