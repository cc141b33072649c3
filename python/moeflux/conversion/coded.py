"""Matrices that are published in codes of four bits, where some columns of a row share a scale and a zero point.

A number is code less zero point, times scale. That is the affine form, with a bias of -zero point * scale. So nothing
is quantised again, and no bit is lost: where zero points differ, scale and bias are kept in f32, which has room for
their product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moeflux.conversion.stored import STORAGE, InRows, Stored, all_finite
from moeflux.errors import FormatError
from moeflux.models.quantised import Awq, Gptq, Int4
from moeflux.models.variants import QuantFormat
from moeflux.stores.floats import encode
from moeflux.stores.spans import SpanReader

__all__ = ["AffineCodes", "Coded", "Int4Kind", "Take", "parts_of_coded", "take_coded"]

Int4Kind = Int4 | Awq | Gptq

Take = Callable[[str, tuple[int, ...], tuple[str, ...]], Stored]
"""Name, shape and types of a tensor -> the tensor, which must be such."""

MIDDLE = 8
"""The zero point of codes that have none of their own."""

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word, from the lowest, hold number i of eight."""


ReadGroups = Callable[["AffineCodes", SpanReader, int, int], "Groups"]
"""Rows from the first to the one behind the last."""


class Groups(NamedTuple):
    """Some rows of a matrix."""

    words: np.ndarray  # u32 [rows, columns / 8], eight codes each, the first the lowest
    scales: np.ndarray  # f32 [rows, groups]
    zeros: np.ndarray  # f32 [rows, groups]


@dataclass(frozen=True)
class Coded(InRows):
    """A matrix in codes. It has what `Stored` has, and `read` gives its numbers."""

    name: str
    shape: tuple[int, ...]
    format: QuantFormat  # in which a store keeps it as it is
    words: Stored
    scales: Stored

    @property
    def file(self) -> int:
        return self.words.file

    @property
    def offset(self) -> int:
        return self.words.offset

    @property
    def dtype(self) -> str:
        return "F32"

    def read(self, reader: SpanReader, start: int, stop: int, element: str) -> np.ndarray:
        """The numbers of rows [start, stop) as `element` holds them."""
        numbers = self.numbers(reader, start, stop)
        values = encode(numbers, element).view(STORAGE[element]).reshape(numbers.shape)
        self.expect_finite(reader, values, element)
        return values

    def numbers(self, reader: SpanReader, start: int, stop: int) -> np.ndarray:
        """Those of rows [start, stop), in f32."""
        raise NotImplementedError

    def parts(self, reader: SpanReader, start: int, stop: int) -> tuple[np.ndarray, ...]:
        """Rows [start, stop) as a store keeps them: the bytes of codes, scales and biases, [rows, bytes]."""
        raise NotImplementedError

    def expect_finite(self, reader: SpanReader, values: np.ndarray, element: str) -> None:
        if not all_finite(values, element):
            raise FormatError(
                f'{reader.files[self.scales.file]}: tensor "{self.scales.name}": expected scales with which '
                f"numbers and biases fit {element}, found larger ones"
            )


@dataclass(frozen=True)
class AffineCodes(Coded):
    """Whole numbers of four bits."""

    zeros: Stored | None  # packed as well; without them, the zero point is 8
    read_groups: ReadGroups

    def numbers(self, reader: SpanReader, start: int, stop: int) -> np.ndarray:
        groups = self.read_groups(self, reader, start, stop)
        codes = _spread(groups.words, IN_ORDER).reshape(*groups.scales.shape, -1).astype(np.float32)
        numbers = (codes - groups.zeros[..., None]) * groups.scales[..., None]
        return np.asarray(numbers).reshape(stop - start, self.columns)

    def parts(self, reader: SpanReader, start: int, stop: int) -> tuple[np.ndarray, ...]:
        groups = self.read_groups(self, reader, start, stop)
        kind = self.format.scale_type
        parts = [np.ascontiguousarray(groups.words).view(np.uint8)]
        for numbers in (groups.scales, groups.zeros * -groups.scales):
            stored = encode(numbers, kind)
            self.expect_finite(reader, stored.view(STORAGE[kind]), kind)
            parts.append(stored.reshape(stop - start, -1))
        return tuple(parts)


def parts_of_coded(name: str, kind: Int4Kind) -> tuple[str, ...]:
    """The tensors of which at least one is there if that matrix is published in codes."""
    if isinstance(kind, Int4):
        return tuple(f"{name}_{part}" for part in ("packed", "scale"))
    return tuple(f"{name.removesuffix('.weight')}.{part}" for part in ("qweight", "scales", "qzeros"))


