"""Texts held to the grammars of requests."""

from __future__ import annotations

import random
from collections.abc import Collection

import numpy as np

from moeflux.serve.constrain import Constraint, Grammars
from moeflux.serve.grammars import grammar_of
from moeflux.serve.request import Ask
from moeflux.serve.tools.families import HERMES, Family
from moeflux.serve.tools.gemma import QUOTE_NAME
from moeflux.text.tokenizer import Tokenizer

__all__ = ["Maker", "allowed", "ends"]


def allowed(bits: np.ndarray) -> list[int]:
    assert bits.dtype == np.uint32
    found: list[int] = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
    return found


def ends(tokenizer: Tokenizer) -> set[int]:
    found = {tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|endoftext|>")}
    return {id for id in found if id is not None}


class Maker:
    """Grammars of requests, and texts held to them."""

    def __init__(self, tokenizer: Tokenizer, grammars: Grammars, ending: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._grammars = grammars
        self._ends = set(ending) or ends(tokenizer)
        closing = (b'"', b"}", b"]", QUOTE_NAME.encode()[:4])
        self._ending = {id for id in range(len(tokenizer)) if tokenizer.token_bytes(id).startswith(closing)}

    def of(self, ask: Ask, family: Family = HERMES, thinking: bool = False, template: str = "") -> Constraint:
        text = grammar_of(ask, family, thinking, template, self._added)
        assert text is not None
        return self._grammars.compile(text, "tools")

    def _added(self, token: str) -> int | None:
        return self.tokenizer.id_of(token) if token in self.tokenizer.added else None

    def end_of(self, constraint: Constraint, text: str) -> str | None:
        """None if the whole text may be the answer, or else the text up to what is not allowed."""
        tokens = [*self.tokenizer.encode_marked(text), min(self._ends)]
        for place, token in enumerate(tokens):
            if token not in allowed(constraint(tokens[:place])):
                return self.tokenizer.decode(tokens[:place])
        return None

    def at_random(self, constraint: Constraint, seed: int, family: Family = HERMES) -> str:
        """A whole answer of tokens that are allowed, none of them likely but those that end something: without them,
        texts and lists would not end. One in channels does not begin with a thought."""
        rng = random.Random(seed)
        tokens = self.tokenizer.encode_marked("<|channel|>commentary") if family.channels else []
        for _ in range(1000):
            ids = allowed(constraint(tokens))
            over = sorted(set(ids) & self._ends)
            if over:
                return self.tokenizer.decode(tokens)
            ending = [id for id in ids if id in self._ending]
            tokens.append(rng.choice(ending if ending and rng.random() < 0.5 else ids))
        raise AssertionError(self.tokenizer.decode(tokens))
