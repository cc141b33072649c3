"""OpenAI's responses: what is asked."""

from __future__ import annotations

import base64
import binascii
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from moeflux.serve.fields import LIMITS, Fields, Limits, RequestError, Table
from moeflux.serve.request import Ask, Form, Message, Tool, sampling_of, texts_of
from moeflux.serve.sse import json_text

__all__ = ["FIELDS", "KEPT_TEXT", "Stored", "read", "sealed"]

FIELDS = Table(
    used={
        "model": "",
        "input": "a text, or items: messages, calls, their outputs, thoughts",
        "instructions": "",
        "previous_response_id": "of a response that is still in memory",
        "max_output_tokens": "",
        "stream": "",
        "store": "false: the response cannot be continued by its id",
        "temperature": "without it, what the model's own file says",
        "top_p": "",
        "top_logprobs": "",
        "tools": "functions, and custom tools as functions with one text; tools that run at OpenAI are left out",
        "tool_choice": "",
        "parallel_tool_calls": "false: one call, where one is required",
        "reasoning": "`effort`: `none` and `minimal` turn thinking off, the rest goes to templates that have it",
        "text": "`format`",
        "metadata": "repeated in the answer",
        "include": "`message.output_text.logprobs`; the rest changes nothing",
    },
    ignored={
        "user": "requests are told apart by their key",
        "stream_options": "nothing is obfuscated",
        "service_tier": "there is one",
        "safety_identifier": "nobody is reported",
        "prompt_cache_key": "what is cached is found by its tokens",
        "prompt_cache_retention": "the server's own options say it",
        "prompt_cache_options": "the server's own options say it",
        "max_tool_calls": "it counts tools that run at OpenAI",
        "client_metadata": "nothing is stored",
        "context_management": "clients do it themselves when the context is full",
        "truncation": "nothing is ever cut; a prompt that is too long is an error",
    },
    refused={
        "background": "expected false: the answer comes with the request",
        "background_options": "expected none: the answer comes with the request",
        "conversation": "expected none: use previous_response_id",
        "prompt": "expected none, for no prompts are stored here",
        "moderation": "expected none, for there is none here",
    },
)
KEPT_TEXT = 32 << 20
"""Of all conversations that can be continued by the id of a response, together: characters."""

SEAL = "moeflux:"
SKIPPED_ITEMS = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "image_generation_call",
        "code_interpreter_call",
        "item_reference",
        "mcp_list_tools",
        "mcp_call",
        "compaction",
    }
)
"""What is left of tools that ran elsewhere, and what can be read only where it was written."""


class Stored:
    """The conversations behind the last responses, by the ids of these."""

    def __init__(self, most: int = KEPT_TEXT) -> None:
        self._most = most
        self._count = 0
        self._kept: OrderedDict[str, tuple[list[Message], int]] = OrderedDict()

    def keep(self, id: str, messages: Sequence[Message]) -> None:
        size = len(json_text(list(messages)))
        self._kept[id] = list(messages), size
        self._count += size
        while self._count > self._most and len(self._kept) > 1:
            self._count -= self._kept.popitem(last=False)[1][1]

    def get(self, id: str) -> list[Message]:
        if id not in self._kept:
            raise RequestError(
                "previous_response_id: expected that of a response in memory, found another: send the whole "
                "conversation as input",
                "previous_response_id",
                404,
            )
        self._kept.move_to_end(id)
        return self._kept[id][0]


def read(body: dict[str, Any], stored: Stored, limits: Limits = LIMITS) -> Ask:
    FIELDS.check(body)
    values = Fields(body, limits=limits)
    values.need("input")
    before = stored.get(values.text("previous_response_id")) if "previous_response_id" in values else []
    said = [message for message in before if message["role"] != "system"] if "instructions" in values else before
    instructions = values.text("instructions")
    tools = tuple(tool for each in values.objects("tools", limits.tools) if (tool := _tool(each)))
    reasoning = values.inner("reasoning")
    effort = reasoning.text("effort")
    logprobs = values.whole("top_logprobs", 0, limits.logprobs)
    if logprobs is None and "message.output_text.logprobs" in values.listed("include", 64):
        logprobs = 0
    return Ask(
        model=values.text("model"),
        messages=([{"role": "system", "content": instructions}] if instructions else [])
        + _joined([*said, *_input(values)]),
        tools=tools,
        choice=_choice(values, tools),
        parallel=values.flag("parallel_tool_calls", True),
        sampling=sampling_of(values),
        max_tokens=values.whole("max_output_tokens", 1),
        form=_form(values.inner("text").inner("format")),
        logprobs=logprobs,
        stream=values.flag("stream"),
        thinking=False if effort in ("none", "minimal") else None,
        optional={"reasoning_effort": effort} if effort else {},
        echo={
            "instructions": instructions or None,
            "metadata": dict(values.inner("metadata")),
            "parallel_tool_calls": values.flag("parallel_tool_calls", True),
            "previous_response_id": values.get("previous_response_id"),
            "max_output_tokens": values.get("max_output_tokens"),
            "temperature": values.get("temperature"),
            "top_p": values.get("top_p"),
            "store": values.flag("store", True),
            "tool_choice": values.get("tool_choice", "auto"),
            "tools": [each for each in values.listed("tools", limits.tools) if each.get("type") == "function"],
            "text": dict(values.inner("text")) or {"format": {"type": "text"}},
            "reasoning": {"effort": effort or None, "summary": None},
        },
    )


