"""An answer as it comes, taken apart into thoughts, text and calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moeflux.serve.events import Event, Text, Thought
from moeflux.serve.tools.families import Family, new_id
from moeflux.serve.tools.values import Schemas
from moeflux.text.chat import ReasoningSplit

__all__ = ["AnswerReader"]


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
        self._split = ReasoningSplit(thinking, breaks=family.openers if tools else ())

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
        return self._reader.add(text) if self._reader else [Text(text)]
