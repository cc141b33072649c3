"""What the columns of a model's matrices meet while it reads a text: the importance by which `convert` rounds."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from moeflux.conversion.importance import Calibration, Importance
from moeflux.errors import ArgumentError
from moeflux.measure.reading import read_text
from moeflux.model import load
from moeflux.progress import Counting, Progress, Silent
from moeflux.runtime.options import LoadOptions
from moeflux.stores.checkpoints import needs_converting
from moeflux.stores.store import open_store

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["calibration_of", "importance_of"]

WINDOW = 1024
ROOM = 64 << 20
"""Bytes of logits at a time. They are wanted for what the output matrix meets, and dropped."""


def calibration_of(
    text: str | Path, source: str | Path, *, progress: Progress | None = None, **options: Unpack[LoadOptions]
) -> Calibration:
    """The importance of a model's columns in a text, gathered by the engine with the model `source`: a store, or a
    folder or file that runs in place. Nothing is read but the text and headers before it is needed."""
    source = Path(source)
    if needs_converting(source):
        raise ArgumentError(
            f"calibrate: {source}: expected a model that runs as it is, found a checkpoint that must be converted. "
            "Convert it without calibration first, to 8 bits or bf16, and give that store with --calibrate-with"
        )
    content = read_text(text)
    with open_store(source) as store:
        model = store.fingerprint[:16]
    label = f"by the activations of {model} in text {hashlib.sha256(content.encode()).hexdigest()[:16]}"
    return Calibration(label, lambda: importance_of(content, source, progress=progress, **options))


def importance_of(
    text: str, source: Path, *, progress: Progress | None = None, **options: Unpack[LoadOptions]
) -> Importance:
    """Reads the text in windows, each from an empty context, on the CPU: no other device shows activations. Without
    look-ahead, whose guesses routers would meet, too."""
    progress = progress or Silent()
    with Counting(progress, "loading") as counting:
        on_cpu: LoadOptions = {**options, "backend": "cpu", "speculate": "off", "look_ahead": "off"}
        model = load(source, on_progress=counting, **on_cpu)
    with model, model.observe_activations() as seen, Counting(progress, "calibrating", "tokens") as counting:
        tokens = model.tokenizer.encode(text)
        prefix = list(model.tokenizer.prefix)
        session = model.session(max_context=min(WINDOW + len(prefix), model.variant.max_context))
        chunk = max(1, ROOM // (4 * model.variant.vocab_size))
        window = session.max_context - len(prefix)
        for start in range(0, len(tokens), window):
            session.clear()
            ids = prefix + tokens[start : start + window]
            for place in range(0, len(ids), chunk):
                session.prefill(ids[place : place + chunk], logits="all")
                counting(min(start + place + chunk, len(tokens)), len(tokens))
        return Importance(seen.dense(), seen.experts())
