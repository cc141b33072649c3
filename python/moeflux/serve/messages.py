"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from moeflux.serve.events import Arguments, Call, CallBegin, CallEnd, Event, Text, Thought
from moeflux.serve.fields import LIMITS, Fields, Limits, RequestError, Table
from moeflux.serve.request import Ask, Ending, Form, Message, Result, TokenLogprob, Tool, Usage, sampling_of
from moeflux.serve.sse import around, event, json_text

__all__ = ["COUNT_FIELDS", "FIELDS", "MessageStream", "read", "read_count", "whole"]

SIGNATURE = "moeflux"
"""Of thoughts. They are recognised by their text."""

TOOLS = "those with a schema; tools that run at Anthropic are left out"
FIELDS = Table(
    used={
        "model": "",
        "messages": "texts, thoughts, calls and their results",
        "system": "a text, or blocks of text",
        "max_tokens": "0 reads the prompt into the cache",
        "stop_sequences": "",
        "stream": "",
        "temperature": "without it, what the model's own file says",
        "top_p": "",
        "top_k": "",
        "tools": TOOLS,
        "tool_choice": "`disable_parallel_tool_use`: one call, where one is required",
        "thinking": "`enabled` and `adaptive` turn it on, `disabled` off, where the template lets one choose",
        "output_config": "`format` (json_schema); `effort` goes to templates that have `reasoning_effort`",
    },
    ignored={
        "metadata": "nothing is stored",
        "service_tier": "there is one",
        "speed": "there is one",
        "inference_geo": "it runs here",
        "cache_control": "always on",
        "context_management": "clients do it themselves when the context is full",
        "diagnostics": "usage says what was cached",
        "betas": "none changes what is answered",
        "user_profile_id": "requests are told apart by their key",
        "workspace_id": "requests are told apart by their key",
    },
    refused={
        "container": "expected none, for nothing is run here",
        "mcp_servers": "expected none, for the client calls them here",
        "thread": "expected all messages, for none are stored here",
        "fallbacks": "expected none, for there is one model here",
        "compaction": "expected none, for the client does it here",
    },
)
COUNT_FIELDS = Table(
    used={name: FIELDS.used[name] for name in ("model", "messages", "system", "tools", "tool_choice", "thinking")},
    ignored={**FIELDS.ignored, "output_config": "it does not change the prompt"},
    refused=FIELDS.refused,
)


def read(body: dict[str, Any], limits: Limits = LIMITS) -> Ask:
    FIELDS.check(body)
    values = Fields(body, limits=limits)
    values.need("max_tokens")
    return _ask(values, values.whole("max_tokens", 0))


def read_count(body: dict[str, Any], limits: Limits = LIMITS) -> Ask:
    """The same for a request whose tokens are to be counted."""
    COUNT_FIELDS.check(body)
    return _ask(Fields(body, limits=limits), None)


def _ask(values: Fields, max_tokens: int | None) -> Ask:
    limits = values.limits
    values.need("messages")
    messages = [each for given in values.objects("messages", limits.messages) for each in _messages(given)]
    system = _texts(values, "system")
    tools = tuple(_tool(each) for each in values.objects("tools", limits.tools) if _is_ours(each))
    choice, parallel = _choice(values, tools)
    output = values.inner("output_config")
    prefill = ""
    if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        prefill = messages.pop()["content"].rstrip()
    thinking = values.inner("thinking").text("type", "", among=("enabled", "disabled", "adaptive", "between_tools"))
    effort = output.text("effort")
    return Ask(
        model=values.text("model"),
        messages=([{"role": "system", "content": system}] if system else []) + messages,
        prefill=prefill,
        tools=tools,
        choice=choice,
        parallel=parallel,
        sampling=sampling_of(values),
        max_tokens=max_tokens,
        stop=values.stops("stop_sequences"),
        form=_form(output),
        stream=values.flag("stream"),
        thinking=None if not thinking else thinking != "disabled",
        optional={"reasoning_effort": effort} if effort else {},
    )


def _form(output: Fields) -> Form | None:
    form = output.inner("format")
    if not form:
        return None
    form.text("type", among=("json_schema",))
    return Form(form.schema("schema"), where="output_config.format.schema")


def _is_ours(tool: Fields) -> bool:
    return tool.text("type", "custom") == "custom"


def _tool(values: Fields) -> Tool:
    values.need("input_schema")
    return Tool(values.needed_text("name", 256), values.text("description"), values.schema("input_schema"))


def _choice(values: Fields, tools: Sequence[Tool]) -> tuple[str, bool]:
    given = values.inner("tool_choice")
    kind = given.text("type", "auto", among=("auto", "any", "tool", "none"))
    parallel = not given.flag("disable_parallel_tool_use")
    if kind == "tool":
        name = given.needed_text("name", 256)
        if all(tool.name != name for tool in tools):
            raise given.wrong("name", "one of the tools")
        return f"tool:{name}", parallel
    if kind == "any" and not tools:
        raise values.wrong("tools", "a tool, for one is required")
    return {"any": "required"}.get(kind, kind), parallel


