"""How well a model predicts a text, and how far it is from another model.

Perplexity is exp of the mean of -log p over tokens; divergence is the mean of KL(reference || model), in nats a token.
Both come with standard errors over windows, because tokens of one window are not independent of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moeflux.measure.reading import WINDOW, Mean, OnProgress, Reader, perplexity, read, signed
from moeflux.model import Model

__all__ = ["Evaluation", "evaluate", "name_of"]


@dataclass(frozen=True)
class Evaluation:
    """The result for one text. Without a reference, figures that need one are None."""

    model: str
    lossy: tuple[str, ...]
    tokens: int  # that were predicted
    windows: int
    window: int
    overlap: int
    loss: Mean  # -log p of the right token, nats
    reference: str | None = None
    reference_loss: Mean | None = None
    difference: Mean | None = None  # of the losses, token by token
    divergence: Mean | None = None  # KL(reference || model), nats
    agreement: Mean | None = None  # share of tokens at which both have the same likeliest one
    worst: float | None = field(default=None)  # divergence of a single token

    @property
    def perplexity(self) -> Mean:
        return perplexity(self.loss)

    @property
    def reference_perplexity(self) -> Mean | None:
        return perplexity(self.reference_loss) if self.reference_loss is not None else None

    def to_dict(self) -> dict[str, Any]:
        reference = self.reference_perplexity
        perplexities = {
            "perplexity": asdict(self.perplexity),
            "reference_perplexity": asdict(reference) if reference is not None else None,
        }
        return {**asdict(self), **perplexities}

    def __str__(self) -> str:
        rows = [
            ("model", self.model),
            *(("LOSSY", sentence) for sentence in self.lossy),
            ("text", f"{self.tokens} tokens predicted, {self.windows} windows of {self.window}"),
            ("loss", f"{self.loss} nats a token"),
            ("perplexity", str(self.perplexity)),
        ]
        if self.overlap:
            rows[-3] = ("text", f"{rows[-3][1]}, {self.overlap} of each only read")
        if self.reference is not None:
            assert self.agreement is not None and self.difference is not None
            error = f" +- {self.agreement.error:.2%}" if self.agreement.error is not None else ""
            rows += [
                ("reference", self.reference),
                ("  perplexity", str(self.reference_perplexity)),
                ("  loss", f"{self.reference_loss} nats; the model's minus this: {signed(self.difference)}"),
                ("divergence", f"{self.divergence} nats a token, {self.worst:.3f} at worst"),
                ("same first choice", f"{self.agreement.value:.2%}{error}"),
            ]
        if self.loss.error is None:
            rows.append(("note", "one window: no standard error; a smaller --window or a longer text has one"))
        return "\n".join(f"{label:<20}{text}" for label, text in rows)


def evaluate(
    model: Model,
    tokens: Sequence[int],
    *,
    reference: Model | None = None,
    window: int = WINDOW,
    overlap: int = 0,
    on_progress: OnProgress = lambda done, total: None,
    **session: Any,
) -> Evaluation:
    """How well the model predicts each of `tokens`, in windows as `reading.read` says.

    With a `reference`, both models read the same text and their predictions are compared. `session` has options of
    `Model.session` for the model, such as kv_dtype. The reference has its own defaults.
    """
    readers = [Reader(model, session)] + ([Reader(reference, {})] if reference is not None else [])
    place = None if reference is None else 1
    found = read(readers, tokens, place, window=window, overlap=overlap, on_progress=on_progress)
    mine = found[0]
    common = (model.variant.name, mine.lossy, mine.tokens, len(mine.windows), window, overlap)
    loss = mine.mean(lambda score: score.loss)
    if reference is None:
        return Evaluation(*common, loss)
    return Evaluation(
        *common,
        loss,
        name_of(reference, found[1].lossy),
        mine.mean(lambda score: score.reference_loss),
        mine.mean(lambda score: score.loss - score.reference_loss),
        mine.mean(lambda score: score.divergence),
        mine.mean(lambda score: score.agreement),
        mine.worst,
    )


def name_of(reference: Model, lossy: Sequence[str]) -> str:
    """Which model was compared with, and how it departs from what was published."""
    departs = "".join(f", LOSSY: {sentence}" for sentence in lossy)
    return f"{reference.variant.name}, {reference.fingerprint[:16]}{departs}"
