"""Text files -> documents. There are two kinds: prose is a text, a chat is a list of messages."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.train.errors import TrainingError

KINDS = ("prose", "chat")
SEPARATOR = "<|endoftext|>"  # a line of its own between the documents of a text file
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Document:
    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()  # (role, content)

    @property
    def kind(self) -> str:
        return "chat" if self.messages else "prose"

    @property
    def size(self) -> int:
        return len(self.text) + sum(len(content) for _, content in self.messages)

    def digest(self) -> bytes:
        """Equal for documents that differ in case, white space or the form of accents alone."""
        whole = "\0".join((self.text, *(part for message in self.messages for part in message)))
        plain = re.sub(r"\s+", " ", unicodedata.normalize("NFKC", whole)).strip().casefold()
        return hashlib.blake2b(plain.encode("utf-8", "surrogatepass"), digest_size=16).digest()


# ---- Files ------------------------------------------------------------------------------------------------------


def text_files(sources: Iterable[Path]) -> list[Path]:
    """The .txt, .md and .jsonl files among the sources and in folders among them, in order of name."""
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            found += sorted(file for file in source.rglob("*") if file.suffix in READERS and file.is_file())
        elif source.suffix in READERS and source.is_file():
            found.append(source)
        else:
            raise TrainingError(f"{source}: expected a folder or a file of {', '.join(READERS)}, found neither")
    if not found:
        raise TrainingError(f"{', '.join(map(str, sources))}: expected files of {', '.join(READERS)}, found none")
    return found


def read_documents(files: Iterable[Path]) -> Iterator[Document]:
    for file in files:
        for document in READERS[file.suffix](file):
            if document.size:
                yield document


def _lines(file: Path) -> Iterator[str]:
    try:
        with open(file, encoding="utf-8") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise TrainingError(f"{file}: expected UTF-8, found byte 0x{error.object[error.start]:02x}") from None


def _texts(file: Path) -> Iterator[Document]:
    gathered: list[str] = []
    for line in _lines(file):
        if line.strip() == SEPARATOR:
            yield Document("".join(gathered).strip())
            gathered = []
        else:
            gathered.append(line)
    yield Document("".join(gathered).strip())


def _records(file: Path) -> Iterator[Document]:
    for number, line in enumerate(_lines(file), start=1):
        if line.strip():
            yield _document(line, f"{file}: line {number}")


def _document(line: str, where: str) -> Document:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TrainingError(f"{where}: expected a JSON object, found what is none: {error}") from None
    expected = f'{where}: expected {{"text": "..."}} or {{"messages": [{{"role": "user", "content": "..."}}, ...]}}'
    if not isinstance(record, dict):
        raise TrainingError(f"{expected}, found {line.strip()!r:.60}")
    text, messages = record.get("text"), record.get("messages")
    if isinstance(text, str) and messages is None:
        return Document(text.strip())
    if not isinstance(messages, list) or text is not None:
        raise TrainingError(f"{expected}, found the fields {sorted(record)}")
    return Document(messages=tuple(_message(message, where) for message in messages))


def _message(message: Any, where: str) -> tuple[str, str]:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if role not in ROLES or not isinstance(content, str):
        raise TrainingError(f"{where}: expected a role of {', '.join(ROLES)} and a text, found {message!r:.80}")
    return role, content


READERS = {".txt": _texts, ".md": _texts, ".jsonl": _records}
