"""Choosing the next token, as a function of float64 arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

Array = np.ndarray


class Asked(Protocol):
    """The fields of `moeflux.Sampling`."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> Mapping[int, float]: ...
    @property
    def seed(self) -> int | None: ...


def changed_logits(
    logits: Array, asked: Asked, prompt: Sequence[int], answer: Sequence[int], allowed: Array | None = None
) -> Array:
    """Biases and penalties, then -inf where bool [vocab] `allowed` is False."""
    values = logits.astype(np.float64)
    for id, bias in asked.logit_bias.items():
        values[id] += bias
    if asked.repetition_penalty != 1:
        ids = np.unique([*prompt, *answer]).astype(np.int64)
        seen = values[ids]
        values[ids] = np.where(seen > 0, seen / asked.repetition_penalty, seen * asked.repetition_penalty)
    ids, times = np.unique(np.asarray(answer, np.int64), return_counts=True)
    values[ids] -= asked.presence_penalty + asked.frequency_penalty * times
    return values if allowed is None else np.where(allowed, values, -np.inf)


def token_weights(values: Array, asked: Asked) -> tuple[Array, Array]:
    """The ids that may be drawn, ascending, and their probabilities up to a factor, by temperature, top-k, top-p and
    min-p. A greater value is likelier, and of equal ones the lower id."""
    ids = np.arange(len(values))
    if 0 < asked.top_k < len(values):
        ids = np.sort(np.argsort(-values, kind="stable")[: asked.top_k])
    with np.errstate(over="ignore"):  # at the coldest temperatures all but the best become -inf, as they should
        weights = np.exp((values[ids] - values.max()) / asked.temperature)
    if asked.top_p < 1:
        order = np.argsort(-values[ids], kind="stable")
        sums = np.cumsum(weights[order])
        kept = np.sort(order[: np.searchsorted(sums, asked.top_p * sums[-1]) + 1])
        ids, weights = ids[kept], weights[kept]
    kept = weights >= asked.min_p * weights.max()
    return ids[kept], weights[kept]


def choose_token(values: Array, asked: Asked, number: float) -> int:
    """The likeliest token at temperature 0. Otherwise the weights are summed up by ascending id, and the first token is
    taken where the sum exceeds the share `number`, in [0, 1), of the total."""
    if asked.temperature == 0:
        return int(values.argmax())
    ids, weights = token_weights(values, asked)
    sums = np.cumsum(weights)
    return int(ids[min(np.searchsorted(sums, number * sums[-1], side="right"), len(ids) - 1)])


LISTED_BLOCK, LISTED_GROUP, MOST_LISTED, MOST_GROUPS = 2048, 32, 2048, 1024  # of csrc/core/shortlist.h


def shortlist(logits: Array, factor: float) -> tuple[int, int, Array, Array, Array, Array]:
    """What a device finds in float32 logits for whoever draws from them: the likeliest token, the first that is not
    finite or -1, the sum of 2^((logit - greatest) * factor) of each block, with its greatest logit, and the tokens that
    are listed, with their logits."""

    def greatest_of(size: int) -> Array:
        return np.maximum.reduceat(logits, np.arange(0, len(logits), size))

    odd = np.flatnonzero(~np.isfinite(logits))
    greatests = greatest_of(LISTED_BLOCK)
    below = (logits.astype(np.float64) - np.repeat(greatests, LISTED_BLOCK)[: len(logits)]) * factor
    sums = np.add.reduceat(np.exp2(below), np.arange(0, len(logits), LISTED_BLOCK))

    def classes(values: Array) -> Array:
        found: Array = (logits.max() - values).view(np.uint32) >> 16 & 0x7FFF  # both zeros are one
        return found

    ranked = np.sort(classes(greatest_of(LISTED_GROUP)))
    listed = np.array([], np.int64)
    most = MOST_GROUPS
    while most > 0:
        limit = ranked[most] if len(ranked) > most else 0x7FFF
        found = np.flatnonzero(classes(logits) < limit)
        if len(found) <= MOST_LISTED:
            listed = found
            break
        most //= 2
    first_odd = int(odd[0]) if len(odd) else -1
    return int(logits.argmax()), first_odd, sums, greatests, listed.astype(np.int32), logits[listed]


def random_numbers(seed: int, count: int) -> list[float]:
    """One double in [0, 1) a token, made of the top 53 bits: the same in every version of NumPy."""
    return [float(bits >> 11) * 2.0**-53 for bits in np.random.Philox(key=seed).random_raw(count).tolist()]


def choose_tokens(logits: Sequence[Array], asked: Asked, prompt: Sequence[int] = ()) -> list[int]:
    """An answer, from the logits of each of its tokens."""
    answer: list[int] = []
    for row, number in zip(logits, random_numbers(asked.seed or 0, len(logits)), strict=True):
        answer.append(choose_token(changed_logits(row, asked, prompt, answer), asked, number))
    return answer


def log_probability(logits: Array, id: int) -> float:
    """The log-probability of a token by the model alone."""
    values = logits.astype(np.float64)
    values -= values.max()
    return float(values[id]) - math.log(math.fsum(np.exp(values)))
