"""What canonical tensors are made of: rows, words or blocks of stored tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from moeflux.conversion.coded import Coded
from moeflux.conversion.stored import Stored
from moeflux.errors import FormatError
from moeflux.models.variants import QuantFormat
from moeflux.stores.spans import SpanReader

__all__ = ["Blocks", "Matrix", "Packed", "Vector"]

Run = tuple[Stored | Coded, int, int]
"""Rows of a stored matrix: the first, and the one behind the last."""

BLOCK_ELEMENTS = 4 << 20  # of a matrix in memory at a time, per thread


@dataclass(frozen=True)
class Matrix:
    """A canonical matrix: its rows in order, as runs of rows of stored tensors. With `transposed` it is a stack of
    matrices, where each run is one matrix to be transposed."""

    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    transposed: bool = False
    columns: slice | None = None  # the part of the stored rows that it takes, if not all

    @property
    def position(self) -> tuple[int, int]:
        return self.runs[0][0].file, self.runs[0][0].offset

    def blocks(self, reader: SpanReader, element: str) -> Iterator[np.ndarray]:
        """The rows as `element` holds them, some at a time: arrays [rows, columns] of its STORAGE type."""
        if self.transposed:
            for stored, start, stop in self.runs:
                rows = stored.read(reader, start, stop, element)
                yield np.ascontiguousarray(rows[:, self.columns or slice(None)].T)
            return
        limit = max(1, BLOCK_ELEMENTS // self.shape[-1])
        for group in _groups_of_rows(self.runs, limit):
            parts = [stored.read(reader, start, stop, element) for stored, start, stop in group]
            rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
            yield np.ascontiguousarray(rows[:, self.columns]) if self.columns else rows


def _groups_of_rows(runs: Iterable[Run], limit: int) -> Iterator[list[Run]]:
    """The same rows in the same order, cut and gathered into groups of at most `limit` rows."""
    group: list[Run] = []
    count = 0
    for stored, start, stop in runs:
        while start < stop:
            end = min(stop, start + limit - count)
            group.append((stored, start, end))
            count += end - start
            start = end
            if count == limit:
                yield group
                group, count = [], 0
    if group:
        yield group


@dataclass(frozen=True)
class Packed:
    """A matrix that is published in codes, and stored in the same: its rows in order, as runs of rows."""

    shape: tuple[int, ...]
    coded: Coded
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def instead_of(cls, matrix: Matrix) -> Packed | Matrix:
        """The same without quantising again, where all of it is whole rows of one matrix in codes."""
        coded = matrix.runs[0][0]
        if not isinstance(coded, Coded) or matrix.transposed or matrix.columns or len(matrix.shape) != 2:
            return matrix
        assert all(stored is coded for stored, _, _ in matrix.runs)
        return cls(matrix.shape, coded, tuple((start, stop) for _, start, stop in matrix.runs))

    @property
    def format(self) -> QuantFormat:
        return self.coded.format

    @property
    def position(self) -> tuple[int, int]:
        return self.coded.file, self.coded.offset

    def parts(self, reader: SpanReader) -> tuple[np.ndarray, ...]:
        """Codes, scales, and biases if it has any, 1-D uint8."""
        first, last = min(start for start, _ in self.runs), max(stop for _, stop in self.runs)
        rows = np.concatenate([np.arange(start - first, stop - first) for start, stop in self.runs])
        parts = self.coded.parts(reader, first, last)
        whole = len(self.runs) == 1
        return tuple((part if whole else part[rows]).reshape(-1) for part in parts)


@dataclass(frozen=True)
class Blocks:
    """A matrix in MXFP4, of which every `step`-th row from `first` on of two stored tensors is taken. A block of 32
    numbers is 16 bytes, two codes in each, the lower one first: the codes as MLX packs them."""

    shape: tuple[int, ...]
    codes: Stored
    scales: Stored
    first: int  # row
    step: int

    @property
    def format(self) -> QuantFormat:
        return QuantFormat.mxfp4()

    @property
    def position(self) -> tuple[int, int]:
        return self.codes.file, self.codes.offset

    def parts(self, reader: SpanReader) -> tuple[np.ndarray, ...]:
        """Codes and scales, 1-D uint8."""
        codes, scales = (self._rows(reader, stored) for stored in (self.codes, self.scales))
        if (scales == 255).any():
            raise FormatError(
                f'{reader.files[self.scales.file]}: tensor "{self.scales.name}": expected scales up to 254, found 255'
            )
        return codes, scales

    def _rows(self, reader: SpanReader, stored: Stored) -> np.ndarray:
        width = int(np.prod(stored.shape[2:]))
        among = self.first % self.step
        rows = reader.read(stored.file, stored.offset + (self.first - among) * width, self.shape[0] * self.step * width)
        return np.ascontiguousarray(rows.reshape(-1, self.step, width)[:, among]).reshape(-1)


@dataclass(frozen=True)
class Vector:
    """A tensor that is neither quantised nor narrowed: a norm, a decay, the convolution's taps."""

    shape: tuple[int, ...]
    stored: Stored
    element: str  # its type in the store
    add_one: bool = False  # in f32: 1 + w has more bits than a bf16 w, and a norm that lost them chooses other experts
    every: tuple[int, int] = (0, 1)  # of the numbers of the stored rows: from the first on, every so many

    @property
    def position(self) -> tuple[int, int]:
        return self.stored.file, self.stored.offset

    def read(self, reader: SpanReader) -> np.ndarray:
        """1-D uint8."""
        first, step = self.every
        values = np.ascontiguousarray(self.stored.read(reader, 0, self.stored.rows, self.element)[:, first::step])
        values = values.reshape(-1)
        return (values + np.float32(1) if self.add_one else values).view(np.uint8)
