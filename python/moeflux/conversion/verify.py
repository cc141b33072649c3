"""Is a store on disk what was written? This reads every byte again, compares checksums and names each wrong part."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moeflux import files
from moeflux._core import ExpertLayout
from moeflux.conversion.packer import worker_count
from moeflux.errors import Error, FormatError, IoError, refusals
from moeflux.models.gguf import find_gguf
from moeflux.progress import Progress, Silent, time_text
from moeflux.sizes import size_text
from moeflux.stores import packed
from moeflux.stores.packed import Description, read_description
from moeflux.stores.spans import SpanReader
from moeflux.stores.store import open_store

__all__ = ["Problem", "VerifyReport", "verify"]

PART_BYTES = 8 << 20  # read and hashed at a time
SHOWN = 40  # problems that the report prints


@dataclass(frozen=True)
class Problem:
    """One part that is not as it should be. `layer` and `expert` are -1 if the fault is not in an expert."""

    file: str  # its path in the store; empty if the message names it
    message: str  # expected and found
    layer: int = -1
    expert: int = -1

    def __str__(self) -> str:
        return f"{self.file}: {self.message}" if self.file else self.message


@dataclass(frozen=True)
class VerifyReport:
    path: Path
    has_checksums: bool
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    tensors: int = 0  # compared
    experts: int = 0  # compared
    bytes: int = 0  # read
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [f"problem   {problem}" for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"problem   and {len(self.problems) - SHOWN} more")
        lines += [f"note      {note}" for note in self.notes]
        if self.has_checksums:
            rate = self.bytes / max(self.seconds, 1e-9)
            lines.append(
                f"read      {size_text(self.bytes)} in {time_text(self.seconds)} ({size_text(rate)}/s): "
                f"{self.tensors} dense tensors, {self.experts} experts"
            )
        verdict = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        good = "every checksum agrees" if self.has_checksums else "complete and consistent, contents unchecked"
        lines.append(f"{self.path}: {good if self.ok else verdict}")
        return "\n".join(lines)


def verify(path: str | Path, *, experts: str | Path | None = None, progress: Progress | None = None) -> VerifyReport:
    """Checks a store. One without moeflux.json has no checksums: only its structure is checked, and the report says so.

    `experts` is the folder with the layer files of an older store, if it is not the default one.
    """
    folder = files.expanded(path)
    if find_gguf(folder) is None:
        files.expect_folder(folder)
    if not files.exists(folder / packed.DESCRIPTION):
        note = f"no {packed.DESCRIPTION}, so no checksums: names, shapes and sizes were checked, contents were not"
        return VerifyReport(folder, False, tuple(structure(folder, experts)), (note,))
    try:
        description = read_description(folder)
    except Error as error:
        return VerifyReport(folder, True, (Problem("", str(error)),), ())
    started = time.monotonic()
    problems: list[Problem] = []
    sizes = file_sizes(folder, description, problems)
    tensors = tensor_ranges(folder, description, sizes, problems)
    experts_of_all = expert_ranges(description, sizes, problems)
    notes = [f"{name}: no part of the store" for name in strangers(folder, description)]
    ranges = [*small_files(description, sizes), *tensors, *experts_of_all]
    if problems:  # with names and sizes, which are quick to see; hours of reading would not mend the store
        ranges, tensors, experts_of_all = [], [], []
        notes.append("contents were not read, for names and sizes are wrong already")
    problems += compare(folder, ranges, progress or Silent())
    return VerifyReport(
        path=folder,
        has_checksums=True,
        problems=tuple(problems or structure(folder, None)),
        notes=tuple(notes),
        tensors=sum(1 for each in tensors if each.sha256),
        experts=len(experts_of_all),
        bytes=sum(each.size for each in ranges),
        seconds=time.monotonic() - started,
    )


def structure(folder: Path, experts: str | Path | None) -> list[Problem]:
    """The problem that opening the store finds, if any."""
    try:
        with open_store(folder, experts=experts):
            return []
    except Error as error:
        return [Problem("", str(error))]


# ---- What must be where -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """Bytes of a file, with the checksum that they must have. An empty checksum means that they must be zeros."""

    file: str
    offset: int
    size: int
    sha256: str
    what: str = ""
    layer: int = -1
    expert: int = -1

    def problem(self, message: str) -> Problem:
        return Problem(self.file, f"{self.what}: {message}" if self.what else message, self.layer, self.expert)


def file_sizes(folder: Path, description: Description, problems: list[Problem]) -> dict[str, int]:
    """The lengths of the files that are there. Missing and wrongly sized ones are problems."""
    sizes = {}
    for name, entry in description.files.items():
        path = folder / name
        kind = files.kind_of(path)
        if kind != "a file":
            problems.append(Problem(name, f"expected a file, found {kind}"))
            continue
        sizes[name] = files.size_of(path)
        if sizes[name] != entry["bytes"]:
            what = "truncated" if sizes[name] < entry["bytes"] else "too long"
            problems.append(Problem(name, f"expected {entry['bytes']} bytes, found {sizes[name]} ({what})"))
    return sizes


def strangers(folder: Path, description: Description) -> list[str]:
    names = {path.relative_to(folder).as_posix() for path in files.listed(folder, "**/*") if files.is_file(path)}
    return sorted(names - {*description.files, packed.DESCRIPTION})


def small_files(description: Description, sizes: dict[str, int]) -> list[Range]:
    return [
        Range(name, 0, sizes[name], entry["sha256"])
        for name, entry in description.files.items()
        if "sha256" in entry and name in sizes
    ]


def tensor_ranges(
    folder: Path, description: Description, sizes: dict[str, int], problems: list[Problem]
) -> list[Range]:
    """Every dense tensor, and the gaps between them."""
    if packed.WEIGHTS not in sizes or packed.MANIFEST not in sizes:
        return []
    try:
        places = manifest_places(folder / packed.MANIFEST)
    except Error as error:
        problems.append(Problem("", str(error)))
        return []
    sums, length = description.tensor_sha256, sizes[packed.WEIGHTS]
    for name in sorted(set(sums) ^ {name for _, _, name in places}):
        where = packed.DESCRIPTION if name in sums else packed.MANIFEST
        problems.append(
            Problem(packed.MANIFEST, f'tensor "{name}": expected in both JSON files, found only in {where}')
        )
    ranges, end = [], 0
    for offset, size, name in places:
        if end < offset <= length:
            ranges.append(Range(packed.WEIGHTS, end, offset - end, "", f'gap before "{name}"'))
        end = max(end, offset + size)
        if offset + size > length:
            message = f'tensor "{name}": expected to end at byte {offset + size}, but the file ends before'
            problems.append(Problem(packed.WEIGHTS, message))
        elif name in sums:
            ranges.append(Range(packed.WEIGHTS, offset, size, sums[name], f'tensor "{name}"'))
    return ranges


def manifest_places(path: Path) -> list[tuple[int, int, str]]:
    """(offset, size, name) of every tensor, in file order."""
    root = files.read_json(path)
    entries = root.get("tensors") if isinstance(root, dict) else None
    if not isinstance(entries, dict):
        raise FormatError(f"{path}: tensors: expected an object")
    places = []
    for name, entry in entries.items():
        numbers = [entry.get(key) for key in ("offset", "size")] if isinstance(entry, dict) else []
        if len(numbers) != 2 or not all(type(number) is int and number >= 0 for number in numbers):
            raise FormatError(f'{path}: tensor "{name}": expected an offset and a size, found {entry!r:.80}')
        places.append((*numbers, name))
    return sorted(places)


def expert_ranges(description: Description, sizes: dict[str, int], problems: list[Problem]) -> list[Range]:
    v, formats = description.variant, description.experts
    size = ExpertLayout(v.hidden_size, v.experts.intermediate, formats.gate, formats.up, formats.down).bytes
    ranges = []
    for layer, sums in description.expert_sha256.items():
        name = f"{description.experts_directory}/{packed.layer_file(layer)}"
        if name not in description.files:
            problems.append(Problem(packed.DESCRIPTION, f"files: expected {name}, found nothing"))
        if name not in sizes:
            continue
        for expert, sha256 in enumerate(sums):
            each = Range(name, expert * size, size, sha256, f"layer {layer} expert {expert}", layer, expert)
            if each.offset + size <= sizes[name]:
                ranges.append(each)
            else:
                message = f"expected to end at byte {each.offset + size}, but the file ends before"
                problems.append(each.problem(message))
    return ranges


# ---- Reading ----------------------------------------------------------------------------------------------------


def compare(folder: Path, ranges: list[Range], progress: Progress) -> list[Problem]:
    """Reads every range, several at a time, in the order given."""
    problems = []
    names = sorted({each.file for each in ranges})
    numbers = {name: number for number, name in enumerate(names)}
    total = sum(each.size for each in ranges)
    with (
        refusals(f"verifying {folder}"),
        SpanReader([folder / name for name in names]) as reader,
        ThreadPoolExecutor(worker_count()) as pool,
        progress.task("verify", total) as task,
    ):
        found = pool.map(partial(fault, reader, numbers), ranges)
        for each, problem in zip(ranges, found, strict=True):
            task.advance(each.size)
            problems += [problem] if problem else []
    return problems


def fault(reader: SpanReader, numbers: dict[str, int], wanted: Range) -> Problem | None:
    digest, only_zeros = hashlib.sha256(), True
    try:
        for start in range(wanted.offset, wanted.offset + wanted.size, PART_BYTES):
            size = min(PART_BYTES, wanted.offset + wanted.size - start)
            part = reader.read(numbers[wanted.file], start, size)
            if wanted.sha256:
                digest.update(part)
            else:
                only_zeros &= not part.any()
    except IoError as error:
        return wanted.problem(str(error))
    if not wanted.sha256:
        return None if only_zeros else wanted.problem("expected zeros, found other bytes")
    found = digest.hexdigest()
    return None if found == wanted.sha256 else wanted.problem(f"expected sha256 {wanted.sha256}, found {found}")
