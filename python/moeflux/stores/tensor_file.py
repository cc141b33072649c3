"""The form of saved sessions and traces: safetensors, with metadata and a sum of every tensor against damage. That is
XXH64, because SHA-256 takes longer than to read the file; older files have that."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moeflux import files
from moeflux._core import SafetensorsFile, Xxh64
from moeflux.errors import FormatError, IoError, refusals

__all__ = [
    "NEW_SUMS",
    "Form",
    "Sum",
    "Sums",
    "arrays_in",
    "check_kind",
    "check_sums",
    "chunks_of",
    "forms_of",
    "header_of",
    "read_arrays",
    "size_of",
    "sums_in",
]

TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
}
NAMES = {dtype: name for name, dtype in TYPES.items()}


class Sum(Protocol):
    def update(self, data: Any, /) -> object: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class Sums:
    """A kind of them."""

    name: str  # among the metadata
    digits: int
    new: Callable[[], Sum]


NEW_SUMS = Sums("xxh64", 16, Xxh64)
OLD_SUMS = Sums("sha256", 64, hashlib.sha256)


@dataclass(frozen=True)
class Form:
    """Of a tensor, whose numbers may be elsewhere."""

    dtype: str  # as the format names it
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: np.ndarray) -> Form:
        return cls(NAMES[array.dtype], array.shape)

    @property
    def bytes(self) -> int:
        return TYPES[self.dtype].itemsize * math.prod(self.shape)


# ---- Writing ----------------------------------------------------------------------------------------------------


def chunks_of(metadata: dict[str, str], arrays: dict[str, np.ndarray]) -> Iterator[bytes | np.ndarray]:
    """The bytes of the file, in order. The checksums join the metadata."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    yield header_of(metadata, forms_of(arrays), checksums(NEW_SUMS, arrays.items()))
    yield from arrays.values()


def forms_of(arrays: dict[str, np.ndarray]) -> dict[str, Form]:
    return {name: Form.of(array) for name, array in arrays.items()}


def size_of(metadata: dict[str, str], forms: dict[str, Form]) -> int:
    """Of all those bytes. Nothing is summed up for it, for every sum has as many digits."""
    header = header_of(metadata, forms, dict.fromkeys(forms, "0" * NEW_SUMS.digits))
    return len(header) + sum(form.bytes for form in forms.values())


def header_of(metadata: dict[str, str], forms: dict[str, Form], sums: dict[str, str]) -> bytes:
    """What the file begins with; the tensors follow each other behind it."""
    stated = json.dumps(sums, separators=(",", ":"))
    header: dict[str, Any] = {"__metadata__": {**metadata, NEW_SUMS.name: stated}}
    end = 0
    for name, form in forms.items():
        header[name] = {"dtype": form.dtype, "shape": list(form.shape), "data_offsets": [end, end + form.bytes]}
        end += form.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# ---- Reading ----------------------------------------------------------------------------------------------------


def check_kind(path: Path, metadata: dict[str, str], format: str, versions: Sequence[str]) -> None:
    """`versions`: those that are read, the one that is written last."""
    for field, expected in (("format", [format]), ("version", versions)):
        if metadata.get(field) not in expected:
            words = " or ".join(map(repr, expected))
            raise FormatError(f"{path}: {field}: expected {words}, found {metadata.get(field)!r:.60}")


def read_arrays(path: Path, file: SafetensorsFile) -> dict[str, np.ndarray]:
    """All tensors, in one pass, each compared with its checksum. The caller must have checked their sizes."""
    arrays: dict[str, np.ndarray] = {}
    check_sums(path, file, checksums(sums_in(file), read_in_order(path, file, arrays)))
    return arrays


def arrays_in(data: np.ndarray, file: SafetensorsFile) -> dict[str, np.ndarray]:
    """The same from the bytes of a file in memory. Copies: the caller's memory is the caller's."""
    arrays = {}
    for name, entry in file.tensors.items():
        stored = data[entry.offset : entry.offset + entry.bytes]
        arrays[name] = np.frombuffer(stored.tobytes(), TYPES[entry.dtype]).reshape(entry.shape)
    check_sums(Path(str(file.path)), file, checksums(sums_in(file), arrays.items()))
    return arrays


def read_in_order(path: Path, file: SafetensorsFile, arrays: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors in the order of the file, and puts them into `arrays` too."""
    with files.open_file(path) as data, files.system_errors(path):
        for name, entry in sorted(file.tensors.items(), key=lambda item: item[1].offset):
            array = np.empty(entry.shape, TYPES[entry.dtype])
            view = memoryview(array.reshape(-1).view(np.uint8))
            data.seek(entry.offset)
            while len(view):
                count = data.readinto(view)
                if not count:
                    raise IoError(f'{path}: tensor "{name}": expected {entry.bytes} bytes, found the end of the file')
                view = view[count:]
            arrays[name] = array
            yield name, array


def sums_in(file: SafetensorsFile) -> Sums:
    return NEW_SUMS if NEW_SUMS.name in file.metadata else OLD_SUMS


def check_sums(path: Path, file: SafetensorsFile, sums: dict[str, str]) -> None:
    name = sums_in(file).name
    try:
        stated = files.parse_json(file.metadata.get(name, ""), name)
    except FormatError:
        stated = None
    if not isinstance(stated, dict):
        raise FormatError(f"{path}: {name}: expected an object of checksums, found {file.metadata.get(name)!r:.60}")
    for tensor, found in sums.items():
        if stated.get(tensor) != found:
            raise FormatError(f'{path}: tensor "{tensor}": expected {name} {stated.get(tensor)!r:.70}, found {found}')


# ---- Checksums --------------------------------------------------------------------------------------------------


def checksums(kind: Sums, arrays: Iterable[tuple[str, np.ndarray]]) -> dict[str, str]:
    """By name, computed while the next arrays arrive: a sum lets other threads run."""
    with refusals("checksums"), ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        made = {name: threads.submit(digest, kind, array) for name, array in arrays}
    return {name: digest.result() for name, digest in made.items()}


def digest(kind: Sums, array: np.ndarray) -> str:
    made = kind.new()
    made.update(array.reshape(-1).view(np.uint8))
    return made.hexdigest()
