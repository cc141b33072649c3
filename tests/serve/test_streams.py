"""Answers as clients expect them: whole and as events, in order, each of a form that the official clients know."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import anthropic.types
import openai
import openai.types
import openai.types.chat
import openai.types.responses
import pytest
from pydantic import TypeAdapter

from moeflux.errors import BudgetError, Refused
from moeflux.serve import chat_completions, completions, errors, messages, response_stream
from moeflux.serve.events import Arguments, CallBegin, CallEnd, Event, Text, Thought, joined, together
from moeflux.serve.fields import RequestError
from moeflux.serve.request import Ask, Ending, Result, TokenLogprob, Tool, Usage

EVENTS: list[Event] = [
    Thought("h"),
    Thought("m"),
    Text("Let "),
    Text("me."),
    CallBegin("call_1", "weather"),
    Arguments('{"city": '),
    Arguments('"Bern"}'),
    CallEnd(),
    CallBegin("call_2", "patch"),
    Arguments('{"input": "***"}'),
    CallEnd(),
]
USAGE = Usage(prompt=100, cached=60, answer=20, thought=2)
TOKENS = [TokenLogprob("Let", b"Let", -0.5, (("Let", b"Let", -0.5), ("\ufffd", b"\xc3", -2.0)))]
TOOLS = (Tool("weather", "", {}), Tool("patch", "", {}, text=True))

CHAT = Ask("m", tools=TOOLS, stream=True, stream_usage=True, logprobs=1)
PLAIN = Ask("m", stream=True)


def lines(stream: str) -> list[dict[str, Any]]:
    """The data of all events, each of which must be well-formed."""
    found = []
    assert stream.endswith("\n\n")
    for block in stream.removesuffix("\n\n").split("\n\n"):
        fields = block.split("\n")
        if fields[0].startswith(": ") or fields == ["data: [DONE]"]:
            continue
        value = json.loads(fields[-1].removeprefix("data: "))
        if len(fields) == 2:
            assert fields[0] == f"event: {value['type']}"
        found.append(value)
    return found


def streamed(writer: Any, events: Sequence[Event], ending: Ending, logprobs: Sequence[TokenLogprob] = ()) -> str:
    parts = [writer.begin(100), writer.ping(10, 100)]
    parts += [writer.add(0, [event], logprobs if isinstance(event, Text) else ()) for event in events]
    return "".join([*parts, writer.end(0, ending), writer.close(USAGE)])


def result(ending: Ending, events: Sequence[Event] = EVENTS, logprobs: Sequence[TokenLogprob] = ()) -> Result:
    return Result(together(events), ending, list(logprobs))


ENDINGS = [("end", "tool_calls"), ("stop", "tool_calls"), ("length", "length"), ("context", "length")]


# ---- Chat completions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("finish", "reason"), ENDINGS)
def test_chat(finish: Any, reason: str) -> None:
    ending = Ending(finish)
    body = chat_completions.whole(CHAT, "chatcmpl-1", [result(ending, EVENTS, TOKENS)], USAGE)
    told = openai.types.chat.ChatCompletion.model_validate(body)
    message = told.choices[0].message
    assert (message.content, message.reasoning_content) == ("Let me.", "hm")  # type: ignore[attr-defined]
    assert [call.function.arguments for call in message.tool_calls] == ['{"city": "Bern"}', '{"input": "***"}']
    assert told.choices[0].finish_reason == reason
    assert told.choices[0].logprobs.content[0].top_logprobs[1].bytes == [0xC3]
    assert (told.usage.prompt_tokens, told.usage.total_tokens) == (100, 120)
    assert told.usage.prompt_tokens_details.cached_tokens == 60
    assert told.usage.completion_tokens_details.reasoning_tokens == 2

    stream = streamed(chat_completions.ChatStream(CHAT, "chatcmpl-1"), EVENTS, ending, TOKENS)
    assert stream.endswith("data: [DONE]\n\n") and ": prompt 10 of 100 tokens\n\n" in stream
    chunks = [openai.types.chat.ChatCompletionChunk.model_validate(each) for each in lines(stream)]
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == "Let me."
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "hm"
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.id) for call in calls if call.id] == [(0, "call_1"), (1, "call_2")]
    assert "".join(call.function.arguments for call in calls if call.index == 0) == '{"city": "Bern"}'
    assert chunks[-2].choices[0].finish_reason == reason
    assert chunks[-1].choices == [] and chunks[-1].usage.prompt_tokens_details.cached_tokens == 60
    assert [chunk.choices[0].logprobs is not None for chunk in chunks[3:5]] == [True, True]


def test_a_chat_without_anything() -> None:
    body = chat_completions.whole(PLAIN, "i", [result(Ending("length"), [])], Usage(1))
    assert body["choices"][0]["message"] == {"role": "assistant", "content": ""}
    assert body["choices"][0]["logprobs"] is None
    chunks = lines(streamed(chat_completions.ChatStream(PLAIN, "i"), [], Ending("end")))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]


def test_several_answers_have_their_own_calls() -> None:
    writer = chat_completions.ChatStream(Ask("m", answers=2), "i")
    begun = lines(writer.begin(5))
    assert [chunk["choices"][0]["index"] for chunk in begun] == [0, 1]
    for index in (0, 1):
        (chunk,) = lines(writer.add(index, [CallBegin(f"c{index}", "f")]))
        assert (chunk["choices"][0]["index"], chunk["choices"][0]["delta"]["tool_calls"][0]["index"]) == (index, 0)


ODD = ['""', '"\\\n\t\u2028\0\x7f', "data: x\n\n", "<\u00e9\U0001f600>"]


@pytest.mark.parametrize("api", [chat_completions.ChatStream, completions.CompletionStream, messages.MessageStream])
def test_texts_are_those_that_were_said_whatever_they_hold(api: Any) -> None:
    """What is around a text is encoded once."""
    writer = api(Ask('m""', answers=1, stream=True, stream_usage=True), '""')
    begun = writer.begin(3)
    told = begun + "".join(writer.add(0, [kind(odd)]) for kind in (Thought, Text) for odd in ODD * 2)
    found: dict[str, str] = {}
    for each in lines(told):
        if "choices" in each:
            choice = each["choices"][0]
            assert (each["model"], each["id"], each.get("usage")) == ('m""', '""', None)
            delta = choice.get("delta", {"content": choice.get("text")})
        else:
            delta = each.get("delta", {})
        for name, value in delta.items():
            found[name] = found.get(name, "") + value
    said = "".join(ODD * 2)
    thoughts = [value for name, value in found.items() if name in ("reasoning_content", "thinking")]
    assert thoughts == ([] if api is completions.CompletionStream else [said])
    assert said in (found.get("content"), found.get("text"))


def test_events_that_came_together_are_told_as_few() -> None:
    few = joined(EVENTS)
    assert few[:2] == [Thought("hm"), Text("Let me.")] and few[3] == Arguments('{"city": "Bern"}')
    assert together(few) == together(EVENTS) and len(few) == len(EVENTS) - 3 and joined([]) == []
    apart = [CallBegin("1", "f"), CallEnd(), CallBegin("1", "f"), CallEnd()]
    assert joined(apart) == apart


# ---- Completions ------------------------------------------------------------------------------------------------


def test_completion() -> None:
    said: list[Event] = [Text("a"), Text("b")]
    ask = Ask("m", prompt="x", logprobs=2, stream=True, stream_usage=True)
    body = completions.whole(ask, "cmpl-1", [result(Ending("end"), said, TOKENS * 2)], USAGE)
    told = openai.types.Completion.model_validate(body)
    assert (told.choices[0].text, told.choices[0].finish_reason) == ("ab", "stop")
    assert told.choices[0].logprobs.text_offset == [0, 3]
    stream = streamed(completions.CompletionStream(ask, "cmpl-1"), said, Ending("length"), TOKENS)
    chunks = [
        openai._models.construct_type(type_=openai.types.Completion, value=each) for each in lines(stream)
    ]  # of which only the last has a reason
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "ab"
    assert [chunk.choices[0].logprobs.text_offset for chunk in chunks[:2]] == [[0], [3]]
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].usage.completion_tokens == 20


# ---- Anthropic's messages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        ("end", "tool_use"),
        ("stop", "stop_sequence"),
        ("length", "max_tokens"),
        ("context", "model_context_window_exceeded"),
        ("timeout", "max_tokens"),
    ],
)
def test_message(finish: Any, reason: str) -> None:
    ending = Ending(finish, "X" if finish == "stop" else None)
    body = messages.whole(PLAIN, "msg_1", [result(ending)], USAGE)
    told = anthropic.types.Message.model_validate(body)
    assert [block.type for block in told.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert told.content[2].input == {"city": "Bern"}
    assert (told.stop_reason, told.stop_sequence) == (reason, ending.stop_string)
    assert (told.usage.input_tokens, told.usage.cache_read_input_tokens, told.usage.output_tokens) == (40, 60, 20)

    events = lines(streamed(messages.MessageStream(PLAIN, "msg_1"), EVENTS, ending))
    for each in events:
        if each["type"] != "ping":
            TypeAdapter(anthropic.types.RawMessageStreamEvent).validate_python(each)
    kinds = [each["type"] for each in events]
    assert kinds[:3] == ["message_start", "ping", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    open_block: int | None = None
    for each in events:
        if each["type"] == "content_block_start":
            assert open_block is None and each["index"] == len(blocks)
            open_block = each["index"]
            blocks.append({**each["content_block"], "json": ""})
        elif each["type"] == "content_block_delta":
            assert each["index"] == open_block
            for name, value in each["delta"].items():
                key = {"partial_json": "json"}.get(name, name)
                if name != "type":
                    blocks[-1][key] = blocks[-1].get(key, "") + value
        elif each["type"] == "content_block_stop":
            assert each["index"] == open_block
            open_block = None
    for block in blocks:
        given = block.pop("json")
        if given:
            block["input"] = json.loads(given)
    assert blocks == body["content"]
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": ending.stop_string}
    assert events[-2]["usage"] == body["usage"]


def test_half_a_call_is_no_call() -> None:
    cut: list[Event] = [CallBegin("c", "write"), Arguments('{"text": "half'), CallEnd(False)]
    body = messages.whole(PLAIN, "m", [result(Ending("length"), cut)], USAGE)
    assert body["content"][0]["input"] == {} and body["stop_reason"] == "max_tokens"


# ---- Responses --------------------------------------------------------------------------------------------------

ECHO = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}}


@pytest.mark.parametrize(("finish", "status"), [("end", "completed"), ("length", "incomplete")])
def test_response(finish: Any, status: str) -> None:
    ask = Ask("m", tools=TOOLS, echo=ECHO, logprobs=1)
    body = response_stream.whole(ask, "resp_1", [result(Ending(finish), EVENTS, TOKENS)], USAGE)
    told = openai.types.responses.Response.model_validate(body)
    assert [item.type for item in told.output] == ["reasoning", "message", "function_call", "custom_tool_call"]
    assert (told.output_text, told.status) == ("Let me.", status)
    assert told.output[2].arguments == '{"city": "Bern"}' and told.output[3].input == "***"
    assert told.usage.input_tokens_details.cached_tokens == 60
    assert (told.incomplete_details is None) == (status == "completed")

    stream = streamed(response_stream.ResponseStream(ask, "resp_1"), EVENTS, Ending(finish), TOKENS)
    events = lines(stream)
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    for each in events:
        TypeAdapter(openai.types.responses.ResponseStreamEvent).validate_python(each)
    part = ["response.content_part.added", "delta", "delta", "done", "response.content_part.done"]
    kinds = [each["type"].rpartition(".")[2] if "delta" in each or "text.done" in each["type"] else each["type"]
             for each in events]  # fmt: skip
    assert kinds == [
        "response.created", "response.in_progress",
        "response.output_item.added", *part, "response.output_item.done",
        "response.output_item.added", *part, "response.output_item.done",
        "response.output_item.added", "delta", "delta", "response.function_call_arguments.done",
        "response.output_item.done",
        "response.output_item.added", "delta", "response.custom_tool_call_input.done", "response.output_item.done",
        f"response.{status}",
    ]  # fmt: skip
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert [strip(item) for item in done] == [strip(item) for item in body["output"]]


def strip(item: dict[str, Any]) -> dict[str, Any]:
    """Without what is made anew each time, and logprobs, which stand with each part of the text in a stream."""
    item = json.loads(json.dumps(item))
    for part in item.get("content", ()):
        part.pop("logprobs", None)
    return {name: value for name, value in item.items() if name != "id"}


def test_an_empty_response() -> None:
    """Agents ask for one token to see whether there is somebody."""
    body = response_stream.whole(Ask("m", echo=ECHO), "r", [result(Ending("length"), [])], Usage(5, 0, 1))
    told = openai.types.responses.Response.model_validate(body)
    assert (told.status, told.output, told.incomplete_details.reason) == ("incomplete", [], "max_output_tokens")


# ---- Errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "openai_kind", "anthropic_kind"),
    [
        (RequestError("a: b", "a"), 400, "invalid_request_error", "invalid_request_error"),
        (RequestError("a: b", "a", 404), 404, "not_found_error", "not_found_error"),
        (errors.ContextError(10, 5, 12), 400, "invalid_request_error", "invalid_request_error"),
        (BudgetError("no room"), 503, "server_error", "overloaded_error"),
        (KeyError("secret"), 500, "server_error", "api_error"),
    ],
)
def test_errors(error: Exception, status: int, openai_kind: str, anthropic_kind: str) -> None:
    assert errors.status_of(error) == status
    told = errors.openai_body(error)["error"]
    assert told["type"] == openai_kind and told["param"] == getattr(error, "field", None)
    body = errors.anthropic_body(error)
    assert body["type"] == "error" and body["error"]["type"] == anthropic_kind
    assert anthropic.types.ErrorResponse.model_validate(body).error.message == told["message"]
    assert "secret" not in told["message"]


def test_a_full_line_says_when_to_come_again() -> None:
    error = Refused("full")
    error.waiting, error.seconds = 3, 12.3
    assert errors.status_of(error) == 429 and errors.headers_of(error) == {"Retry-After": "13"}
    assert errors.headers_of(RequestError("a")) == {}
    closing = Refused("closing")
    assert errors.status_of(closing) == 503 and errors.headers_of(closing) == {"Retry-After": "1"}


def test_a_prompt_that_is_too_long_is_told_in_numbers() -> None:
    error = errors.ContextError(1000, 24, 512)
    assert "maximum context length is 512 tokens, found 1000 tokens of the prompt and 24 for the answer" in str(error)
    assert errors.openai_body(error)["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("make", [
    lambda: chat_completions.ChatStream(PLAIN, "i").error(errors.openai_body(BudgetError("x"))),
    lambda: messages.MessageStream(PLAIN, "i").error(errors.anthropic_body(BudgetError("x"))),
    lambda: response_stream.ResponseStream(Ask("m", echo=ECHO), "i").error(errors.openai_body(BudgetError("x"))),
])  # fmt: skip
def test_errors_in_the_midst_of_a_stream(make: Callable[[], str]) -> None:
    (value,) = lines(make())
    assert "x" in json.dumps(value)
