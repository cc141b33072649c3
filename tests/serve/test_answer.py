"""An answer's pieces come one by one, or several at once: what is made of them is the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux import builtin
from moeflux.serve.answer import Answer
from moeflux.serve.events import Event, joined
from moeflux.serve.request import Ask, Tool, Usage
from moeflux.serve.tools.families import FAMILIES
from moeflux.text.channels import heard
from moeflux.text.generate import Piece
from moeflux.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(builtin.path())
TOOLS = (Tool("write", "Writes.", {"type": "object", "properties": {"path": {"type": "string"}}}),)
BY_NAME = {family.name: family for family in FAMILIES}
WORDS = ["\n", " ", "a", "<", "think", "<think>", "</think>", "</", ">", "<tool_call>", '{"name": "write", ',
         '"arguments": {}}', "</tool_call>", "b < c"]  # fmt: skip
CHANNELS = [heard(word) for word in ("<|channel|>", "analysis", "<|message|>", "hm", "<|end|>", "<|start|>", "final",
                                     "assistant", "commentary to=functions.write", "{}", "<|call|>", " ")]  # fmt: skip


def told(texts: list[str], sizes: list[int], family: str, thinking: bool, tools: Any) -> tuple[list[Event], Usage]:
    """What an answer tells of these tokens, when so many come at once."""
    answer = Answer(Ask("m", tools=tools), 3, thinking, BY_NAME[family], TOKENIZER)
    events, at = list[Event](), 0
    for size in [*sizes, len(texts)]:
        pieces = [Piece(text, 5, None) for text in texts[at : at + size]]  # type: ignore[arg-type]
        events += answer.take(pieces)[0]
        at += size
    events += answer.finish("length")[0]
    return joined(events), answer.usage(0)


def without_ids(events: list[Event]) -> list[Any]:
    return [(type(event), getattr(event, "text", getattr(event, "name", None))) for event in events]


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("thinking", [False, True], ids=["", "thinking"])
@pytest.mark.parametrize(("family", "words"), [("hermes", WORDS), ("harmony", CHANNELS)])
@given(data=st.data())
def test_pieces_that_come_together_are_told_as_those_that_do_not(
    family: str, words: list[str], thinking: bool, tools: Any, data: st.DataObject
) -> None:
    texts = data.draw(st.lists(st.sampled_from(words), max_size=24))
    sizes = data.draw(st.lists(st.integers(1, 8), max_size=8))
    events, usage = told(texts, sizes, family, thinking, tools)
    alone, usage_alone = told(texts, [1] * len(texts), family, thinking, tools)
    assert without_ids(events) == without_ids(alone)
    assert usage == usage_alone


def test_tokens_of_a_thought_are_counted() -> None:
    _, usage = told(["hm", " so", "</think>", "Yes", "."], [5], "hermes", True, ())
    assert (usage.answer, usage.thought) == (5, 3)
    _, usage = told(["hm", " so", " and", " so"], [4], "hermes", True, ())
    assert (usage.answer, usage.thought) == (4, 4)
