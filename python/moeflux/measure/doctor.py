"""What this disk and this machine can do, measured with the engine's own reads: the content of `moeflux doctor`.

The disk is read as decoding reads it: pieces of an expert's size in random order, no piece twice, with 1 to 8 threads,
past the page cache and through it. In a store, its own experts are read. Elsewhere, a file is written for this and
removed again.
"""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from moeflux import _core, files
from moeflux.errors import IoError
from moeflux.machine.machine import Machine, this_machine
from moeflux.machine.memory import available
from moeflux.machine.remembered import Probe, remember, remembered
from moeflux.measure.bench import drop_cached
from moeflux.progress import Progress, Silent
from moeflux.sizes import size_text
from moeflux.stores.store import Store, is_store, open_store

__all__ = ["Diagnosis", "MemoryRate", "Probe", "ReadRate", "examine", "recommend", "remembered"]

DEFAULT_EXPERT = 1_769_472
"""Bytes: one of Qwen3.6-35B-A3B in 4 bits, and 432 blocks."""
READERS = (1, 2, 4, 8)
NAMELESS = Path("/proc/self/fd")
CLOSE = 0.95
"""Rates within this share of the best count as equal: then fewer threads win, and direct reads, which leave the memory
to others."""


@dataclass(frozen=True)
class Effort:
    seconds: float  # of a turn; each way of reading has `turns` of them, there and back: a slow spell hits all ways
    turns: int
    file_bytes: int
    write_seconds: float  # the file stays as long as it is after this time
    all_thread_counts: bool


FULL = Effort(seconds=0.55, turns=2, file_bytes=1_000_000_000, write_seconds=4, all_thread_counts=True)
QUICK = Effort(seconds=0.2, turns=1, file_bytes=300_000_000, write_seconds=1, all_thread_counts=False)


@dataclass(frozen=True)
class ReadRate:
    reads: str  # "direct" or "buffered"
    readers: int
    count: int  # of experts read
    bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds


@dataclass(frozen=True)
class MemoryRate:
    threads: int
    bytes_per_second: float


@dataclass(frozen=True)
class Limits:
    """What the system allows. None: no limit."""

    page_bytes: int
    huge_pages: str  # "always", "madvise" or "never"; empty where nobody knows
    locked_memory_bytes: int | None
    open_files: int | None
    memory_bytes: int
    available_bytes: int  # that this process may take beyond what it has
    available_source: str

    def rows(self) -> list[tuple[str, str]]:
        locked = self.locked_memory_bytes
        return [
            ("page size", f"{self.page_bytes} bytes"),
            *([("huge pages", self.huge_pages)] if self.huge_pages else []),
            ("locked memory", "no limit" if locked is None else size_text(locked)),
            ("open files", "no limit" if self.open_files is None else str(self.open_files)),
            ("memory", size_text(self.memory_bytes)),
            ("  to be had", f"{size_text(self.available_bytes)}, {self.available_source}"),
        ]


@dataclass(frozen=True)
class Diagnosis:
    path: Path
    what: str  # what was read
    direct: str  # "" when direct reads work, else why not
    disk: tuple[ReadRate, ...]
    memory: tuple[MemoryRate, ...]
    machine: Machine
    limits: Limits
    probe: Probe
    reason: str  # of the recommended settings
    kept: str = field(default="")  # where the probe is remembered, or why it is not

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "what": self.what,
            "direct": not self.direct,
            "disk": [{**asdict(rate), "bytes_per_second": rate.bytes_per_second} for rate in self.disk],
            "memory": [asdict(rate) for rate in self.memory],
            "machine": self.machine.to_dict(),
            "limits": asdict(self.limits),
            "recommended": {**asdict(self.probe), "when": self.probe.when.isoformat(), "reason": self.reason},
            "kept": self.kept,
        }

    def __str__(self) -> str:
        return "\n".join(lines_of(self))


def examine(path: str | Path = ".", quick: bool = False, progress: Progress | None = None) -> Diagnosis:
    """Measures, recommends settings, and remembers them for everything on the same disk."""
    progress = progress or Silent()
    effort = QUICK if quick else FULL
    with source_at(files.expanded(path), effort, progress) as source:
        why_not = no_direct(source)
        ways = [("direct", n) for n in READERS if not why_not] + [("buffered", n) for n in READERS]
        disk = disk_rates(source, ways, effort, progress)
        memory = memory_rates(effort, progress)
        best, reason = recommend(disk, why_not)
        probe = Probe(
            disk_bytes_per_second=best.bytes_per_second,
            memory_bytes_per_second=max(rate.bytes_per_second for rate in memory),
            reads=best.reads,
            readers=best.readers,
            read_bytes=source.piece_bytes,
            when=datetime.now(timezone.utc).replace(microsecond=0),
        )
        try:
            kept = str(remember(source.place, probe))
        except (OSError, RuntimeError) as error:
            kept = f"not remembered: {error}"
        return Diagnosis(
            Path(path), source.what, why_not, disk, memory, this_machine(), limits_here(), probe, reason, kept
        )


