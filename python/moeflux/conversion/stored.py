"""Tensors as a Hugging Face checkpoint has them, fp8 with its scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moeflux.errors import FormatError
from moeflux.stores.floats import FLOAT_BYTES, decode, encode, rounded
from moeflux.stores.spans import SpanReader

__all__ = ["STORAGE", "InRows", "Stored", "all_finite"]

STORAGE: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
"""How NumPy holds elements of each type; bf16 as its bits."""


class InRows:
    """What has a shape, flattened to rows of its last dimension."""

    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=np.int64))

    @property
    def columns(self) -> int:
        return self.shape[-1]


@dataclass(frozen=True)
class Stored(InRows):
    """A tensor of a shard, flattened to rows of its last dimension. fp8 has one scale for each block of a matrix."""

    name: str
    file: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    scale: Stored | None = None
    block: tuple[int, int] = (0, 0)

    def read(self, reader: SpanReader, start: int, stop: int, element: str) -> np.ndarray:
        """Rows [start, stop) as `element` holds them, an array of its STORAGE type."""
        width = self.columns * FLOAT_BYTES[self.dtype]
        raw = reader.read(self.file, self.offset + start * width, (stop - start) * width)
        if self.dtype == element:
            values = raw.view(STORAGE[element]).reshape(stop - start, self.columns)
        else:
            wide = decode(raw, self.dtype).reshape(stop - start, self.columns)
            if self.scale is not None:
                wide = rounded(wide * self._scales(reader, start, stop), "BF16")
            values = encode(wide, element).view(STORAGE[element]).reshape(wide.shape)
        if not all_finite(values, element):
            raise FormatError(
                f'{reader.files[self.file]}: tensor "{self.name}": expected finite numbers that fit {element}, found '
                f"infinite ones or NaN in rows {start} to {stop - 1}"
            )
        return values

    def _scales(self, reader: SpanReader, start: int, stop: int) -> np.ndarray:
        """The scale of every element of the rows."""
        scales = self.scale_rows(reader, start, stop, "F32")
        return np.asarray(np.repeat(scales, self.block[1], axis=1)[:, : self.columns])

    def scale_rows(self, reader: SpanReader, start: int, stop: int, element: str) -> np.ndarray:
        """The scales of the blocks of each row."""
        rows_of_matrix = self.shape[-2]
        blocks_of_matrix = -(-rows_of_matrix // self.block[0])
        row = np.arange(start, stop)
        block_row = row // rows_of_matrix * blocks_of_matrix + row % rows_of_matrix // self.block[0]
        first, last = int(block_row[0]), int(block_row[-1])
        assert self.scale is not None
        return np.asarray(self.scale.read(reader, first, last + 1, element)[block_row - first])


def all_finite(values: np.ndarray, element: str) -> bool:
    if element == "BF16":
        return not bool(((values & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(values).all())
