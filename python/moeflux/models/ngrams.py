"""Which rows of an n-gram table tokens choose, in Python: what the core and the oracle are held to."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from moeflux.models.layers import NgramEmbedding
from moeflux.models.variants import Variant

__all__ = ["head_rows", "ngram_rows", "published_hashes", "table_rows"]

WORD = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


@functools.cache
def head_rows(shape: NgramEmbedding) -> tuple[int, ...]:
    """How many rows each head's part of the table has. The tables of the layers before have taken the primes before."""
    primes: list[int] = []
    number = shape.min_rows
    while len(primes) < (shape.index + 1) * shape.rows_per_token:
        if is_prime(number):
            primes.append(number)
        number += 1
    return tuple(primes[shape.index * shape.rows_per_token :])


def table_rows(shape: NgramEmbedding) -> int:
    return -(-sum(head_rows(shape)) // shape.divisor) * shape.divisor


def mixed(value: int) -> int:
    """SplitMix64's step from a state to a number."""
    value = (value + STEP) & WORD
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & WORD
    return value ^ value >> 31


def multipliers(shape: NgramEmbedding, vocab: int) -> list[int]:
    """Of a token, of the one before it, and so on: odd, and so small that no product with a token overflows."""
    bound = max(1, ((1 << 63) - 1) // max(vocab, 1) // 2)
    base = shape.seed + 10007 * shape.index
    return [2 * (mixed(base + STEP * (distance + 1) & WORD) % bound) + 1 for distance in range(shape.length)]


def published_hashes(variant: Variant) -> Iterator[tuple[str, list[int]]]:
    """The tensors of whole numbers that are published beside the tables, and what they must be."""
    for index, layer in enumerate(variant.layers):
        if layer.ngram is None:
            continue
        at, sizes = f"model.layers.{index}.ple.ple_embedding.", head_rows(layer.ngram)
        yield f"{at}layer_multipliers", multipliers(layer.ngram, variant.vocab_size)
        yield f"{at}ngram_heads_vocab_sizes", list(sizes)
        yield f"{at}ngram_heads_offsets", list(accumulate(sizes[:-1], initial=0))


def ngram_rows(shape: NgramEmbedding, vocab: int, tokens: Sequence[int], first: int) -> npt.NDArray[np.intp]:
    """The rows of the tokens from `first` on; `tokens` are those of the whole text. -> [tokens, rows of a token]"""
    factors, sizes = multipliers(shape, vocab), head_rows(shape)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp)
    rows = []
    for at in range(first, len(tokens)):
        chosen, value, ended = [], tokens[at] * factors[0], False
        for distance in range(1, shape.length):
            ended = ended or distance > at or tokens[at - distance] == shape.end_id
            value ^= (shape.end_id if ended else tokens[at - distance]) * factors[distance]
            chosen += [value] * shape.heads
        rows.append([start + hashed % size for hashed, size, start in zip(chosen, sizes, starts, strict=True)])
    return np.array(rows, np.intp).reshape(-1, shape.rows_per_token)
