"""An answer as it comes, taken apart into thoughts, text and calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moeflux.serve.events import Event, Text, Thought, joined, together
from moeflux.serve.request import Ask, Ending, Result, TokenLogprob, Usage
from moeflux.serve.tools.families import Family, new_id
from moeflux.serve.tools.values import Schemas
from moeflux.text.channels import ANSWER_HEAD
from moeflux.text.generate import Finish, Piece
from moeflux.text.tokenizer import Tokenizer

__all__ = ["Answer", "AnswerReader"]


class AnswerReader:
    """What comes out, put together, does not depend on where the text was cut."""

    def __init__(
        self,
        thinking: bool,
        family: Family,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        ids: Callable[[], str] = new_id,
    ) -> None:
        """`thinking`: the template has begun a thought. `tools` are the schemas of their parameters by name; without
        any, nothing is a call. Some models begin a call before they have closed their thought."""
        self._reader = family.reader(Schemas(tools), ids) if tools else None
        breaks = family.openers if tools else ()
        self._split = family.speech.split(thinking, breaks)
        self._spelled = family.speech.marks.spelled

    @property
    def thinking(self) -> bool:
        return self._split.thinking

    def keeps(self, text: str) -> bool:
        """Whether no part of this text changes `thinking`."""
        return self._split.keeps(text)

    def add(self, text: str) -> list[Event]:
        """What is certain now."""
        return [event for thought, part in self._split.add(text) for event in self._part(thought, part)]

    def finish(self, cut: bool = False) -> list[Event]:
        """The rest. `cut`: the answer was ended from outside, and not by the model."""
        events = [event for thought, part in self._split.finish() for event in self._part(thought, part)]
        return events + (self._reader.finish(cut) if self._reader else [])

    def _part(self, thought: bool, text: str) -> list[Event]:
        if thought:
            return [Thought(text)]
        return self._reader.add(text) if self._reader else [Text(self._spelled(text))]


class Answer:
    """One answer, from the pieces that a scheduler gives to events, and at last as a whole."""

    def __init__(self, ask: Ask, prompt_tokens: int, thinking: bool, family: Family, tokenizer: Tokenizer) -> None:
        tools = {tool.name: tool.parameters for tool in ask.tools} if ask.choice != "none" else {}
        self._mute = ask.max_tokens == 0  # the client only wants the prompt to be read
        self._plain = ask.prompt is not None  # a text that goes on has neither thoughts nor calls
        self._reader = AnswerReader(thinking, family, tools)
        self._tokenizer = tokenizer
        marks = () if self._plain else (*family.marks, *family.speech.marks, "<think>", "</think>")
        ids = {tokenizer.id_of(mark): family.heard(mark) for mark in marks}
        self._hidden: dict[int | None, str] = {id: mark for id, mark in ids.items() if id in tokenizer.special_ids}
        if ask.prefill and family.channels:
            self._reader.add(family.heard(ANSWER_HEAD))
        self._events: list[Event] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_tokens = prompt_tokens
        self._thought_tokens = 0
        self._ending = Ending("cancelled")
        self.tokens: list[int] = []

    def take(self, pieces: Sequence[Piece]) -> tuple[list[Event], list[TokenLogprob]]:
        """What pieces make certain that have come together."""
        if self._mute:
            return [], []
        tokens = [piece.token for piece in pieces if piece.token is not None]
        self.tokens += tokens
        texts = [piece.text + self._hidden.get(piece.token, "") for piece in pieces]
        text = "".join(texts)
        if self._plain:
            events: list[Event] = [Text(text)] if text else []
        elif self._reader.keeps(text):
            self._thought_tokens += self._reader.thinking * len(tokens)
            events = self._reader.add(text)
        else:
            events = joined(self._one_by_one(pieces, texts))
        told = [
            self._told(piece.token, piece.logprob, piece.top)
            for piece in pieces
            if piece.token is not None and piece.logprob is not None
        ]
        self._logprobs += told
        return self._say(events), told

    def _one_by_one(self, pieces: Sequence[Piece], texts: Sequence[str]) -> Iterator[Event]:
        """Each token is one of a thought, or not."""
        for piece, text in zip(pieces, texts, strict=True):
            self._thought_tokens += self._reader.thinking and piece.token is not None
            yield from self._reader.add(text)

    def finish(self, finish: Finish, stop_string: str | None = None) -> tuple[list[Event], Ending]:
        """The rest, and why it ended."""
        assert finish != "failed"
        self._ending = Ending("length") if self._mute else Ending(finish, stop_string)
        return self._say([] if self._plain else self._reader.finish(self._ending.cut)), self._ending

    def result(self) -> Result:
        """All of it, once it is finished."""
        return Result(together(self._events), self._ending, self._logprobs)

    def usage(self, cached: int) -> Usage:
        return Usage(self._prompt_tokens, cached, len(self.tokens), self._thought_tokens)

    def _say(self, events: list[Event]) -> list[Event]:
        self._events += events
        return events

    def _told(self, token: int, logprob: float, top: tuple[tuple[int, float], ...]) -> TokenLogprob:
        def spelled(id: int) -> tuple[str, bytes]:
            data = self._tokenizer.token_bytes(id)
            return data.decode("utf-8", "replace"), data

        return TokenLogprob(*spelled(token), logprob, tuple((*spelled(id), each) for id, each in top))
