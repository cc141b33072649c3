"""The small files that lie beside the weights of a model: its config, its tokenizer, its chat template, how it wants to
be sampled. In a folder they are files. A GGUF file has the same in its values, and here they look as in a folder."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from moeflux import files
from moeflux.models.gguf import GgufValues, find_gguf
from moeflux.models.gguf_config import config_of_gguf, generation_config
from moeflux.models.gguf_tokenizer import has_tokenizer, tokenizer_config, tokenizer_json

__all__ = ["MADE", "ModelFiles", "files_of"]


class ModelFiles:
    """Those of a folder."""

    made = False
    """Whether they are made here, of rules that are known."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def where(self, name: str) -> str:
        """What begins messages about a file."""
        return str(self.path / name)

    def has(self, name: str) -> bool:
        return files.exists(self.path / name)

    def size(self, name: str) -> int:
        """Bytes of a file that is there, which may be a guess."""
        return files.size_of(self.path / name)

    def bytes_of(self, name: str) -> bytes:
        return files.read_bytes(self.path / name)

    def text_of(self, name: str) -> str:
        return files.read_text(self.path / name)

    def json_of(self, name: str) -> Any:
        return files.read_json(self.path / name)


class GgufFiles(ModelFiles):
    """Those that the values of a GGUF file stand for. Each is made anew when somebody asks; the header is read once."""

    made = True

    @cached_property
    def values(self) -> GgufValues:
        return GgufValues(self.path)

    def where(self, name: str) -> str:
        return f"{self.path}: as {name}"

    def has(self, name: str) -> bool:
        if name == "tokenizer.json":
            return has_tokenizer(self.values)
        return name in MADE

    def size(self, name: str) -> int:
        """Merges, and a vocabulary in JSON, are about twice as long as their strings."""
        return 2 * self.values.file.header_bytes

    def bytes_of(self, name: str) -> bytes:
        assert name == "tokenizer.json"  # the one that may be large
        return tokenizer_json(self.values)

    def json_of(self, name: str) -> Any:
        return MADE[name](self.values)


MADE = {
    "config.json": config_of_gguf,
    "tokenizer_config.json": tokenizer_config,
    "generation_config.json": generation_config,
}


def files_of(path: str | Path) -> ModelFiles:
    """The files of a model in a folder, or in a GGUF file."""
    gguf = find_gguf(Path(path))
    return ModelFiles(Path(path)) if gguf is None else GgufFiles(gguf)
