"""How well a model predicts a text, and how far it is from another model.

Perplexity is exp of the mean of -log p over tokens; divergence is the mean of KL(reference || model), in nats a token.
Both come with standard errors over windows, because tokens of one window are not independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moeflux import files
from moeflux.errors import ArgumentError, FormatError, found
from moeflux.model import Model
from moeflux.session import Session
from moeflux.text.sampling import log_probabilities

__all__ = ["Evaluation", "Mean", "evaluate", "read_text"]

OnProgress = Callable[[int, int], object]
WINDOW = 1024
ROOM = 256 << 20
"""Bytes of logits at a time: those of a long window of a large vocabulary would be gigabytes."""
ROWS = 32
"""Of them, that are looked at in float64 at a time."""


@dataclass(frozen=True)
class Mean:
    """The mean of a figure per token, over windows of a text."""

    value: float
    error: float | None  # standard error; None: one window is not enough to tell

    @classmethod
    def of(cls, sums: Sequence[float], counts: Sequence[int]) -> Mean:
        """The error is that of a ratio of sums over windows: windows are independent samples, tokens are not."""
        total, tokens, windows = math.fsum(sums), sum(counts), len(sums)
        value = total / tokens
        if windows < 2:
            return cls(value, None)
        squares = math.fsum((one - value * count) ** 2 for one, count in zip(sums, counts, strict=True))
        return cls(value, math.sqrt(squares * windows / (windows - 1)) / tokens)

    def __str__(self) -> str:
        """The mean with as many digits as the error lets one trust: two digits of the error."""
        if self.error is None:
            return f"{self.value:.4g}"
        digits = min(max(1 - math.floor(math.log10(self.error)), 0), 9) if self.error > 0 else 4
        return f"{self.value:.{digits}f} +- {self.error:.{digits}f}"


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
        return _perplexity(self.loss)

    @property
    def reference_perplexity(self) -> Mean | None:
        return _perplexity(self.reference_loss) if self.reference_loss is not None else None

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
            assert self.agreement is not None
            error = f" +- {self.agreement.error:.2%}" if self.agreement.error is not None else ""
            rows += [
                ("reference", self.reference),
                ("  perplexity", str(self.reference_perplexity)),
                ("  loss", f"{self.reference_loss} nats; the model's minus this: {_signed(self.difference)}"),
                ("divergence", f"{self.divergence} nats a token, {self.worst:.3f} at worst"),
                ("same first choice", f"{self.agreement.value:.2%}{error}"),
            ]
        if self.loss.error is None:
            rows.append(("note", "one window: no standard error; a smaller --window or a longer text has one"))
        return "\n".join(f"{label:<20}{text}" for label, text in rows)


def _perplexity(loss: Mean) -> Mean:
    value = math.exp(min(loss.value, 700.0))
    return Mean(value, value * loss.error if loss.error is not None else None)


def _signed(mean: Mean | None) -> str:
    assert mean is not None
    return f"{'+' if mean.value >= 0 else ''}{mean}"


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
    """Reads `tokens` in windows, each from an empty context, and measures how well the model predicted each token.

    Each window but the first begins with the last `overlap` tokens of the one before. They are context and are not
    counted again. With a `reference`, both models read the same text and their predictions are compared. `session` has
    options of `Model.session` for the model, such as kv_dtype. The reference has its own defaults.
    """
    prefix = list(model.tokenizer.prefix)
    if window < 2 or not 0 <= overlap < window - 1:
        raise ArgumentError(
            f"window: expected at least 2 tokens, and an overlap of at most two less, found {found(window)} and "
            f"{found(overlap)}"
        )
    if len(tokens) < 2:
        raise ArgumentError(f"text: expected at least 2 tokens, found {len(tokens)}")
    if reference is not None and reference.variant.vocab_size != model.variant.vocab_size:
        raise ArgumentError(
            f"reference: expected a vocabulary of {model.variant.vocab_size}, found {reference.variant.vocab_size}"
        )
    readers = [model.session(max_context=window + len(prefix), **session)]
    if reference is not None:
        readers.append(reference.session(max_context=window + len(prefix)))
    scores: list[_Scores] = []
    total = sum(len(ids) for ids, _ in _windows(tokens, window, overlap))
    done = 0
    for ids, counted in _windows(tokens, window, overlap):
        scores.append(_read(readers, prefix, ids, counted, lambda count: on_progress(done + count, total)))  # noqa: B023
        done += len(ids)
    return _summary(readers, scores, window, overlap)


def _windows(tokens: Sequence[int], window: int, overlap: int) -> Iterator[tuple[list[int], int]]:
    """(tokens of a window, how many at its end are predicted). Every token of the text is predicted exactly once,
    except the first and, without an overlap, those that begin a window."""
    start = 0
    while start + 1 < len(tokens):
        ids = list(tokens[start : start + window])
        counted = len(ids) - (overlap if start and overlap else 1)
        if counted > 0:
            yield ids, counted
        if start + window >= len(tokens):
            return
        start += window - overlap


@dataclass
class _Scores:
    """Sums over the counted tokens of one window."""

    tokens: int = 0
    loss: float = 0.0
    reference_loss: float = 0.0
    divergence: float = 0.0
    agreement: int = 0
    worst: float = 0.0


def _read(
    sessions: Sequence[Session], prefix: list[int], ids: list[int], counted: int, tell: Callable[[int], object]
) -> _Scores:
    """Reads chunk by chunk, so that only a few tokens' logits are there at a time. Their bits do not depend on it."""
    for session in sessions:
        session.clear()
        if prefix:
            session.prefill(prefix)
    vocab = sessions[0].model.variant.vocab_size
    chunk = max(ROWS, ROOM // (4 * vocab * len(sessions)))
    score = _Scores()
    first = len(ids) - counted - 1  # the logits of this token are the first that count
    for start in range(0, len(ids) - 1, chunk):
        piece = ids[start : min(start + chunk, len(ids) - 1)]
        skip = max(first - start, 0)
        if skip >= len(piece):
            for session in sessions:
                session.prefill(piece)
        else:
            logits = [session.prefill(piece, logits="all") for session in sessions]
            for row in range(skip, len(piece), ROWS):
                end = min(row + ROWS, len(piece))
                expected = [log_probabilities(each[row:end]) for each in logits]
                _add(score, expected, ids[start + row + 1 : start + end + 1])
        tell(start + len(piece))
    tell(len(ids))
    return score


def _add(score: _Scores, expected: list[np.ndarray], right: list[int]) -> None:
    """`expected` is float64 [tokens, vocab] of the model, and of the reference if there is one."""
    mine, places = expected[0], np.arange(len(right))
    score.tokens += len(right)
    score.loss -= float(mine[places, right].sum())
    if len(expected) == 1:
        return
    theirs = expected[1]
    score.reference_loss -= float(theirs[places, right].sum())
    # Only rounding can bring it below 0.
    apart = np.maximum((np.exp(theirs) * (theirs - mine)).sum(axis=-1), 0.0)
    score.divergence += float(apart.sum())
    score.worst = max(score.worst, float(apart.max()))
    score.agreement += int((mine.argmax(axis=-1) == theirs.argmax(axis=-1)).sum())


def _summary(readers: list[Session], scores: list[_Scores], window: int, overlap: int) -> Evaluation:
    name = readers[0].model.variant.name
    counts = [score.tokens for score in scores]

    def mean(figure: Callable[[_Scores], float]) -> Mean:
        return Mean.of([figure(score) for score in scores], counts)

    common = (name, readers[0].lossy, sum(counts), len(scores), window, overlap)
    loss = mean(lambda score: score.loss)
    if len(readers) == 1:
        return Evaluation(*common, loss)
    reference = readers[1].model
    lossy = "".join(f", LOSSY: {sentence}" for sentence in readers[1].lossy)
    return Evaluation(
        *common,
        loss,
        f"{reference.variant.name}, {reference.fingerprint[:16]}{lossy}",
        mean(lambda score: score.reference_loss),
        mean(lambda score: score.loss - score.reference_loss),
        mean(lambda score: score.divergence),
        mean(lambda score: score.agreement),
        max(score.worst for score in scores),
    )


def read_text(path: str | Path) -> str:
    text = files.read_text(path)
    if not text.strip():
        raise FormatError(f"{path}: expected some text, found none")
    return text
