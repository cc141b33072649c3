"""A decoder of one request beside `step` and `Sampler.choose`, and of eight beside eight in turn:
make bench-ops ARGS=bench/ops/test_decoding.py

The model has the width and the vocabulary of Qwen3.6-35B-A3B, four layers and 32 experts in each, all in memory. The
tiny one has nothing to compute: what is left is the way through the interpreter. The last group has the vocabulary of
the first, and requests that need nothing but a choice.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import _core
from moeflux.conversion.synth import synth
from moeflux.models.layers import RoutedExperts
from moeflux.models.presets import preset
from moeflux.text.sampling import Sampler, Sampling

A3B = preset("a3b").with_layers(4).with_parts(RoutedExperts, count=32)
TINY = A3B.with_layers(1).with_parts(RoutedExperts, count=2, per_token=1, intermediate=64)
TALKATIVE = dataclasses.replace(TINY, hidden_size=64)
VARIANTS = {"a3b": A3B, "tiny": dataclasses.replace(TALKATIVE, vocab_size=384)}
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}
CONTEXT = 1024


@pytest.fixture(scope="module", params=VARIANTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> moeflux.Model:
    folder = tmp_path_factory.mktemp("decoder") / request.param
    synth(folder, VARIANTS[request.param])
    return moeflux.load(folder)


class Alone:
    def __init__(self, model: moeflux.Model, seed: int) -> None:
        vocab = model.variant.vocab_size
        self.session, self.sampler = (
            model.session(max_context=CONTEXT),
            Sampler(Sampling(seed=seed, **SAMPLING), vocab, []),
        )
        self.logits = self.session.prefill([seed])

    def step(self) -> None:
        self.logits = self.session.step(self.sampler.choose(self.logits).token)


@pytest.mark.parametrize("count", [1, 8])
def test_in_turn(benchmark: Any, model: moeflux.Model, count: int) -> None:
    benchmark.group = f"{model.path.name}, {count} requests"
    requests = [Alone(model, seed) for seed in range(1, count + 1)]

    def steps() -> None:
        for each in requests:
            each.step()

    benchmark.pedantic(steps, rounds=200, warmup_rounds=5)


@pytest.mark.parametrize("count", [1, 8])
def test_decoder(benchmark: Any, model: moeflux.Model, count: int) -> None:
    benchmark.group = f"{model.path.name}, {count} requests"
    decoder, vocab = _core.Decoder(model._engine), model.variant.vocab_size
    for seed in range(1, count + 1):
        sampler = Sampler(Sampling(seed=seed, **SAMPLING), vocab, [])
        decoder.add(model.session(max_context=CONTEXT)._core, np.asarray([seed], np.int32), sampler._core, (), CONTEXT)
    tokens = itertools.count()

    def step() -> None:
        for event in decoder.step():
            assert event.token is not None
            next(tokens)

    benchmark.pedantic(step, rounds=200, warmup_rounds=5)


@pytest.mark.parametrize("threads", [1, 2])
def test_choices_side_by_side(benchmark: Any, tmp_path: Path, threads: int) -> None:
    benchmark.group = "8 choices of one step"
    synth(tmp_path / "talkative", TALKATIVE)
    with moeflux.load(tmp_path / "talkative", threads=threads) as model:
        decoder, vocab = _core.Decoder(model._engine), model.variant.vocab_size
        samplers = [Sampler(Sampling(seed=seed, **SAMPLING), vocab, []) for seed in range(8)]
        sessions = [model.session(max_context=64) for _ in samplers]
        for token, session in enumerate(sessions):
            session.prefill([token])

        def add() -> None:
            for session, sampler in zip(sessions, samplers, strict=True):
                decoder.add(session._core, np.zeros(0, np.int32), sampler._core, (), 1)

        benchmark.pedantic(decoder.step, setup=add, rounds=400, warmup_rounds=5)
