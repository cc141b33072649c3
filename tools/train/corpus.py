"""Documents, each once -> tokens to train on and tokens held out.

Files are read twice, a document at a time: first what documents there are, then, chosen and encoded, into a folder of
token files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.train.documents import KINDS, Document, read_documents, text_files
from tools.train.tokenizer import Encoder

DESCRIPTION = "data.json"
BATCH = 1000  # documents encoded at a time


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
