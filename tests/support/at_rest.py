"""What a process holds at rest, to the byte: does it give back what it took?

Resident memory cannot tell. A page is resident from its first use on, and what is planned for 64 sessions is used for
the first time over tens of thousands of tokens. So the soaks rest now and then, with everything put away, and ask
malloc how many bytes it has given out. What the engine has of the system, it counts itself.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["MAX_GROWTH", "RESTS", "Records", "Rest", "bytes_in_use", "count_every_byte", "growth", "is_flat", "told"]

RESTS = 8
"""Of a run, spread evenly."""
MAX_GROWTH = 1 << 20
"""Bytes that may be in use at the last rest beyond those after a quarter of the run. What a scheduler keeps of its last
4096 answers fills up in between. A kilobyte lost with each of 10,000 requests would be seven times as much."""

EVERYTHING = {
    # Python's own heap takes its memory of the system in large pieces; malloc is asked for each byte.
    "PYTHONMALLOC": "malloc",
    # What a thread keeps for itself counts as given out.
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
}


class _Figures(ctypes.Structure):
    """mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "free", "fast", "maps", "mapped", "unused", "fast_bytes", "given_out", "left", "on_top")
    ]


def count_every_byte() -> None:
    """Starts this program again, so that malloc knows of all memory. To be called first of all."""
    if any(os.environ.get(name) != value for name, value in EVERYTHING.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | EVERYTHING)


def bytes_in_use() -> int | None:
    """Bytes that malloc has given out and not got back; None where the C library is not glibc from 2.33 on."""
    gc.collect()
    try:
        figures = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    figures.restype = _Figures
    found = figures()
    return int(found.given_out + found.mapped)


@dataclass(frozen=True)
class Rest:
    done: int
    """Tokens or requests so far."""
    in_use: int | None
    held: int
    """Bytes of the engine, as it counts them."""

    @classmethod
    def now(cls, done: int, held: int) -> Rest:
        return cls(done, bytes_in_use(), held)


def counted(rests: Sequence[Rest]) -> tuple[Rest, Rest]:
    """From when on growth counts, and until when. In the first quarter everything is used for the first time."""
    return rests[max(0, len(rests) // 4 - 1)], rests[-1]


def growth(rests: Sequence[Rest]) -> int | None:
    first, last = counted(rests)
    return None if first.in_use is None or last.in_use is None else last.in_use - first.in_use


def is_flat(rests: Sequence[Rest]) -> bool:
    """Also where nobody can say: that is told."""
    return (growth(rests) or 0) <= MAX_GROWTH


def told(rests: Sequence[Rest], what: str) -> str:
    grown = growth(rests)
    if grown is None:
        return "in use at rest: not known, because this C library has no mallinfo2"
    each = ", ".join(f"{(rest.in_use or 0) / 1e6:.3f}" for rest in rests)
    first, last = counted(rests)
    done = last.done - first.done
    return (
        f"in use at rest: {each} MB; {grown / 1e6:+.3f} MB after the first quarter, "
        f"{grown / done:+.1f} bytes for each of {done} {what}"
    )


class Records:
    """What is kept to be compared. It grows, so it is in a file and not in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self._file = path.open("w")

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, record: Any) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self.count += 1

    def differing_from(self, program: str) -> int:
        """How many, in a fresh process of `program`."""
        command = [sys.executable, program, "--compare", str(self.path)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    @staticmethod
    def read(path: Path) -> Iterator[Any]:
        with path.open() as file:
            yield from map(json.loads, file)
