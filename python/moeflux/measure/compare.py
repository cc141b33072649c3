"""Several models that read the same text, in one table: what each takes, and how far it is from a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from moeflux.measure.evaluate import name_of
from moeflux.measure.reading import WINDOW, Mean, OnProgress, Reader, Reading, perplexity, read, signed
from moeflux.model import Model
from moeflux.models.tensors import dense_shapes
from moeflux.sizes import size_text
from moeflux.stores.costs import dense_sizes
from moeflux.stores.store import open_store

__all__ = ["Compared", "Comparison", "compare", "share_of_budget"]


@dataclass(frozen=True)
class Compared:
    """One model of a comparison. The figures that need a reference are None of the reference itself."""

    model: str  # as it was named
    experts: str  # the formats of the routed experts
    bits: float  # of a weight, of all that are in memory or read as they are picked
    bytes: int  # of these weights
    lossy: tuple[str, ...]
    loss: Mean
    perplexity: Mean
    difference: Mean | None = None  # of the losses, the model's minus the reference's
    divergence: Mean | None = None  # KL(reference || model), nats a token
    agreement: Mean | None = None  # share of tokens at which both have the same likeliest one
    worst: float | None = None  # divergence of a single token


@dataclass(frozen=True)
class Comparison:
    """`models` are in the order in which they were named, the reference among them."""

    models: tuple[Compared, ...]
    reference: str
    tokens: int  # that were predicted
    windows: int
    window: int
    overlap: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        read_only = f", {self.overlap} of each only read" if self.overlap else ""
        lines = [
            f"text       {self.tokens} tokens predicted, {self.windows} windows of {self.window}{read_only}",
            f"reference  {self.reference}",
            *(f"LOSSY      {each.model}: {sentence}" for each in self.models for sentence in each.lossy),
            "",
            *_table([COLUMNS, *map(_cells, self.models)]),
        ]
        if self.windows < 2:
            lines += ["", "note       one window: no standard error; a smaller --window or a longer text has one"]
        return "\n".join(lines)


COLUMNS = ["model", "experts", "bits", "size", "perplexity", "loss more", "divergence", "worst", "same first"]


def _cells(each: Compared) -> list[str]:
    own = [each.model, each.experts, f"{each.bits:.2f}", size_text(each.bytes), str(each.perplexity)]
    if each.divergence is None or each.difference is None or each.agreement is None:
        return [*own, "-", "-", "-", "-"]
    error = "" if each.agreement.error is None else f" +- {each.agreement.error:.2%}"
    apart = [signed(each.difference), str(each.divergence), f"{each.worst:.3f}"]
    return [*own, *apart, f"{each.agreement.value:.2%}{error}"]


def _table(rows: list[list[str]]) -> list[str]:
    """Words to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def compare(
    models: Sequence[tuple[str, Model]],
    tokens: Sequence[int],
    *,
    reference: int = 0,
    window: int = WINDOW,
    overlap: int = 0,
    on_progress: OnProgress = lambda done, total: None,
) -> Comparison:
    """All models read the same tokens, a piece of a window each in turns, and are compared with the one numbered
    `reference`. So all are loaded at once. Each comes with the name that the table gives it."""
    readers = [Reader(model, {}) for _, model in models]
    found = read(readers, tokens, reference, window=window, overlap=overlap, on_progress=on_progress)
    _, compared_with = models[reference]
    return Comparison(
        tuple(
            _compared(name, model, reading, place == reference)
            for place, ((name, model), reading) in enumerate(zip(models, found, strict=True))
        ),
        name_of(compared_with, found[reference].lossy),
        found[0].tokens,
        len(found[0].windows),
        window,
        overlap,
    )


def _compared(name: str, model: Model, reading: Reading, is_reference: bool) -> Compared:
    size, weights, experts = _weights(model)
    loss = reading.mean(lambda score: score.loss)
    own = Compared(name, experts, 8 * size / weights, size, reading.lossy, loss, perplexity(loss))
    if is_reference:
        return own
    return replace(
        own,
        difference=reading.mean(lambda score: score.loss - score.reference_loss),
        divergence=reading.mean(lambda score: score.divergence),
        agreement=reading.mean(lambda score: score.agreement),
        worst=reading.worst,
    )


def _weights(model: Model) -> tuple[int, int, str]:
    """Bytes of the weights, how many they are, and the formats of the experts. Without tables whose rows stay on the
    disk, and without a layer that drafts, which decides about no answer."""
    with open_store(model.path) as store:
        variant, directory = store.variant.without_draft(), store.directory
    experts, layers = variant.experts, variant.moe_layers
    sizes = dense_sizes(directory)
    size = sum(each for name, each in sizes.items() if not store.variant.is_of_draft(name))
    size += sum(experts.count * directory.experts_of(layer).bytes for layer in layers)
    weights = sum(prod(each.shape) for each in dense_shapes(variant) if not each.is_table)
    weights += 3 * variant.hidden_size * experts.intermediate * experts.count * len(layers)
    formats = dict.fromkeys(
        str(each)
        for layer in layers
        for own in [directory.experts_of(layer).formats]
        for each in (own.gate, own.up, own.down)
    )
    return size, weights, " / ".join(formats)


def share_of_budget(budget: int, place: int, count: int) -> int:
    """A budget is for the whole process: the model numbered `place` of `count` may use what those before it left of
    their shares."""
    return budget * (place + 1) // count
