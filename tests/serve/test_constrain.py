"""Answers that keep to a grammar: what is allowed, what is not, and what cannot be kept to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import builtin
from moeflux.errors import Error
from moeflux.serve.answer import AnswerReader
from moeflux.serve.constrain import Grammars
from moeflux.serve.events import Said, together
from moeflux.serve.fields import RequestError
from moeflux.serve.grammars import grammar_of
from moeflux.serve.request import Ask, Form, Tool
from moeflux.serve.tools.families import FAMILIES, HERMES, Family
from moeflux.text.sampling import Sampler, Sampling
from moeflux.text.tokenizer import Tokenizer
from support.constrained import Maker, allowed, ends

BY_NAME = {family.name: family for family in FAMILIES}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "maxLength": 6},
        "mode": {"type": "integer", "minimum": 0, "maximum": 777},
        "kind": {"enum": ["file", "folder"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["path", "mode"],
}
WRITE, NOW = Tool("write", "", SCHEMA), Tool("now", "", {})
REQUIRED = Ask("m", tools=(WRITE, NOW), choice="required")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(builtin.path())


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, ends(tokenizer), len(tokenizer) + 40)


@pytest.fixture(scope="module")
def make(tokenizer: Tokenizer, grammars: Grammars) -> Maker:
    return Maker(tokenizer, grammars)


def read(family: Family, text: str, thinking: bool = False) -> Said:
    reader = AnswerReader(thinking, family, {"write": SCHEMA, "now": {}})
    return together(reader.add(family.heard(text)) + reader.finish())


# ---- Calls ------------------------------------------------------------------------------------------------------

BAR, LOW = "\uff5c", "\u2581"
DSML = f"{BAR}DSML{BAR}"


def mark(name: str) -> str:
    return f"<{BAR}{name.replace(' ', LOW)}{BAR}>"


ARGUMENTS = '{"path": "a.py", "mode": 7, "kind": "file"}'
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "write", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "qwen-xml": "<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n"
    "<parameter=mode>\n7\n</parameter>\n"
    "<parameter=kind>\nfile\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a.py</arg_value>\n<arg_key>mode</arg_key>\n"
    "<arg_value>7</arg_value>\n<arg_key>kind</arg_key>\n<arg_value>file</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="write">\n<parameter name="path">a.py</parameter>\n'
    '<parameter name="mode">7</parameter>\n<parameter name="kind">file</parameter>\n</invoke>\n</minimax:tool_call>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek": f"{mark('tool calls begin')}{mark('tool call begin')}write{mark('tool sep')}{ARGUMENTS}"
    f"{mark('tool call end')}{mark('tool calls end')}",
    "dsml": f"<{DSML}function_calls>\n"
    f'<{DSML}invoke name="write">\n<{DSML}parameter name="path" string="true">a.py</{DSML}parameter>\n'
    f'<{DSML}parameter name="mode" string="false">7</{DSML}parameter>\n'
    f'<{DSML}parameter name="kind" string="true">file</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>',
    "harmony": f"<|channel|>commentary to=functions.write <|constrain|>json<|message|>{ARGUMENTS}",
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_must_come(name: str, make: Maker) -> None:
    family, text = BY_NAME[name], CALLS[name]
    assert make.end_of(make.of(REQUIRED, family), text) is None
    assert json.loads(read(family, text).calls[0].arguments) == json.loads(ARGUMENTS)
    assert make.end_of(make.of(REQUIRED, family), "I would rather not.") == ""
    wrong = text.replace("file", "fail")
    assert (make.end_of(make.of(REQUIRED, family), wrong) or "").endswith(("f", "", '"', "\n"))
    assert make.end_of(make.of(REQUIRED, family), text.replace("write", "read")) is not None
    assert make.end_of(make.of(REQUIRED, family), text.replace("7", "seven")) is not None


@pytest.mark.parametrize("name", CALLS)
def test_the_tool_that_is_named_must_be_called(name: str, make: Maker) -> None:
    family, named = BY_NAME[name], Ask("m", tools=(WRITE, NOW), choice="tool:now")
    assert make.end_of(make.of(named, family), CALLS[name]) is not None
    made = make.at_random(make.of(named, family), 1, family)
    assert {call.name for call in read(family, made).calls} == {"now"}


@pytest.mark.parametrize("name", CALLS)
def test_one_call_or_more(name: str, make: Maker) -> None:
    family, text = BY_NAME[name], CALLS[name]
    if name in ("kimi", "deepseek"):
        begin = text.index("<", 1)
        inner = text[begin : text.rindex("<")]
        two = text[:begin] + inner * 2 + text[text.rindex("<") :]
    elif name in ("minimax", "dsml"):
        begin, end = text.index("<", 1), text.rindex("</")
        two = text[:begin] + text[begin:end] * 2 + text[end:]
    else:
        two = f"{text}{'<|end|><|start|>assistant' if family.channels else chr(10)}{text}"
    assert len(read(family, two).calls) == 2
    assert make.end_of(make.of(REQUIRED, family), two) is None
    single = Ask("m", tools=(WRITE, NOW), choice="required", parallel=False)
    assert make.end_of(make.of(single, family), text) is None
    assert make.end_of(make.of(single, family), two) is not None


@pytest.mark.parametrize("name", ["hermes", "kimi", "deepseek", "harmony"])
@pytest.mark.parametrize("seed", range(4))
def test_calls_at_random_keep_to_the_schema(name: str, seed: int, make: Maker) -> None:
    family = BY_NAME[name]
    text = make.at_random(make.of(Ask("m", tools=(WRITE,), choice="required", parallel=False), family), seed, family)
    said = read(family, text)
    assert said.text == "" and len(said.calls) == 1
    arguments = json.loads(said.calls[0].arguments)
    assert arguments.keys() <= SCHEMA["properties"].keys() and {"path", "mode"} <= arguments.keys()
    assert 0 <= arguments["mode"] <= 777 and len(arguments["path"]) <= 6
    assert arguments.get("kind", "file") in ("file", "folder")


def test_the_older_form_of_deepseek(make: Maker) -> None:
    text = (
        f"{mark('tool calls begin')}{mark('tool call begin')}function{mark('tool sep')}write\n```json\n{ARGUMENTS}\n```"
        f"{mark('tool call end')}{mark('tool calls end')}"
    )
    family = BY_NAME["deepseek"]
    assert make.end_of(make.of(REQUIRED, family, template="```json"), text) is None
    assert json.loads(read(family, text).calls[0].arguments) == json.loads(ARGUMENTS)


def test_a_thought_may_come_first(make: Maker) -> None:
    text = CALLS["hermes"]
    assert make.end_of(make.of(REQUIRED, template="</think>"), f"<think>\nhm\n</think>\n\n{text}") is None
    assert make.end_of(make.of(REQUIRED, thinking=True), f"hm\n</think>\n\n{text}") is None
    assert make.end_of(make.of(REQUIRED, thinking=True), text) is not None
    said = read(HERMES, f"hm\n</think>\n\n{text}", thinking=True)
    assert (said.thought, len(said.calls)) == ("hm", 1)


def test_strict_tools_are_held_to_their_schemas_when_they_are_called(make: Maker) -> None:
    ask = Ask("m", tools=(Tool("write", "", SCHEMA, strict=True),))
    assert make.end_of(make.of(ask), "No call today.") is None
    assert make.end_of(make.of(ask), f"Here: {CALLS['hermes']}") is None
    assert make.end_of(make.of(ask), f"Here: {CALLS['hermes'].replace('7', 'true')}") is not None


def test_where_anything_may_be_said_there_is_no_grammar() -> None:
    for ask in (Ask("m"), Ask("m", tools=(WRITE,)), Ask("m", tools=(WRITE,), choice="none")):
        assert grammar_of(ask, HERMES, False, "", lambda token: None) is None


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(RequestError, match="tool_choice: expected auto or none beside a form"):
        grammar_of(Ask("m", tools=(WRITE,), choice="required", form=Form()), HERMES, False, "", lambda token: None)
    with pytest.raises(RequestError, match="messages: expected no beginning"):
        grammar_of(Ask("m", form=Form(), prefill="{"), HERMES, False, "", lambda token: None)


# ---- JSON -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_json_of_a_schema(seed: int, make: Maker) -> None:
    closed = {**SCHEMA, "additionalProperties": False}
    text = make.at_random(make.of(Ask("m", form=Form(closed))), seed)
    value = json.loads(text)
    assert {"path", "mode"} <= value.keys() <= SCHEMA["properties"].keys()
    assert json.dumps(value, ensure_ascii=False).replace(" ", "") == text.replace(" ", "") or "\\" in text
    assert re.search(r'[{\[]\s|\s\s(?=")', re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)) is None, "white space was free"


def test_any_json_object(make: Maker) -> None:
    constraint = make.of(Ask("m", form=Form()))
    assert make.end_of(constraint, '{"a": [1, {"b": null}], "c": "d"}') is None
    assert make.end_of(make.of(Ask("m", form=Form())), "[1]") == ""


@pytest.mark.parametrize(
    ("schema", "named", "only_strictly"),
    [
        ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, "not", True),
        ({"type": "array", "uniqueItems": True, "contains": {}}, "contains, uniqueItems", True),
        ({"if": {}, "then": {}}, "if, then", True),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "oneOf constraints are not supported", True),
        ({"type": "string", "format": "shape"}, "Unknown format: shape", False),
        ({"type": "string", "pattern": "("}, "regex parse error", False),
        ({"type": "magic"}, "Invalid type: magic", False),
        ({"$ref": "https://example.com/schema"}, "expected a schema that can be kept to, found", False),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_name(
    schema: dict[str, Any], named: str, only_strictly: bool, make: Maker
) -> None:
    with pytest.raises(RequestError, match=named) as refused:
        make.of(Ask("m", form=Form(schema)))
    assert refused.value.field == "tools" and str(refused.value).startswith("tools: expected a schema")
    if only_strictly:
        make.of(Ask("m", form=Form(schema, strict=False)))


def test_a_form_that_takes_too_much_ends_the_answer(make: Maker) -> None:
    huge = {"type": "string", "pattern": "((a{0,9999}){0,9999}){0,9999}"}
    with pytest.raises(RequestError, match="grammar: expected one of which the next tokens can be told"):
        make.end_of(make.of(Ask("m", form=Form(huge))), '"' + "a" * 40 + '"')


# ---- Masks ------------------------------------------------------------------------------------------------------


def test_answers_to_one_request_have_their_own_place(make: Maker) -> None:
    one = make.of(Ask("m", form=Form()))
    first = one([])
    brace = make.tokenizer.encode("{")
    assert not np.array_equal(one(brace), first)
    other = one.again()
    assert np.array_equal(other([]), first)
    assert np.array_equal(other(brace), one(brace))
    assert not one.complete


def test_tokens_beyond_the_vocabulary_are_never_allowed(make: Maker) -> None:
    bits = make.of(Ask("m", tools=(Tool("f", "", {}, strict=True),)))([])
    count = len(make.tokenizer)
    assert len(bits) == -(-(count + 40) // 32)
    assert all(id < count for id in allowed(bits))
    assert count - 200 < len(allowed(bits)) < count, "special tokens are not text"


def test_a_token_that_was_not_allowed_ends_the_answer(make: Maker) -> None:
    constraint = make.of(Ask("m", form=Form()))
    with pytest.raises(Error, match="grammar: expected tokens that it allows"):
        constraint(make.tokenizer.encode("no"))


def test_the_sampler_takes_the_masks(make: Maker) -> None:
    """The model that tells stories writes JSON."""
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "green"]}, "age": {"type": "integer", "maximum": 99}},
        "required": ["color", "age"],
        "additionalProperties": False,
    }
    constraint = make.of(Ask("m", form=Form(schema)))
    with moeflux.load(builtin.path(), threads=1) as model, model.session() as session:
        vocab = model.variant.vocab_size
        logits = session.prefill(model.tokenizer.encode("Once upon a time"))
        sampler, tokens = Sampler(Sampling(temperature=1.0, seed=3), vocab, []), list[int]()
        while len(tokens) < 60:
            bits = constraint(tokens)[: -(-vocab // 32)]
            token = sampler.choose(logits, allowed=bits).token
            if token in model.end_tokens:
                break
            tokens.append(token)
            logits = session.step(token)
    value = json.loads(make.tokenizer.decode(tokens))
    assert value["color"] in ("red", "green") and value["age"] <= 99


# ---- Every keyword ----------------------------------------------------------------------------------------------

TEXT, NUMBER, LIST, OBJECT = ({"type": kind} for kind in ("string", "integer", "array", "object"))
INNER = {"a": {"type": "string"}}
KEYWORDS: dict[str, dict[str, Any]] = {
    "additionalItems": {**LIST, "items": [TEXT], "additionalItems": False},
    "additionalProperties": {**OBJECT, "properties": INNER, "additionalProperties": NUMBER},
    "allOf": {"allOf": [TEXT, {"maxLength": 3}]},
    "anyOf": {"anyOf": [TEXT, NUMBER]},
    "const": {"const": {"a": 1}},
    "contains": {**LIST, "contains": NUMBER},
    "dependencies": {**OBJECT, "dependencies": {"a": ["b"]}},
    "dependentRequired": {**OBJECT, "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {**OBJECT, "dependentSchemas": {"a": {"required": ["b"]}}},
    "$dynamicAnchor": {**TEXT, "$dynamicAnchor": "a"},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "else": {"else": TEXT},
    "enum": {"enum": ["a", 1, None]},
    "exclusiveMaximum": {**NUMBER, "exclusiveMaximum": 3},
    "exclusiveMinimum": {**NUMBER, "exclusiveMinimum": 3},
    "format": {**TEXT, "format": "date-time"},
    "if": {"if": TEXT, "then": {"maxLength": 3}},
    "items": {**LIST, "items": NUMBER},
    "maxContains": {**LIST, "contains": NUMBER, "maxContains": 2},
    "maxItems": {**LIST, "maxItems": 2},
    "maxLength": {**TEXT, "maxLength": 2},
    "maxProperties": {**OBJECT, "maxProperties": 2},
    "maximum": {**NUMBER, "maximum": 2},
    "minContains": {**LIST, "contains": NUMBER, "minContains": 2},
    "minItems": {**LIST, "minItems": 2},
    "minLength": {**TEXT, "minLength": 2},
    "minProperties": {**OBJECT, "minProperties": 2},
    "minimum": {**NUMBER, "minimum": 2},
    "multipleOf": {**NUMBER, "multipleOf": 2},
    "not": {"not": TEXT},
    "oneOf": {"oneOf": [TEXT, {"minLength": 2}]},
    "pattern": {**TEXT, "pattern": "^a+$"},
    "patternProperties": {**OBJECT, "patternProperties": {"^a": NUMBER}},
    "prefixItems": {**LIST, "prefixItems": [TEXT, NUMBER]},
    "properties": {**OBJECT, "properties": INNER},
    "propertyNames": {**OBJECT, "propertyNames": {"maxLength": 3}},
    "$ref": {"$ref": "#/$defs/a", "$defs": INNER},
    "required": {**OBJECT, "properties": INNER, "required": ["a"]},
    "then": {"then": TEXT},
    "unevaluatedItems": {**LIST, "unevaluatedItems": False},
    "unevaluatedProperties": {**OBJECT, "unevaluatedProperties": False},
    "uniqueItems": {**LIST, "uniqueItems": True},
}


def test_the_page_lists_the_keywords_that_are_refused(make: Maker) -> None:
    refused = []
    for keyword, schema in KEYWORDS.items():
        try:
            make.of(Ask("m", form=Form(schema)))
        except RequestError as error:
            assert keyword in str(error) or "contains" in str(error), error
            refused.append(f"`{keyword}`")
    page = (Path(__file__).resolve().parents[2] / "docs" / "serve.md").read_text()
    assert f"These keywords cannot be kept to: {', '.join(refused)}." in " ".join(page.split()), refused
