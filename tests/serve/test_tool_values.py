"""The values of a call's arguments as models write them: taken as the schema says, and put right where JSON is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux.serve.tools.values import JsonText, Schemas, arguments_of, value_of


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("3", {"integer"}, 3),
        ("3", {"number"}, 3),
        ("3", {"string", "integer"}, "3"),
        ("three", {"integer"}, "three"),
        ("True", {"boolean"}, True),
        ("FALSE", {"boolean"}, False),
        ("null", {"string", "null"}, None),
        ("None", {"object", "null"}, None),
        ("{'a': [1, None]}", {"object"}, {"a": [1, None]}),
        ('{"a": "line\nend"}', {"object"}, {"a": "line\nend"}),
        ('["a"]', {"string", "array"}, ["a"]),
        ("", {"integer"}, ""),
        ("[" * 10_000, {"array"}, "[" * 10_000),
        ("(" * 60, {"array"}, "(" * 60),
        ("9" * 6000, {"integer"}, "9" * 6000),
        ("nan", {"number"}, "nan"),
        (r"'\d'", {"object"}, r"\d"),
        ("{1, 2}", {"array"}, "{1, 2}"),
    ],
)
def test_values_take_their_kind_from_the_schema(text: str, kinds: set[str], value: Any) -> None:
    assert json.loads(value_of(text, frozenset(kinds))) == value


def test_kinds_of_schemas() -> None:
    root = {
        "properties": {
            "listed": {"type": ["string", "null"]},
            "chosen": {"enum": [1, "a"]},
            "fixed": {"const": True},
            "named": {"$ref": "#/$defs/size"},
            "round": {"$ref": "#/properties/round"},
            "either": {"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/size"}]},
            "free": {"description": "anything"},
            "broken": 7,
        },
        "$defs": {"size": {"type": "number"}},
    }
    schemas = Schemas({"f": root})
    assert schemas.kinds("f", "listed") == {"string", "null"}
    assert schemas.kinds("f", "chosen") == {"integer", "string"}
    assert schemas.kinds("f", "fixed") == {"boolean"}
    assert schemas.kinds("f", "named") == {"number"}
    assert schemas.kinds("f", "either") == {"integer", "number"}
    assert schemas.kinds("f", "unknown") == schemas.kinds("g", "x") == {"string"}
    for name in ("free", "broken", "round"):
        assert schemas.kinds("f", name) == {"string", "array", "object"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "line\nend"}', {"a": "line\nend"}),
        (r'{"a": "\d\'\\"}', {"a": "\\d'\\"}),
        ('{"a": [1, 2, ], "b": None, }', {"a": [1, 2], "b": None}),
        ('{"a": [1, 2}', {"a": [1, 2]}),
        ('{"a": {"b": "c', {"a": {"b": "c"}}),
        ('{"a"', {"a": None}),
        ('{"a":', {"a": None}),
        ('{"a', {"a": None}),
        ('{"a": 1,', {"a": 1}),
        ('{"a": 1, "b": tr', {"a": 1, "b": "tr"}),
        ('{{"a": 1}}', {"a": 1}),
        ('{"a" 1 "b": [2 3],, "c" "d"}', {"a": 1, "b": [2, 3], "c": "d"}),
        (r'{"a": "\u00e9\u12 \uD83D\uDE00\u1"}', {"a": "é\\u12 😀\\u1"}),
        ('{"a": 007, "b": .5, "c": -1.5e3, "d": NaN}', {"a": "007", "b": ".5", "c": -1500.0, "d": "NaN"}),
        ('{"a": "b" "c"', {"a": "b", "c": None}),
        ("{:,]", {}),
        ("{a: 1, b: True}", {"a": 1, "b": True}),
        ("{", {}),
    ],
)
def test_json_is_put_right(text: str, value: Any) -> None:
    reader = JsonText()
    said = reader.add(text)[0] + reader.close()
    assert json.loads(said) == value


@given(st.text(alphabet='{}[]",: \\un1ab\n', max_size=30))
def test_whatever_comes_json_is_passed_on(text: str) -> None:
    whole, pieces = JsonText(), JsonText()
    said, rest = whole.add("{" + text)
    assert isinstance(json.loads(said + ("" if rest is not None else whole.close())), dict)
    assert "".join(pieces.add(character)[0] for character in "{" + text[: len(text) - len(rest or "")]) == said


@given(st.dictionaries(st.text(max_size=8), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
), max_size=4), st.text(max_size=4))  # fmt: skip
def test_json_that_is_right_passes_as_it_is(value: Any, after: str) -> None:
    text = json.dumps(value, indent=1)
    assert JsonText().add(text + after) == (text, after)
    assert json.loads(arguments_of(text) or "") == value
