"""OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from moeflux.serve.events import Arguments, Call, CallBegin, Event, Text, Thought
from moeflux.serve.fields import LIMITS, Fields, Limits, Table
from moeflux.serve.request import (
    Ask,
    Ending,
    Form,
    Message,
    Result,
    TokenLogprob,
    Tool,
    Usage,
    bias_of,
    sampling_of,
    texts_of,
)
from moeflux.serve.sse import DONE, around, comment, data, json_text

__all__ = ["FIELDS", "ChatStream", "finish_of", "logprobs_body", "read", "usage_body", "whole"]

OWN = {
    "top_k": "",
    "min_p": "",
    "repetition_penalty": "",
    "ignore_eos": "the model's own end tokens do not end the answer",
    "chat_template_kwargs": "variables of the chat template; `enable_thinking` says whether the model thinks",
}
FIELDS = Table(
    used={
        "model": "",
        "messages": "texts only",
        "stream": "",
        "stream_options": "`include_usage`",
        "max_completion_tokens": "",
        "max_tokens": "",
        "temperature": "without it, what the model's own file says",
        "top_p": "",
        "n": "",
        "stop": "",
        "seed": "",
        "presence_penalty": "",
        "frequency_penalty": "",
        "logit_bias": "-100 forbids a token",
        "logprobs": "",
        "top_logprobs": "",
        "response_format": "`text`, `json_object`, `json_schema`",
        "tools": "functions",
        "tool_choice": "",
        "parallel_tool_calls": "false: one call, where one is required",
        "reasoning_effort": "`none` and `minimal` turn thinking off, the rest goes to templates that have it",
        **OWN,
    },
    ignored={
        "user": "requests are told apart by their key",
        "metadata": "nothing is stored",
        "store": "nothing is stored",
        "service_tier": "there is one",
        "safety_identifier": "nobody is reported",
        "prompt_cache_key": "what is cached is found by its tokens",
        "prompt_cache_retention": "the server's own options say it",
        "prompt_cache_options": "the server's own options say it",
        "prediction": "the answer is the same without it",
        "verbosity": "no model here knows it",
        "cache_prompt": "always on",
    },
    refused={
        "audio": "expected no sound, for models here read and write text",
        "modalities": "expected text alone",
        "web_search_options": "expected no search, for there is none here",
        "moderation": "expected none, for there is none here",
        "functions": "expected `tools`, which replaced it",
        "function_call": "expected `tool_choice`, which replaced it",
    },
)
TEXT_PARTS = ("text", "refusal")
TEXTS: dict[type[Event], str] = {Text: "content", Thought: "reasoning_content"}


def read(body: dict[str, Any], limits: Limits = LIMITS) -> Ask:
    if body.get("modalities") == ["text"]:
        body = {name: value for name, value in body.items() if name != "modalities"}
    FIELDS.check(body)
    values = Fields(body, limits=limits)
    values.need("messages")
    tools = tuple(_tool(each) for each in values.objects("tools", limits.tools))
    effort = values.text("reasoning_effort")
    variables = dict(values.inner("chat_template_kwargs"))
    thinking = variables.pop("enable_thinking", None)
    if thinking is None and effort in ("none", "minimal"):
        thinking = False
    logprobs = values.whole("top_logprobs", 0, limits.logprobs)
    most = values.whole("max_completion_tokens", 1)
    return Ask(
        model=values.text("model"),
        messages=[_message(each) for each in values.objects("messages", limits.messages)],
        tools=tools,
        choice=_choice(values, tools),
        parallel=values.flag("parallel_tool_calls", True),
        sampling={**sampling_of(values), **({"logit_bias": bias_of(values)} if "logit_bias" in values else {})},
        max_tokens=values.whole("max_tokens", 1) if most is None else most,
        stop=values.stops("stop"),
        form=_form(values.inner("response_format")),
        logprobs=(logprobs or 0) if values.flag("logprobs") else None,
        answers=values.whole("n", 1, limits.answers) or 1,
        stream=values.flag("stream"),
        stream_usage=values.inner("stream_options").flag("include_usage"),
        thinking=thinking,
        variables=variables,
        optional={"reasoning_effort": effort} if effort else {},
        ignore_end=values.flag("ignore_eos"),
    )


def _message(values: Fields) -> Message:
    role = values.text("role", among=("system", "developer", "user", "assistant", "tool"))
    message: Message = {"role": "system" if role == "developer" else role}
    if "content" in values:
        message["content"] = texts_of(values, "content", TEXT_PARTS)
    elif role != "assistant":
        values.need("content")
    if role == "assistant":
        reasoning = values.text("reasoning_content") or values.text("reasoning")
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = [_call(each) for each in values.objects("tool_calls", values.limits.tools)]
        if calls:
            message["tool_calls"] = calls
        message.setdefault("content", "")
    if role == "tool":
        message["tool_call_id"] = values.text("tool_call_id")
    if "name" in values:
        message["name"] = values.text("name")
    return message


def _call(values: Fields) -> dict[str, Any]:
    if values.text("type", "function") != "function":
        raise values.wrong("type", "'function'")
    function = values.inner("function")
    name = function.needed_text("name", 256)
    return {
        "id": values.text("id"),
        "type": "function",
        "function": {"name": name, "arguments": function.text("arguments")},
    }


def _tool(values: Fields) -> Tool:
    if values.text("type", "function") != "function":
        raise values.wrong("type", "'function'")
    function = values.inner("function")
    return Tool(
        function.needed_text("name", 256),
        function.text("description"),
        function.schema("parameters"),
        function.flag("strict"),
    )


def _choice(values: Fields, tools: Sequence[Tool]) -> str:
    given = values.get("tool_choice")
    if isinstance(given, dict):
        name = values.inner("tool_choice").inner("function").needed_text("name", 256)
        if all(tool.name != name for tool in tools):
            raise values.wrong("tool_choice", "one of the tools", name)
        return f"tool:{name}"
    choice = values.text("tool_choice", "auto", among=("auto", "none", "required"))
    if choice == "required" and not tools:
        raise values.wrong("tools", "a tool, for one is required")
    return choice


def _form(values: Fields) -> Form | None:
    kind = values.text("type", "text", among=("text", "json_object", "json_schema"))
    if kind == "text":
        return None
    if kind == "json_object":
        return Form()
    inner = values.inner("json_schema")
    inner.need("schema")
    return Form(inner.schema("schema"), inner.flag("strict", True), "response_format.json_schema.schema")


# ---- Answers ----------------------------------------------------------------------------------------------------


def finish_of(ending: Ending, called: bool) -> str:
    if ending.cut:
        return "length"
    return "tool_calls" if called else "stop"


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.answer,
        "total_tokens": usage.prompt + usage.answer,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.thought},
    }


def logprobs_body(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": each.text,
                "logprob": each.logprob,
                "bytes": list(each.data),
                "top_logprobs": [
                    {"token": text, "logprob": logprob, "bytes": list(data)} for text, data, logprob in each.top
                ],
            }
            for each in tokens
        ],
        "refusal": None,
    }


def _call_body(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def whole(ask: Ask, id: str, results: Sequence[Result], usage: Usage) -> dict[str, Any]:
    choices = []
    for index, result in enumerate(results):
        said = result.said
        message: dict[str, Any] = {"role": "assistant", "content": said.text or (None if said.calls else "")}
        if said.thought:
            message["reasoning_content"] = said.thought
        if said.calls:
            message["tool_calls"] = [_call_body(call) for call in said.calls]
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": None if ask.logprobs is None else logprobs_body(result.logprobs),
                "finish_reason": finish_of(result.ending, bool(said.calls)),
            }
        )
    return {**_head(ask, id, "chat.completion"), "choices": choices, "usage": usage_body(usage)}


def _head(ask: Ask, id: str, kind: str) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": int(time.time()), "model": ask.model}


class ChatStream:
    """The same as server-sent events."""

    def __init__(self, ask: Ask, id: str) -> None:
        self._ask = ask
        self._head = _head(ask, id, "chat.completion.chunk")
        self._calls: dict[int, int] = {}  # of each answer, so far
        self._around: dict[tuple[int, str], tuple[str, str]] = {}  # texts of an answer

    def begin(self, prompt_tokens: int) -> str:
        return "".join(self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._ask.answers))

    def add(self, index: int, events: Sequence[Event], logprobs: Sequence[TokenLogprob] = ()) -> str:
        if not logprobs:
            return "".join([self._told(index, event) for event in events])
        deltas = [delta for event in events for delta in self._delta(index, event)]
        *others, last = deltas or [{}]
        lines = [self._chunk(index, delta) for delta in others]
        return "".join([*lines, self._chunk(index, last, logprobs=logprobs)])

    def end(self, index: int, ending: Ending) -> str:
        return self._chunk(index, {}, finish=finish_of(ending, index in self._calls))

    def close(self, usage: Usage) -> str:
        last = ""
        if self._ask.stream_usage:
            last = data({**self._head, "choices": [], "usage": usage_body(usage)})
        return last + DONE

    def ping(self, read: int, prompt_tokens: int) -> str:
        """A comment, which clients skip."""
        return comment(f"prompt {read} of {prompt_tokens} tokens")

    def error(self, body: dict[str, Any]) -> str:
        return data(body)

    def _told(self, index: int, event: Event) -> str:
        if not isinstance(event, Text | Thought):
            return "".join(self._chunk(index, delta) for delta in self._delta(index, event))
        key = index, TEXTS[type(event)]
        if key not in self._around:
            self._around[key] = around(self._chunk(index, {key[1]: ""}))
        before, after = self._around[key]
        return f"{before}{json_text(event.text)}{after}"

    def _delta(self, index: int, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, Text | Thought):
            return [{TEXTS[type(event)]: event.text}]
        if isinstance(event, CallBegin):
            self._calls[index] = self._calls.get(index, -1) + 1
            function = {"name": event.name, "arguments": ""}
            return [self._call(index, {"id": event.id, "type": "function", "function": function})]
        if isinstance(event, Arguments):
            return [self._call(index, {"function": {"arguments": event.text}})]
        return []

    def _call(self, index: int, part: dict[str, Any]) -> dict[str, Any]:
        return {"tool_calls": [{"index": self._calls[index], **part}]}

    def _chunk(
        self, index: int, delta: dict[str, Any], *, logprobs: Sequence[TokenLogprob] = (), finish: str | None = None
    ) -> str:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs_body(logprobs) if logprobs else None,
            "finish_reason": finish,
        }
        extra = {"usage": None} if self._ask.stream_usage else {}
        return data({**self._head, "choices": [choice], **extra})