# ---- What is read -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    what: str
    place: Path  # on the disk in question
    files: list[str]
    piece_bytes: int
    read: Callable[
        [str, int, float, int], tuple[int, int, float]
    ]  # mode, readers, seconds, seed: reads, bytes, seconds


@contextlib.contextmanager
def source_at(path: Path, effort: Effort, progress: Progress) -> Generator[Source, None, None]:
    if files.exists(path) and is_store(path):
        with open_store(path) as store:
            yield of_store(store)
        return
    files.expect_folder(path)
    with written_file(path, effort, progress) as file:

        def read(mode: str, readers: int, seconds: float, seed: int) -> tuple[int, int, float]:
            return _core.probe_file_reads(file, DEFAULT_EXPERT, mode, readers, seconds, seed)

        size = files.size_of(file)
        what = f"a file of {size_text(size)}, removed again"
        yield Source(what, path, [str(file)], DEFAULT_EXPERT, read)


def of_store(store: Store) -> Source:
    def read(mode: str, readers: int, seconds: float, seed: int) -> tuple[int, int, float]:
        return _core.probe_expert_reads(store.directory, mode, readers, seconds, seed)

    return Source(
        what=f"the experts of {store.variant.name}",
        place=Path(store.expert_files[0]),
        files=store.expert_files,
        piece_bytes=store.directory.experts.bytes,
        read=read,
    )


@contextlib.contextmanager
def written_file(folder: Path, effort: Effort, progress: Progress) -> Generator[Path, None, None]:
    """A file of random bytes, which no file system can make smaller. It is gone at the end, however the end comes.

    Where there is /proc, the file has no name from the start, so not even `kill -9` leaves it behind.
    """
    free = files.free_bytes(folder)
    needed = effort.file_bytes + 100_000_000
    if free < needed:
        raise IoError(
            f"{folder}: expected {size_text(needed)} free for a file to read, found {size_text(free)}; "
            "name a folder on another disk, or one with a store, which is read as it is"
        )
    try:
        progress.note(f"writing {size_text(effort.file_bytes)} to {folder}")
        file: Any
        if files.is_folder(NAMELESS):
            file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        else:
            file = tempfile.NamedTemporaryFile(dir=folder, buffering=0, prefix="moeflux-doctor-")  # noqa: SIM115
    except OSError as error:
        raise IoError(f"{folder}: no file can be written here: {error.strerror}") from None
    with file:
        try:
            fill(file, effort)
        except OSError as error:
            raise IoError(f"{folder}: a file to read could not be written: {error.strerror}") from None
        yield NAMELESS / str(file.fileno()) if files.is_folder(NAMELESS) else Path(file.name)


def fill(file: Any, effort: Effort) -> None:
    """Fills the file to the length asked for, or as far as the time goes, but at least for a hundred reads."""
    block = os.urandom(1 << 24)
    started, written = time.monotonic(), 0
    while written < effort.file_bytes:
        if time.monotonic() - started > effort.write_seconds and written >= 100 * DEFAULT_EXPERT:
            break
        written += file.write(block[: effort.file_bytes - written])
        if written % (4 * len(block)) == 0:
            os.fsync(file.fileno())  # otherwise memory would take it all at once, and the disk would write later
    os.fsync(file.fileno())


# ---- The disk ---------------------------------------------------------------------------------------------------


def no_direct(source: Source) -> str:
    """Why direct reads do not work there, in the words of a failed one; empty when they do."""
    try:
        source.read("direct", 1, 0.0, 0)  # one read
    except IoError as error:
        return str(error).replace(source.files[0], str(source.place))  # a file of our own has no name to speak of
    return ""


def disk_rates(source: Source, ways: list[tuple[str, int]], effort: Effort, progress: Progress) -> tuple[ReadRate, ...]:
    """Measures each way of reading in turn, and then in the opposite order, so that the order favours none."""
    found: dict[tuple[str, int], list[tuple[int, int, float]]] = {way: [] for way in ways}
    for turn in range(effort.turns):
        for number, (reads, readers) in enumerate(ways if turn % 2 == 0 else reversed(ways)):
            progress.note(f"reading {source.what}: {reads}, {readers} at a time")
            drop_cached(source.files)
            seed = turn * len(ways) + number
            found[reads, readers].append(source.read(reads, readers, effort.seconds, seed))
    rates = []
    for (reads, readers), turns in found.items():
        count, size, seconds = (sum(each) for each in zip(*turns, strict=True))
        rates.append(ReadRate(reads, readers, int(count), int(size), seconds))
    return tuple(rates)


