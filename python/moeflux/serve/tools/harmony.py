"""Calls as gpt-oss writes them: messages in channels, to functions.NAME."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from moeflux.serve.request import Message
from moeflux.serve.tools.reader import NAME, Reader, Wait
from moeflux.serve.tools.values import JsonText, arguments_of
from moeflux.text.channels import CALL, END, MESSAGE, RETURN, START, recipient_of, spelled, without_thoughts

__all__ = ["EFFORTS", "PREFIX", "HarmonyReader", "arranged", "described"]

PREFIX = "functions."
ENDS = (END, CALL, RETURN)
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""These models always think, with low, medium or high effort: what clients ask for otherwise, as the nearest."""


class HarmonyReader(Reader):
    """Reads what ChannelSplit leaves of messages: texts as they are, and messages to somebody with their marks."""

    def _read(self) -> Wait:
        while True:
            if not (yield from self._until((START,), self._say)):
                self._end_text()
                return
            yield from self._message()

    def _message(self) -> Wait:
        header: list[str] = []
        yield from self._until((MESSAGE,), header.append)
        name = self._tool("".join(header))
        if name and (yield from self._ahead(("{",))) == "{":
            self._begin(name)
            yield from self._streamed()
            return
        body: list[str] = []
        end = yield from self._until(ENDS, body.append)
        arguments = None if not name or (self._cut and not end) else arguments_of("".join(body))
        if arguments is None:
            self._say(spelled("".join((START, *header, MESSAGE, *body, end))))
            return
        self._begin(name)
        self._argue(arguments)
        self._end(True)

    def _tool(self, header: str) -> str:
        """The name of the tool, or "" where there is no call. Without the prefix, it must be one that there is."""
        recipient = recipient_of(header)
        name = recipient.removeprefix(PREFIX)
        return name if NAME.fullmatch(name) and (name != recipient or name in self._schemas) else ""

    def _streamed(self) -> Wait:
        """Tells the object that the message begins with. Whatever follows it in the message is text."""
        arguments, closed = JsonText(), False

        def tell(text: str) -> None:
            nonlocal closed
            said, rest = ("", text) if closed else arguments.add(text)
            self._argue(said)
            if rest is not None:
                closed = True
                self._keep_for_later(rest)

        yield from self._take_space()
        end = yield from self._until(ENDS, tell)
        complete = closed or bool(end) or not self._cut
        if complete and not closed:
            self._argue(arguments.close())
        self._end(complete)


# ---- What templates take ----------------------------------------------------------------------------------------


def arranged(messages: Sequence[Message]) -> list[Message]:
    """Messages as the templates take them. A message has one call, and its result follows it: the name that a result
    bears is that of the call before it. A text beside a call is part of the thought that led to it, for there is one
    place for both. Instructions in the midst of a conversation come from the user: templates leave them out."""
    found: list[Message] = []
    waiting: list[Message] = []  # calls of the last answer, of which the results have not come
    for message in without_thoughts(messages):
        if message["role"] == "tool":
            _put_result(found, waiting, message)
            continue
        found += waiting
        waiting = []
        if found and message["role"] == "system":
            message = {**message, "role": "user"}
        if message.get("tool_calls"):
            message, *waiting = _one_call_each(message)
        found.append(message)
    return found + waiting


def _put_result(found: list[Message], waiting: list[Message], result: Message) -> None:
    """Behind its call. Of calls that wait, those before it come first."""
    ids = [call["tool_calls"][0]["id"] for call in waiting]
    count = ids.index(result["tool_call_id"]) + 1 if result.get("tool_call_id") in ids else 0
    found += [*waiting[:count], result]
    del waiting[:count]


def _one_call_each(message: Message) -> list[Message]:
    first, *others = message["tool_calls"]
    parts = (message.get("reasoning_content"), message.get("content"))
    thought = "\n\n".join(part for part in parts if isinstance(part, str) and part)
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    begun = {**rest, "content": "", "tool_calls": [first], **({"reasoning_content": thought} if thought else {})}
    return [begun, *({"role": message["role"], "content": "", "tool_calls": [call]} for call in others)]


def described(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as the templates take them. They add a default to a text if there are choices beside it."""

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(each) for each in value]
        if not isinstance(value, dict):
            return value
        found = {name: walk(each) for name, each in value.items()}
        chosen = any(isinstance(found.get(name), list) for name in ("enum", "oneOf"))
        if chosen and not isinstance(found.get("default", ""), str):
            found["default"] = json.dumps(found["default"], ensure_ascii=False)
        return found

    return [walk(tool) for tool in tools]
