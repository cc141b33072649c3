"""The journal of an unfinished store: which pieces are safely on disk, so that a later run can go on from there.

It is a text file of JSON lines. The first binds the folder to its source and options. Each further line names a
finished piece and its checksums, and is written only after the piece's bytes have been synced. A last line without its
newline is what a kill left behind, and counts as absent.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from moeflux import files
from moeflux.errors import FormatError, StateError
from moeflux.stores.packed import JOURNAL

__all__ = ["JOURNAL", "Journal", "check_binding", "read_lines"]

MAX_BYTES = 1 << 30
"""A line of checksums for each matrix and each run of experts: hundreds of megabytes are of a model beyond reason."""


class Journal:
    """The journal of one folder, open for appending until `close`. `done` is what earlier runs finished."""

    def __init__(self, folder: Path, binding: dict[str, Any]) -> None:
        """Starts the journal, or takes up the one that is there. StateError if that has another source or options."""
        self.path = folder / JOURNAL
        self.done: list[dict[str, Any]] = []
        lines, length = read_lines(self.path) if files.exists(self.path) else ([], 0)
        check_binding(folder, lines, binding)
        self.done = lines[1:]
        self._descriptor = files.open_to_write(self.path, append=True)
        with files.system_errors(self.path):
            os.ftruncate(self._descriptor, length)
        if not lines:
            self.append([binding])

    def append(self, entries: list[dict[str, Any]]) -> None:
        """Adds entries whose pieces are on disk already."""
        text = "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in entries)
        data = text.encode()
        with files.system_errors(self.path):
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a journal, and their length in bytes."""
    if not files.exists(path):
        raise StateError(f"{path}: expected the journal of an unfinished conversion, found nothing")
    data = files.read_bytes(path, MAX_BYTES)
    length = data.rfind(b"\n") + 1
    lines = []
    for number, line in enumerate(data[:length].splitlines(), start=1):
        try:
            entry = files.parse_json(line, "")
        except FormatError:
            entry = None
        if not isinstance(entry, dict):
            raise FormatError(
                f"{path}: line {number}: expected a JSON object, found {line[:60]!r}; use force to start over"
            )
        lines.append(entry)
    return lines, length


def check_binding(folder: Path, lines: list[dict[str, Any]], binding: dict[str, Any]) -> None:
    if lines and lines[0] != binding:
        raise StateError(
            f"{folder}: holds an unfinished conversion {difference(lines[0], binding)}. Finish that one with its own "
            "source and options, or use force (--force) to discard it"
        )


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """ "with format 4-bit g64, now 8-bit g64" """
    for key in [*before, *now]:
        if before.get(key) != now.get(key):
            if isinstance(before.get(key), str) and isinstance(now.get(key), str):
                return f"with {key} {before[key]}, now {now[key]}"
            return f"whose {key} were others than now"
    return "of another source"
