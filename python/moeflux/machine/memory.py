"""How much memory there is: what this process holds, and what it may still take."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from moeflux.files import system_text

__all__ = ["Available", "Resident", "available", "huge_pages_unasked", "resident", "resident_of"]

NO_LIMIT = 1 << 60
"""The first version of control groups says "no limit" with a number near 2^63."""


# ---- This process -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resident:
    """Bytes of this process in physical memory."""

    now: int
    peak: int  # since it began
    anonymous: int  # the part of `now` that belongs to no file, so only the process itself can give it back


def resident(root: Path = Path("/")) -> Resident:
    try:
        fields: dict[str, str] = dict(
            re.findall(r"^(\w+):\s+(\d+) kB", system_text(root / "proc/self/status"), re.MULTILINE)
        )
        now, peak = 1024 * int(fields["VmRSS"]), 1024 * int(fields["VmHWM"])
        return Resident(now, max(now, peak), 1024 * int(fields.get("RssAnon", fields["VmRSS"])))
    except (OSError, KeyError):
        pass
    # No /proc, so not Linux. macOS counts the peak in bytes, others in kB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    now = resident_of(os.getpid()) or peak
    return Resident(now, max(now, peak), now)


def resident_of(pid: int) -> int:
    """Bytes of a process in physical memory, where there is no /proc; 0 when nobody can say."""
    found = re.match(r"\s*(\d+)", _output("ps", "-o", "rss=", "-p", str(pid)))
    return 1024 * int(found[1]) if found else 0


def huge_pages_unasked(root: Path = Path("/")) -> bool:
    """Whether the system gives huge pages to those who do not ask for them, including stacks of threads."""
    try:
        return "[always]" in system_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    except OSError:
        return False


# ---- This machine -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Available:
    bytes: int  # that this process may take beyond what it has, without anything being swapped out or killed
    source: str  # what sets the limit
    limited: bool = False  # by a control group, which counts the page cache as well


def available(root: Path = Path("/")) -> Available:
    """What is free on this machine, or in the control group of this process that is nearest to its limit."""
    return min([_free(root), *_groups(root)], key=lambda found: found.bytes)


def _free(root: Path) -> Available:
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", system_text(root / "proc/meminfo"), re.MULTILINE)
    except OSError:
        match = None
    if match:
        return Available(1024 * int(match[1]), "free on this machine")
    pages = free_pages(_output("vm_stat"))
    if pages is not None:
        return Available(pages, "free on this machine")
    return Available(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2, "half of this machine")


def free_pages(vm_stat: str) -> int | None:
    """Bytes that macOS can give without swapping, from what its vm_stat prints."""
    page = re.search(r"page size of (\d+) bytes", vm_stat)
    counts = dict(re.findall(r"^Pages ([\w -]+):\s+(\d+)\.", vm_stat, re.MULTILINE))
    kinds = ("free", "inactive", "speculative", "purgeable")
    return int(page[1]) * sum(int(counts.get(kind, 0)) for kind in kinds) if page and counts else None


def _groups(root: Path) -> Iterator[Available]:
    """One for each control group with a limit, from this process's own up to the outermost that can be seen."""
    try:
        mounts = system_text(root / "proc/self/mountinfo").splitlines()
        lines = system_text(root / "proc/self/cgroup").splitlines()
    except OSError:
        return
    memberships = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    for mount in mounts:
        left, separator, right = mount.partition(" - ")
        fields, kind = left.split(), right.split()
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            own = next((path for _, controllers, path in memberships if not controllers), None)
            files: tuple[str, tuple[str, ...], str] = ("memory.current", ("memory.max", "memory.high"), "")
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            own = next((path for _, controllers, path in memberships if "memory" in controllers.split(",")), None)
            files = ("memory.usage_in_bytes", ("memory.limit_in_bytes",), "total_")
        else:
            continue
        if own is not None:
            yield from _levels(root, _plain(fields[4]), _within(_plain(fields[3]), own), *files)


def _levels(
    root: Path, mount: str, group: PurePosixPath, usage: str, limits: tuple[str, ...], prefix: str
) -> Iterator[Available]:
    """`prefix` begins those fields of memory.stat that count the groups below too."""
    for level in (group, *group.parents):
        folder = root / mount.lstrip("/") / level
        limit = min((_number(folder / name) for name in limits), default=NO_LIMIT)
        if limit >= NO_LIMIT:
            continue
        used = _number(folder / usage, 0)
        # The page cache counts as used, but the system drops it when memory is wanted.
        try:
            stat = dict(line.split(" ", 1) for line in system_text(folder / "memory.stat").splitlines())
            cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
        except (OSError, ValueError):
            cache = 0
        place = PurePosixPath("/") / level
        yield Available(max(0, limit - max(0, used - cache)), f"free below the limit of control group {place}", True)


def _within(mount_root: str, group: str) -> PurePosixPath:
    """The path of a group below its mount. A container may see its own group as the root of the mount."""
    path = PurePosixPath(group)
    if ".." in path.parts:
        return PurePosixPath()
    try:
        return path.relative_to(mount_root)
    except ValueError:
        return PurePosixPath() if mount_root != "/" else path.relative_to("/")


def _plain(field: str) -> str:
    r"""mountinfo writes a space as \040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _number(file: Path, otherwise: int = NO_LIMIT) -> int:
    try:
        return int(system_text(file))
    except (OSError, ValueError):  # "max", or no such file in the outermost group
        return otherwise


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except OSError:
        return ""
