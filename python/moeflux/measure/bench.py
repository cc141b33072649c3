"""How fast a model runs here, cold and warm: the content of `moeflux bench`.

Cold means that the model is opened anew, with its files dropped from the page cache and no expert in a slot. Warm means
the same model again, with whatever the cold run left in its slots. It gets other tokens, so it profits only from
experts that the model itself makes common. Decoding evaluates tokens one at a time: the likeliest next ones, those that
are drawn as somebody asks, or random ones.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeflux import _core
from moeflux.errors import ArgumentError
from moeflux.files import open_file, system_errors, system_text, tell_system
from moeflux.model import Model, load
from moeflux.models.hub import find_model
from moeflux.progress import Counting, Progress, Silent
from moeflux.runtime.options import LoadOptions
from moeflux.runtime.tokens import random_prompt
from moeflux.session import Session
from moeflux.sizes import size_text
from moeflux.stores.store import open_store
from moeflux.text.sampling import Sampler, Sampling

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Row", "bench", "drop_cached", "table"]

SETTLE = 4
"""Steps before warm decoding is counted: the first find slots full of what the prefill left."""


@dataclass(frozen=True)
class Row:
    phase: str  # "prefill" or "decode"
    state: str  # "cold" or "warm"
    rep: int
    context: int  # tokens before the first one counted
    tokens: int
    seconds: float
    choosing_seconds: float | None  # the part of them in which the next token was chosen; None for a prefill
    bytes_read: int  # that the engine asked for
    physical_bytes: int | None  # that the disk gave to this process, where the system counts them
    hits: int
    misses: int
    read_wait_seconds: float
    look_ahead_reads: int
    look_ahead_used: int
    drafted: int  # tokens evaluated because they were likely to come next
    accepted: int  # of these, that came
    peak_bytes: int  # resident, of this process: in this row if the system can tell, else so far
    load_seconds: float | None  # of opening the model before a cold row
    settings: str
    # On a GPU with memory of its own:
    host_hits: int = 0  # of the misses, those that were in the host's memory
    bytes_copied: int = 0  # from there

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def hit_rate(self) -> float | None:
        asked = self.hits + self.misses
        return self.hits / asked if asked else None

    @property
    def wait_share(self) -> float:
        """The share of the time in which the call stood still for reads."""
        return self.read_wait_seconds / self.seconds

    @property
    def look_ahead_recall(self) -> float | None:
        """The share of the experts to read whose reads the look-ahead had begun."""
        needed = self.look_ahead_used + self.misses
        return self.look_ahead_used / needed if self.look_ahead_reads and needed else None

    def to_dict(self) -> dict[str, Any]:
        derived = ("tokens_per_second", "hit_rate", "wait_share", "look_ahead_recall")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def bench(
    name: str | Path | None = None,
    *,
    prefill: int = 256,
    decode: int = 32,
    reps: int = 1,
    prompt: Sequence[int] | None = None,
    random_decode: bool = False,
    sampling: Sampling | None = None,
    progress: Progress | None = None,
    open_model: Callable[..., Model] = load,
    **options: Unpack[LoadOptions],
) -> Iterator[Row]:
    """Yields row by row. A `prompt` replaces the `prefill` random tokens; `options` are those of moeflux.load. Decoding
    chooses its tokens as `sampling` says, by default the likeliest ones. `open_model` is called as moeflux.load."""
    if prompt is not None and len(prompt) < 2:
        raise ArgumentError(f"prompt: expected at least 2 tokens, found {len(prompt)}")
    store = find_model(name)
    files = files_of(store)
    for rep in range(reps):
        repetition = Repetition(
            store, files, options, rep, sampling or Sampling(seed=0), progress or Silent(), open_model
        )
        yield from repetition.rows(prefill, decode, prompt, random_decode)


class Repetition:
    def __init__(
        self,
        store: Path,
        files: list[str],
        options: LoadOptions,
        rep: int,
        sampling: Sampling,
        progress: Progress,
        open_model: Callable[..., Model],
    ) -> None:
        self.store = store
        self.files = files
        self.options = options
        self.rep = rep
        self.sampling = sampling
        self.progress = progress
        self.open_model = open_model

    def rows(self, prefill: int, decode: int, prompt: Sequence[int] | None, random_decode: bool) -> Iterator[Row]:
        """Cold decoding comes first. Its model is closed before the next is opened, so there are never two."""
        vocab = self.vocab()
        prompts = [list(prompt), list(prompt)] if prompt else [self.random(prefill, vocab, part) for part in range(2)]
        context = len(prompts[0]) + SETTLE + decode + 1
        answers = [self.random(SETTLE + decode, vocab, 2 + part) if random_decode else None for part in range(2)]

        if decode:
            model, seconds = self.open_cold(context)
            yield self.decoded("cold", model.session(context), prompts[0][0], decode, answers[0], 0, seconds)
            del model
        model, seconds = self.open_cold(context)
        session = model.session(context)
        yield self.prefilled("cold", session, prompts[0], seconds)
        session.clear()
        yield self.prefilled("warm", session, prompts[1], None)
        if decode:
            yield self.decoded("warm", session, None, decode, answers[1], SETTLE, None)

    def open_cold(self, context: int) -> tuple[Model, float]:
        drop_cached(self.files)
        started = time.perf_counter()
        options: LoadOptions = {"context": context, **self.options}
        model = self.open_model(self.store, **options)
        return model, time.perf_counter() - started

    def vocab(self) -> int:
        with open_store(self.store) as store:
            return store.variant.vocab_size

    def random(self, tokens: int, vocab: int, part: int) -> list[int]:
        return random_prompt(tokens, vocab, seed=4 * self.rep + part)

    # ---- Measuring ----------------------------------------------------------------------------------------------

    def prefilled(self, state: str, session: Session, prompt: list[int], load_seconds: float | None) -> Row:
        self.progress.note(f"prefill, {state}")
        with Counting(self.progress, f"prefill, {state}", "tokens") as counting:
            counted = Counted(self, "prefill", state, session, load_seconds)
            session.prefill(prompt, counting)
        return counted.row(len(prompt), [session.stats])

    def decoded(
        self,
        state: str,
        session: Session,
        first: int | None,
        decode: int,
        answer: list[int] | None,
        settle: int,
        load_seconds: float | None,
    ) -> Row:
        """`first` is the token to begin with, by default the likeliest next one. `settle` steps are not counted."""
        self.progress.note(f"decode, {state}")
        # A session that stands at a prefill's end has the logits of its last token.
        token = session._core.argmax() if first is None else first
        following = Following(session, Sampler(self.sampling, session.model.variant.vocab_size, []), answer)
        for _ in range(settle):
            token = following.token(token)
        counted = Counted(self, "decode", state, session, load_seconds)
        before, stats = following.choosing_seconds, []
        with Counting(self.progress, f"decode, {state}", "tokens") as counting:
            for _ in range(decode):
                token = following.token(token)
                stats.append(session.stats)
                counting(len(stats), decode)
        return counted.row(decode, stats, following.choosing_seconds - before)


class Following:
    """Evaluates tokens, and chooses the next one even where `answer` says which it is: that is to be measured too."""

    def __init__(self, session: Session, sampler: Sampler, answer: list[int] | None) -> None:
        self.session = session
        self.sampler = sampler
        self.answer = None if answer is None else iter(answer)
        self.choosing_seconds = 0.0

    def token(self, token: int) -> int:
        """Evaluates a token and returns the next one."""
        logits = self.session.step(token)
        started = time.perf_counter()
        chosen = self.sampler.choose(logits).token
        self.choosing_seconds += time.perf_counter() - started
        return chosen if self.answer is None else next(self.answer)


class Counted:
    """What the clock and the system count between its making and `row`."""

    def __init__(self, owner: Repetition, phase: str, state: str, session: Session, load_seconds: float | None) -> None:
        self.owner = owner
        self.phase = phase
        self.state = state
        self.session = session
        self.load_seconds = load_seconds
        self.context = session.position
        forget_peak()
        self.physical = physical_bytes()
        self.started = time.perf_counter()

    def row(self, tokens: int, stats: list[_core.StepStats], choosing_seconds: float | None = None) -> Row:
        seconds = time.perf_counter() - self.started
        after = physical_bytes()

        def total(name: str) -> Any:
            return sum(getattr(each, name) for each in stats)

        return Row(
            phase=self.phase,
            state=self.state,
            rep=self.owner.rep,
            context=self.context,
            tokens=tokens,
            seconds=seconds,
            choosing_seconds=choosing_seconds,
            bytes_read=total("bytes_read"),
            physical_bytes=None if after is None or self.physical is None else after - self.physical,
            hits=total("expert_hits"),
            misses=total("expert_misses"),
            read_wait_seconds=total("read_wait_seconds"),
            look_ahead_reads=total("look_ahead_reads"),
            look_ahead_used=total("look_ahead_used"),
            drafted=total("drafted"),
            accepted=total("accepted"),
            peak_bytes=peak_bytes(),
            load_seconds=self.load_seconds,
            settings=repr(self.session.model),
            host_hits=total("host_hits"),
            bytes_copied=total("bytes_copied"),
        )


# ---- The system -------------------------------------------------------------------------------------------------


def files_of(store: str | Path) -> list[str]:
    with open_store(store) as opened:
        return list(opened.directory.files)


def drop_cached(files: Sequence[str | Path]) -> bool:
    """Drops these files from the page cache. False if the system has no call for that."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files:
        with open_file(file) as opened, system_errors(file):
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def physical_bytes() -> int | None:
    """The bytes that disks have given to this process since it began."""
    try:
        lines = system_text(Path("/proc/self/io")).splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def forget_peak() -> None:
    """Makes the peak of memory count from here on, if the system can forget it."""
    with contextlib.suppress(OSError):
        tell_system(Path("/proc/self/clear_refs"), "5")


