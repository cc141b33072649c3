"""From a request to what the model reads: templates of every family get calls as they take them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moeflux.errors import StateError
from moeflux.serve.prompt import prepared, prompt_of, without_billing
from moeflux.serve.request import Ask, Tool
from moeflux.serve.tools.families import FAMILIES, HERMES, Family
from moeflux.text.chat import ChatFormat
from moeflux.text.tokenizer import Tokenizer
from support.vocabularies import byte_level

BY_NAME = {family.name: family for family in FAMILIES}
TOOL = Tool("weather", "Tells it.", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = {"id": "call_9", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, {**CALL, "id": "call_10"}]},
    {"role": "tool", "tool_call_id": "call_10", "content": "sun"},
]
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = "{{ tools|tojson }}{{ reasoning_effort }}{% if enable_thinking is false %}no{% endif %}" + PLAIN


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def plain(tokenizer: Tokenizer) -> ChatFormat:
    return ChatFormat(tokenizer, {"default": PLAIN})


@pytest.fixture(scope="module")
def with_tools(tokenizer: Tokenizer) -> ChatFormat:
    return ChatFormat(tokenizer, {"default": WITH_TOOLS})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_arguments_are_as_templates_take_them(family: Family, with_tools: ChatFormat) -> None:
    messages, tools = prepared(Ask("m", TALK, tools=(TOOL,)), with_tools, family)
    assert tools == [TOOL.for_template()]
    first, second = (call for message in messages for call in message.get("tool_calls", ()))
    assert [len(message["tool_calls"]) for message in messages if "tool_calls" in message] == (
        [1, 1] if family.one_call else [2]
    )
    arguments = first["function"]["arguments"]
    assert (json.loads(arguments) if family.arguments_as_text else arguments) == {"city": "Bern"}
    assert isinstance(arguments, str) == (family.name in ("deepseek", "kimi"))
    ids = ("functions.weather:0", "functions.weather:1") if family.name == "kimi" else ("call_9", "call_10")
    assert (first["id"], second["id"]) == ids
    if family.result is None:  # results have messages of their own
        assert messages[-1]["tool_call_id"] == ids[1]
    assert TALK[2]["tool_calls"][0] is CALL and CALL["id"] == "call_9", "the request itself was changed"


def test_arguments_that_are_no_object_are_still_an_argument(with_tools: ChatFormat) -> None:
    call = {**CALL, "function": {"name": "weather", "arguments": "[1"}}
    messages, _ = prepared(Ask("m", [{"role": "assistant", "tool_calls": [call]}]), with_tools, HERMES)
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == {"arguments": "[1"}


def test_a_template_without_tools_gets_them_as_text(plain: ChatFormat) -> None:
    text = prompt_of(Ask("m", TALK, tools=(TOOL,)), plain, HERMES).text
    assert text.startswith("<|im_start|>system\nBe kind.\n\nYou can call these functions")
    assert '{"name": "weather", "description": "Tells it."' in text
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>\n<tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>" in text
    without = prompt_of(Ask("m", TALK[1:2], tools=(TOOL,)), plain, HERMES).text
    assert without.startswith("<|im_start|>system\nYou can call these functions")
    assert "weather" not in prompt_of(Ask("m", TALK[1:2], tools=(TOOL,), choice="none"), plain, HERMES).text


def test_a_template_with_calls_and_without_tools_gets_tools_as_text(tokenizer: Tokenizer) -> None:
    """As DeepSeek's: it writes calls and their results by itself."""
    calls = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments + '!' }}{% endfor %}{% endfor %}"
    form = ChatFormat(tokenizer, {"default": calls + PLAIN})
    text = prompt_of(Ask("m", TALK, tools=(TOOL,)), form, BY_NAME["deepseek"]).text
    assert text.startswith('{"city": "Bern"}!{"city": "Bern"}!<|im_start|>system\nBe kind.\n\nYou can call')
    assert BY_NAME["deepseek"].example in text and "<tool_call>" not in text
    assert "<|im_start|>tool\nsun<|im_end|>" in text


def test_wishes_reach_templates_that_know_them(plain: ChatFormat, with_tools: ChatFormat) -> None:
    ask = Ask("m", TALK[1:2], thinking=False, optional={"reasoning_effort": "low"})
    assert prompt_of(ask, with_tools, HERMES).text.startswith("nulllowno<|im_start|>user")
    assert prompt_of(ask, plain, HERMES).text.startswith("<|im_start|>user")
    assert prompt_of(Ask("m", TALK[1:2], thinking=True), plain, HERMES).text.startswith("<|im_start|>user")


def test_an_answer_goes_on_from_its_beginning(plain: ChatFormat) -> None:
    whole = prompt_of(Ask("m", TALK[1:2]), plain, HERMES)
    begun = prompt_of(Ask("m", TALK[1:2], prefill="It <|im_end|> is"), plain, HERMES)
    assert begun.text == whole.text + "It <|im_end|> is"
    assert begun.tokens[: len(whole.tokens)] == whole.tokens
    end = plain.tokenizer.id_of("<|im_end|>")
    assert end not in begun.tokens[len(whole.tokens) :], "what a client writes became a token of its own"


def test_instructions_stand_where_templates_have_a_place_for_them(tokenizer: Tokenizer, plain: ChatFormat) -> None:
    two = [TALK[0], {"role": "system", "content": "Be brief."}, TALK[1]]
    assert prompt_of(Ask("m", two), plain, HERMES).text.startswith(
        "<|im_start|>system\nBe kind.\n\nBe brief.<|im_end|>"
    )
    late = [TALK[1], TALK[0]]
    assert "<|im_start|>system\nBe kind." in prompt_of(Ask("m", late), plain, HERMES).text
    strict = "{% if messages[1:]|selectattr('role', 'equalto', 'system')|list %}{{ raise_exception('no') }}{% endif %}"
    form = ChatFormat(tokenizer, {"default": strict + PLAIN})
    assert "<|im_start|>user\nBe kind." in prompt_of(Ask("m", late), form, HERMES).text
    refusing = ChatFormat(tokenizer, {"default": "{{ raise_exception('never') }}"})
    with pytest.raises(StateError, match="never"):
        prompt_of(Ask("m", late[:1]), refusing, HERMES)


# ---- Lines that change ------------------------------------------------------------------------------------------

LINE = "x-anthropic-billing-header: cc_version=2.1.330.a1b; cc_entrypoint=sdk-cli; cch=00000;"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (LINE, ""),
        (f"{LINE}\nYou are kind.", "You are kind."),
        (f"{LINE}\n\nYou are kind.\n", "You are kind.\n"),
        (f"One.\n{LINE}\nTwo.", "One.\nTwo."),
        ("The x-anthropic-billing-header: is a line.", "The x-anthropic-billing-header: is a line."),
        ("Nothing.", "Nothing."),
    ],
)
def test_the_billing_line_is_taken_out(text: str, left: str) -> None:
    assert without_billing(text) == left


def test_the_billing_line_is_taken_out_of_instructions_alone(plain: ChatFormat) -> None:
    said = [{"role": "system", "content": LINE}, {"role": "user", "content": LINE}]
    messages, _ = prepared(Ask("m", said), plain, HERMES)
    assert messages == said[1:]
    two = [{"role": "system", "content": f"{LINE.replace('00000', word)}\nBe kind."} for word in ("11111", "22222")]
    one, other = (prompt_of(Ask("m", [each, *TALK[1:2]]), plain, HERMES) for each in two)
    assert one == other
