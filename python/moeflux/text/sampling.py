"""Which token comes next: the model's logits, changed as asked, and one random number a token.

The order never varies: bias, penalties, what is allowed, temperature, top-k, top-p, min-p. The probabilities that are
left are summed up in the order of the ids, and the first token whose sum exceeds the random number is taken. So the
same seed gives the same text wherever the logits are the same. Where last bits differ between backends, borders between
two tokens move as little. `moeflux.oracle.sampling` is the definition.
"""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moeflux import _core
from moeflux.errors import ArgumentError, FormatError, found
from moeflux.models.model_files import files_of
from moeflux.runtime.logits import Logits

__all__ = ["Choice", "Sampler", "Sampling", "log_probabilities"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: by default, always the likeliest. The values are checked when it is made."""

    temperature: float = 0.0  # 0: the likeliest; below 1 favours likely tokens, above 1 the others
    top_k: int = 0  # only the k likeliest; 0: all
    top_p: float = 1.0  # only the likeliest that together have this probability
    min_p: float = 0.0  # only those with at least this share of the likeliest one's probability
    repetition_penalty: float = 1.0  # divides logits of tokens that are in the prompt or the answer
    presence_penalty: float = 0.0  # subtracted from logits of tokens that are in the answer
    frequency_penalty: float = 0.0  # subtracted from them once for each time they are in the answer
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of ids; -inf forbids one
    seed: int | None = None  # of the random numbers; None: a new one each time

    def __post_init__(self) -> None:
        for name, minimum, maximum in (
            ("temperature", 0.0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.0, math.inf),
            ("presence_penalty", -math.inf, math.inf),
            ("frequency_penalty", -math.inf, math.inf),
        ):
            value = _number(name, getattr(self, name))
            if not minimum <= value <= maximum or (value == 0 and name in ("top_p", "repetition_penalty")):
                raise ArgumentError(f"{name}: expected {_range(name, minimum, maximum)}, found {value:g}")
        _whole("top_k", self.top_k, (1 << 31) - 1)
        if self.seed is not None:
            _whole("seed", self.seed, (1 << 64) - 1)
        for id, bias in self.logit_bias.items():
            _whole("logit_bias: token", id, (1 << 31) - 1)
            if bias != -math.inf:
                _number(f"logit_bias[{id}]", bias)

    @classmethod
    def default(cls, folder: str | Path) -> Sampling:
        """What generation_config.json of a model's folder asks for, or the likeliest token if it asks for nothing."""
        beside, name = files_of(folder), "generation_config.json"
        path = beside.where(name)
        config = beside.json_of(name) if beside.has(name) else {}
        if not isinstance(config, dict):
            raise FormatError(f"{path}: expected an object, found {type(config).__name__}")
        known = {each.name for each in fields(cls)} - {"logit_bias", "seed"}
        given: dict[str, Any] = {name: value for name, value in config.items() if name in known and value is not None}
        if not config.get("do_sample", False):
            given["temperature"] = 0.0
        elif "temperature" not in given:
            given["temperature"] = 1.0
        try:
            return cls(**given)
        except ArgumentError as error:
            raise FormatError(f"{path}: {error}") from error

    def resolved(self) -> Sampling:
        """The same with a seed, so that one can tell which it was."""
        if self.seed is not None:
            return self
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        values["seed"] = int.from_bytes(os.urandom(4), "little")
        return Sampling(**values)


class Choice(NamedTuple):
    """A token, and what the model itself says about it: log-probabilities contain nothing that Sampling asks for."""

    token: int
    logprob: float | None  # None: it was not asked for
    top: list[tuple[int, float]]  # the likeliest tokens and their log probabilities, best first


class Sampler:
    """Chooses the tokens of one answer, and counts them for the penalties. The core does it, where the logits lie."""

    def __init__(self, sampling: Sampling, vocab_size: int, prompt: Iterable[int], *, isa: str = "") -> None:
        self.sampling = asked = sampling.resolved()
        assert asked.seed is not None
        self._core = _core.Sampler(
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            min_p=asked.min_p,
            repetition_penalty=asked.repetition_penalty,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            logit_bias=dict(asked.logit_bias),
            seed=asked.seed,
            vocab_size=vocab_size,
            prompt=np.asarray(list(prompt), np.int32),
            isa=isa,
        )

    def choose(
        self, logits: Logits | np.ndarray, *, allowed: np.ndarray | None = None, logprobs: int | None = None
    ) -> Choice:
        """The next token, from a session's logits or float32 [vocab], where -inf forbids one.

        allowed   uint32 [ceil(vocab / 32)]; bit i of word w is for token 32 * w + i; where it is 0, the token is not
                  allowed this time
        logprobs  give that of the token, and of so many alternatives
        """
        if isinstance(logits, np.ndarray):
            return Choice(*self._core.choose(logits, allowed, logprobs))
        return Choice(*logits.choose(self._core, allowed, logprobs))


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """The log-probability of every token by the model alone, without what Sampling asks for. float64 [..., vocab]."""
    values = logits.astype(np.float64)
    values -= values.max(axis=-1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=-1, keepdims=True))
    return values


# ---- What callers give ------------------------------------------------------------------------------------------


def _range(name: str, minimum: float, maximum: float) -> str:
    if maximum == math.inf:
        return "more than 0" if name == "repetition_penalty" else f"at least {minimum:g}"
    return f"{'more than 0' if name == 'top_p' else f'{minimum:g}'} to {maximum:g}"


def _number(name: str, value: Any) -> float:
    real = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
    if not real or not abs(value) <= sys.float_info.max:
        raise ArgumentError(f"{name}: expected a number, found {found(value)}")
    return float(value)


def _whole(name: str, value: Any, maximum: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= operator.index(value) <= maximum:
        raise ArgumentError(f"{name}: expected a whole number from 0 to {maximum}, found {found(value)}")
    return operator.index(value)
