"""Sessions of one model, in threads, for a long time, at the smallest possible memory budget. They prefill, step, are
stopped, go back, are saved and restored. Is the budget kept, does memory stay flat, and are the logits those of a fresh
process?

    python tests/support/soak.py --tokens 10000

A seed decides what every session does. It does not decide which of them is served first, and that must not matter. Now
and then a session's logits are kept with its tokens. In the end another process evaluates the same tokens, with every
expert in memory, and compares bits. Eight times all of them rest, with nothing evaluated and nothing saved: then no
more memory may be in use than before.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import moeflux
from moeflux import builtin
from moeflux.machine.memory import resident
from moeflux.runtime.logits import Logits
from moeflux.runtime.plan import plan

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from support.at_rest import RESTS, Records, Rest, count_every_byte, is_flat, told  # noqa: E402

MAX_CONTEXT = 256
CHUNK = 16
RECORDS = 60
"""Logits that are put aside, spread evenly over the run."""


@dataclass
class Tally:
    """What was done, by all sessions together; under the lock."""

    max_tokens: int
    records: Records  # tokens, SHA-256 of the logits after them
    until: int = 0
    """Tokens at which the sessions rest."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    tokens: int = 0
    done: dict[str, int] = field(default_factory=dict)
    max_resident: int = 0
    errors: list[BaseException] = field(default_factory=list)


@dataclass
class Report:
    tokens: int
    seconds: float
    done: dict[str, int]
    compared: int
    differing: int
    held_before: int
    """Bytes as the engine counts them, with every session there and nothing evaluated yet."""
    rests: list[Rest]
    max_resident: int
    budget: int
    slots: int
    bytes_read: int

    @property
    def is_right(self) -> bool:
        kept = self.max_resident <= self.budget and all(rest.held == self.held_before for rest in self.rests)
        return kept and not self.differing and is_flat(self.rests)

    def __str__(self) -> str:
        done = ", ".join(f"{count} {what}" for what, count in sorted(self.done.items()))
        return (
            f"{self.tokens} tokens in {self.seconds:.0f} s, {self.bytes_read / 1e9:.1f} GB of experts read\n{done}\n"
            f"logits against a fresh process: {self.compared - self.differing} of {self.compared} equal\n"
            f"memory the engine holds: {self.held_before} bytes before, {self.rests[-1].held} after\n"
            f"budget: {self.budget / 1e6:.1f} MB, the floor, with {self.slots} expert slots; at most "
            f"{self.max_resident / 1e6:.1f} MB resident\n{told(self.rests, 'tokens')}"
        )


class Walker:
    """One session and what happens to it."""

    def __init__(self, model: moeflux.Model, seed: int, tally: Tally, folder: Path) -> None:
        self.session = model.session(max_context=MAX_CONTEXT)
        self.vocab = model.variant.vocab_size
        self.random = random.Random(seed)
        self.tally = tally
        self.file = folder / f"session-{seed}.moeflux"
        self.saved: moeflux.Snapshot | None = None

    def run(self) -> None:
        try:
            if not self.tally.done.get("rests"):  # each of these at least once
                self.prefill(stop_after=1)
                self.save_or_restore()
                self.steps()
                self.save_or_restore()
            while self.tally.tokens < self.tally.until and not self.tally.errors:
                self.act()
            self.session.clear()
            self.saved = None
        except BaseException as error:
            self.tally.errors.append(error)

    def act(self) -> None:
        choice = self.random.random()
        room = MAX_CONTEXT - self.session.position
        if room < 64:
            self.go_back()
        elif choice < 0.15:
            self.prefill()
        elif choice < 0.3:
            self.prefill(stop_after=self.random.randint(1, 3))
        elif choice < 0.4:
            self.save_or_restore()
        elif choice < 0.45:
            self.go_back()
        else:
            self.steps()

    def prefill(self, stop_after: int = 0) -> None:
        """Stopped after so many chunks; 0: not at all."""
        ids = [self.random.randrange(self.vocab) for _ in range(self.random.randint(17, 60))]
        chunks = 0

        def go_on(done: int, total: int) -> bool:
            nonlocal chunks
            chunks += 1
            return chunks != stop_after

        before = self.session.position
        logits = self.session.prefill(ids, go_on)
        done = self.session.position - before
        self.count("prefills stopped" if done < len(ids) else "prefills", done, logits)

    def steps(self) -> None:
        count = self.random.randint(1, 20)
        for _ in range(count):
            logits = self.session.step(self.random.randrange(self.vocab))
        self.count("runs of steps", count, logits)

    def save_or_restore(self) -> None:
        if self.saved is None:
            self.saved = self.session.snapshot()
            self.saved.save(self.file)
            self.count("snapshots")
        else:
            self.session.restore(self.file if self.random.random() < 0.5 else self.saved)
            self.saved = None
            self.count("restores")

    def go_back(self) -> None:
        """Goes back to a checkpoint or to the start. A little further on, it makes a checkpoint for the next time."""
        if self.session.checkpoints and self.random.random() < 0.5:
            self.session.rewind(self.random.choice(self.session.checkpoints))
            self.count("rewinds")
        else:
            self.session.clear()
            self.count("clears")
        if self.session.position < MAX_CONTEXT // 2:
            self.prefill()
            self.session.checkpoint()
            self.count("checkpoints")

    def count(self, what: str, tokens: int = 0, logits: Logits | None = None) -> None:
        with self.tally.lock:
            before = self.tally.tokens * RECORDS // self.tally.max_tokens
            self.tally.tokens += tokens
            self.tally.done[what] = self.tally.done.get(what, 0) + 1
            if before != self.tally.tokens * RECORDS // self.tally.max_tokens and logits is not None:
                self.tally.records.add([self.session.tokens, digest(logits.numpy())])
                self.tally.max_resident = max(self.tally.max_resident, resident().now)


