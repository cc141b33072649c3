"""What several sessions that evaluate together are held to."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from support.engine import Folder, load_faulty

Expect = Callable[[str], list[np.ndarray]]


def logits_alone(folder: Folder, streams: Sequence[list[int]]) -> Expect:
    """Of a model by name: the logits of every token of each stream, of a session that has the model to itself."""
    known: dict[str, list[np.ndarray]] = {}

    def of(name: str) -> list[np.ndarray]:
        if name not in known:
            model = load_faulty(folder(name))
            known[name] = [model.session().prefill(ids, logits="all") for ids in streams]
        return known[name]

    return of


def plant_nan(store: Path, token: int) -> None:
    """In the embedding of a token."""
    entry = json.loads((store / "model_weights.json").read_text())["tensors"]["model.embed_tokens.scales"]
    assert entry["dtype"] == "BF16"
    with (store / "model_weights.bin").open("r+b") as file:
        file.seek(entry["offset"] + 2 * token * entry["shape"][1])
        file.write(b"\xc0\x7f")
