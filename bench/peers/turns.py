"""What every comparison shares: programs that take turns, and what the system measures of each run."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Name = TypeVar("Name")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ran:
    text: str  # printed
    disk_bytes: int
    cpu_seconds: float
    others: float  # share of the processors that other programs took meanwhile

    def __str__(self) -> str:
        return f"disk {self.disk_bytes / 1e9:6.1f} GB  cpu {self.cpu_seconds:6.1f} s  others {self.others:4.0%}"


def run(command: list[str], enter: Callable[[], None] | None = None, **environment: str) -> Ran:
    """`enter` is called in the new process, before the program."""
    before, busy_before = resource.getrusage(resource.RUSAGE_CHILDREN), processor_seconds()
    done = subprocess.run(
        command, preexec_fn=enter, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-2000:]}")
    after, busy_after = resource.getrusage(resource.RUSAGE_CHILDREN), processor_seconds()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    busy, elapsed = (b - a for a, b in zip(busy_before, busy_after, strict=True))
    return Ran(
        done.stdout, 512 * (after.ru_inblock - before.ru_inblock), cpu, max(0.0, busy - cpu) / max(elapsed, 0.01)
    )


def processor_seconds() -> tuple[float, float]:
    """The time of all processors together since the start: busy, and total."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    seconds = [tick / os.sysconf("SC_CLK_TCK") for tick in ticks]
    return sum(seconds) - seconds[3] - seconds[4], sum(seconds)


def take_turns(
    runs: Mapping[Name, Callable[[], Result]], rounds: int, fewer: Mapping[Name, int] | None = None
) -> Iterator[tuple[Name, Result]]:
    """Every round reverses the order of the one before, A-B-B-A, so that a machine that slows down slows all. Programs
    named in `fewer` take part in so many rounds only."""
    for turn in range(rounds):
        began = time.monotonic()
        for name in list(runs) if turn % 2 == 0 else list(reversed(runs)):
            if turn < (fewer or {}).get(name, rounds):
                yield name, runs[name]()
        print(f"round {turn + 1} of {rounds}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
