"""How a model is loaded: the options that `moeflux.load`, `plan`, `bench` and the command line share."""

from __future__ import annotations

import operator
import typing
from typing import Any, Literal, TypedDict

from moeflux.errors import ArgumentError, found

__all__ = ["DEFAULTS", "LoadOptions", "resolved", "whole_number", "words_of"]

# The words are those of csrc/core/choices.h.
KvType = Literal["f32", "bf16", "q8"]
Precision = Literal["auto", "exact"]
Reads = Literal["auto", "direct", "buffered"]
CachePolicy = Literal["lru", "lfu", "none"]
LookAhead = Literal["auto", "on", "off"]
CpuExperts = Literal["off", "auto", "all"]
Speculate = Literal["off", "auto", "lookup", "mtp"]

MAX_DEVICES = 256


class LoadOptions(TypedDict, total=False):
    """The keyword arguments of `moeflux.load`, which says what each does. None: the plan or the engine chooses."""

    memory: int | str | None
    device_memory: int | str | None
    context: int | None
    sessions: int
    kv_dtype: KvType
    backend: str
    device: int
    isa: str | None
    precision: Precision
    threads: int | None
    readers: int | None
    expert_slots: int | None
    host_slots: int | None
    ring_depth: int | None
    chunk: int | None
    reads: Reads
    cache: CachePolicy
    look_ahead: LookAhead
    cpu_experts: CpuExperts
    speculate: Speculate
    verify_reads: bool
    layers: tuple[int, int] | None
    experts_per_token: int | None


DEFAULTS: LoadOptions = {
    "memory": "auto",
    "device_memory": "auto",
    "context": None,
    "sessions": 1,
    "kv_dtype": "f32",
    "backend": "auto",
    "device": 0,
    "isa": None,
    "precision": "auto",
    "threads": None,
    "readers": None,
    "expert_slots": None,
    "host_slots": None,
    "ring_depth": None,
    "chunk": None,
    "reads": "auto",
    "cache": "lru",
    "look_ahead": "auto",
    "cpu_experts": "off",
    "speculate": "off",
    "verify_reads": False,
    "layers": None,
    "experts_per_token": None,
}


def words_of(name: str) -> tuple[str, ...]:
    """The words that an option may be; none if it is not one of a few words."""
    hint = _HINTS[name]
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def resolved(given: LoadOptions) -> LoadOptions:
    """All options, with defaults for those that were not given. ArgumentError for an option that does not exist, and
    for a word that an option cannot be. The plan checks numbers."""
    for name, value in given.items():
        if name not in DEFAULTS:
            raise ArgumentError(f"options: expected {', '.join(DEFAULTS)}, found {name}")
        if name in ("backend", "isa") and not isinstance(value, str | type(None)):
            raise ArgumentError(f"{name}: expected a name, found {value!r:.40}")
        if name == "layers" and not (value is None or _is_pair(value)):
            raise ArgumentError(f"layers: expected a first layer and one past the last, found {value!r:.40}")
        if name == "device" and not (type(value) is int and 0 <= value < MAX_DEVICES):
            raise ArgumentError(f"device: expected a number from 0 on, found {found(value)}")
        words = words_of(name)
        if words and value not in words:
            raise ArgumentError(f"{name}: expected one of {', '.join(words)}, found {_shown(value)}")
    return {**DEFAULTS, **given}


def whole_number(name: str, count: int | None, maximum: int) -> int | None:
    """A number from outside, checked."""
    if count is None:
        return None
    if isinstance(count, bool) or not hasattr(count, "__index__") or operator.index(count) < 1:
        raise ArgumentError(f"{name}: expected a whole number of at least 1, found {found(count)}")
    if operator.index(count) > maximum:
        raise ArgumentError(f"{name}: expected 1 to {maximum}, found {found(count)}")
    return operator.index(count)


def _is_pair(value: object) -> bool:
    """Whether it is two numbers. Which layers there are is known once the model is open."""
    numbers = value if isinstance(value, tuple) and len(value) == 2 else (None,)
    return all(isinstance(each, int) and not isinstance(each, bool) and abs(each) < 1 << 31 for each in numbers)


def _shown(value: object) -> str:
    return f'"{value:.40}"' if isinstance(value, str) else f"{value!r:.40}"


_HINTS: dict[str, Any] = typing.get_type_hints(LoadOptions)
