"""Calls whose arguments are JSON: Hermes (Qwen3 and many others), DeepSeek and Kimi."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from moeflux.serve.tools.reader import NAME, Reader, Wait
from moeflux.serve.tools.values import JsonText, Schemas, arguments_of

__all__ = [
    "CLOSE",
    "DEEPSEEK_MARKS",
    "KIMI_MARKS",
    "OPEN",
    "HermesReader",
    "MarkedReader",
    "Marks",
    "calls_in",
]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*"({NAME.pattern})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)', re.ASCII)
HEAD_STOPS = re.compile(rf'"(?:arguments|parameters)"\s*:\s*[^\s]|{OPEN}|{CLOSE}')
TAIL = re.compile(r'\s*(?:,\s*"[^"\\]*"\s*:\s*(?:"(?:[^"\\]|\\.)*"|[\w.+-]+)\s*)*\}*')
"""What may follow the arguments inside a call."""


class HermesReader(Reader):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""

    def _read(self) -> Wait:
        while True:
            if not (yield from self._until((OPEN,), self._say)):
                self._end_text()
                return
            yield from self._json_call()

    def _json_call(self) -> Wait:
        match = yield from self._match(HEAD, HEAD_STOPS)
        if match:
            self._begin(match[1])
            yield from self._streamed()
        else:
            yield from self._whole()

    def _streamed(self) -> Wait:
        if not (yield from self._stream_object(JsonText())):
            return
        yield from self._until_close(self._keep_for_later)
        self._after = self._after[TAIL.match(self._after).end() :]  # type: ignore[union-attr]
        self._end(True)

    def _whole(self) -> Wait:
        """The parts stand in another order, or something is missing."""
        parts: list[str] = []
        closed = yield from self._until_close(parts.append)
        body = "".join(parts)
        calls = [] if self._cut and not closed else calls_in(body)
        for name, arguments in calls:
            self._begin(name)
            self._argue(arguments)
            self._end(True)
        if not calls:
            self._say(OPEN + body + closed)

    def _until_close(self, say: Callable[[str], object]) -> Generator[None, None, str]:
        marker = yield from self._until((CLOSE, OPEN), say)
        if marker == OPEN:  # the next call, and this one was not closed
            self._left = OPEN + self._left
            return ""
        return marker


def calls_in(body: str) -> list[tuple[str, str]]:
    """Names and arguments of what is written there, however it is wrapped; none if anything cannot be read."""
    found: list[tuple[str, str]] = []
    at, decoder = 0, json.JSONDecoder(strict=False)
    body = body.strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    while at < len(body):
        if body[at].isspace() or body[at] in ",}":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            return found or _repaired(body)
        for each in value if isinstance(value, list) else [value]:
            call = _call_of(each)
            if call is None:
                return found
            found.append(call)
    return found


def _repaired(body: str) -> list[tuple[str, str]]:
    text = JsonText()
    begin = body.find("{")
    if begin < 0:
        return []
    said, rest = text.add(body[begin:])
    try:
        call = _call_of(json.loads(said if rest is not None else said + text.close()))
    except (ValueError, RecursionError):
        return []
    return [] if call is None else [call]


def _call_of(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    if isinstance(inner, dict):
        value = inner
    name = next((value[each] for each in ("name", "function", "tool") if isinstance(value.get(each), str)), None)
    if name is None or not NAME.fullmatch(name):
        return None
    given: Any = next((value[each] for each in ("arguments", "parameters", "input") if each in value), {})
    arguments = arguments_of(given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
    return None if arguments is None else (name, arguments)


# ---- Calls between marks of their own ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Marks:
    section: str
    section_end: str
    call: str
    separator: str  # before the arguments, or before the name if `kind` stands before it
    call_end: str
    kind: str  # what may stand where the name does in newer versions
    prefix: str  # of names

    @property
    def example(self) -> str:
        one = f"{self.call}NAME{self.separator}OBJECT{self.call_end}"
        return f"{self.section}{one}{self.section_end}"

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.section, self.section_end, self.call, self.separator, self.call_end


DEEPSEEK_MARKS = Marks(
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "function",
    "",
)
KIMI_MARKS = Marks(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "",
    "functions.",
)
NUMBER = re.compile(r":\d+$")
LINE_NAME = re.compile(rf"\s*({NAME.pattern})[ \t]*(?=[\n{{`]|\Z)", re.ASCII)
LINE_STOPS = re.compile(r"[^\s][^\n{`]*[\n{`]")
FENCE = re.compile(r"\s*```[a-z]*\s*(?=\{)")
FENCE_STOPS = re.compile(r"[^`a-z\s]")


class MarkedReader(Reader):
    def __init__(self, schemas: Schemas, new_id: Callable[[], str], marks: Marks) -> None:
        self._marks = marks
        super().__init__(schemas, new_id)

    def _read(self) -> Wait:
        marks, section = self._marks, False
        while True:
            marker = yield from self._until((marks.section, marks.call, marks.section_end), self._say)
            if not marker:
                self._end_text()
                return
            if marker != marks.call:  # a section that has begun drops the white space before it
                section = marker == marks.section
                if section:
                    self._space = ""
                continue
            yield from self._call()

    def _call(self) -> Wait:
        marks, head = self._marks, list[str]()
        stops = (marks.separator, marks.call_end, marks.call, marks.section_end)
        marker = yield from self._until(stops, head.append)
        name, raw = "".join(head).strip(), marks.call + "".join(head) + marker
        if marker == marks.separator and marks.kind and name == marks.kind:
            match = yield from self._match(LINE_NAME, LINE_STOPS)
            name, raw = (match[1], raw + match[0]) if match else ("", raw)
        name = NUMBER.sub("", name.removeprefix(marks.prefix)) if marks.prefix else name
        if marker != marks.separator or not NAME.fullmatch(name):
            if marker in (marks.call, marks.section_end):
                raw, self._left = raw.removesuffix(marker), marker + self._left
            self._say(raw)
            return
        if (yield from self._ahead(("```",))) == "```":
            yield from self._match(FENCE, FENCE_STOPS)
        if (yield from self._ahead(("{",))) == "{":
            yield from self._take_space()
            self._begin(name)
            if (yield from self._stream_object(JsonText())):
                yield from self._until_end(self._keep_for_later)
                self._after = self._after.strip().removeprefix("```")
                self._end(True)
            return
        parts: list[str] = []
        marker = yield from self._until_end(parts.append)
        arguments = None if self._cut and not marker else arguments_of("".join(parts))
        if arguments is None:
            self._say(raw + "".join(parts) + marker)
            return
        self._begin(name)
        self._argue(arguments)
        self._end(True)

    def _until_end(self, say: Callable[[str], object]) -> Generator[None, None, str]:
        marks = self._marks
        marker = yield from self._until((marks.call_end, marks.call, marks.section_end), say)
        if marker not in ("", marks.call_end):
            self._left = marker + self._left
        return marker if marker == marks.call_end else ""
