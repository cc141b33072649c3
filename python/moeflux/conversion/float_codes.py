"""Matrices that are published in codes that are floats, and that a store keeps as they are: FP8 with a scale a block,
and NVFP4 with a scale for 16 columns and one of the tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeflux.conversion.coded import Coded, Take
from moeflux.conversion.stored import Stored
from moeflux.errors import FormatError
from moeflux.models.quantised import Nvfp4
from moeflux.models.variants import QuantFormat
from moeflux.stores.floats import E4M3
from moeflux.stores.spans import SpanReader

__all__ = ["Fp8Codes", "has_nvfp4", "take_nvfp4"]

NO_NUMBER = 127
"""The code of E4M3, but for its sign, that stands for none."""

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""What codes of four bits stand for."""


@dataclass(frozen=True)
class Fp8Codes(Coded):
    """Codes E4M3. In a store, each row has the scales of its blocks for itself."""

    @classmethod
    def of(cls, stored: Stored) -> Fp8Codes | Stored:
        """The same, where a store can keep it as it is: blocks of 128 columns, scales bf16 or f32."""
        if stored.scale is None or stored.block[1] != 128 or stored.columns % 128:
            return stored
        if stored.scale.dtype not in ("BF16", "F32"):
            return stored
        format = QuantFormat.floats("FP8" if stored.scale.dtype == "BF16" else "FP8_F32")
        return cls(stored.name, stored.shape, format, stored, stored.scale)

    def numbers(self, reader: SpanReader, start: int, stop: int) -> np.ndarray:
        return self.words.read(reader, start, stop, "F32")

    def parts(self, reader: SpanReader, start: int, stop: int) -> tuple[np.ndarray, ...]:
        codes = _bytes(reader, self.words, start, stop)
        _expect_numbers(reader, self.words, codes)
        scales = self.words.scale_rows(reader, start, stop, self.scales.dtype)
        return codes, np.ascontiguousarray(scales).view(np.uint8)


@dataclass(frozen=True)
class Nvfp4Codes(Coded):
    """Codes E2M1, two to a byte, the lower half first. In a store, each row has the tensor's scale for itself."""

    whole: Stored  # the scale of the tensor
    divides: bool  # whether others are divided by it

    def numbers(self, reader: SpanReader, start: int, stop: int) -> np.ndarray:
        codes = _bytes(reader, self.words, start, stop)
        both = np.stack([codes & 15, codes >> 4], axis=-1).reshape(stop - start, self.columns // 16, 16)
        scales = E4M3[self._scale_codes(reader, start, stop)] * self._of_tensor(reader)
        return np.asarray(E2M1[both] * scales[..., None]).reshape(stop - start, self.columns)

    def parts(self, reader: SpanReader, start: int, stop: int) -> tuple[np.ndarray, ...]:
        of_rows = np.full((stop - start, 1), self._of_tensor(reader), "<f4").view(np.uint8)
        return _bytes(reader, self.words, start, stop), np.hstack([of_rows, self._scale_codes(reader, start, stop)])

    def _scale_codes(self, reader: SpanReader, start: int, stop: int) -> np.ndarray:
        codes = _bytes(reader, self.scales, start, stop)
        _expect_numbers(reader, self.scales, codes)
        return codes

    def _of_tensor(self, reader: SpanReader) -> np.float32:
        found = self.whole.read(reader, 0, 1, "F32").reshape(-1)[0]
        with np.errstate(divide="ignore", over="ignore"):
            scale = np.float32(1) / found if self.divides else found
        if not np.isfinite(scale) or scale <= 0:
            raise FormatError(
                f'{reader.files[self.whole.file]}: tensor "{self.whole.name}": expected a scale above 0, found {found}'
            )
        return np.float32(scale)


def has_nvfp4(name: str, kind: Nvfp4, tensors: dict[str, Stored]) -> bool:
    """Whether the matrix of that name is published so."""
    if kind.divides:
        return f"{name}_packed" in tensors
    return name in tensors and tensors[name].dtype == "U8"


def take_nvfp4(name: str, shape: tuple[int, ...], kind: Nvfp4, take: Take) -> Nvfp4Codes:
    format = QuantFormat.floats("NVFP4")
    rows, columns = shape
    if not format.fits(columns):
        raise FormatError(f"{name}: expected whole groups of {format.whole_columns} columns, found {list(shape)}")
    codes, whole = ("_packed", "_global_scale") if kind.divides else ("", "_scale_2")
    words = take(f"{name}{codes}", (rows, columns // 2), ("U8",))
    scales = take(f"{name}_scale", (rows, columns // 16), ("F8_E4M3",))
    return Nvfp4Codes(name, shape, format, words, scales, take(f"{name}{whole}", (1,), ("F32",)), kind.divides)


def _bytes(reader: SpanReader, stored: Stored, start: int, stop: int) -> np.ndarray:
    """Rows of a tensor of bytes."""
    width = stored.columns
    return reader.read(stored.file, stored.offset + start * width, (stop - start) * width).reshape(-1, width)


def _expect_numbers(reader: SpanReader, stored: Stored, codes: np.ndarray) -> None:
    if (codes & 127 == NO_NUMBER).any():
        raise FormatError(f'{reader.files[stored.file]}: tensor "{stored.name}": expected finite numbers, found NaN')
