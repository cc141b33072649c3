"""A scheduler for a long time, at the smallest possible memory budget: 64 clients hold conversations that come and go.
They share instructions, change what was said, are cancelled, put aside, and moved to the disk and back. Is the plan
kept, does memory stay flat, and are the answers those of a fresh process?

    python tests/support/serving_soak.py --requests 10000

A seed decides what every client asks for. It does not decide who is served first, and that must not matter. Now and
then an answer is kept. In the end another process makes the same answers, one at a time and with every expert in
memory. Eight times all clients rest until every conversation is on the disk: then no more memory may be in use than
before.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moeflux
from moeflux import Refused, Sampling, builtin
from moeflux.machine.memory import resident
from moeflux.runtime.plan import plan
from moeflux.serving import Handle, Request, Scheduler, SchedulerStats

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from support.at_rest import RESTS, Records, Rest, count_every_byte, is_flat, told  # noqa: E402

CONTEXT = 512
LONGEST = 400
"""Tokens of a conversation, which then ends."""
RECORDS = 200
"""Answers that are put aside to be compared, spread evenly over the run."""
UNUSED = ("text", "encoder", "renderer")
"""Parts of the plan that nobody asks for here: they are no excuse for others."""


@dataclass
class Tally:
    requests: int  # to be made
    records: Records
    compared: int  # answers that are put aside
    until: int = 0
    """Requests after which the clients rest."""
    begun: int = 0
    ended: int = 0
    done: Counter[str] = field(default_factory=Counter)


@dataclass
class Report:
    seconds: float
    done: Counter[str]
    stats: SchedulerStats
    compared: int
    differing: int
    planned: int
    """Bytes of the plan, without what nobody asks for."""
    peak: int
    """Bytes that were resident at most."""
    rests: list[Rest]
    sessions_left: int
    bytes_left: int
    """What sessions still held in the end."""

    @property
    def is_right(self) -> bool:
        left = self.sessions_left or self.bytes_left or any(rest.held != self.rests[0].held for rest in self.rests)
        return self.peak <= self.planned and is_flat(self.rests) and not (self.differing or self.stats.failed or left)

    def __str__(self) -> str:
        done = ", ".join(f"{count} {what}" for what, count in sorted(self.done.items()))
        return (
            f"{self.stats.ended} requests in {self.seconds:.0f} s\n{done}\n{self.stats}\n"
            f"answers against a fresh process: {self.compared - self.differing} of {self.compared} equal\n"
            f"memory: {self.planned / 1e6:.1f} MB planned, at most {self.peak / 1e6:.1f} MB resident\n"
            f"{told(self.rests, 'requests')}\n"
            f"the engine held at rest: {', '.join(str(rest.held) for rest in self.rests)} bytes\n"
            f"left behind: {self.sessions_left} sessions, {self.bytes_left} bytes"
        )


class Client:
    """One conversation after another."""

    def __init__(self, scheduler: Scheduler, vocab: int, seed: int, tally: Tally) -> None:
        self.scheduler = scheduler
        self.vocab = vocab
        self.random = random.Random(seed)
        self.tally = tally
        self.said: list[int] = []
        self.borders: list[int] = []

    async def run(self) -> None:
        while self.tally.begun < self.tally.until:
            self.tally.begun += 1
            if not self.said or len(self.said) > LONGEST:
                self.begin()
            elif len(self.borders) > 2 and self.random.random() < 0.1:
                self.change()
            self.say(self.random.randint(5, 30))
            await self.ask()

    def begin(self) -> None:
        """Instructions that others have too."""
        kind = random.Random(self.random.randrange(8))
        self.said = [kind.randrange(self.vocab) for _ in range(kind.randint(80, 160))]
        self.borders = [len(self.said)]

    def change(self) -> None:
        """What was said from some border on becomes something else."""
        kept = self.random.randrange(1, len(self.borders))
        self.said, self.borders = self.said[: self.borders[kept - 1]], self.borders[:kept]
        self.tally.done["changes"] += 1

    def say(self, tokens: int) -> None:
        self.said += [self.random.randrange(self.vocab) for _ in range(tokens)]
        self.borders.append(len(self.said))

    async def ask(self) -> None:
        sampling = Sampling(self.random.choice((0.0, 1.0)), seed=self.random.randrange(1 << 30))
        request = Request(
            list(self.said),
            max_tokens=self.random.randint(1, 8),
            ignore_end=True,
            sampling=sampling,
            borders=list(self.borders),
            tenant=str(self.random.randrange(4)),
            priority=self.random.randrange(2),
        )
        cancelled = self.random.random() < 0.05
        handle = await self.submitted(request)
        pieces = 0
        async for _ in handle:
            pieces += 1
            if cancelled and pieces == 2:
                handle.cancel()
        self.said += handle.tokens
        self.note(request, handle)

    async def submitted(self, request: Request) -> Handle:
        while True:
            try:
                return self.scheduler.submit(request)
            except Refused:
                self.tally.done["refusals"] += 1
                await asyncio.sleep(0.01)

    def note(self, request: Request, handle: Handle) -> None:
        tally = self.tally
        tally.ended += 1
        tally.done[f"ended by {handle.finish}"] += 1
        tally.done["put aside"] += handle.put_aside
        wanted = tally.ended * tally.compared // tally.requests
        if handle.finish == "length" and tally.records.count < wanted and request.sampling is not None:
            asked = {"prompt": request.prompt, "count": request.max_tokens}
            how = {"temperature": request.sampling.temperature, "seed": request.sampling.seed}
            tally.records.add(asked | how | {"tokens": handle.tokens})


def options(sessions: int) -> dict[str, Any]:
    return {"context": CONTEXT, "sessions": sessions, "threads": 2, "readers": 2}


def load_at_the_floor(sessions: int) -> moeflux.Model:
    def once() -> moeflux.Model:
        floor = plan(builtin.path(), memory="1TB", **options(sessions)).floor_bytes
        return moeflux.load(builtin.path(), memory=floor, **options(sessions))

    try:
        return once()
    except moeflux.BudgetError:  # this process has grown over the border of a step in between; not twice
        return once()


def soak(
    requests: int,
    clients: int = 64,
    rests: int = RESTS,
    compared: int = RECORDS,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    start = time.monotonic()
    model = load_at_the_floor(clients)
    with tempfile.TemporaryDirectory() as folder, Records(Path(folder) / "records.json") as records:
        tally = Tally(requests, records, compared)
        at_rest = []

        async def serve(scheduler: Scheduler) -> None:
            async def tell() -> None:
                while True:
                    await asyncio.sleep(10)
                    say(f"{resident().now / 1e6:.1f} MB resident; {scheduler.stats}")

            telling = asyncio.create_task(tell())
            vocab = model.variant.vocab_size
            all_clients = [Client(scheduler, vocab, seed, tally) for seed in range(clients)]
            for rest in range(rests):
                tally.until = requests * (rest + 1) // rests
                await asyncio.gather(*(client.run() for client in all_clients))
                patience = time.monotonic() + 60
                # One that is being written is no longer idle and still there.
                while (scheduler.stats.idle or model._engine.sessions) and time.monotonic() < patience:
                    await asyncio.sleep(0.1)
                at_rest.append(Rest.now(tally.ended, model._engine.held))
            telling.cancel()

        with Scheduler(
            model,
            running=clients * 3 // 4,  # so that those of a higher priority find all places taken
            waiting=clients // 2,
            disk=Path(folder) / "states",
            disk_quota="50MB",
            idle_seconds=3,
        ) as scheduler:
            asyncio.run(serve(scheduler))
        peak = resident().peak
        say(f"comparing {records.count} answers with those of a fresh process")
        differing = records.differing_from(__file__)
    return Report(
        seconds=time.monotonic() - start,
        done=tally.done,
        stats=scheduler.stats,
        compared=records.count,
        differing=differing,
        planned=model.plan.total_bytes - sum(model.plan.parts.get(name, 0) for name in UNUSED),
        peak=peak,
        rests=at_rest,
        sessions_left=model._engine.sessions,
        bytes_left=model._engine.memory.sessions,
    )


def differing_here(file: Path) -> int:
    session = moeflux.load(builtin.path(), memory=None, context=CONTEXT, threads=2).session()
    differing = 0
    for each in Records.read(file):
        session.clear()
        sampling = Sampling(each["temperature"], seed=each["seed"])
        answer = session.generate(each["prompt"], max_tokens=each["count"], ignore_end=True, sampling=sampling).wait()
        differing += answer.tokens != each["tokens"]
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="10000")
    parser.add_argument("--clients", type=int, default=64, help="conversations at the same time; 64")
    parser.add_argument("--compare", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compare:
        print(differing_here(arguments.compare))
        return 0
    count_every_byte()
    report = soak(arguments.requests, arguments.clients, say=lambda line: print(line, file=sys.stderr, flush=True))
    print(report)
    return 0 if report.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
