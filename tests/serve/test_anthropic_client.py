"""Anthropic's official client against the server: sync, async and streaming."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from support.live_server import Live

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
SURE: dict[str, Any] = {"extra_body": {"temperature": 0}}  # the client has no name for it, and the interface does
PARIS = "The capital of France is Paris."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "d", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather",  "arguments": {"city":"Bern"}}\n</tool_call>'


@pytest.fixture
def client(server: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0, timeout=60) as client:
        yield client


def test_a_message(client: anthropic.Anthropic) -> None:
    told = client.messages.create(model="m", max_tokens=30, messages=FRANCE, **SURE)
    assert [(block.type, block.text) for block in told.content] == [("text", PARIS)]  # type: ignore[union-attr]
    assert (told.stop_reason, told.usage.output_tokens) == ("end_turn", 8)
    counted = client.messages.count_tokens(model="m", messages=FRANCE)
    assert counted.input_tokens == told.usage.input_tokens + (told.usage.cache_read_input_tokens or 0)
    assert client.models.list().data[0].id == "builtin"


def test_a_message_as_a_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="m", max_tokens=30, messages=FRANCE, **SURE) as stream:
        assert "".join(stream.text_stream) == PARIS
        told = stream.get_final_message()
    assert told.stop_reason == "end_turn"
    assert (told.usage.cache_read_input_tokens or 0) > 0 and told.usage.output_tokens == 8


def test_thoughts_and_calls(client: anthropic.Anthropic, server: Live) -> None:
    server.scheduler.script = lambda prompt: f"<think>\nhm\n</think>\n\nLet me.\n{CALL}"
    asked: dict[str, Any] = {"model": "m", "max_tokens": 99, "messages": FRANCE, "tools": [WEATHER]}
    with client.messages.stream(thinking={"type": "adaptive"}, **asked) as stream:
        streamed = stream.get_final_message()
    whole = client.messages.create(**asked)
    for told in (streamed, whole):
        assert [block.type for block in told.content] == ["thinking", "text", "tool_use"]
        thought, text, call = told.content
        assert (thought.thinking, text.text, call.input) == ("hm", "Let me.", {"city": "Bern"})  # type: ignore[union-attr]
        assert told.stop_reason == "tool_use"


def test_a_conversation_with_a_tool(client: anthropic.Anthropic, server: Live) -> None:
    server.scheduler.script = lambda prompt: "Sun." if "<tool_response>" in prompt else f"<think>hm</think>{CALL}"
    asked: dict[str, Any] = {"model": "m", "max_tokens": 99, "tools": [WEATHER]}
    first = client.messages.create(messages=FRANCE, **asked)
    call = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}  # type: ignore[union-attr]
    said = [*FRANCE, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=said, **asked).content[0].text == "Sun."  # type: ignore[union-attr]
    line = "x-anthropic-billing-header: cc_version=2; cch={};\nBe kind."
    prompts = []
    for number in (1, 2):
        client.messages.create(messages=FRANCE, system=line.format(number), **asked)
        prompts.append(server.scheduler.seen[-1][0].prompt)
    assert prompts[0] == prompts[1], "a line that changes was part of the prompt"


def test_what_ends_an_answer(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": FRANCE, **SURE}
    told = client.messages.create(max_tokens=3, **asked)
    assert (told.stop_reason, told.usage.output_tokens) == ("max_tokens", 3)
    warmed = client.messages.create(max_tokens=0, **asked)
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
    told = client.messages.create(max_tokens=30, stop_sequences=[" France"], **asked)
    assert (told.stop_reason, told.stop_sequence, told.content[0].text) == (  # type: ignore[union-attr]
        "stop_sequence", " France", "The capital of",
    )  # fmt: skip
    begun = [*FRANCE, {"role": "assistant", "content": "The capital of France"}]
    told = client.messages.create(model="m", max_tokens=30, messages=begun, **SURE)  # type: ignore[arg-type]
    assert told.content[0].text == " is Paris."  # type: ignore[union-attr]


def test_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="maximum context length is 4096 tokens") as refused:
        client.messages.create(model="m", max_tokens=3, messages=[{"role": "user", "content": "word " * 6000}])
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="container: expected none"):
        client.messages.create(model="m", max_tokens=3, messages=FRANCE, extra_body={"container": "c"})


def test_async_clients_all_at_once(server: Live) -> None:
    async def ask(client: anthropic.AsyncAnthropic, number: int) -> str:
        asked: dict[str, Any] = {"model": "m", "max_tokens": 30, "messages": FRANCE, **SURE}
        if number % 2:
            return (await client.messages.create(**asked)).content[0].text  # type: ignore[union-attr]
        async with client.messages.stream(**asked) as stream:
            return "".join([part async for part in stream.text_stream])

    async def all_of_them() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(16)))

    assert asyncio.run(all_of_them()) == [PARIS] * 16