def peak_bytes() -> int:
    try:
        lines = system_text(Path("/proc/self/status")).splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---- As text ----------------------------------------------------------------------------------------------------


ORDER = [("prefill", "cold"), ("prefill", "warm"), ("decode", "cold"), ("decode", "warm")]


def table(rows: Sequence[Row]) -> str:
    """A line for each phase and state, medians where there are several repetitions. Fit for pasting."""
    columns = "phase state tok/s read/token disk/token hits waiting foreseen choosing peak".split()
    copies = any(row.bytes_copied for row in rows)
    columns += ["host hits", "copied/token"] if copies else []
    lines: list[list[str]] = [[*columns]]
    for phase, state in sorted({(row.phase, row.state) for row in rows}, key=ORDER.index):
        group = [row for row in rows if (row.phase, row.state) == (phase, state)]
        lines.append([phase, state, *cells(group), *(copied_cells(group) if copies else [])])
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    text = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join(text)


def copied_cells(group: list[Row]) -> list[str]:
    asked = [row.host_hits / (row.hits + row.misses) for row in group if row.hits + row.misses]
    copied = statistics.median(row.bytes_copied / row.tokens for row in group)
    return [f"{statistics.median(asked):.1%}" if asked else "-", size_text(round(copied))]


def cells(group: list[Row]) -> list[str]:
    def median(value: Callable[[Row], float | None]) -> float | None:
        present = [each for row in group if (each := value(row)) is not None]
        return statistics.median(present) if present else None

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    def size(value: float | None) -> str:
        return "-" if value is None else size_text(value)

    def milliseconds(value: float | None) -> str:
        return "-" if value is None else f"{1000 * value:.2f}ms"

    speed = median(lambda row: row.tokens_per_second)
    assert speed is not None
    return [
        f"{speed:.3g}" if speed < 1000 else f"{speed:.0f}",
        size(median(lambda row: row.bytes_read / row.tokens)),
        size(median(lambda row: None if row.physical_bytes is None else row.physical_bytes / row.tokens)),
        share(median(lambda row: row.hit_rate)),
        share(median(lambda row: row.wait_share)),
        share(median(lambda row: row.look_ahead_recall)),
        milliseconds(median(lambda row: None if row.choosing_seconds is None else row.choosing_seconds / row.tokens)),
        size(max(row.peak_bytes for row in group)),
    ]
