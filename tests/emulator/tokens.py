"""Text of a kernel as tokens: enough to find signatures, attributes and declarations, not to parse C++."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<line>\#[^\n]*)
      | (?P<string>"(?:\\.|[^"\\])*")
      | (?P<word>[A-Za-z_]\w*)
      | (?P<number>(?:\d|\.\d)(?:[eE][+-]|[\w.])*)
      | (?P<space>\s+)
      | (?P<mark>\[\[|\]\]|::|->|.)""",
    re.VERBOSE | re.DOTALL,
)
_LINE_MARKER = re.compile(r'#\s*(?:line\s+)?(\d+)\s+"([^"]*)"')
_CLOSING = {"(": ")", "[": "]", "{": "}", "[[": "]]"}


class KernelError(Exception):
    """Text that is no kernel we can build: where, what was expected and what was found."""


@dataclass(frozen=True)
class Token:
    kind: str  # line, string, word, number, space, mark
    text: str
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def tokens(preprocessed: str) -> list[Token]:
    """All of it, spaces too: joined again, the tokens are the text."""
    found, file, line = [], "?", 1
    for match in _TOKEN.finditer(preprocessed):
        text = match.group()
        if marker := _LINE_MARKER.match(text) if match.lastgroup == "line" else None:
            file, line = marker.group(2), int(marker.group(1)) - 1
        found.append(Token(match.lastgroup or "", text, file, line))
        line += text.count("\n")
    return found


def meaningful(text: list[Token]) -> list[Token]:
    return [token for token in text if token.kind not in ("space", "line")]


def joined(text: list[Token]) -> str:
    """Without the spaces that mean nothing."""
    return " ".join(token.text for token in meaningful(text))


def closing(text: list[Token], start: int) -> int:
    """The place of the bracket that closes the one at `start`."""
    opening, depth = text[start].text, 0
    for i in range(start, len(text)):
        if text[i].text == opening:
            depth += 1
        elif text[i].text == _CLOSING[opening]:
            depth -= 1
            if depth == 0:
                return i
    raise KernelError(f"{text[start].place}: {opening} is never closed")


def parts(text: list[Token]) -> Iterator[list[Token]]:
    """What lies between the commas that are in no bracket."""
    part: list[Token] = []
    depth = 0
    for token in text:
        if token.text in ("(", "[", "{", "[[", "<"):
            depth += 1
        elif token.text in (")", "]", "}", "]]", ">"):
            depth -= 1
        if token.text == "," and depth == 0:
            yield part
            part = []
        else:
            part.append(token)
    if meaningful(part):
        yield part