def recommend(disk: tuple[ReadRate, ...], why_not: str = "") -> tuple[ReadRate, str]:
    """The settings to read with, and why."""
    fastest = max(disk, key=lambda rate: rate.bytes_per_second)
    close = [rate for rate in disk if rate.bytes_per_second >= CLOSE * fastest.bytes_per_second]
    best = min(close, key=lambda rate: (rate.reads != "direct", rate.readers))

    def said(rate: ReadRate) -> str:
        return f"{rate.reads} reads, {rate.readers} at a time ({size_text(rate.bytes_per_second)}/s)"

    if best is fastest:
        reason = f"{said(best)}: nothing was faster"
    else:
        reason = f"{said(best)}: as fast as {said(fastest)} within 5%"
        reason += ", with fewer threads" if best.reads == fastest.reads else ", and the memory is left to the slots"
    others = [rate for rate in disk if rate.reads != best.reads]
    if others:
        reason += f"; best otherwise: {said(max(others, key=lambda rate: rate.bytes_per_second))}"
    if why_not:
        reason += f"; no direct reads here: {why_not}"
    return best, reason


# ---- Memory and limits ------------------------------------------------------------------------------------------


def memory_rates(effort: Effort, progress: Progress) -> tuple[MemoryRate, ...]:
    cores = os.cpu_count() or 1
    counts = sorted({1, cores} | ({2**n for n in range(1, 12) if 2**n < cores} if effort.all_thread_counts else set()))
    progress.note("reading memory")
    # Large enough to exceed the caches, and small enough for a machine of many cores or a limited control group.
    part = max(1 << 20, min(1 << 28, (1 << 30) // cores, available().bytes // 4 // cores)) // 128 * 128
    bandwidth = _core.ReadBandwidth(cores, part)
    return tuple(MemoryRate(count, bandwidth.measure(count)) for count in counts)


def limits_here(root: Path = Path("/")) -> Limits:
    def of(limit: int) -> int | None:
        soft, _ = resource.getrlimit(limit)
        return None if soft == resource.RLIM_INFINITY else soft

    huge_pages = ""
    with contextlib.suppress(OSError):
        text = files.system_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
        huge_pages = text.partition("[")[2].partition("]")[0] or text.strip()
    page, to_take = os.sysconf("SC_PAGE_SIZE"), available(root)
    return Limits(
        page_bytes=page,
        huge_pages=huge_pages,
        locked_memory_bytes=of(resource.RLIMIT_MEMLOCK),
        open_files=of(resource.RLIMIT_NOFILE),
        memory_bytes=page * os.sysconf("SC_PHYS_PAGES"),
        available_bytes=to_take.bytes,
        available_source=to_take.source,
    )


# ---- As text ----------------------------------------------------------------------------------------------------


def lines_of(d: Diagnosis) -> list[str]:
    machine = d.machine
    rows = [
        ("cpu", f"{machine.cpus} x {machine.cpu}"),
        ("  features", " ".join(machine.cpu_features) or "unknown"),
        ("kernels", machine.backend),
        ("metal", machine.metal),
        ("cuda", machine.cuda),
        *d.limits.rows(),
        *((threads_text(rate.threads), f"{size_text(rate.bytes_per_second)}/s read") for rate in d.memory),
        ("disk", f"{d.path}: {d.what}, {size_text(d.probe.read_bytes)} a read, in random order"),
    ]
    lines = [f"{label:<20}{text}" for label, text in rows]
    lines.append(f"{'':<20}{'at a time':<10}" + "".join(f"{readers:>12}" for readers in READERS))
    for reads in ("direct", "buffered"):
        found = {rate.readers: rate for rate in d.disk if rate.reads == reads}
        cells = "".join(f"{size_text(found[n].bytes_per_second) + '/s' if found else '-':>12}" for n in READERS)
        lines.append(f"{'':<20}{reads:<10}{cells}")
    lines.append(f"{'recommended':<20}reads={d.probe.reads!r}, readers={d.probe.readers}")
    lines.append(f"{'  because':<20}{d.reason}")
    lines.append(f"{'  remembered':<20}{d.kept}")
    return lines


def threads_text(count: int) -> str:
    return f"memory, {count} thread{'s' if count > 1 else ''}"
