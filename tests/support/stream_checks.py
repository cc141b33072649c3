"""Checks of every backend's ops of residual streams, against the oracle. `run` has the methods of Ops."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeflux.oracle import streams as oracle
from support.op_checks import wide
from support.ops import numbers
from support.tolerances import assert_close

EPS = 1e-6
SHAPES = [(1, 2, 1), (3, 4, 33), (2, 3, 300), (1, 4, 2050)]
"""Rows, streams, width: less and more than a vector, a unit of work, a threadgroup."""


def check_streams(run: Any, n: int, streams: int, width: int) -> None:
    rng = np.random.default_rng([n, streams, width])
    x, y = numbers(rng, n, streams, width) * 3, numbers(rng, n, width)
    weight, gates = numbers(rng, streams, width), numbers(rng, n, streams, width) * 4
    injections = numbers(rng, n, streams) * 6
    assert_close("hyper_norm", run.hyper_norm(x, weight, EPS), oracle.hyper_norm(*wide(x, weight), EPS))
    expected = oracle.hyper_mix(*wide(x, gates))
    assert_close("hyper_mix", run.hyper_mix(x, gates), expected, np.abs(wide(x)[0]).mean(axis=1))
    expected = oracle.hyper_add(*wide(x, y, injections))
    size = np.abs(wide(x)[0]) + 2 * np.abs(wide(y)[0])[:, None]
    assert_close("hyper_add", run.hyper_add(x, y, injections), expected, size)
    assert_close("silu", run.silu(x, 0.25), oracle.silu(wide(x)[0], 0.25))


def check_ngram_gate(run: Any, n: int, streams: int, width: int) -> None:
    rng = np.random.default_rng([n, streams, width])
    key, query, value = numbers(rng, n, streams, width), numbers(rng, n, streams, width), numbers(rng, n, width)
    key[0, 0] = 0  # a score of nothing, whose gate is one half
    query[0, 1] = key[0, 1] * 30  # and one as large as scores get
    expected = oracle.ngram_gate(*wide(key, query, value))
    # The root of a score near nothing makes much of what is lost in the sum.
    terms = np.abs(wide(key * query)[0]).sum(axis=-1) / width**0.5
    score = np.abs((wide(key)[0] * wide(query)[0]).sum(axis=-1)) / width**0.5
    lost = 1e-6 * terms / np.sqrt(np.maximum(score, 1e-6))
    allowed = np.abs(wide(value)[0])[:, None] * (1 + lost[..., None] / 1e-6)
    assert_close("ngram_gate", run.ngram_gate(key, query, value), expected, allowed)
    assert np.array_equal(run.ngram_gate(key, query, value)[0, 0], value[0] / 2)


def check_rows_of_streams_alone(run: Any) -> None:
    """A row's bits do not depend on the rows beside it."""
    rng = np.random.default_rng(5)
    x, gates, other = (numbers(rng, 5, 3, 70) for _ in range(3))
    weight, y, injections = numbers(rng, 3, 70), numbers(rng, 5, 70), numbers(rng, 5, 3)
    together = [
        run.hyper_norm(x, weight, EPS),
        run.hyper_mix(x, gates),
        run.hyper_add(x, y, injections),
        run.ngram_gate(x, other, y),
    ]
    for i in range(5):
        row = slice(i, i + 1)
        alone = [
            run.hyper_norm(x[row], weight, EPS),
            run.hyper_mix(x[row], gates[row]),
            run.hyper_add(x[row], y[row], injections[row]),
            run.ngram_gate(x[row], other[row], y[row]),
        ]
        for whole, part in zip(together, alone, strict=True):
            assert np.array_equal(whole[row], part)
