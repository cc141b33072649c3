"""Residual streams and the gate of n-gram embeddings, on every instruction set, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import ArgumentError, FormatError
from moeflux.ops import Ops
from support.op_checks import check_convolution
from support.ops import isa, numbers, ops_of, run
from support.stream_checks import SHAPES, check_ngram_gate, check_rows_of_streams_alone, check_streams

__all__ = ["isa", "run"]


@pytest.mark.parametrize("shape", [*SHAPES, (70, 4, 1000)])
def test_streams(run: Ops, shape: tuple[int, int, int]) -> None:
    check_streams(run, *shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_ngram_gate(run: Ops, shape: tuple[int, int, int]) -> None:
    check_ngram_gate(run, *shape)


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("n", [1, 5, 13])
def test_convolution_of_rows_apart(run: Ops, n: int, taps: int) -> None:
    """Also with fewer rows than the state has: some of the old state stays."""
    check_convolution(run, n, 67, taps, dilation=3)
    check_convolution(run, n, 600, taps, dilation=2)


def test_rows_alone_and_together(run: Ops) -> None:
    check_rows_of_streams_alone(run)


def test_threads_change_no_bit(isa: str) -> None:
    rng = np.random.default_rng(7)
    x, gates = numbers(rng, 9, 4, 3000), numbers(rng, 9, 4, 3000)
    y, injections = numbers(rng, 9, 3000), numbers(rng, 9, 4)
    results = [
        [
            ops_of(isa, threads).hyper_mix(x, gates),
            ops_of(isa, threads).hyper_add(x, y, injections),
            ops_of(isa, threads).ngram_gate(x, gates, y),
            ops_of(isa, threads).hyper_norm(x, gates[0], 1e-6),
            ops_of(isa, threads).silu(x, 0.5),
        ]
        for threads in (1, 3)
    ]
    for one, three in zip(*results, strict=True):
        assert np.array_equal(one, three)


def test_wrong_shapes_are_refused() -> None:
    run = ops_of("portable", 1)
    x, y = np.zeros((2, 3, 5), np.float32), np.zeros((2, 5), np.float32)
    for call, name in [
        (lambda: run.hyper_norm(x, y, 1e-6), "weight"),
        (lambda: run.hyper_mix(x, x[:1]), "gates"),
        (lambda: run.hyper_add(x, y, y), "gates"),
        (lambda: run.hyper_add(x, y[:1], y[:, :3].copy()), "y"),
        (lambda: run.ngram_gate(x, x[:1], y), "query"),
        (lambda: run.ngram_gate(x, x, y[:, :3].copy()), "value"),
        (lambda: run.conv1d(y, y, np.zeros((5, 2), np.float32), 3), "state"),
        (lambda: run.conv1d(y, y, np.zeros((5, 2), np.float32), 0), "dilation"),
    ]:
        with pytest.raises((ArgumentError, FormatError), match=name):
            call()
