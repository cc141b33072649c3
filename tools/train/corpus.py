"""Text files -> documents, each once -> tokens to train on and tokens held out.

Two kinds of documents: prose is a text, a chat is a list of messages. Files are read twice, a document at a time: first
what documents there are, then, chosen and encoded, into a folder of token files.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.train.errors import TrainingError
from tools.train.tokenizer import Encoder

KINDS = ("prose", "chat")
SEPARATOR = "<|endoftext|>"  # a line of its own between the documents of a text file
ROLES = ("system", "user", "assistant")
DESCRIPTION = "data.json"
BATCH = 1000  # documents encoded at a time


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


# ---- Which documents --------------------------------------------------------------------------------------------


@dataclass
class Survey:
    """What a corpus holds: how many documents and characters of each kind, and which are held out."""

    documents: dict[str, int]
    characters: dict[str, int]
    repeated: int
    held_out: dict[str, set[bytes]]


def survey(files: list[Path], share: float) -> Survey:
    """Held out are the documents of the smallest digests, of each kind until they make up `share` of its characters:
    the same ones in every run, and hardly others when the corpus grows. At least one is left to train on."""
    sizes: dict[str, dict[bytes, int]] = {kind: {} for kind in KINDS}
    count = 0
    for document in read_documents(files):
        count += 1
        sizes[document.kind].setdefault(document.digest(), document.size)
    characters = {kind: sum(of_kind.values()) for kind, of_kind in sizes.items()}
    held_out: dict[str, set[bytes]] = {}
    for kind, of_kind in sizes.items():
        held_out[kind] = set()
        gathered = 0
        for digest in sorted(of_kind)[: len(of_kind) - 1]:
            if gathered >= share * characters[kind]:
                break
            held_out[kind].add(digest)
            gathered += of_kind[digest]
    documents = {kind: len(of_kind) for kind, of_kind in sizes.items()}
    return Survey(documents, characters, count - sum(documents.values()), held_out)


def chosen_documents(files: list[Path], found: Survey) -> Iterator[tuple[Document, str]]:
    """Each document once, and where it goes: "train" or "held-out"."""
    seen: set[bytes] = set()
    for document in read_documents(files):
        digest = document.digest()
        if digest not in seen:
            seen.add(digest)
            yield document, "held-out" if digest in found.held_out[document.kind] else "train"


# ---- Token files ------------------------------------------------------------------------------------------------


def prepare(sources: list[Path], tokenizer: Path, folder: Path, share: float) -> dict[str, Any]:
    """Writes folder/PART-KIND.tokens, u16 or u32 ids with an end-of-text behind each document, and data.json."""
    files = text_files(sources)
    found = survey(files, share)
    encoder = Encoder(tokenizer)
    dtype = np.dtype("<u2" if encoder.vocab_size <= 1 << 16 else "<u4")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DESCRIPTION).unlink(missing_ok=True)  # there again when all is written
    parts = [(part, kind) for kind in KINDS for part in ("train", "held-out")]
    counts = dict.fromkeys(parts, 0)
    outputs = {part: open(tokens_file(folder, *part), "wb") for part in parts}  # noqa: SIM115
    try:
        for batch in _batches(chosen_documents(files, found)):
            ids = encoder.encode_batch([document for document, _ in batch])
            for (document, part), tokens in zip(batch, ids, strict=True):
                outputs[part, document.kind].write(np.asarray(tokens, dtype).tobytes())
                counts[part, document.kind] += len(tokens)
    finally:
        for output in outputs.values():
            output.close()
    shutil.copytree(tokenizer, folder / "tokenizer", dirs_exist_ok=True)
    description = {
        "vocab_size": encoder.vocab_size,
        "dtype": dtype.str,
        "end_ids": encoder.end_ids,
        "tokens": {f"{part}-{kind}": count for (part, kind), count in counts.items()},
        "documents": found.documents,
        "characters": found.characters,
        "repeated_documents": found.repeated,
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")
    return description


def tokens_file(folder: Path, part: str, kind: str) -> Path:
    return folder / f"{part}-{kind}.tokens"


def _batches(items: Iterator[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for item in items:
        batch.append(item)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
