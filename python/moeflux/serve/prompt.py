"""From a request to the tokens that the model reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from moeflux.errors import ArgumentError, StateError
from moeflux.serve.request import Ask, Message, Tool
from moeflux.serve.tools.families import Family
from moeflux.serve.tools.values import arguments_of
from moeflux.text.channels import ANSWER_HEAD
from moeflux.text.chat import ChatFormat, Prompt

__all__ = ["BILLING", "prepared", "prompt_of", "without_billing"]

BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n*", re.MULTILINE)
"""A line that one agent puts into its instructions. It counts and signs requests (`cch=`), so it is another one each
time, and nothing that follows it could be found in the cache. It says nothing to a model."""


def without_billing(text: str) -> str:
    return BILLING.sub("", text)


def prompt_of(ask: Ask, form: ChatFormat, family: Family) -> Prompt:
    """The conversation as the model reads it, up to where its answer begins or goes on."""
    messages, tools = prepared(ask, form, family)
    optional = {name: family.efforts.get(value, value) for name, value in ask.optional.items() if form.knows(name)}
    variables = {"tools": tools or None, "enable_thinking": _thinking(ask, form), **optional, **ask.variables}
    try:
        prompt = form.encode(messages, **variables)
    except StateError:
        told = _told_by_users(messages)
        if told == messages:
            raise
        prompt = form.encode(told, **variables)
    if not ask.prefill:
        return prompt
    head = ANSWER_HEAD if family.channels else ""
    text = [*form.tokenizer.encode_marked(head), *form.tokenizer.encode(ask.prefill)]
    return Prompt(prompt.text + head + ask.prefill, [*prompt.tokens, *text], prompt.borders, prompt.thinking)


def _told_by_users(messages: Sequence[Message]) -> list[Message]:
    """Agents put instructions in the midst of a conversation, and some templates refuse that: there they come from the
    user."""
    return [*messages[:1], *({**each, "role": "user"} if each["role"] == "system" else each for each in messages[1:])]


def _thinking(ask: Ask, form: ChatFormat) -> bool | None:
    """What the client wants, where the template lets one choose: agents ask for thoughts whatever the model is."""
    wanted = False if ask.prefill else ask.thinking
    try:
        form.check_thinking(wanted)
    except ArgumentError:
        return None
    return wanted


def prepared(ask: Ask, form: ChatFormat, family: Family) -> tuple[list[Message], list[dict[str, Any]]]:
    """Messages and tools as the template of this family wants them. Where it has no place for tools, they stand in the
    instructions."""
    tools = family.tools([tool.for_template() for tool in ask.tools]) if ask.choice != "none" else []
    messages = family.messages(_with_instructions(_for_family(ask.messages, family)))
    if tools and not form.knows("tools"):
        if not form.knows("tool_calls"):
            messages = [_plain(message) for message in messages]
        messages = _with_tools(messages, ask.tools, family)
        tools = []
    return messages, tools


def _with_instructions(messages: Iterable[Message]) -> list[Message]:
    """Without the lines that change; an instruction that was nothing else is none. Those that a conversation begins
    with are one, because templates know one."""
    found: list[Message] = []
    for message in messages:
        if message["role"] == "system" and isinstance(message.get("content"), str):
            content = without_billing(message["content"])
            if not content and message["content"]:
                continue
            message = {**message, "content": content}
            if len(found) == 1 and found[0]["role"] == "system":
                found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{content}"}
                continue
        found.append(message)
    return found


def _for_family(messages: Sequence[Message], family: Family) -> list[Message]:
    """Arguments as the family's templates take them: as values, or as text. Kimi's models read the names of calls in
    their ids, numbered from the beginning."""
    names: dict[str, str] = {}
    count = 0
    found = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if family.numbered_ids:
                names[call["id"]] = f"functions.{function['name']}:{count}"
                count += 1
            arguments: Any = arguments_of(function["arguments"])
            if arguments is None:  # what the model said was no object
                arguments = json.dumps({"arguments": function["arguments"]}, ensure_ascii=False)
            if not family.arguments_as_text:
                arguments = json.loads(arguments)
            function = {"name": function["name"], "arguments": arguments}
            calls.append({"id": names.get(call["id"], call["id"]), "type": "function", "function": function})
        if calls:
            message = {**message, "tool_calls": calls}
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": names.get(message["tool_call_id"], message["tool_call_id"])}
        found.append(message)
    return found


# ---- Templates without tools ------------------------------------------------------------------------------------


def _with_tools(messages: Sequence[Message], tools: Sequence[Tool], family: Family) -> list[Message]:
    """With the tools, and how to call them, in the instructions."""
    listed = "\n".join(json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools)
    told = (
        "You can call these functions, each of which is described by a line of JSON:\n"
        f"{listed}\n"
        f"To call one, write {family.example} with nothing after it."
    )
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{told}"}, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]


def _plain(message: Message) -> Message:
    """A message for a template that knows no calls: they stand in its text, as Hermes writes them."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    if not calls:
        return message
    written = "\n".join(f"<tool_call>{call}</tool_call>" for call in calls)
    text = "\n".join(part for part in (message.get("content", ""), written) if part)
    return {"role": message["role"], "content": text}
