"""Arguments of calls: JSON repaired as it comes, and values written without quotes, which take their type from the
schema of the tool."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["JsonText", "Schemas", "arguments_of", "escaped", "kinds_of", "value_of"]

CLOSERS = {"{": "}", "[": "]"}
SPELLINGS = {"True": "true", "False": "false", "None": "null", "undefined": "null"}
ESCAPES, HEX = frozenset('"\\/bfnrt'), frozenset("0123456789abcdefABCDEF")
LITERAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
DEEPEST = 128  # brackets in one another
LONGEST_PYTHON, DEEPEST_PYTHON = 4096, 64  # characters, brackets and signs
KINDS = {"string", "number", "integer", "boolean", "object", "array", "null"}


def escaped(text: str) -> str:
    """The text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class JsonText:
    """Passes one JSON object on as it comes, up to the brace that closes it. Whatever the text is, what is passed on,
    with `close`, is JSON: what models get wrong is put right on the way. That is line ends inside strings, escapes that
    JSON does not have, commas and colons too many or too few, Python's names of constants, names without quotes, and
    brackets that close another kind."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._expected = ["value"]  # of each level: a key, a colon, a value, or what is after one
        self._in_string = False
        self._escape: str | None = None  # what has come of an escape
        self._comma = ""  # held, with the white space after it: it may be one too many
        self._word = ""  # a number or constant that may go on

    def add(self, text: str) -> tuple[str, str | None]:
        """(JSON that is certain, the text after the end, or None if that has not come)"""
        out: list[str] = []
        for place, character in enumerate(text):
            out.append(self._next(character))
            if not self._open:
                return "".join(out), text[place + 1 :]
        return "".join(out), None

    @property
    def in_string(self) -> bool:
        return self._in_string

    @property
    def after_value(self) -> bool:
        return self._expected[-1] == "after"

    @property
    def in_value(self) -> bool:
        """Whether a value comes next, and not a name."""
        return self._expected[-1] == "value"

    def close(self) -> str:
        """What is missing to end it here."""
        out = self._end_string() if self._in_string else self._said_word()
        while self._open:
            out += self._closed()
        return out

    def _next(self, character: str) -> str:
        if self._in_string:
            return self._in_text(character)
        if character not in '{}[]",: \t\r\n':
            self._word += character
            return ""
        return self._said_word() + self._structure(character)

    # ---- Strings ------------------------------------------------------------------------------------------------

    def _in_text(self, character: str) -> str:
        if self._escape is not None:
            return self._in_escape(character)
        if character == "\\":
            self._escape = ""
            return ""
        if character == '"':
            return self._end_string()
        return escaped(character) if character < " " else character

    def _in_escape(self, character: str) -> str:
        begun, self._escape = self._escape or "", None
        if not begun and character in ESCAPES:
            return "\\" + character
        if (not begun and character == "u") or (begun and character in HEX and len(begun) < 4):
            self._escape = begun + character
            return ""
        if begun and character in HEX:
            return f"\\{begun}{character}"
        if not begun and character == "'":
            return character
        return f"\\\\{begun}" + self._in_text(character)

    def _end_string(self) -> str:
        self._in_string, self._escape = False, None
        self._expected[-1] = "colon" if self._expected[-1] == "key" else "after"
        return '"'

    # ---- Everything else ----------------------------------------------------------------------------------------

    def _structure(self, character: str) -> str:
        if character.isspace():
            if not self._comma:
                return character
            self._comma += character
            return ""
        if character == ",":
            return self._next_member()
        if character == ":":
            return self._colon(":") if self._expected[-1] == "colon" else ""
        if character in "]}":
            return self._closed()
        if character == '"':
            out = self._place()
            self._in_string = True
            return out + character
        return self._opened(character)

    def _place(self) -> str:
        """What must precede a string or a word here."""
        expected = self._expected[-1]
        out = self._colon(": ") if expected == "colon" else self._next_member(",") if expected == "after" else ""
        comma, self._comma = self._comma, ""
        return out + comma

    def _colon(self, text: str) -> str:
        self._expected[-1] = "value"
        return text

    def _next_member(self, comma: str = ",") -> str:
        """A comma, if something stands before it."""
        out = self._whole_member()
        if self._expected[-1] == "after":
            self._comma = comma
            self._expected[-1] = "key" if self._open[-1] == "{" else "value"
        return out

    def _whole_member(self) -> str:
        """What a member of an object lacks that was begun."""
        if self._open[-1:] != ["{"] or self._expected[-1] not in ("colon", "value"):
            return ""
        out = ": null" if self._expected[-1] == "colon" else "null"
        self._expected[-1] = "after"
        return out

    def _opened(self, character: str) -> str:
        expected = self._expected[-1]
        needs_name = expected == "key" or (expected == "after" and self._open[-1:] == ["{"])
        if needs_name or len(self._open) >= DEEPEST:
            return ""  # one too many
        out = self._place()
        self._expected[-1] = "after"
        self._open.append(character)
        self._expected.append("key" if character == "{" else "value")
        return out + character

    def _closed(self) -> str:
        out = self._whole_member()
        self._comma = ""
        self._expected.pop()
        return out + CLOSERS[self._open.pop()]

    def _said_word(self) -> str:
        word, self._word = self._word, ""
        if not word:
            return ""
        out = self._place()
        if self._expected[-1] == "key":  # without its quotes
            self._expected[-1] = "colon"
            return f'{out}"{escaped(word)}"'
        self._expected[-1] = "after"
        word = SPELLINGS.get(word, word)
        return out + (word if LITERAL.fullmatch(word) else f'"{escaped(word)}"')


def arguments_of(text: str) -> str | None:
    """The JSON of arguments that were written as a whole, maybe as a string, or not at all. None if they are none."""
    text = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    if not text:
        return "{}"
    value = _lenient(text)
    if isinstance(value, str):
        value = _lenient(value) if value.strip() else {}
    if value is None:
        value = {}
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None


class _Unreadable:
    """What no value is."""


def _lenient(text: str) -> Any:
    """A JSON value, or one as Python writes it."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        value = _python_value(text)
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, RecursionError):
        return _Unreadable


