"""How far a long task has come, on stderr: a bar with rate and time left in a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

__all__ = ["Bars", "Lines", "Progress", "Silent", "Task", "counter", "for_terminal", "size_text", "time_text"]

SECONDS_BETWEEN_LINES = 15.0


class Task(Protocol):
    def advance(self, bytes_done: int) -> None: ...


class Progress(Protocol):
    """Where a command tells how far it is. One task at a time."""

    def task(self, label: str, total: int) -> ContextManagerOfTask: ...

    def note(self, sentence: str) -> None: ...


class ContextManagerOfTask(Protocol):
    def __enter__(self) -> Task: ...

    def __exit__(self, *error: object) -> bool | None: ...


def for_terminal(stream: TextIO | None = None) -> Progress:
    """Bars where a person looks on, lines where a log does."""
    stream = stream or sys.stderr
    return Bars() if stream.isatty() and stream is sys.stderr else Lines(stream)


class Silent:
    """For library use."""

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Task]:
        yield self

    def advance(self, bytes_done: int) -> None:
        pass

    def note(self, sentence: str) -> None:
        pass


class Lines:
    """A line at most every 15 seconds, and one at the end of a task that took longer than that."""

    def __init__(self, stream: TextIO | None = None, seconds: float = SECONDS_BETWEEN_LINES) -> None:
        self.stream = stream or sys.stderr
        self.seconds = seconds

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Task]:
        task = _LineTask(self, label, total)
        yield task
        if task.said_something:
            task.say()

    def note(self, sentence: str) -> None:
        print(sentence, file=self.stream, flush=True)


class _LineTask:
    def __init__(self, owner: Lines, label: str, total: int) -> None:
        self.owner = owner
        self.label = label
        self.total = total
        self.done = 0
        self.started = self.last = time.monotonic()
        self.said_something = False

    def advance(self, bytes_done: int) -> None:
        self.done += bytes_done
        if time.monotonic() - self.last >= self.owner.seconds:
            self.say()

    def say(self) -> None:
        self.said_something = True
        self.last = time.monotonic()
        rate = self.done / max(self.last - self.started, 1e-9)
        share = self.done / self.total if self.total else 1.0
        left = (self.total - self.done) / rate if rate else 0.0
        self.owner.note(
            f"{self.label}: {share:.0%} of {size_text(self.total)}, {size_text(rate)}/s, {time_text(left)} left"
        )


class Bars:
    """A bar drawn by rich."""

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Task]:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with RichProgress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bars:
            yield _BarTask(bars, bars.add_task(label, total=total))

    def note(self, sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)


class _BarTask:
    def __init__(self, bars, identifier) -> None:  # types of rich, which is imported only when a bar is drawn
        self.bars = bars
        self.identifier = identifier

    def advance(self, bytes_done: int) -> None:
        self.bars.advance(self.identifier, bytes_done)


def counter(progress: Progress, label: str, seconds: float = 5.0) -> Callable[[int, int], None]:
    """For work that is counted, not measured in bytes: a line at most every few seconds."""
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            progress.note(f"{label}: {done} of {total}")

    return tell


# ---- Words ------------------------------------------------------------------------------------------------------


def size_text(size: float) -> str:
    """Decimal units, as disks are sold: 17.4 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 100 * factor else f"{size / factor:.0f} {unit}"
    return f"{size:.0f} bytes"


def time_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
