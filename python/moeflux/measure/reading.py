"""Models that read the same text, and how well each predicts it: sums over windows, and means with standard errors.

Tokens of one window are not independent of each other, so errors are over windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeflux import files
from moeflux.errors import ArgumentError, FormatError, found
from moeflux.model import Model
from moeflux.session import Session
from moeflux.text.sampling import log_probabilities

__all__ = ["WINDOW", "Mean", "OnProgress", "Reader", "Reading", "Scores", "perplexity", "read", "read_text", "signed"]

OnProgress = Callable[[int, int], object]
WINDOW = 1024
ROOM = 256 << 20
"""Bytes of logits at a time, of all models: those of a long window of a large vocabulary would be gigabytes."""
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


def perplexity(loss: Mean) -> Mean:
    value = math.exp(min(loss.value, 700.0))
    return Mean(value, value * loss.error if loss.error is not None else None)


def signed(mean: Mean) -> str:
    return f"{'+' if mean.value >= 0 else ''}{mean}"


@dataclass(frozen=True)
class Reader:
    """A model, and the options of its session, such as kv_dtype."""

    model: Model
    options: dict[str, Any]


@dataclass
class Scores:
    """Sums over the counted tokens of one window. All but the first two are of a model beside a reference."""

    tokens: int = 0
    loss: float = 0.0
    reference_loss: float = 0.0
    divergence: float = 0.0
    agreement: int = 0
    worst: float = 0.0


@dataclass(frozen=True)
class Reading:
    """What one reader's windows have added up to."""

    lossy: tuple[str, ...]
    windows: tuple[Scores, ...]

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.windows)

    @property
    def worst(self) -> float:
        return max(each.worst for each in self.windows)

    def mean(self, figure: Callable[[Scores], float]) -> Mean:
        return Mean.of([figure(each) for each in self.windows], [each.tokens for each in self.windows])


def read(
    readers: Sequence[Reader],
    tokens: Sequence[int],
    reference: int | None,
    *,
    window: int = WINDOW,
    overlap: int = 0,
    on_progress: OnProgress = lambda done, total: None,
) -> list[Reading]:
    """Every model reads `tokens` in windows, each from an empty context. Each window but the first begins with the last
    `overlap` tokens of the one before. They are context and are not counted again. The predictions of all are compared
    with those of the reader numbered `reference`.

    All models read a piece of a window before any goes on, so no more than a few tokens' logits are ever there.
    """
    first = readers[0].model
    prefix = list(first.tokenizer.prefix)
    if window < 2 or not 0 <= overlap < window - 1:
        raise ArgumentError(
            f"window: expected at least 2 tokens, and an overlap of at most two less, found {found(window)} and "
            f"{found(overlap)}"
        )
    if len(tokens) < 2:
        raise ArgumentError(f"text: expected at least 2 tokens, found {len(tokens)}")
    for each in readers[1:]:
        if each.model.variant.vocab_size != first.variant.vocab_size:
            raise ArgumentError(
                f"{each.model.path}: expected a vocabulary of {first.variant.vocab_size}, as {first.path} has, found "
                f"{each.model.variant.vocab_size}"
            )
    sessions = [each.model.session(max_context=window + len(prefix), **each.options) for each in readers]
    scores: list[list[Scores]] = []
    total = sum(len(ids) for ids, _ in _windows(tokens, window, overlap))
    done = 0
    for ids, counted in _windows(tokens, window, overlap):
        scores.append(
            _read(sessions, reference, prefix, ids, counted, lambda count: on_progress(done + count, total))  # noqa: B023
        )
        done += len(ids)
    return [
        Reading(tuple(session.lossy), windows)
        for session, windows in zip(sessions, zip(*scores, strict=True), strict=True)
    ]


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


def _read(
    sessions: Sequence[Session],
    reference: int | None,
    prefix: list[int],
    ids: list[int],
    counted: int,
    tell: Callable[[int], object],
) -> list[Scores]:
    """Reads chunk by chunk. The bits of the logits do not depend on it."""
    for session in sessions:
        session.clear()
        if prefix:
            session.prefill(prefix)
    vocab = sessions[0].model.variant.vocab_size
    chunk = max(ROWS, ROOM // (4 * vocab * len(sessions)))
    scores = [Scores() for _ in sessions]
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
                right = ids[start + row + 1 : start + end + 1]
                theirs = None if reference is None else log_probabilities(logits[reference][row:end])
                for place, score in enumerate(scores):
                    same = theirs if place == reference else None
                    mine = log_probabilities(logits[place][row:end]) if same is None else same
                    _add(score, mine, theirs, right)
        tell(start + len(piece))
    tell(len(ids))
    return scores


def _add(score: Scores, mine: np.ndarray, theirs: np.ndarray | None, right: list[int]) -> None:
    """`mine` and `theirs` are float64 [tokens, vocab] of a model, and of the reference if there is one."""
    places = np.arange(len(right))
    score.tokens += len(right)
    score.loss -= float(mine[places, right].sum())
    if theirs is None:
        return
    score.reference_loss -= float(theirs[places, right].sum())
    # Only rounding can bring it below 0.
    apart = np.maximum((np.exp(theirs) * (theirs - mine)).sum(axis=-1), 0.0)
    score.divergence += float(apart.sum())
    score.worst = max(score.worst, float(apart.max()))
    score.agreement += int((mine.argmax(axis=-1) == theirs.argmax(axis=-1)).sum())


def read_text(path: str | Path) -> str:
    text = files.read_text(path)
    if not text.strip():
        raise FormatError(f"{path}: expected some text, found none")
    return text