def digest(logits: np.ndarray) -> str:
    return hashlib.sha256(logits.tobytes()).hexdigest()


def load(sessions: int, memory: int | None) -> moeflux.Model:
    return moeflux.load(builtin.path(), memory=memory, **options(sessions))


def options(sessions: int) -> dict[str, Any]:
    return {"context": MAX_CONTEXT, "sessions": sessions, "threads": 2, "readers": 2, "chunk": CHUNK, "reads": "direct"}


def load_at_the_floor(sessions: int) -> moeflux.Model:
    def once() -> moeflux.Model:
        return load(sessions, plan(builtin.path(), memory="1TB", **options(sessions)).floor_bytes)

    try:
        return once()
    except moeflux.BudgetError:  # this process has grown over the border of a step in between; not twice
        return once()


def soak(tokens: int, sessions: int = 3, rests: int = RESTS, say: Callable[[str], None] = lambda line: None) -> Report:
    """Raises what a session raised."""
    start = time.monotonic()
    model = load_at_the_floor(sessions)
    at_rest = []
    with tempfile.TemporaryDirectory() as folder, Records(Path(folder) / "records.json") as records:
        tally = Tally(tokens, records)
        walkers = [Walker(model, seed, tally, Path(folder)) for seed in range(sessions)]
        held_before = model._engine.held
        for rest in range(rests):
            tally.until = tokens * (rest + 1) // rests
            walk(walkers, tally, say)
            walkers[0].count("rests")
            at_rest.append(Rest.now(tally.tokens, model._engine.held))
        say(f"comparing {records.count} logits with those of a fresh process")
        differing = records.differing_from(__file__)
    return Report(
        tokens=tally.tokens,
        seconds=time.monotonic() - start,
        done=tally.done,
        compared=records.count,
        differing=differing,
        held_before=held_before,
        rests=at_rest,
        max_resident=tally.max_resident,
        budget=model.plan.floor_bytes,
        slots=model.plan.slots,
        bytes_read=sum(walker.session.total_stats.bytes_read for walker in walkers),
    )


def walk(walkers: list[Walker], tally: Tally, say: Callable[[str], None]) -> None:
    """Until all of them rest."""
    threads = [threading.Thread(target=walker.run) for walker in walkers]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(10)
            say(f"{tally.tokens} of {tally.max_tokens} tokens, {resident().now / 1e6:.1f} MB resident")
    if tally.errors:
        raise tally.errors[0]


def differing_here(file: Path) -> int:
    session = load(1, None).session(max_context=MAX_CONTEXT)
    differing = 0
    for tokens, expected in Records.read(file):
        session.clear()
        logits = session.prefill(tokens)
        differing += digest(logits.numpy()) != expected
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000, help="of all sessions together; 10000")
    parser.add_argument("--sessions", type=int, default=3, help="one a thread; 3")
    parser.add_argument("--compare", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compare:
        print(differing_here(arguments.compare))
        return 0
    count_every_byte()
    report = soak(arguments.tokens, arguments.sessions, say=lambda line: print(line, file=sys.stderr, flush=True))
    print(report)
    return 0 if report.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
