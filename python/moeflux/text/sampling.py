"""Which token comes next: the model's logits, changed as asked, and one random number a token.

The order never varies: bias, penalties, temperature, top-k, top-p, min-p. What is left is summed up in the order of the
ids, and the first token whose sum exceeds the random number is taken. So the same seed gives the same text wherever
the logits are the same, and last bits that differ between backends move a border between two tokens by as little.
"""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from moeflux import files
from moeflux.errors import FormatError, StateError, found
from moeflux.runtime.logits import Logits

__all__ = ["Sampler", "Sampling", "log_probabilities", "weights"]

ENGINE_TOP_K = 1024  # the engine picks so many best without a copy of the logits


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. As it stands: always the likeliest. Checked when it is made."""

    temperature: float = 0.0  # 0: the likeliest; below 1 more of the likely, above 1 more of the others
    top_k: int = 0  # only the k likeliest; 0: all
    top_p: float = 1.0  # only the likeliest that together have this probability
    min_p: float = 0.0  # only those with this share of the likeliest one's probability
    repetition_penalty: float = 1.0  # divides logits of tokens that are in the prompt or the answer
    presence_penalty: float = 0.0  # taken from logits of tokens that are in the answer
    frequency_penalty: float = 0.0  # the same, for every time they are
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of ids; -inf forbids one
    seed: int | None = None  # of the random numbers; None: a new one each time

    def __post_init__(self) -> None:
        for name, least, most in (
            ("temperature", 0.0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.0, math.inf),
            ("presence_penalty", -math.inf, math.inf),
            ("frequency_penalty", -math.inf, math.inf),
        ):
            value = _number(name, getattr(self, name))
            if not least <= value <= most or (value == 0 and name in ("top_p", "repetition_penalty")):
                raise StateError(f"{name}: expected {_range(name, least, most)}, found {value:g}")
        _whole("top_k", self.top_k, (1 << 31) - 1)
        if self.seed is not None:
            _whole("seed", self.seed, (1 << 64) - 1)
        for id, bias in self.logit_bias.items():
            _whole("logit_bias: token", id, (1 << 31) - 1)
            if bias != -math.inf:
                _number(f"logit_bias[{id}]", bias)

    @classmethod
    def usual(cls, folder: str | Path) -> Sampling:
        """What generation_config.json of a model's folder asks for; the likeliest token where it asks for nothing."""
        path = Path(folder) / "generation_config.json"
        config = files.read_json(path) if files.exists(path) else {}
        if not isinstance(config, dict):
            raise FormatError(f"{path}: expected an object, found {type(config).__name__}")
        known = {each.name for each in fields(cls)} - {"logit_bias", "seed"}
        given = {name: value for name, value in config.items() if name in known and value is not None}
        if not config.get("do_sample", False):
            given["temperature"] = 0.0
        elif "temperature" not in given:
            given["temperature"] = 1.0
        try:
            return cls(**given)
        except StateError as error:
            raise FormatError(f"{path}: {error}") from error

    def settled(self) -> Sampling:
        """With a seed, so that it can be said which one it was."""
        if self.seed is not None:
            return self
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return Sampling(**(values | {"seed": int.from_bytes(os.urandom(4), "little")}))

    @property
    def changes_logits(self) -> bool:
        """Is there anything to do before the temperature?"""
        neutral = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) == (1.0, 0.0, 0.0)
        return bool(self.logit_bias) or not neutral


