"""What clients send: every field is used, ignored by a table, or refused by name, and what is wrong is said where."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic.types.message_count_tokens_params as count_params
import anthropic.types.message_create_params as message_params
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import openai.types.responses.response_create_params as response_params
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux.errors import Error
from moeflux.serve import chat_completions, completions, messages, responses
from moeflux.serve.fields import LIMITS, Limits, RequestError, parse_body
from moeflux.serve.request import Ask, Form
from moeflux.serve.responses import Stored, sealed
from moeflux.serve.tables import TABLES, table_text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serve.md"

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = {"model": "m", "messages": HELLO}
MESSAGES = {"model": "m", "max_tokens": 8, "messages": HELLO}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}


def read_responses(body: dict[str, Any]) -> Ask:
    return responses.read(body, Stored())


READERS: dict[str, tuple[Callable[[dict[str, Any]], Ask], dict[str, Any]]] = {
    "/v1/chat/completions": (chat_completions.read, CHAT),
    "/v1/completions": (completions.read, {"model": "m", "prompt": "Once"}),
    "/v1/responses": (read_responses, {"model": "m", "input": "Hello"}),
    "/v1/messages": (messages.read, MESSAGES),
    "/v1/messages/count_tokens": (messages.read_count, {"model": "m", "messages": HELLO}),
}


# ---- The tables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("/v1/chat/completions", chat_params.CompletionCreateParamsBase),
        ("/v1/completions", completion_params.CompletionCreateParamsBase),
        ("/v1/responses", response_params.ResponseCreateParamsBase),
        ("/v1/messages", message_params.MessageCreateParamsBase),
        ("/v1/messages/count_tokens", count_params.MessageCountTokensParams),
    ],
)
def test_the_tables_have_what_the_official_clients_know(path: str, params: Any) -> None:
    table = TABLES[path]
    fields = set(inspect.get_annotations(params))
    headers = {"workspace_id", "user_profile_id"}
    later = {"access_programs", "image"}  # of models that are not here; unknown, so refused
    assert fields - {*table.used, *table.ignored, *table.refused} - headers <= later
    assert not (table.used.keys() & table.ignored.keys() or table.ignored.keys() & table.refused.keys())


def test_the_page_has_the_tables() -> None:
    text = PAGE.read_text()
    for path in TABLES:
        assert table_text(path) in text, f"docs/serve.md: the table of {path} should be:\n{table_text(path)}"


@pytest.mark.parametrize("path", TABLES)
def test_fields_are_ignored_or_refused_as_the_table_says(path: str) -> None:
    read, body = READERS[path]
    table = TABLES[path]
    for name in table.ignored:
        assert read({**body, name: {"a": 1}}) == read(body)
    for name in table.refused:
        with pytest.raises(RequestError, match=rf"^{name}: expected ") as refused:
            read({**body, name: {"a": 1}})
        assert refused.value.field == name
        assert read({**body, name: None}) == read(body)
    with pytest.raises(RequestError, match="'temprature': expected a field of this interface"):
        read({**body, "temprature": 1})


# ---- What is wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "change", "where", "words"),
    [
        ("/v1/chat/completions", {"messages": None}, "messages", "expected a value, found none"),
        ("/v1/chat/completions", {"messages": "Hello"}, "messages", "expected a list"),
        ("/v1/chat/completions", {"messages": ["Hello"]}, "messages[0]", "expected an object, found text"),
        ("/v1/chat/completions", {"messages": [{"role": "robot"}]}, "messages[0].role", "found 'robot'"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content", "found none"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "expected text or refusal, found 'image_url'",
        ),
        ("/v1/chat/completions", {"temperature": "hot"}, "temperature", "expected a number from 0 to 100"),
        ("/v1/chat/completions", {"temperature": True}, "temperature", "found True"),
        ("/v1/chat/completions", {"top_p": 1.5}, "top_p", "found 1.5"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens", "from 1 to"),
        ("/v1/chat/completions", {"n": 17}, "n", "from 1 to 16"),
        ("/v1/chat/completions", {"stop": [""]}, "stop", "expected texts of 1 to 1024 characters"),
        ("/v1/chat/completions", {"stop": ["a"] * 17}, "stop", "expected at most 16 texts"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ("/v1/chat/completions", {"logit_bias": {"a": 1}}, "logit_bias.a", "the number of a token"),
        ("/v1/chat/completions", {"logit_bias": {"1": 101}}, "logit_bias.1", "from -100 to 100"),
        ("/v1/chat/completions", {"tools": [{"type": "magic"}]}, "tools[0].type", "expected 'function'"),
        ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "tools[0].function.name", "found none"),
        ("/v1/chat/completions", {"tool_choice": "required"}, "tools", "expected a tool, for one is required"),
        (
            "/v1/chat/completions",
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
            "expected one of the tools, found 'other'",
        ),
        ("/v1/chat/completions", {"response_format": {"type": "xml"}}, "response_format.type", "found 'xml'"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            "found none",
        ),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt", "expected one text that is not empty"),
        ("/v1/completions", {"prompt": ""}, "prompt", "expected one text"),
        ("/v1/completions", {"prompt": [-1]}, "prompt", "or one list of tokens"),
        ("/v1/responses", {"input": [{"type": "hologram"}]}, "input[0].type", "expected a message, a call"),
        ("/v1/responses", {"previous_response_id": "resp_x"}, "previous_response_id", "expected that of a response"),
        ("/v1/messages", {"max_tokens": None}, "max_tokens", "expected a value, found none"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
            "expected what is text, found 'image'",
        ),
        ("/v1/messages", {"tools": [{"name": "f"}]}, "tools[0].input_schema", "found none"),
        ("/v1/messages", {"thinking": {"type": "perhaps"}}, "thinking.type", "found 'perhaps'"),
    ],
)
def test_what_is_wrong_is_said_where(path: str, change: dict[str, Any], where: str, words: str) -> None:
    read, body = READERS[path]
    with pytest.raises(RequestError, match=re.escape(words)) as refused:
        read({**body, **change})
    assert refused.value.field == where and str(refused.value).startswith(f"{where}: ")


def test_texts_of_people_stay_out_of_errors() -> None:
    with pytest.raises(RequestError) as refused:
        chat_completions.read({**CHAT, "messages": [{"role": "user", "content": 3, "name": "x"}]})
    assert "found 3" in str(refused.value)
    with pytest.raises(RequestError, match="found a text of 14"):
        chat_completions.read({**CHAT, "messages": "my secret text"})


def test_bodies_have_limits() -> None:
    with pytest.raises(RequestError, match="expected at most 10 bytes") as refused:
        parse_body(b"{" + b" " * 10 + b"}", Limits(body=10))
    assert refused.value.status == 413
    for body, words in [
        (b"", "body"), (b"[]", "found a list"), (b"{", "body"), (b'{"a": 1, "a": 2}', "body"), (b"\xff", "body"),
        (b'{"a":' + b"[" * 100_000, "body"),
    ]:  # fmt: skip
        with pytest.raises(RequestError, match=words):
            parse_body(body)
    limits = Limits(messages=2, tools=1, schema=40, depth=3)
    for change, words in [
        ({"messages": HELLO * 3}, "messages: expected at most 2 entries, found 3"),
        ({"tools": [FUNCTION] * 2}, "tools: expected at most 1 entries"),
        ({"tools": [FUNCTION]}, "expected a schema of at most 40 bytes"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [[[[]]]]}}}]}, "at most 3 deep"),
    ]:
        with pytest.raises(RequestError, match=words):
            chat_completions.read({**CHAT, **change}, limits)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "name", "function", "id", "arguments", "input", "schema"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.sampled_from(sorted(READERS)), st.data())
def test_whatever_is_sent_is_understood_or_refused(path: str, data: Any) -> None:
    read, body = READERS[path]
    names = sorted({*TABLES[path].used})
    change = data.draw(st.dictionaries(st.sampled_from(names), anything, max_size=4))
    try:
        assert isinstance(read({**body, **change}), Ask)
    except Error as error:
        assert isinstance(error, RequestError) and ": " in str(error)


# ---- What it comes to -------------------------------------------------------------------------------------------


def test_a_chat() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    ask = chat_completions.read(
        {
            **CHAT,
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
                {"role": "tool", "tool_call_id": "c1", "content": "sun"},
            ],
            "tools": [FUNCTION],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "temperature": 0.5,
            "top_p": 0,
            "top_k": -1,
            "seed": -1,
            "max_tokens": 3,
            "max_completion_tokens": 4,
            "stop": "x",
            "logprobs": True,
            "logit_bias": {"5": -100},
            "n": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "reasoning_effort": "none",
            "parallel_tool_calls": False,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            "modalities": ["text"],
        }
    )
    assert [message["role"] for message in ask.messages] == ["system", "user", "assistant", "tool"]
    assert ask.messages[0]["content"] == "a\nb"
    assert ask.messages[2] == {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    assert ask.sampling == {
        "temperature": 0.5, "top_p": 1e-9, "top_k": 0, "seed": (1 << 64) - 1, "logit_bias": {5: float("-inf")},
    }  # fmt: skip
    assert (ask.choice, ask.max_tokens, ask.stop, ask.logprobs) == ("tool:weather", 4, ("x",), 0)
    assert (ask.answers, ask.stream, ask.stream_usage, ask.parallel, ask.thinking) == (2, True, True, False, False)
    assert ask.form == Form(SCHEMA, True)
    assert ask.tools[0].for_template() == FUNCTION


def test_messages_of_anthropic() -> None:
    ask = messages.read(
        {
            **MESSAGES,
            "system": [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}],
            "messages": [
                {"role": "user", "content": "Weather?"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "Let me see."},
                        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Zürich"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                        {"type": "tool_result", "tool_use_id": "t2", "content": "gone", "is_error": True},
                        {"type": "text", "text": "So?"},
                    ],
                },
                {"role": "assistant", "content": "It is "},
            ],
            "tools": [
                {"name": "weather", "input_schema": SCHEMA},
                {"type": "web_search_20250305", "name": "web_search"},
            ],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
            "stop_sequences": ["x"],
        }
    )
    assert [message["role"] for message in ask.messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert ask.messages[0]["content"] == "a\nb"
    said = ask.messages[2]
    assert (said["content"], said["reasoning_content"]) == ("Let me see.", "hm")
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"city": "Zürich"}
    assert [message["content"] for message in ask.messages[3:]] == ["sun", "Error: gone", "So?"]
    assert (ask.prefill, ask.choice, ask.parallel, ask.thinking) == ("It is", "required", False, True)
    assert [tool.name for tool in ask.tools] == ["weather"]
    assert (ask.form, ask.optional, ask.stop) == (Form(SCHEMA), {"reasoning_effort": "high"}, ("x",))
    assert messages.read({**MESSAGES, "max_tokens": 0}).max_tokens == 0


def test_items_of_responses() -> None:
    stored = Stored()
    ask = responses.read(
        {
            "model": "m",
            "instructions": "Be kind.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Patch it."}]},
                {"type": "reasoning", "summary": [], "encrypted_content": sealed("hm")},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
                {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "***"},
                {"type": "function_call_output", "call_id": "c1", "output": "sun"},
                {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
                {"type": "web_search_call", "id": "w"},
                {"type": "reasoning", "summary": [], "encrypted_content": "of another service"},
            ],
            "tools": [
                {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True},
                {"type": "custom", "name": "patch", "description": "Patches.", "format": {"definition": "start: x"}},
                {"type": "web_search"},
                {"type": "namespace", "name": "n", "tools": []},
                {"type": "local_shell"},
            ],
            "max_output_tokens": 1,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "low", "summary": "auto"},
        },
        stored,
    )
    assert [message["role"] for message in ask.messages] == ["system", "user", "assistant", "tool", "tool"]
    said = ask.messages[2]
    assert (said["content"], said["reasoning_content"]) == ("Yes.", "hm")
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["weather", "patch"]
    assert json.loads(said["tool_calls"][1]["function"]["arguments"]) == {"input": "***"}
    assert [(tool.name, tool.text) for tool in ask.tools] == [("weather", False), ("patch", True)]
    assert "start: x" in ask.tools[1].description
    assert (ask.max_tokens, ask.optional, ask.thinking) == (1, {"reasoning_effort": "low"}, None)


def test_a_response_goes_on_from_another() -> None:
    stored = Stored(most=400)
    stored.keep("resp_1", [{"role": "system", "content": "Old."}, *HELLO, {"role": "assistant", "content": "Hi"}])
    body = {"model": "m", "input": "And?", "previous_response_id": "resp_1"}
    assert [message["content"] for message in responses.read(body, stored).messages] == ["Old.", "Hello", "Hi", "And?"]
    changed = responses.read({**body, "instructions": "New."}, stored)
    assert [message["content"] for message in changed.messages] == ["New.", "Hello", "Hi", "And?"]
    stored.keep("resp_2", HELLO * 10)
    with pytest.raises(RequestError, match="send the whole conversation") as refused:
        responses.read(body, stored)
    assert refused.value.status == 404


def test_limits_say_what_they_are() -> None:
    assert LIMITS.body == 32 << 20 and LIMITS.answers == 16
