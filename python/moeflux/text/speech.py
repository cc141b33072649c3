"""How models say what they think: in tags, in gpt-oss' channels, or in Gemma 4's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moeflux.text import channels
from moeflux.text.marks import Marks
from moeflux.text.thoughts import AnswerSplit, ReasoningSplit

__all__ = ["CHANNELS", "GEMMA", "GEMMA_MARKS", "TAGS", "Speech", "speech_of"]


@dataclass(frozen=True)
class Speech:
    sign: str  # that only templates of this kind have
    opening: str  # of a thought, as templates write it
    label: str  # what follows that
    end: str  # behind a thought
    marks: Marks  # tokens that divide what is said, for the split and for calls
    split: Callable[[bool, Sequence[str]], AnswerSplit]  # (the template has begun a thought, what ends one too)

    @property
    def start(self) -> str:
        """What stands before a thought, white space aside."""
        return self.opening + self.label.rstrip()


GEMMA_MARKS = Marks(
    (
        "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
    ),
    0xFDE0,
)  # fmt: skip
"""<|channel>thought, a thought<channel|>an answer. Calls of tools and their results have marks of their own, and so
have the texts in them."""
LABEL = "thought\n"


def _in_tags(thinking: bool, breaks: Sequence[str]) -> AnswerSplit:
    return ReasoningSplit(thinking, breaks=breaks)


def _in_channels(thinking: bool, breaks: Sequence[str]) -> AnswerSplit:
    return channels.ChannelSplit()


def _as_gemma(thinking: bool, breaks: Sequence[str]) -> AnswerSplit:
    return ReasoningSplit(thinking, GEMMA_MARKS["<|channel>"], GEMMA_MARKS["<channel|>"], breaks, LABEL)


TAGS = Speech("<think>", "<think>", "", "</think>", Marks(), _in_tags)
CHANNELS = Speech(channels.SIGN, channels.THOUGHT_HEAD, "", channels.THOUGHT_END, channels.MARKS, _in_channels)
GEMMA = Speech("<|channel>", "<|channel>", LABEL, "<channel|>", GEMMA_MARKS, _as_gemma)


def speech_of(template: str) -> Speech:
    """By the text of the chat template."""
    return next((each for each in (CHANNELS, GEMMA) if each.sign in template), TAGS)