def take_coded(name: str, shape: tuple[int, ...], kind: Int4Kind, take: Take) -> AffineCodes:
    """The matrix whose weight would be called `name`, if it were not quantised."""
    rows, columns = shape
    if columns % kind.group_size or (rows % 8 and not isinstance(kind, Int4)):
        raise FormatError(f"{name}: expected whole groups of {kind.group_size} and whole words, found {list(shape)}")
    groups = columns // kind.group_size
    base = name.removesuffix(".weight")
    floats = tuple(STORAGE)
    zeros: Stored | None
    read: ReadGroups
    if isinstance(kind, Int4):
        take(f"{name}_shape", (2,), ("I32", "I64"))
        words = take(f"{name}_packed", (rows, columns // 8), ("I32",))
        scales = take(f"{name}_scale", (rows, groups), floats)
        zeros = None if kind.symmetric else take(f"{name}_zero_point", (-(-rows // 8), groups), ("I32",))
        read = _compressed_groups
    else:
        scales = take(f"{base}.scales", (groups, rows), floats)
        zeros = take(f"{base}.qzeros", (groups, rows // 8), ("I32",))
        if isinstance(kind, Awq):
            words = take(f"{base}.qweight", (columns, rows // 8), ("I32",))
            read = _awq_groups
        else:
            words = take(f"{base}.qweight", (columns // 8, rows), ("I32",))
            order = take(f"{base}.g_idx", (columns,), ("I32",))
            read = _gptq_reader(kind, order)
    symmetric = isinstance(kind, Int4 | Gptq) and kind.symmetric
    format = QuantFormat.affine(4, kind.group_size, scales.dtype if symmetric else "F32")
    return AffineCodes(name, shape, format, words, scales, zeros, read)


# ---- As they are packed -----------------------------------------------------------------------------------------


def _raw(reader: SpanReader, stored: Stored, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Rows of a tensor of words: u32."""
    stop = stored.rows if stop is None else stop
    width = stored.columns * 4
    raw = reader.read(stored.file, stored.offset + start * width, (stop - start) * width)
    return raw.view("<u4").reshape(stop - start, stored.columns)


def _compressed_groups(matrix: AffineCodes, reader: SpanReader, start: int, stop: int) -> Groups:
    words = _raw(reader, matrix.words, start, stop)
    scales = matrix.scales.read(reader, start, stop, "F32")
    if matrix.zeros is None:
        return Groups(words, scales, np.full(scales.shape, MIDDLE, np.float32))
    packed = _raw(reader, matrix.zeros, start // 8, -(-stop // 8))
    zeros = _spread(packed.T, IN_ORDER).T[start % 8 :][: stop - start]
    return Groups(words, scales, zeros.astype(np.float32))


def _awq_groups(matrix: AffineCodes, reader: SpanReader, start: int, stop: int) -> Groups:
    assert matrix.zeros is not None
    packed = _raw(reader, matrix.words)
    words = np.empty((matrix.rows, matrix.columns // 8), np.uint32)
    for i, place in enumerate(AWQ_ORDER):
        codes = ((packed >> np.uint32(4 * place)) & np.uint32(15)).reshape(-1, 8, packed.shape[1])
        together = codes[:, 0]
        for j in range(1, 8):
            together = together | codes[:, j] << np.uint32(4 * j)
        words[i::8] = together.T
    zeros = _spread(_raw(reader, matrix.zeros), AWQ_ORDER).T
    return Groups(words[start:stop], _across(matrix.scales, reader)[start:stop], zeros[start:stop].astype(np.float32))


def _gptq_reader(kind: Gptq, order: Stored) -> ReadGroups:
    def read(matrix: AffineCodes, reader: SpanReader, start: int, stop: int) -> Groups:
        assert matrix.zeros is not None
        _expect_order(reader, order, kind.group_size)
        zeros = _spread(_raw(reader, matrix.zeros), IN_ORDER).T + np.uint32(kind.less)
        where = f'{reader.files[matrix.zeros.file]}: tensor "{matrix.zeros.name}"'
        if kind.symmetric and (zeros != MIDDLE).any():
            raise FormatError(
                f"{where}: expected zero points of {MIDDLE}, for quantization_config says sym, found others"
            )
        if zeros.max(initial=0) > 15:  # some make 0 of it, some 16, and what packs a 0 so spoils those beside it
            raise FormatError(f"{where}: expected zero points up to 15, found 16, which is packed as 15 in this format")
        words = _raw(reader, matrix.words).T
        return Groups(
            words[start:stop], _across(matrix.scales, reader)[start:stop], zeros[start:stop].astype(np.float32)
        )

    return read


def _expect_order(reader: SpanReader, order: Stored, group_size: int) -> None:
    found = reader.read(order.file, order.offset, 4 * order.columns).view("<i4")
    if not np.array_equal(found, np.arange(order.columns) // group_size):
        raise FormatError(
            f'{reader.files[order.file]}: tensor "{order.name}": expected columns in their own order, in groups of '
            f"{group_size}, found another order (desc_act)"
        )


def _across(scales: Stored, reader: SpanReader) -> np.ndarray:
    """Scales of [groups, rows] as [rows, groups]."""
    return np.ascontiguousarray(scales.read(reader, 0, scales.rows, "F32").T)


def _spread(words: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Words [n, m] -> their codes [n, 8 * m]."""
    codes = [(words >> np.uint32(4 * place)) & np.uint32(15) for place in order]
    return np.stack(codes, axis=-1).reshape(len(words), -1)
