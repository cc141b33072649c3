"""Bytes of GGUF files, right or wrong in every field."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

KINDS = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10, "q": 11, "d": 12}
"""struct's letter of a number -> its kind."""
STRING, ARRAY = 8, 9


def string(text: str | bytes, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def scalar(letter: str, number: Any) -> bytes:
    return struct.pack("<I", KINDS[letter]) + struct.pack(f"<{letter}", number)


def words(text: str | bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", STRING) + string(text, length)


def array(kind: int, content: bytes, count: int) -> bytes:
    """The content of each element stands without its kind."""
    return struct.pack("<IIQ", ARRAY, kind, count) + content


def value(key: str | bytes, content: bytes) -> bytes:
    return string(key) + content


def tensor(name: str | bytes, shape: Sequence[int], type: int, offset: int, rank: int | None = None) -> bytes:
    """`shape` has the fastest size first, as the file has it."""
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    rank = len(shape) if rank is None else rank
    return string(name) + struct.pack("<I", rank) + sizes + struct.pack("<IQ", type, offset)


def header(
    values: Sequence[bytes],
    tensors: Sequence[bytes],
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """`counts` are those that the file states, of tensors and of values."""
    stated = counts or (len(tensors), len(values))
    return magic + struct.pack("<IQQ", version, *stated) + b"".join(values) + b"".join(tensors)


def file(values: Sequence[bytes], tensors: Sequence[bytes], data: int, alignment: int = 32, **changes: Any) -> bytes:
    begin = header(values, tensors, **changes)
    return begin + bytes(-len(begin) % alignment) + bytes(data)
