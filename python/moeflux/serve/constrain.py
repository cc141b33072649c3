"""Answers that keep to a grammar: which tokens may come next, as bits."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from moeflux.errors import Error
from moeflux.serve.fields import RequestError
from moeflux.text.tokenizer import Tokenizer

__all__ = ["Constraint", "Grammars"]

LIMITS = LLParserLimits(max_grammar_size=200_000, initial_lexer_fuel=2_000_000, verbose_errors=False)
KEYWORDS = re.compile(r'"([^"]+)"')


class Grammars:
    """Makes constraints for one model. Its tokens are read from the tokenizer once: a quarter of a second for a large
    vocabulary."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, ends, vocab_size)), eos_token=sorted(ends))

    def compile(self, grammar: str, field: str) -> Constraint:
        """RequestError if it cannot be kept to; it names what cannot. `field` is where it came from."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise RequestError(_refusal(field, matcher.get_error()), field)
        return Constraint(matcher, self._vocab_size)


class Constraint:
    """For one answer. Given the tokens so far, once before each choice, it returns which may follow: uint32
    [ceil(vocab / 32)], where bit i of word w is for token 32 * w + i."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._seen = 0

    def again(self) -> Constraint:
        """The same for another answer to the same request. The compiled grammar is shared."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return Constraint(matcher, self._vocab_size)

    def __call__(self, tokens: Sequence[int]) -> np.ndarray:
        new = list(tokens[self._seen :])
        self._seen = len(tokens)
        if new and not self._matcher.consume_tokens(new):
            raise Error(f"grammar: expected tokens that it allows, found others: {self._matcher.get_error():.200}")
        bits = np.zeros(-(-self._vocab_size // 32), np.uint32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            said = self._matcher.get_error()
            raise RequestError(f"grammar: expected one of which the next tokens can be told, found: {said:.200}")
        return bits

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()


class _Tokens:
    """A tokenizer as the library wants it. Added tokens are special: only where the grammar names one may it come."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(ends)
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        added = (tokenizer.id_of(token) for token in tokenizer.added)
        self.special_token_ids = sorted(id for id in added if id is not None and id < vocab_size)

    def __call__(self, text: Any) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def _refusal(field: str, words: str) -> str:
    """What the library says, in our way."""
    line = words.strip().splitlines()[0] if words.strip() else "nothing"
    if "Unimplemented keys" in line:
        named = ", ".join(sorted(set(KEYWORDS.findall(line.partition("Unimplemented keys")[2]))))
        return f"{field}: expected a schema whose keywords can be kept to, found {named}"
    line = re.sub(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?", "", line)
    return f"{field}: expected a schema that can be kept to, found: {line:.200}"