def _python_value(text: str) -> Any:
    # Python's parser takes a stack in proportion to how deep a text is nested.
    if len(text) > LONGEST_PYTHON or sum(map(text.count, "([{-+~")) > DEEPEST_PYTHON:
        return _Unreadable
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not have
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return _Unreadable


class Schemas:
    """What the arguments of the tools of a request may be."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """Schemas of the parameters by the tool's name."""
        self._tools = tools

    def __contains__(self, tool: str) -> bool:
        return tool in self._tools

    def names(self, tool: str) -> frozenset[str]:
        return frozenset(self._parameters(tool))

    def kinds(self, tool: str, name: str) -> frozenset[str]:
        """The kinds of value that a parameter may have. One that the schema does not have is a text."""
        parameters = self._parameters(tool)
        if name not in parameters:
            return frozenset({"string"})
        return kinds_of(parameters[name], self._tools[tool]) or frozenset({"string", "array", "object"})

    def _parameters(self, tool: str) -> Mapping[str, Any]:
        found = self._tools.get(tool, {}).get("properties")
        return found if isinstance(found, Mapping) else {}


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The kinds of value that a schema allows, as far as it says; `root` is the whole that it is part of."""
    if not isinstance(schema, Mapping) or depth == 16:
        return frozenset()
    said = schema.get("type")
    listed = said if isinstance(said, list) else [said]
    kinds = {kind for kind in listed if isinstance(kind, str) and kind in KINDS}
    if kinds:
        return frozenset(kinds)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]]
        return frozenset(map(_kind, values))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        return kinds_of(target, root, depth + 1)
    parts: Iterable[Any] = [
        part for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list) for part in schema[name]
    ]
    return frozenset(kind for part in parts for kind in kinds_of(part, root, depth + 1))


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def value_of(text: str, kinds: frozenset[str]) -> str:
    """The JSON of a value that was written without quotes. What fits none of the kinds is a text: the tool will say
    what it thinks of it."""
    value = _lenient(text.strip())
    fits = value is not _Unreadable and (_kind(value) in kinds or (_kind(value) == "integer" and "number" in kinds))
    if "string" in kinds and not (fits and _kind(value) in ("null", "array", "object")):
        return json.dumps(text, ensure_ascii=False)
    lowered = text.strip().lower()
    if not fits and lowered in ("true", "false") and "boolean" in kinds:
        return lowered
    if not fits and lowered in ("null", "none") and "null" in kinds:
        return "null"
    return json.dumps(text if value is _Unreadable else value, ensure_ascii=False)
