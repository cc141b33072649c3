"""Calls of tools as models write them: rightly, in every family, and wrongly, in the ways that are known. Whatever the
text is, and wherever it is cut, the same comes out and nothing is lost."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moeflux.serve.answer import AnswerReader
from moeflux.serve.events import Arguments, CallBegin, CallEnd, Event, Said, Text, Thought, together
from moeflux.serve.tools.families import FAMILIES, HERMES, Family, family_of
from moeflux.text.channels import MARKS
from moeflux.text.speech import GEMMA_MARKS

BY_NAME = {family.name: family for family in FAMILIES}

TOOLS: dict[str, Any] = {
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "mode": {"type": "integer"},
            "force": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "more": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
}
ARGUMENTS = {"path": "a/ü.py", "text": 'if a < b:\n    print("x")\n', "mode": 3, "force": True, "tags": ["a", "b"]}

BAR = "\uff5c"
DSML = f"{BAR}DSML{BAR}"


def deepseek(name: str) -> str:
    return f"<{BAR}{name.replace(' ', chr(0x2581))}{BAR}>"


def qwen(name: str, arguments: dict[str, Any]) -> str:
    inner = "".join(f"<parameter={key}>\n{spelled(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm(name: str, arguments: dict[str, Any], line: str = "\n") -> str:
    inner = "".join(
        f"<arg_key>{key}</arg_key>{line}<arg_value>{spelled(value)}</arg_value>{line}"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{line}{inner}</tool_call>"


def minimax(*made: tuple[str, dict[str, Any]], line: str = "\n") -> str:
    parts = [
        f'<invoke name="{name}">{line}'
        + "".join(f'<parameter name="{key}">{spelled(value)}</parameter>{line}' for key, value in arguments.items())
        + f"</invoke>{line}"
        for name, arguments in made
    ]
    return f"<minimax:tool_call>{line}{''.join(parts)}</minimax:tool_call>"


def dsml(*made: tuple[str, dict[str, Any]], line: str = "\n") -> str:
    parts = [
        f'<{DSML}invoke name="{name}">{line}'
        + "".join(
            f'<{DSML}parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">{spelled(value)}'
            f"</{DSML}parameter>{line}"
            for key, value in arguments.items()
        )
        + f"</{DSML}invoke>{line}"
        for name, arguments in made
    ]
    return f"<{DSML}function_calls>{line}{''.join(parts)}</{DSML}function_calls>"


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def kimi(*calls: tuple[str, dict[str, Any]]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{json.dumps(arguments)}"
        "<|tool_call_end|>"
        for place, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def deepseek_31(*calls: tuple[str, dict[str, Any]]) -> str:
    inner = "".join(
        f"{deepseek('tool call begin')}{name}{deepseek('tool sep')}{json.dumps(arguments)}{deepseek('tool call end')}"
        for name, arguments in calls
    )
    return deepseek("tool calls begin") + inner + deepseek("tool calls end")


def deepseek_3(*calls: tuple[str, dict[str, Any]]) -> str:
    inner = "\n".join(
        f"{deepseek('tool call begin')}function{deepseek('tool sep')}{name}\n```json\n{json.dumps(arguments)}\n```"
        f"{deepseek('tool call end')}"
        for name, arguments in calls
    )
    return deepseek("tool calls begin") + inner + deepseek("tool calls end")


def spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def read(
    family: str | Family, pieces: str | list[str], *, thinking: bool = False, cut: bool = False, tools: Any = TOOLS
) -> Said:
    return together(events(family, pieces, thinking=thinking, cut=cut, tools=tools))


def events(
    family: str | Family, pieces: str | list[str], *, thinking: bool = False, cut: bool = False, tools: Any = TOOLS
) -> list[Event]:
    ids = map("call_{}".format, itertools.count())
    reader = AnswerReader(thinking, BY_NAME[family] if isinstance(family, str) else family, tools, lambda: next(ids))
    found = [event for piece in ([pieces] if isinstance(pieces, str) else pieces) for event in reader.add(piece)]
    return found + reader.finish(cut)


def calls(said: Said) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in said.calls]


# ---- As it should be --------------------------------------------------------------------------------------------

WELL = {
    "qwen-xml": [qwen("write", ARGUMENTS) + "\n" + qwen("now", {})],
    "glm": [glm("write", ARGUMENTS) + "\n" + glm("now", {}), glm("write", ARGUMENTS, "") + glm("now", {}, "")],
    "minimax": [
        minimax(("write", ARGUMENTS), ("now", {})),
        minimax(("write", ARGUMENTS), line="") + "\n" + minimax(("now", {})),
    ],
    "dsml": [
        dsml(("write", ARGUMENTS), ("now", {})),
        dsml(("write", ARGUMENTS), ("now", {}), line=""),
    ],
    "hermes": [hermes("write", ARGUMENTS) + "\n" + hermes("now", {})],
    "kimi": [kimi(("write", ARGUMENTS), ("now", {}))],
    "deepseek": [deepseek_31(("write", ARGUMENTS), ("now", {})), deepseek_3(("write", ARGUMENTS), ("now", {}))],
}
GOOD = [(family, text) for family, texts in WELL.items() for text in texts]


@pytest.mark.parametrize(("family", "text"), GOOD)
def test_two_calls_after_a_text(family: str, text: str) -> None:
    said = read(family, f"Let me see.\n\n{text}")
    assert said.text == "Let me see."
    assert calls(said) == [("write", ARGUMENTS), ("now", {})]
    assert [call.id for call in said.calls] == ["call_0", "call_1"]
    assert all(call.complete for call in said.calls)


@pytest.mark.parametrize(("family", "text"), GOOD)
def test_thoughts_end_before_calls(family: str, text: str) -> None:
    said = read(family, f"hm\n</think>\n\n{text}", thinking=True)
    assert (said.thought, said.text, len(said.calls)) == ("hm", "", 2)
    said = read(family, f"<think>\nhm\n</think>\n\nSo: {text}")
    assert (said.thought, said.text, len(said.calls)) == ("hm", "So:", 2)


@pytest.mark.parametrize(("family", "text"), GOOD)
def test_a_call_ends_a_thought_that_was_not_closed(family: str, text: str) -> None:
    said = read(family, f"I write it.\n{text}", thinking=True)
    assert (said.thought, said.text) == ("I write it.", "")
    assert calls(said) == [("write", ARGUMENTS), ("now", {})]


@pytest.mark.parametrize(("family", "text"), GOOD)
def test_arguments_come_as_they_form(family: str, text: str) -> None:
    found = events(family, list(text))
    begin = next(place for place, event in enumerate(found) if isinstance(event, CallBegin))
    end = next(place for place, event in enumerate(found) if isinstance(event, CallEnd))
    assert end - begin > 40, "the text of the file came at once"


@pytest.mark.parametrize(("family", "text"), GOOD)
def test_without_tools_everything_is_text(family: str, text: str) -> None:
    assert read(family, text, tools={}) == Said(text=text)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_text_stays_as_it_is(family: Family) -> None:
    text = "  One <tool>, two {braces} and <b>three</b>:\n\n\tfour. \n"
    assert read(family, text) == Said(text=text)


def test_families_are_told_from_templates() -> None:
    template = "{{ '<tool_call>\\n<function=' + call.name + '>\\n' }}"
    assert family_of(template).name == "qwen-xml"
    assert family_of("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key>").name == "glm"
    assert family_of('{%- set begin = "<minimax:tool_call>" %}{{ call["arguments"] }}').name == "minimax"
    assert family_of(deepseek("tool call begin")).name == "deepseek"
    assert family_of(f"{{{{ '<{DSML}function_calls>' }}}}").name == "dsml"
    assert family_of("<|tool_call_begin|>").name == "kimi"
    assert family_of("{{ '<|tool_call>call:' + call.name }}").name == "gemma"
    assert family_of("<|start|>assistant<|channel|>final<|message|>").name == "harmony"
    assert family_of('<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}').name == "hermes"
    assert family_of("{{ message.content }}") is HERMES


# ---- As models slip ---------------------------------------------------------------------------------------------

ONE = [("write", {"path": "a"})]
WRITE, ARGUE, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
SLIPS = {
    "no close tag": ("hermes", '<tool_call>\n{"name": "write", "arguments": {"path": "a"}}'),
    "no close tag, another call": (
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"path": "a"}}\n<tool_call>{"name": "now", "arguments": {}}',
    ),
    "one brace too many": ("hermes", '<tool_call>{"name": "write", "arguments": {"path": "a"}}}</tool_call>'),
    "one brace too few": ("hermes", '<tool_call>{"name": "write", "arguments": {"path": "a"}</tool_call>'),
    "arguments as a string": ("hermes", r'<tool_call>{"name": "write", "arguments": "{\"path\": \"a\"}"}</tool_call>'),
    "arguments first": ("hermes", '<tool_call>{"arguments": {"path": "a"}, "name": "write"}</tool_call>'),
    "called parameters": ("hermes", '<tool_call>{"name": "write", "parameters": {"path": "a"}}</tool_call>'),
    "as the API has it": (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "write", "arguments": {"path": "a"}}}</tool_call>',
    ),
    "an id after it": ("hermes", '<tool_call>{"name": "write", "arguments": {"path": "a"}, "id": "x-1"}</tool_call>'),
    "two in one tag": (
        "hermes",
        '<tool_call>[{"name": "write", "arguments": {"path": "a"}}, {"name": "now", "arguments": {}}]</tool_call>',
    ),
    "two objects in one tag": (
        "hermes",
        '<tool_call>{"arguments": {"path": "a"}, "name": "write"}\n{"name": "now", "arguments": {}}</tool_call>',
    ),
    "a comma too many": ("hermes", '<tool_call>{"name": "write", "arguments": {"path": "a",}}</tool_call>'),
    "Python's constants": ("hermes", '<tool_call>{"name": "write", "arguments": {"force": True}}</tool_call>'),
    "a fence": ("hermes", '<tool_call>\n```json\n{"name": "write", "arguments": {"path": "a"}}\n```\n</tool_call>'),
    "JSON where tags belong": ("qwen-xml", '<tool_call>\n{"name": "write", "arguments": {"path": "a"}}\n</tool_call>'),
    "no opening tag": ("qwen-xml", "<function=write>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>"),
    "no closing tags": ("qwen-xml", "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>"),
    "no closing tag of a value": (
        "qwen-xml", "<tool_call>\n<function=write>\n<parameter=path>\na\n</function>\n</tool_call>"
    ),
    "no closing tag between values": (
        "qwen-xml",
        "<tool_call><function=write>\n<parameter=path>\na\n<parameter=mode>\n3\n</parameter></function></tool_call>",
    ),
    "no closing tag of the function": (
        "qwen-xml", "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n</tool_call>"
    ),
    "no bracket after the name": (
        "qwen-xml", "<tool_call>\n<function=write\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>"
    ),
    "values on the line of their tags": (
        "qwen-xml", "<tool_call><function=write><parameter=path>a</parameter></function></tool_call>"
    ),
    "a space after the name": ("glm", "<tool_call>write <arg_key>path</arg_key> <arg_value>a</arg_value> </tool_call>"),
    "no close tag, GLM": ("glm", "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n"),
    "no value tag": ("glm", "<tool_call>write\n<arg_key>path</arg_key>a</arg_value>\n</tool_call>"),
    "no section, MiniMax": ("minimax", '<invoke name="write">\n<parameter name="path">a</parameter>\n</invoke>'),
    "no closing tags, MiniMax": ("minimax", '<minimax:tool_call>\n<invoke name="write">\n<parameter name="path">a'),
    "no closing tag of the function, MiniMax": (
        "minimax",
        '<minimax:tool_call><invoke name="write"><parameter name="path">a</parameter></minimax:tool_call>',
    ),
    "no closing tag of a value, another call": (
        "minimax",
        '<minimax:tool_call><invoke name="write"><parameter name="path">a</invoke><invoke name="now"></invoke>',
    ),
    "no section, DSML": ("dsml", dsml(*ONE).split("function_calls>\n", 1)[1].rpartition("</")[0]),
    "no closing tags, DSML": ("dsml", dsml(*ONE).partition("</")[0]),
    "no closing tag of the function, DSML": ("dsml", dsml(*ONE).replace(f"</{DSML}invoke>\n", "")),
    "no closing tag of a value, DSML, another call": (
        "dsml", dsml(*ONE, ("now", {})).replace(f"</{DSML}parameter>\n", "")
    ),
    "no word about the value": ("dsml", dsml(*ONE).replace(' string="true"', "")),
    "JSON in place of parameters": (
        "dsml", f'<{DSML}function_calls>\n<{DSML}invoke name="write">\n{{"path": "a"}}\n</{DSML}invoke>\n</{DSML}fun'
        "ction_calls>"
    ),
    "JSON without an end, DSML": ("dsml", f'<{DSML}function_calls>\n<{DSML}invoke name="write">{{"path": "a"'),
    "JSON, DSML, another call": (
        "dsml", f'<{DSML}function_calls><{DSML}invoke name="write">{{"path": "a"}}</{DSML}invoke>'
        f'<{DSML}invoke name="now">{{}}</{DSML}invoke></{DSML}function_calls>'
    ),
    "no section": ("kimi", WRITE + "functions.write:0" + ARGUE + '{"path": "a"}' + END),
    "no prefix": ("kimi", '<|tool_call_begin|>write<|tool_call_argument_begin|>{"path": "a"}<|tool_call_end|>'),
    "no end": ("kimi", '<|tool_calls_section_begin|>' + WRITE + "write:3" + ARGUE + '{"path": "a"'),
    "a string, Kimi": ("kimi", WRITE + "functions.write:0" + ARGUE + r'"{\"path\": \"a\"}"' + END),
    "a fence, DeepSeek": (
        "deepseek",
        f"{deepseek('tool call begin')}write{deepseek('tool sep')}"
        f"```json\n{{\"path\": \"a\"}}\n```{deepseek('tool call end')}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("slip", SLIPS)
def test_slips_are_understood(slip: str) -> None:
    family, text = SLIPS[slip]
    said = read(family, text)
    assert said.text == ""
    first, *others = calls(said)
    assert first[0] == "write"
    assert first[1] in ({"path": "a"}, {"path": "a", "mode": 3}, {"force": True})
    assert others in ([], [("now", {})])
    assert bool(others) == ("another" in slip or "two" in slip)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "Write <tool_call> and then JSON."),
        ("hermes", '<tool_call>{"nome": "write"}</tool_call>'),
        ("hermes", "<tool_call>\nwrite(path)\n</tool_call>"),
        ("hermes", '<tool_call>{"name": "write", "arguments": 7}</tool_call>'),
        ("qwen-xml", "The form is <tool_call>, then a name."),
        ("qwen-xml", "The form is <function=name> in full."),
        ("qwen-xml", "<tool_call>\n<function= >\n</function>\n</tool_call>"),
        ("glm", "The tag <tool_call> opens a call."),
        ("minimax", "The form is <minimax:tool_call>, then a name."),
        ("minimax", 'The form is <invoke name="name"> in full.'),
        ("dsml", f"The form is <{DSML}function_calls>, then a name."),
        ("dsml", f'The form is <{DSML}invoke name="name"> in full.'),
        ("kimi", "<|tool_call_begin|>write<|tool_call_end|>"),
        ("kimi", "<|tool_call_begin|>a b<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("kimi", "<|tool_call_begin|>write<|tool_call_argument_begin|>[1]<|tool_call_end|>"),
        (
            "deepseek",
            f"{deepseek('tool call begin')}function{deepseek('tool sep')}a b\n{{}}{deepseek('tool call end')}",
        ),
    ],
)
def test_what_cannot_be_read_is_text(family: str, text: str) -> None:
    assert read(family, text) == Said(text=text)


def test_text_after_a_call_and_inside_it_is_not_lost() -> None:
    said = read("hermes", hermes("now", {})[:-12] + " Now we wait.</tool_call>\nAnd wait.\n")
    assert calls(said) == [("now", {})] and said.text == "Now we wait.\nAnd wait."
    said = read("qwen-xml", qwen("now", {}).replace("</function>", "I call it.\n</function>") + "\n\nDone.")
    assert calls(said) == [("now", {})] and said.text == "I call it.\n\nDone."


def test_values_may_be_about_tags() -> None:
    text = "Close with </parameter> and </function>, or <parameter=x>,\nor </tool_call>. <tool_call> opens."
    said = read("qwen-xml", qwen("write", {"path": "a", "text": text}))
    assert calls(said) == [("write", {"path": "a", "text": text})]
    text = 'Close with </parameter> and </invoke>, or <parameter name="x">. <minimax:tool_call> opens.'
    found = [("write", {"path": "a", "text": text}), ("now", {})]
    assert calls(read("minimax", minimax(*found))) == found
    text = f'Close with </{DSML}parameter> and </{DSML}invoke>, or <{DSML}parameter name="x" string="true">.'
    found = [("write", {"path": "a", "text": text}), ("now", {})]
    assert calls(read("dsml", dsml(*found))) == found
    text = "Close with </arg_value> or </tool_call>."
    assert calls(read("glm", glm("write", {"text": text}))) == [("write", {"text": text})]


@pytest.mark.parametrize(("family", "written"), [("minimax", minimax), ("dsml", dsml)])
def test_a_section_holds_calls_of_tools_that_there_are_not(family: str, written: Any) -> None:
    """Each is as good as the first, which no name makes a text."""
    made = [("read", {"path": "a"}), ("fly", {}), ("write", {"path": "b"})]
    assert calls(read(family, written(*made))) == made


def test_what_stands_beside_a_value_says_what_it_is() -> None:
    """And not the schema, which the model may have forgotten, or which says nothing."""
    arguments = {"path": 7, "mode": "7", "tags": "[]", "more": None, "new": {"a": [True, 1.5]}, "text": "true"}
    assert calls(read("dsml", dsml(("write", arguments)))) == [("write", arguments)]
    text = dsml(("write", {"path": [1]})).replace("[1]", "no JSON")
    assert calls(read("dsml", text)) == [("write", {"path": "no JSON"})]


def test_a_call_that_was_cut_stays_open() -> None:
    """Half a file must not look like a whole one."""
    for family, text in GOOD:
        whole = text.index("print")
        said = read(family, text[:whole], cut=True)
        (call,) = said.calls
        assert not call.complete and said.text == ""
        with pytest.raises(ValueError, match="Unterminated string"):
            json.loads(call.arguments)


def test_a_call_is_complete_when_only_its_close_tag_was_cut() -> None:
    said = read("hermes", '<tool_call>{"name": "now", "arguments": {}}', cut=True)
    assert said.calls[0].complete


# ---- Any text, cut anywhere -------------------------------------------------------------------------------------

SCRAPS = [
    *"\n \"{}[],:>a", "<think>", "</think>", "<tool_call>", "</tool_call>", "write", "now", '{"name": "write", ',
    '"arguments": {', '"path": "', "\\", "<function=", "</function>", "<parameter=", "</parameter>", "path", "mode",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "functions.write:0", "```json\n", "```", "function",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>", deepseek("tool calls begin"), deepseek("tool call begin"), deepseek("tool sep"),
    deepseek("tool call end"), deepseek("tool calls end"), *MARKS,
    *GEMMA_MARKS, "call:", "write{path:", "thought\n", "'",
    "commentary", "to=functions.write", *SLIPS["arguments first"][1:], *WELL["qwen-xml"], "é",
]  # fmt: skip


@settings(max_examples=400)
@example(HERMES, ["<tool_call>", "<", "tool_call>"], [1, 2], False, True)
@given(
    st.sampled_from(FAMILIES),
    st.lists(st.sampled_from(SCRAPS), max_size=14),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_what_comes_out_does_not_depend_on_the_cuts(
    family: Family, scraps: list[str], places: list[int], thinking: bool, cut: bool
) -> None:
    text = family.heard("".join(scraps))
    whole = read(family, text, thinking=thinking, cut=cut)
    bounds = sorted({0, len(text), *(place for place in places if place < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    assert read(family, pieces, thinking=thinking, cut=cut) == whole
    assert read(family, list(text), thinking=thinking, cut=cut) == whole
    for call in whole.calls:
        assert call.complete or cut


@pytest.mark.parametrize("case", [*GOOD, *SLIPS.values()])
def test_calls_do_not_depend_on_the_cuts(case: tuple[str, str]) -> None:
    family, text = case
    whole = read(family, text)
    for place in range(len(text)):
        assert read(family, [text[:place], text[place:]]) == whole
    assert read(family, list(text)) == whole


@settings(max_examples=200)
@given(st.sampled_from(FAMILIES), st.lists(st.sampled_from(SCRAPS), max_size=14))
def test_events_come_in_order(family: Family, scraps: list[str]) -> None:
    open_call = False
    for event in events(family, ["", *map(family.heard, scraps), ""]):
        if isinstance(event, CallBegin):
            assert not open_call
            open_call = True
        elif isinstance(event, CallEnd):
            assert open_call
            open_call = False
        else:
            assert open_call == isinstance(event, Arguments)
            assert isinstance(event, Text | Thought | Arguments) and event.text
    assert not open_call
