"""Tools and calls of a published benchmark: every family's reader finds the calls, and the grammar that a required call
gets lets them through and nothing that breaks their schemas.

published_calls.json has some cases of bfcl-eval 2026.3.23 (Berkeley Function Calling Leaderboard, Apache-2.0): names,
types and the arguments of one right answer, without any text of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeflux import builtin
from moeflux.serve.answer import AnswerReader
from moeflux.serve.constrain import Grammars
from moeflux.serve.events import Call, together
from moeflux.serve.request import Ask, Tool
from moeflux.serve.tools.families import FAMILIES, HERMES, Family
from moeflux.text.tokenizer import Tokenizer
from support.constrained import Maker, ends
from support.published_calls import keeps_to, written

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "published_calls.json").read_text())
ALL = [*FAMILIES, HERMES] if HERMES not in FAMILIES else list(FAMILIES)
OF_JSON = [family for family in ALL if family.name in ("hermes", "kimi", "deepseek", "harmony")]


@pytest.fixture(scope="module")
def make() -> Maker:
    tokenizer = Tokenizer.from_folder(builtin.path())
    return Maker(tokenizer, Grammars(tokenizer, ends(tokenizer), len(tokenizer)))


def asking(case: dict[str, Any]) -> Ask:
    tools = tuple(Tool(tool["name"], "", tool["parameters"]) for tool in case["tools"])
    return Ask("m", tools=tools, choice="required")


def calls_in(case: dict[str, Any], family: Family, text: str) -> list[Call]:
    reader = AnswerReader(False, family, {tool["name"]: tool["parameters"] for tool in case["tools"]})
    said = together(reader.add(family.heard(text)) + reader.finish())
    assert said.text.strip() == "" and said.thought == ""
    return said.calls


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_what_is_right_is_read_and_allowed(case: dict[str, Any], family: Family, make: Maker) -> None:
    text = written(family.name, case["calls"])
    found = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls_in(case, family, text)]
    assert found == case["calls"]
    assert make.end_of(make.of(asking(case), family), text) is None


@pytest.mark.parametrize("family", OF_JSON, ids=lambda family: family.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_whatever_is_allowed_keeps_to_the_schema(case: dict[str, Any], family: Family, make: Maker) -> None:
    tools = {tool["name"]: tool["parameters"] for tool in case["tools"]}
    for call in calls_in(case, family, make.at_random(make.of(asking(case), family), 1, family)):
        arguments = json.loads(call.arguments)
        assert keeps_to(arguments, {"type": "object", **tools[call.name]}), arguments
