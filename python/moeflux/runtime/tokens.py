"""Token ids as callers have them: arrays and lists, files of numbers, random ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

import numpy as np

from moeflux import files
from moeflux.errors import ArgumentError, FormatError

__all__ = ["Tokens", "is_token", "random_prompt", "read_prompt", "token_array"]

Tokens = Sequence[int] | np.ndarray


def is_token(token: object) -> TypeGuard[int]:
    """Whether it is a plain int that may be a token, so that nothing of it is to be refused or converted. Each step of
    each session asks, while the device waits."""
    return type(token) is int and 0 <= token < 1 << 31


def token_array(tokens: Tokens) -> np.ndarray:
    """A copy as int32, so that nobody changes the tokens while the engine reads them. It refuses what is no whole
    number: 1.5 is no token, and neither is True."""
    if type(tokens) is list and all(type(token) is int and abs(token) < 1 << 31 for token in tokens):
        return np.array(tokens, np.int32)  # nothing is left to refuse; it is a part of every step
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise ArgumentError(f"tokens: expected whole numbers in one dimension, found no array: {error}") from error
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        what = "text" if array.dtype.kind in "US" else f"{array.dtype} {array.shape}"
        raise ArgumentError(f"tokens: expected whole numbers in one dimension, found {what}")
    if not isinstance(tokens, np.ndarray) and any(isinstance(token, (bool, np.bool_)) for token in tokens):
        raise ArgumentError("tokens: expected whole numbers in one dimension, found True or False among them")
    if array.min() < -(1 << 31) or array.max() >= 1 << 31:
        raise ArgumentError(f"tokens: expected ids of the vocabulary, found {array.min()} to {array.max()}")
    return array.astype(np.int32, order="C")


def read_prompt(path: str | Path, vocab: int) -> list[int]:
    """Token ids from a text file of numbers. White space, commas or the brackets of a JSON list may separate them."""
    words = files.read_text(path).replace(",", " ").replace("[", " ").replace("]", " ").split()
    if not words:
        raise FormatError(f"{path}: expected token ids, found none")
    for place, word in enumerate(words):
        if not (word.isascii() and word.isdigit() and len(word) < 10 and int(word) < vocab):
            raise FormatError(f"{path}: token {place}: expected 0 to {vocab - 1}, found {word!r:.40}")
    return [int(word) for word in words]


def random_prompt(tokens: int, vocab: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(vocab, size=tokens)]