class Sampler:
    """Chooses the tokens of one answer, and counts them for the penalties."""

    def __init__(self, sampling: Sampling, vocab_size: int, prompt: Iterable[int]) -> None:
        self.sampling = sampling.settled()
        for id in self.sampling.logit_bias:
            if id >= vocab_size:
                raise StateError(f"logit_bias: expected tokens 0 to {vocab_size - 1}, found {id}")
        self._random = np.random.Philox(key=self.sampling.seed)
        self._room = np.empty(vocab_size, np.float32)
        self._answered = np.zeros(vocab_size, np.int64)
        self._seen = np.zeros(vocab_size, bool)
        self._seen[np.asarray(list(prompt), np.int64)] = True
        self._bias = np.array(list(self.sampling.logit_bias.values()), np.float64)
        self._biased = np.array(list(self.sampling.logit_bias), np.int64)

    def pick(self, logits: Logits) -> int:
        """The next token."""
        token = self._pick(logits)
        self._seen[token] = True
        self._answered[token] += 1
        return token

    def _pick(self, logits: Logits) -> int:
        asked = self.sampling
        if asked.changes_logits:
            values = self._changed(logits.numpy(self._room))
            if asked.temperature == 0:
                return int(values.argmax())
            ids, found = weights(values, asked)
        elif asked.temperature == 0:
            return logits.argmax()  # nothing is copied
        elif 0 < asked.top_k <= min(ENGINE_TOP_K, len(logits)):
            best, values = logits.top_k(asked.top_k)
            order = np.argsort(best)
            kept, found = weights(values[order].astype(np.float64), asked)
            ids = best[order][kept]
        else:
            ids, found = weights(logits.numpy(self._room).astype(np.float64), asked)
        sums = np.cumsum(found)
        # One double in [0, 1) a token, made of the top 53 bits: the same in every version of NumPy.
        at = (self._random.random_raw() >> 11) * 2.0**-53 * sums[-1]
        return int(ids[min(np.searchsorted(sums, at, side="right"), len(ids) - 1)])

    def _changed(self, logits: np.ndarray) -> np.ndarray:
        asked, values = self.sampling, logits.astype(np.float64)
        values[self._biased] += self._bias
        if asked.repetition_penalty != 1:
            seen = values[self._seen]
            values[self._seen] = np.where(seen > 0, seen / asked.repetition_penalty, seen * asked.repetition_penalty)
        if asked.presence_penalty or asked.frequency_penalty:
            answered = np.flatnonzero(self._answered)
            values[answered] -= asked.presence_penalty + asked.frequency_penalty * self._answered[answered]
        if values.max() == -np.inf:
            raise StateError("logit_bias: expected to leave at least one token, found all of them forbidden")
        return values


def weights(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """What may be drawn, ascending, and its probabilities up to a factor. float64 [vocab] in. The lower id wins a
    tie for a place."""
    ids = np.arange(len(logits))
    if 0 < sampling.top_k < len(logits):
        least = np.partition(logits, -sampling.top_k)[-sampling.top_k]
        above = np.flatnonzero(logits > least)
        ids = np.sort(np.concatenate([above, np.flatnonzero(logits == least)[: sampling.top_k - len(above)]]))
    with np.errstate(over="ignore"):  # at the coldest temperatures all but the best become -inf, as they should
        found = np.exp((logits[ids] - logits.max()) / sampling.temperature)
    if sampling.top_p < 1:
        kept = _nucleus(found, sampling.top_p)
        ids, found = ids[kept], found[kept]
    if sampling.min_p > 0:
        likely = found >= sampling.min_p * found.max()
        ids, found = ids[likely], found[likely]
    return ids, found


def _nucleus(found: np.ndarray, top_p: float) -> np.ndarray:
    """Places of the fewest that together reach `top_p`, ascending."""
    goal = top_p * found.sum()
    for most in (ENGINE_TOP_K, len(found)):  # nearly always a few are enough, and sorting all is slow
        places = np.arange(len(found))
        if most < len(found):
            places = np.flatnonzero(found >= np.partition(found, -most)[-most])
        places = places[np.argsort(-found[places], kind="stable")]
        sums = np.cumsum(found[places])
        if sums[-1] >= goal or most >= len(found):
            break
    return np.sort(places[: np.searchsorted(sums, goal) + 1])


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Of every token, by the model alone: nothing that Sampling asks for is in them. float64 [..., vocab]."""
    values = logits.astype(np.float64)
    values -= values.max(axis=-1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=-1, keepdims=True))
    return values


# ---- What callers give ------------------------------------------------------------------------------------------


def _range(name: str, least: float, most: float) -> str:
    if most == math.inf:
        return "more than 0" if name == "repetition_penalty" else f"at least {least:g}"
    return f"{'more than 0' if name == 'top_p' else f'{least:g}'} to {most:g}"


def _number(name: str, value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float, np.floating))
        or not abs(value) <= sys.float_info.max
    ):
        raise StateError(f"{name}: expected a number, found {found(value)}")
    return float(value)


def _whole(name: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= operator.index(value) <= most:
        raise StateError(f"{name}: expected a whole number from 0 to {most}, found {found(value)}")
    return operator.index(value)