# ---- Tools ------------------------------------------------------------------------------------------------------


def _tool(values: Fields) -> Tool | None:
    kind = values.text("type", "function")
    if kind == "function":
        return Tool(
            values.needed_text("name", 256),
            values.text("description"),
            values.schema("parameters"),
            values.flag("strict"),
        )
    if kind == "custom":
        schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        form = values.inner("format").text("definition")
        description = values.text("description") + (f"\n\nThe form of `input`:\n{form}" if form else "")
        return Tool(values.needed_text("name", 256), description, schema, text=True)
    return None


def _choice(values: Fields, tools: Sequence[Tool]) -> str:
    given = values.get("tool_choice")
    if not isinstance(given, dict):
        choice = values.text("tool_choice", "auto", among=("auto", "none", "required"))
        if choice == "required" and not tools:
            raise values.wrong("tools", "a tool that is run by the client, for one is required")
        return choice
    inner = values.inner("tool_choice")
    if inner.text("type") == "allowed_tools":
        return inner.text("mode", "auto", among=("auto", "required"))
    name = inner.needed_text("name", 256)
    if all(tool.name != name for tool in tools):
        raise inner.wrong("name", "one of the tools")
    return f"tool:{name}"


def _form(values: Fields) -> Form | None:
    kind = values.text("type", "text", among=("text", "json_object", "json_schema"))
    if kind == "text":
        return None
    if kind == "json_object":
        return Form()
    values.need("schema")
    return Form(values.schema("schema"), values.flag("strict", True), "text.format.schema")


# ---- Items ------------------------------------------------------------------------------------------------------


def sealed(thought: str) -> str:
    """A thought as `encrypted_content`. It is no secret: clients send back what is in this field and drop the rest."""
    return SEAL + base64.b64encode(thought.encode()).decode()


def _unsealed(text: str) -> str:
    try:
        return base64.b64decode(text.removeprefix(SEAL), validate=True).decode() if text.startswith(SEAL) else ""
    except (binascii.Error, ValueError):
        return ""


def _input(values: Fields) -> list[Message]:
    if isinstance(values["input"], str):
        return [{"role": "user", "content": values.text("input")}]
    items = [_item(each) for each in values.objects("input", values.limits.messages)]
    return [item for item in items if item]


def _item(values: Fields) -> Message:
    """One item as a message; nothing of what it takes another service to read."""
    kind = values.text("type", "message")
    if kind == "message":
        role = values.text("role", among=("system", "developer", "user", "assistant"))
        values.need("content")
        content = texts_of(values, "content", ("input_text", "output_text", "text", "refusal"))
        return {"role": "system" if role == "developer" else role, "content": content}
    if kind in ("function_call", "custom_tool_call"):
        arguments = values.text("arguments") if kind == "function_call" else _custom(values.text("input"))
        function = {"name": values.needed_text("name", 256), "arguments": arguments}
        call = {"id": values.text("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = texts_of(values, "output", ("input_text", "output_text", "text"))
        return {"role": "tool", "tool_call_id": values.text("call_id"), "content": output}
    if kind == "reasoning":
        content = "".join(each.text("text") for each in values.objects("content", values.limits.parts))
        thought = content or _unsealed(values.text("encrypted_content"))
        return {"role": "assistant", "content": "", "reasoning_content": thought} if thought else {}
    if kind in SKIPPED_ITEMS:
        return {}
    path = values.path("type")
    raise RequestError(f"{path}: expected a message, a call, its output or a thought, found {kind!r:.40}", path)


def _custom(text: str) -> str:

    return json_text({"input": text})


def _joined(messages: Sequence[Message]) -> list[Message]:
    """A thought, a text and calls that follow one another are one message of the model's."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if not (last and last["role"] == message["role"] == "assistant" and _follows(last, message)):
            found.append(dict(message))
            continue
        last["content"] = "\n".join(text for text in (last["content"], message["content"]) if text)
        if "tool_calls" in message:
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
        if "reasoning_content" in message:
            last["reasoning_content"] = message["reasoning_content"]
    return found


def _follows(last: Message, message: Message) -> bool:
    """Whether both may be of one answer: thoughts come first, then text, then calls."""
    if "reasoning_content" in message:
        return False
    return not ("tool_calls" in last and message["content"])