def _messages(values: Fields) -> list[Message]:
    """One message may have results of calls and a text: to templates, each result is a message."""
    role = values.text("role", among=("user", "assistant", "system"))
    if isinstance(values.need("content"), str):
        return [{"role": role, "content": values.text("content")}]
    blocks = values.objects("content", values.limits.parts)
    if role == "assistant":
        return [_assistant(blocks)]
    found: list[Message] = []
    texts: list[str] = []
    for block in blocks:
        kind = block.text("type", "text")
        if kind == "tool_result" and role == "user":
            content = _texts(block, "content")
            if block.flag("is_error"):
                content = f"Error: {content}"
            found.append({"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": content})
        else:
            texts.append(_text_of(block, kind))
    if texts or not found:
        found.append({"role": role, "content": "\n".join(texts)})
    return found


def _assistant(blocks: Sequence[Fields]) -> Message:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.text("type", "text")
        if kind == "thinking":
            thoughts.append(block.text("thinking"))
        elif kind == "tool_use":
            arguments = json.dumps(dict(block.inner("input")), ensure_ascii=False)
            function = {"name": block.needed_text("name", 256), "arguments": arguments}
            calls.append({"id": block.text("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":  # of another model, which nobody here can read
            texts.append(_text_of(block, kind))
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text_of(block: Fields, kind: str) -> str:
    if kind != "text":
        path = block.path("type")
        raise RequestError(f"{path}: expected what is text, found {kind!r:.40}", path)
    return block.text("text")


def _texts(values: Fields, name: str) -> str:
    if isinstance(values.get(name, ""), str):
        return values.text(name)
    blocks = values.objects(name, values.limits.parts)
    return "\n".join(_text_of(block, block.text("type", "text")) for block in blocks)


# ---- Answers ----------------------------------------------------------------------------------------------------


def _stop_reason(ending: Ending, called: bool) -> str:
    if ending.finish == "end":
        return "tool_use" if called else "end_turn"
    if ending.finish == "stop":
        return "stop_sequence"
    return "model_context_window_exceeded" if ending.finish == "context" else "max_tokens"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.answer,
    }


def _message(ask: Ask, id: str, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage),
    }


def whole(ask: Ask, id: str, results: Sequence[Result], usage: Usage) -> dict[str, Any]:
    (result,) = results
    said, content = result.said, list[dict[str, Any]]()
    if said.thought:
        content.append({"type": "thinking", "thinking": said.thought, "signature": SIGNATURE})
    if said.text:
        content.append({"type": "text", "text": said.text})
    content += [{"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)} for call in said.calls]
    reason = _stop_reason(result.ending, bool(said.calls))
    stop = {"stop_reason": reason, "stop_sequence": result.ending.stop_string}
    return {**_message(ask, id, content, usage), **stop}


def _input(call: Call) -> dict[str, Any]:
    """Of a call that was cut, nothing: the reason of the stop says so, and half of it could be taken for the whole."""
    try:
        value = json.loads(call.arguments) if call.complete else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class MessageStream:
    """The same as server-sent events: a block after the other, each begun and ended."""

    def __init__(self, ask: Ask, id: str) -> None:
        self._ask = ask
        self._id = id
        self._open = ""  # the kind of block that is open
        self._index = -1
        self._around: dict[str, tuple[str, str]] = {}  # texts of the block
        self._called = False
        self._ending = Ending("end")

    def begin(self, prompt_tokens: int) -> str:
        message = _message(self._ask, self._id, [], Usage(prompt_tokens))
        return event({"type": "message_start", "message": message}) + self.ping(0, prompt_tokens)

    def add(self, index: int, events: Sequence[Event], logprobs: Sequence[TokenLogprob] = ()) -> str:
        return "".join(self._event(each) for each in events)

    def end(self, index: int, ending: Ending) -> str:
        self._ending = ending
        return self._close_block()

    def close(self, usage: Usage) -> str:
        reason = _stop_reason(self._ending, self._called)
        delta = {"stop_reason": reason, "stop_sequence": self._ending.stop_string}
        return event({"type": "message_delta", "delta": delta, "usage": _usage(usage)}) + event(
            {"type": "message_stop"}
        )

    def ping(self, read: int, prompt_tokens: int) -> str:
        return event({"type": "ping", "prompt": {"read": read, "of": prompt_tokens}})

    def error(self, body: dict[str, Any]) -> str:
        return event(body)

    def _event(self, each: Event) -> str:
        if isinstance(each, Text):
            begun = self._block("text", {"type": "text", "text": ""})
            return begun + self._grow("text_delta", "text", each.text)
        if isinstance(each, Thought):
            begun = self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return begun + self._grow("thinking_delta", "thinking", each.text)
        if isinstance(each, CallBegin):
            self._called = True
            call = {"type": "tool_use", "id": each.id, "name": each.name, "input": {}}
            return self._close_block() + self._block("tool_use", call)
        if isinstance(each, Arguments):
            return self._grow("input_json_delta", "partial_json", each.text)
        assert isinstance(each, CallEnd)
        return self._close_block()

    def _block(self, kind: str, block: dict[str, Any]) -> str:
        if self._open == kind:
            return ""
        closed = self._close_block()
        self._open = kind
        self._index += 1
        self._around.clear()
        return closed + event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _close_block(self) -> str:
        kind, self._open = self._open, ""
        if not kind:
            return ""
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if kind == "thinking" else ""
        return signed + event({"type": "content_block_stop", "index": self._index})

    def _grow(self, kind: str, name: str, text: str) -> str:
        if kind not in self._around:
            self._around[kind] = around(self._delta({"type": kind, name: ""}))
        before, after = self._around[kind]
        return f"{before}{json_text(text)}{after}"

    def _delta(self, delta: dict[str, Any]) -> str:
        return event({"type": "content_block_delta", "index": self._index, "delta": delta})
