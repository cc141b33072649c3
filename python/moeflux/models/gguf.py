"""GGUF files: which file a name stands for, and what its values say of the model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moeflux import files
from moeflux._core import GgufFile
from moeflux.errors import FormatError

__all__ = ["GgufValues", "find_gguf"]

SUFFIX = ".gguf"
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf")
PROJECTOR = "mmproj"
"""Begins the names of vision towers, which lie beside the models that see."""
OTHER_WEIGHTS = ("*.safetensors", "moeflux.json", "model_weights.json", "artifacts/model_weights.json")


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that a path stands for: the file itself, or the one model in a folder that has no weights of
    another kind. None if there is no such file; FormatError if there are several."""
    if path.suffix == SUFFIX and files.is_file(path):
        return path
    if not files.is_folder(path) or any(files.listed(path, pattern) for pattern in OTHER_WEIGHTS):
        return None
    found = [file for file in files.listed(path, f"*{SUFFIX}") if _begins_model(file.name)]
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:8])
        raise FormatError(f"{path}: expected one model in GGUF, found {len(found)}: {names:.300}. Name the file")
    return found[0] if found else None


def _begins_model(name: str) -> bool:
    part = PART.search(name)
    return not name.startswith(PROJECTOR) and (part is None or int(part[1]) == 1)


class GgufValues:
    """The values and the tensors of a GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GgufFile(path)
        self.keys = frozenset(self.file.keys)
        self.tensors = self.file.tensors

    def fail(self, key: str, expected: str) -> FormatError:
        found = f"{self.file.value(key)!r:.120}" if key in self.keys else "nothing"
        return FormatError(f"{self.path}: {key}: expected {expected}, found {found}")

    def get(self, key: str) -> Any:
        """The value of a key, None without one. A number of 32 bits is the shortest decimal that stands for it, as
        config.json would have it."""
        return _decimal(self.file.value(key))

    def text(self, key: str, default: str | None = None) -> str:
        """`default` is for a key that is not there; without one, the key must be."""
        value = self.file.value(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.fail(key, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.file.value(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return default if value is None else value

    def token(self, key: str) -> int | None:
        """The id of a token."""
        value = self.file.value(key)
        if value is not None and (type(value) is not int or not 0 <= value < 1 << 31):
            raise self.fail(key, "the id of a token")
        return value

    def listed(self, key: str, kind: type) -> list[Any]:
        """A list of values of one kind, empty if there is none."""
        value = self.file.value(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(each) is kind for each in value):
            raise self.fail(key, f"a list of {kind.__name__}")
        return value

    def vector(self, name: str, length: int) -> np.ndarray:
        """The numbers of a tensor that is a vector of so many f32."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.type != "F32" or tensor.shape != (length,):
            found = f"{tensor.type} {list(tensor.shape)}" if tensor is not None else "none"
            raise FormatError(f"{self.path}: tensor {name}: expected F32 [{length}], found {found}")
        file = self.file.files[tensor.file]
        with files.open_file(file) as opened:
            opened.seek(tensor.offset)
            data = opened.read(tensor.bytes)
        if len(data) != tensor.bytes:
            raise FormatError(f"{file}: tensor {name}: expected {tensor.bytes} bytes, found {len(data)}")
        return np.frombuffer(data, "<f4")

    def under(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """The values whose keys begin so, by the rest of the key."""
        for key in sorted(self.keys):
            if key.startswith(prefix):
                yield key.removeprefix(prefix), self.get(key)


def _decimal(value: Any) -> Any:
    if isinstance(value, list):
        return [_decimal(each) for each in value]
    if not isinstance(value, float) or np.float32(value) != value:
        return value
    return float(str(np.float32(value)))
