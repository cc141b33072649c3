"""What clients send to the server: every body is understood, or refused with words that say where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moeflux import serve
from moeflux.serve import chat_completions, completions, messages, responses
from moeflux.serve.fields import RequestError, parse_body
from moeflux.serve.request import Ask

HELLO: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: list[dict[str, Any]] = [
    {"messages": [HELLO, {"role": "assistant", "tool_calls": [CALL]},
                  {"role": "tool", "tool_call_id": "c", "content": "x"}],
     "tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "f"}}, "logit_bias": {"1": -100},
     "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "n": 2, "stop": ["a"], "seed": 3},
    {"prompt": [1, 2], "max_tokens": 3, "logprobs": 2, "stream": True, "stream_options": {"include_usage": True}},
    {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "moeflux:aGk="}, HELLO,
               {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x"}], "instructions": "Be kind.",
     "tools": [{"type": "custom", "name": "p"}, {"type": "function", "name": "f"}], "reasoning": {"effort": "low"}},
    {"max_tokens": 4, "system": [{"type": "text", "text": "a"}], "messages": [HELLO, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm"}, {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "b"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x", "is_error": True}]}],
     "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}, "thinking": {"type": "enabled"}},
]  # fmt: skip
READERS = (
    chat_completions.read,
    completions.read,
    lambda body: responses.read(body, responses.Stored()),
    messages.read,
    messages.read_count,
)


def seeds() -> list[bytes]:
    return [bytes([place]) + json.dumps(body).encode() for place, body in enumerate(BODIES)]


COVERED = (str(Path(serve.__file__).parent),)


def one(data: bytes) -> None:
    if not data:
        return
    try:
        ask = READERS[data[0] % len(READERS)](parse_body(data[1:]))
    except RequestError as error:
        assert ": " in str(error) and 400 <= error.status < 500
        return
    assert isinstance(ask, Ask)
