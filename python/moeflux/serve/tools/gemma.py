"""Calls as Gemma 4 writes them: `<|tool_call>call:NAME{city:<|"|>Zürich<|"|>,days:3}<tool_call|>`. Names have no
quotes, and a text stands between marks, as it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from moeflux.serve.request import Message
from moeflux.serve.tools.reader import NAME, Reader, Wait
from moeflux.serve.tools.values import JsonText, escaped, kinds_of
from moeflux.serve.tools.written import calls_in
from moeflux.text.speech import GEMMA_MARKS

__all__ = [
    "CALL", "CALL_END_NAME", "CALL_NAME", "QUOTE_NAME", "RESULT_NAMES", "GemmaReader", "arranged", "described",
]  # fmt: skip

CALL_NAME, CALL_END_NAME, QUOTE_NAME = "<|tool_call>", "<tool_call|>", '<|"|>'
RESULT_NAMES = ("<|tool_response>", "<tool_response|>")
CALL, CALL_END, QUOTE = (GEMMA_MARKS[name] for name in (CALL_NAME, CALL_END_NAME, QUOTE_NAME))
RESULT = GEMMA_MARKS[RESULT_NAMES[0]]
ENDS = (CALL_END, CALL, RESULT)
MARKED = "".join(GEMMA_MARKS.values())
HEAD = re.compile(rf"\s*(call\s*:\s*)?({NAME.pattern})\s*(?=[{{{MARKED}]|\Z)", re.ASCII)
SHOWN = ("string", "object", "array", "number", "integer", "boolean")
HEAD_STOPS = re.compile(rf"[{{{MARKED}]")


class GemmaReader(Reader):
    def _read(self) -> Wait:
        while True:
            mark = yield from self._until(ENDS, self._say_spelled)
            if not mark:
                self._end_text()
                return
            if mark == CALL:
                yield from self._call()
            elif not self._calls or self._said:  # some models repeat the end of a call, and announce its result
                self._say_spelled(mark)

    def _say_spelled(self, text: str) -> None:
        self._say(GEMMA_MARKS.spelled(text))

    def _call(self) -> Wait:
        match = yield from self._match(HEAD, HEAD_STOPS)
        follows = self._left[:1]
        if match and follows == "{":
            self._begin(match[2])
            if (yield from self._stream_object(GemmaText())):
                yield from self._after_arguments()
        elif match and (follows or not self._cut) and (match[2] in self._schemas or (match[1] and follows == CALL_END)):
            self._begin(match[2])
            self._argue("{}")
            yield from self._after_arguments()
        elif not match and self._left.lstrip().startswith("{"):
            yield from self._json()
        else:
            self._say_spelled(CALL + (match[0] if match else ""))

    def _after_arguments(self) -> Wait:
        mark = yield from self._until(ENDS, self._keep_for_later)
        if mark == CALL:  # the next one, and this one was not closed
            self._left = CALL + self._left
        self._after = GEMMA_MARKS.spelled(self._after.lstrip().lstrip("}"))
        self._end(True)

    def _json(self) -> Wait:
        """Other models write such calls."""
        parts: list[str] = []
        mark = yield from self._until(ENDS, parts.append)
        body = "".join(parts)
        if mark == CALL:
            self._left = CALL + self._left
        calls = [] if self._cut and not mark else calls_in(body.replace(QUOTE, '"'))
        for name, arguments in calls:
            self._begin(name)
            self._argue(arguments)
            self._end(True)
        if not calls:
            self._say_spelled(CALL + body + (mark if mark != CALL else ""))


class GemmaText:
    """Makes JSON of one object as it comes, up to the brace that closes it or the mark that ends the call. What models
    get wrong is put right on the way: other quotes, texts without any, and a text that was not closed."""

    def __init__(self) -> None:
        self._json = JsonText()
        self._closer = ""  # of the text that is open
        self._held = ""  # of it: brackets, which stand behind it if it is never closed
        self._bare = ""  # words without quotes

    def add(self, text: str) -> tuple[str, str | None]:
        """(JSON that is certain, the text after the end, or None if that has not come)"""
        out: list[str] = []
        for place, character in enumerate(text):
            if character in ENDS:
                return "".join(out) + self.close(), text[place:]
            said, rest = self._json.add(self._as_json(character))
            out.append(said)
            if rest is not None:
                return "".join(out), text[place + 1 :]
        return "".join(out), None

    def close(self) -> str:
        """What is missing to end it here."""
        said, _ = self._json.add('"' if self._closer else self._said_bare())
        self._closer = ""
        return said + self._json.close()

    def _as_json(self, character: str) -> str:
        if self._closer:
            return self._in_text(character)
        if self._json.in_string:  # in quotes as JSON has them
            return '"' if character == QUOTE else GEMMA_MARKS.spelled(character)
        bare = bool(self._bare.strip())
        if character == QUOTE and (bare or self._json.after_value):  # behind a text that began without it
            return self._said_bare()
        if character == QUOTE or (character == "'" and not bare):
            self._closer, self._bare = character, ""
            return '"'
        if character in '{}[],"' or (character == ":" and not (bare and self._json.in_value)):
            return self._said_bare() + character
        self._bare += "" if character in MARKED else character
        return ""

    def _in_text(self, character: str) -> str:
        if character == self._closer:
            text, self._held, self._closer = self._held, "", ""
            return escaped(text) + '"'
        self._held += GEMMA_MARKS.spelled(character)
        if character.isspace() or character in "]}":
            return ""
        text, self._held = self._held, ""
        return escaped(text)

    def _said_bare(self) -> str:
        word, self._bare = self._bare.strip(), ""
        return f'"{escaped(word)}"' if re.search(r"[\s:]", word) else word


# ---- What templates take ----------------------------------------------------------------------------------------


def arranged(messages: Sequence[Message]) -> list[Message]:
    """Messages as the templates take them. A message has calls, their results and the text that follows those: some
    templates know no other place for results. A text before a call is part of the thought that led to it."""
    found: list[Message] = []
    for message in messages:
        called = found[-1] if found and found[-1].get("tool_calls") else None
        if message["role"] == "tool" and called:
            found[-1] = {**called, "tool_responses": [*called.get("tool_responses", ()), _result_of(called, message)]}
        elif called and called.get("tool_responses") and _only_says(message):
            found[-1] = {**called, "content": message["content"]}
        else:
            found.append(_thought_before_calls(message))
    return found


def _result_of(called: Message, result: Message) -> dict[str, Any]:
    names = {call["id"]: call["function"]["name"] for call in called["tool_calls"]}
    first = called["tool_calls"][0]["function"]["name"]
    return {"name": names.get(result.get("tool_call_id"), first), "response": result["content"]}


def _only_says(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls") and bool(message.get("content"))


def _thought_before_calls(message: Message) -> Message:
    if not message.get("tool_calls") or not message.get("content"):
        return message
    parts = (message.get("reasoning_content"), message["content"])
    return {**message, "content": "", "reasoning_content": "\n\n".join(part for part in parts if part)}


def described(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as the templates take them. They show one type of a parameter, and whether it may be null."""

    def walk(value: Any, root: Mapping[str, Any]) -> Any:
        if isinstance(value, list):
            return [walk(each, root) for each in value]
        if not isinstance(value, dict):
            return value
        found = {name: walk(each, root) for name, each in value.items()}
        for place in ("properties", "items"):
            inner = found.get(place)
            if isinstance(inner, dict):
                found[place] = (
                    {name: _of_one_type(each, root) for name, each in inner.items()}
                    if place == "properties"
                    else _of_one_type(inner, root)
                )
        return found

    return [walk(tool, tool["function"]["parameters"]) for tool in tools]


def _of_one_type(schema: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(schema, dict) or isinstance(schema.get("type"), str):
        return schema
    kinds = kinds_of(schema, root)
    kind = next((each for each in SHOWN if each in kinds), "string")
    return {**schema, "type": kind, **({"nullable": True} if "null" in kinds else {})}
