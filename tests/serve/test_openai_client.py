"""OpenAI's official client against the server: sync, async and streaming."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.live_server import Live

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "weather",  "arguments": {"city":"Bern"}}\n</tool_call>'


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=60) as client:
        yield client


def once(said: str) -> Any:
    return lambda prompt: said


# ---- Models -----------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("builtin", "moeflux")
    assert client.models.retrieve("builtin").id == "builtin"
    with pytest.raises(openai.NotFoundError, match="model: expected 'builtin', found another"):
        client.models.retrieve("gpt")


# ---- Chat completions -------------------------------------------------------------------------------------------


def test_a_chat(client: openai.OpenAI) -> None:
    told = client.chat.completions.create(
        model="builtin", messages=FRANCE, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = told.choices[0]
    assert (choice.message.content, choice.finish_reason, told.model) == (PARIS, "stop", "builtin")
    assert told.usage is not None and told.usage.total_tokens == told.usage.prompt_tokens + told.usage.completion_tokens
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(each.token for each in choice.logprobs.content).startswith(PARIS)
    assert all(len(each.top_logprobs) == 2 for each in choice.logprobs.content)


def test_a_chat_as_a_stream(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="builtin", messages=FRANCE, temperature=0, stream=True, stream_options=options
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == PARIS
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8


def test_the_helper_for_streams_puts_a_chat_together(client: openai.OpenAI, server: Live) -> None:
    server.scheduler.script = once(f"Let me.\n{CALL}")
    with client.chat.completions.stream(model="m", messages=FRANCE, tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
        told = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and "content.delta" in kinds
    assert told.message.content == "Let me." and told.finish_reason == "tool_calls"
    assert json.loads(told.message.tool_calls[0].function.arguments) == {"city": "Bern"}


def test_the_prompt_is_found_again(client: openai.OpenAI) -> None:
    for _ in range(2):
        told = client.chat.completions.create(model="m", messages=FRANCE, temperature=0, max_tokens=1)
        assert told.choices[0].finish_reason == "length"
        assert told.usage is not None and told.usage.prompt_tokens_details is not None
    assert told.usage.prompt_tokens_details.cached_tokens > 0


def test_stop_seed_and_n(client: openai.OpenAI) -> None:
    told = client.chat.completions.create(model="m", messages=FRANCE, temperature=0, stop=[" France"])
    assert (told.choices[0].message.content, told.choices[0].finish_reason) == ("The capital of", "stop")
    story: list[Any] = [{"role": "user", "content": "Tell me a story."}]
    asked: dict[str, Any] = {"model": "m", "messages": story, "temperature": 1.0, "seed": 7, "max_tokens": 12}
    several = client.chat.completions.create(n=3, **asked)
    texts = [choice.message.content for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert client.chat.completions.create(**asked).choices[0].message.content == texts[0]
    asked["seed"] = 9
    assert client.chat.completions.create(**asked).choices[0].message.content == texts[2]
    streamed = ["", "", ""]
    asked["seed"] = 7
    for chunk in client.chat.completions.create(n=3, stream=True, **asked):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_thoughts_stand_apart(client: openai.OpenAI, server: Live) -> None:
    server.scheduler.script = once("<think>\nhm\n</think>\n\nYes.")
    told = client.chat.completions.create(model="m", messages=FRANCE)
    assert (told.choices[0].message.content, told.choices[0].message.reasoning_content) == ("Yes.", "hm")  # type: ignore[attr-defined]
    assert told.usage.completion_tokens_details.reasoning_tokens > 0  # type: ignore[union-attr]


def test_a_conversation_with_a_tool(client: openai.OpenAI, server: Live) -> None:
    server.scheduler.script = lambda prompt: "It is sunny." if "<tool_response>" in prompt else CALL
    asked: dict[str, Any] = {"model": "m", "tools": [WEATHER]}
    first = client.chat.completions.create(messages=FRANCE, **asked).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.tool_calls is not None
    call = first.message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Bern"}  # type: ignore[union-attr]
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    told = client.chat.completions.create(messages=[*FRANCE, first.message, result], **asked)  # type: ignore[list-item]
    assert told.choices[0].message.content == "It is sunny."
    before, after = (handle.prompt for handle, _ in server.scheduler.seen)
    answer = server.desk.tokenizer.encode_marked(CALL)
    assert after[: len(before) + len(answer)] == before + answer, "what was sampled did not come back as it was"


def test_json_by_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 9}}, "required": ["age"]}
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {**schema, "additionalProperties": False}, "strict": True},
    }
    told = client.chat.completions.create(model="m", messages=FRANCE, response_format=form, max_tokens=40)
    assert json.loads(told.choices[0].message.content or "")["age"] <= 9
    form["json_schema"]["schema"] = {"type": "object", "not": {}}
    with pytest.raises(openai.BadRequestError, match="found not") as refused:
        client.chat.completions.create(model="m", messages=FRANCE, response_format=form)
    assert refused.value.param == "response_format.json_schema.schema"


def test_a_call_that_must_come(client: openai.OpenAI) -> None:
    tool = json.loads(json.dumps(WEATHER))
    tool["function"]["parameters"]["properties"]["city"] = {"enum": ["Bern", "Rome"]}
    told = client.chat.completions.create(
        model="m", messages=FRANCE, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=80
    )
    (call,) = told.choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments)["city"] in ("Bern", "Rome")  # type: ignore[union-attr]


# ---- Completions ------------------------------------------------------------------------------------------------


def test_a_completion(client: openai.OpenAI, server: Live) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 5}
    told = client.completions.create(logprobs=1, **asked)
    assert told.choices[0].finish_reason == "length" and told.usage is not None and told.usage.completion_tokens == 5
    assert told.choices[0].logprobs is not None and len(told.choices[0].logprobs.tokens or ()) == 5
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **asked))
    assert streamed == told.choices[0].text
    tokens = server.desk.tokenizer.encode("Once upon a time")
    assert client.completions.create(**{**asked, "prompt": tokens}).choices[0].text == streamed


# ---- Responses --------------------------------------------------------------------------------------------------


def test_a_response(client: openai.OpenAI) -> None:
    told = client.responses.create(model="m", input="What is the capital of France?", temperature=0)
    assert (told.output_text, told.status) == (PARIS, "completed")
    again = client.responses.create(model="m", input="And?", previous_response_id=told.id, max_output_tokens=1)
    assert again.status == "incomplete" and again.usage is not None and told.usage is not None
    assert again.usage.input_tokens > told.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match="previous_response_id: expected"):
        client.responses.create(model="m", input="And?", previous_response_id="resp_none")
    forgotten = client.responses.create(model="m", input="x", max_output_tokens=1, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="m", input="And?", previous_response_id=forgotten.id)


def test_a_response_as_a_stream(client: openai.OpenAI, server: Live) -> None:
    server.scheduler.script = once(f"<think>hm</think>Let me.\n{CALL}")
    tool: Any = {"type": "function", **WEATHER["function"], "strict": False}
    with client.responses.stream(model="m", input="Weather?", tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        told = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [item.type for item in told.output] == ["reasoning", "message", "function_call"]
    assert told.output_text == "Let me."
    assert json.loads(told.output[2].arguments) == {"city": "Bern"}  # type: ignore[union-attr]


def test_a_custom_tool(client: openai.OpenAI, server: Live) -> None:
    server.scheduler.script = once('<tool_call>{"name": "patch", "arguments": {"input": "*** a"}}</tool_call>')
    tools: Any = [{"type": "custom", "name": "patch"}, {"type": "web_search"}]
    told = client.responses.create(model="m", input="Patch it.", tools=tools)
    (call,) = told.output
    assert (call.type, call.input) == ("custom_tool_call", "*** a")  # type: ignore[union-attr]


# ---- Errors, and many at once -----------------------------------------------------------------------------------


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"temperature: expected a number from 0 to 100") as refused:
        client.chat.completions.create(model="m", messages=FRANCE, temperature=1000)
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    long: list[Any] = [{"role": "user", "content": "word " * 6000}]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens, found 60") as refused:
        client.chat.completions.create(model="m", messages=long)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="path: expected one of this server's"):
        client.embeddings.create(model="m", input="x")


def test_async_clients_all_at_once(server: Live) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        if number % 2:
            told = await client.chat.completions.create(model="m", messages=FRANCE, temperature=0)
            return told.choices[0].message.content or ""
        parts = await client.chat.completions.create(model="m", messages=FRANCE, temperature=0, stream=True)
        return "".join([part.choices[0].delta.content or "" async for part in parts])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    assert asyncio.run(all_of_them()) == [PARIS] * 64
