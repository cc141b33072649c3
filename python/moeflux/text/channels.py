"""The channels of gpt-oss, a form that its makers call harmony. What a model says is a row of messages. The header of
each names a channel, and somebody whom it is for if that is not the user:

<|channel|>analysis<|message|>a thought<|end|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"a": 1}<|call|>
<|start|>assistant<|channel|>final<|message|>the answer<|return|>
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from moeflux.text.marks import Marks

__all__ = [
    "ANSWER_HEAD",
    "CALL",
    "END",
    "MARKS",
    "MESSAGE",
    "RETURN",
    "SIGN",
    "START",
    "THOUGHT_END",
    "THOUGHT_HEAD",
    "ChannelSplit",
    "heard",
    "recipient_of",
    "spelled",
    "without_thoughts",
]

Message = dict[str, Any]
MARKS = Marks(("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"), 0xFDD0)
"""The tokens that divide messages."""
heard, spelled = MARKS.heard, MARKS.spelled
START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL = MARKS.values()
SIGN = "<|channel|>"
"""Templates that have it are of this form."""
THOUGHT_HEAD, ANSWER_HEAD = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
"""How a thought and an answer begin behind what announces them in the prompt."""
THOUGHT_END = "<|end|>"

ENDS = (END, RETURN, CALL)
PIECE = re.compile(f"[{START}-{CALL}]|[^{START}-{CALL}]+")
RECIPIENT = re.compile(rf"\bto=([^\s{START}-{CALL}]+)")
NAMED = re.compile(rf"{CHANNEL}\s*(\w*)")
ROLE = "assistant"
WORDS = (ROLE, "to=")  # that a header may begin with
MARKED = frozenset(MARKS.values())
THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def recipient_of(header: str) -> str:
    """Whom a message is for; "": the user."""
    found = RECIPIENT.findall(header)
    return "" if not found or found[-1] in (ROLE, "user", "all") else str(found[-1])


def without_thoughts(messages: Sequence[Message]) -> list[Message]:
    """The messages as templates of this form take them. They write a thought where it led to a call, and some write the
    answer as one if it stands beside another thought."""
    return [
        message if message.get("tool_calls") else {name: message[name] for name in message if name not in THOUGHTS}
        for message in messages
    ]


class ChannelSplit:
    """Splits what a model says into thoughts and answer as it comes, as ReasoningSplit does. A message that is for
    somebody else than the user is part of the answer as it is, with its marks: it may be a call. Nothing is an error:
    a message may lack its header, its channel or its end, and a channel that nobody knows is part of the answer."""

    def __init__(self) -> None:
        self._header: str | None = ""  # so far; None inside a message
        self._kind = "answer"  # of the message that is open; "thought", or "call" if it is passed on as it is
        self._fresh = True  # nothing of this message has been said yet
        self._said = set[str]()  # kinds

    @property
    def thinking(self) -> bool:
        """Whether what comes now is a thought."""
        return self._header is None and self._kind == "thought"

    def keeps(self, text: str) -> bool:
        """Whether no part of this text changes `thinking`."""
        return self._header is None and MARKED.isdisjoint(text)

    def add(self, text: str) -> Sequence[tuple[bool, str]]:
        """(is it a thought, text)"""
        return tuple(self._parts(text))

    def _parts(self, text: str) -> Iterator[tuple[bool, str]]:
        for piece in PIECE.findall(text):
            yield from self._inside(piece) if self._header is None else self._before(piece)

    def finish(self) -> Iterator[tuple[bool, str]]:
        if self._header is not None:
            yield from self._left_over()

    # ---- Inside a message ---------------------------------------------------------------------------------------

    def _inside(self, piece: str) -> Iterator[tuple[bool, str]]:
        if piece in (MESSAGE, CONSTRAIN):  # out of place
            return
        if piece not in (*ENDS, START, CHANNEL):
            yield from self._say(piece)
            return
        if self._kind == "call":
            yield False, piece if piece in ENDS else END
        self._header = "" if piece in ENDS else piece

    def _say(self, text: str) -> Iterator[tuple[bool, str]]:
        """Messages of one kind are paragraphs."""
        if not text:
            return
        if self._fresh and self._kind in self._said and self._kind != "call":
            text = f"\n\n{text}"
        self._fresh = False
        self._said.add(self._kind)
        yield self._kind == "thought", text

    # ---- Before it ----------------------------------------------------------------------------------------------

    def _before(self, piece: str) -> Iterator[tuple[bool, str]]:
        assert self._header is not None
        if piece in (*ENDS, START):
            yield from self._left_over()
            self._header = "" if piece in ENDS else piece
        elif piece == MESSAGE:
            yield from self._open()
        else:
            self._header += piece
            if not _may_be_header(self._header):
                text = self._header
                self._begin("answer")
                yield from self._say(text)

    def _begin(self, kind: str) -> None:
        self._header, self._kind, self._fresh = None, kind, True

    def _open(self) -> Iterator[tuple[bool, str]]:
        header = self._header or ""
        if not recipient_of(header):
            self._begin(_kind_of(header))
            return
        self._begin("call")
        self._said.add("answer")
        begun = "" if header.startswith(START) else START if header.lstrip().startswith(ROLE) else START + ROLE
        yield False, f"{begun}{header}{MESSAGE}"

    def _left_over(self) -> Iterator[tuple[bool, str]]:
        """A header after which no message came. What follows the name of its channel may be meant as one."""
        header = self._header or ""
        if recipient_of(header):
            yield False, spelled(header)
        else:
            self._begin(_kind_of(header))
            named = list(NAMED.finditer(header))
            text = (header[named[-1].end() :] if named else header.strip(START)).strip()
            yield from self._say("" if text == ROLE else spelled(text))
        self._header = ""


def _kind_of(header: str) -> str:
    named = NAMED.findall(header)
    return "thought" if named and named[-1].lower() == "analysis" else "answer"


def _may_be_header(text: str) -> bool:
    """Whether it has a mark, or may be what stands before the first one."""
    rest = text.lstrip()
    return not rest or rest[0] in MARKED or any(rest.startswith(word) or word.startswith(rest) for word in WORDS)
