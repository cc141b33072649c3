"""Reads byte ranges of files: until full, in the order they lie on disk, from any number of threads."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType

import numpy as np

from moeflux.errors import IoError
from moeflux.files import open_file

__all__ = ["Request", "SpanReader"]

Request = tuple[int, int, memoryview]  # file index, offset in the file, where the bytes go

MAX_VIEWS = 512  # of one scattered read; the system's limit (IOV_MAX) is at least 1024


class SpanReader:
    """Owns the descriptors of a list of files, opened at first use, closed by `close` or the end of a `with`."""

    def __init__(self, files: Sequence[str | os.PathLike[str]]) -> None:
        self.files = [os.fspath(file) for file in files]
        self._opened: dict[int, io.FileIO] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> SpanReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            for opened in self._opened.values():
                opened.close()
            self._opened.clear()

    def read(self, file: int, offset: int, size: int) -> np.ndarray:
        """`size` bytes as 1-D uint8."""
        data = np.empty(size, np.uint8)
        self.read_all([(file, offset, memoryview(data))])
        return data

    def read_all(self, requests: Iterable[Request]) -> None:
        """Fills every view. Ranges that touch in the file are one system call, whatever order they came in."""
        ordered = sorted((request for request in requests if len(request[2])), key=lambda request: request[:2])
        start = 0
        while start < len(ordered):
            stop = start + 1
            while stop < len(ordered) and stop - start < MAX_VIEWS and _touch(ordered[stop - 1], ordered[stop]):
                stop += 1
            file, offset, _ = ordered[start]
            self._fill(file, offset, [view for _, _, view in ordered[start:stop]])
            start = stop

    def _fill(self, file: int, offset: int, views: list[memoryview]) -> None:
        wanted = sum(len(view) for view in views)
        done = 0
        while views:
            try:
                count = os.preadv(self._descriptor(file), views, offset + done)
            except OSError as error:
                raise IoError(f"{self.files[file]}: {error.strerror} (reading at byte {offset + done})") from error
            if count == 0:
                raise IoError(
                    f"{self.files[file]}: expected {wanted} bytes at byte {offset}, found only {done}: the file ends"
                )
            done += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]

    def _descriptor(self, file: int) -> int:
        with self._lock:
            if file not in self._opened:
                self._opened[file] = open_file(self.files[file])
            return self._opened[file].fileno()


def _touch(before: Request, after: Request) -> bool:
    return before[0] == after[0] and before[1] + len(before[2]) == after[1]
