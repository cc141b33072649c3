"""The grammar of a call as Gemma 4 writes it: the values of a JSON schema, with names that have no quotes and texts
that stand between marks. Names come in the order in which the templates show them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from moeflux.serve.fields import RequestError
from moeflux.serve.lark import ANY, Lark, literal
from moeflux.serve.request import Tool
from moeflux.serve.tools.gemma import CALL_END_NAME, CALL_NAME, QUOTE_NAME

__all__ = ["gemma_call"]

Schema = Mapping[str, Any]
FREE_NAME = "/[A-Za-z_][A-Za-z0-9_-]{0,63}/"
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
KNOWN = {
    "type", "enum", "const", "anyOf", "allOf", "$ref", "$defs", "definitions", "properties", "required",
    "additionalProperties", "items", "minItems", "maxItems", "pattern", "minLength", "maxLength", *OF_NUMBERS,
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment",
}  # fmt: skip
"""Keywords that are kept to, and those that say nothing about a value."""
SCALARS = ("integer", "number", "boolean", "null")
KINDS = ("string", "object", "array", *SCALARS)


def gemma_call(lark: Lark, tool: Tool) -> str:
    schema = {"type": "object", "properties": {}, "additionalProperties": False, **tool.parameters}
    begin = f"{lark.mark(CALL_NAME)} {literal(f'call:{tool.name}')}"
    return f"{begin} {_Values(lark, tool).of(schema)} {lark.mark(CALL_END_NAME)}"


class _Values:
    """The rules of the values that one tool takes."""

    def __init__(self, lark: Lark, tool: Tool) -> None:
        self._lark = lark
        self._tool = tool
        self._quote = lark.mark(QUOTE_NAME)

    def of(self, schema: Any) -> str:
        if not isinstance(schema, Mapping) or not schema:
            return self._any()
        unknown = schema.keys() - KNOWN if self._tool.strict else ()
        if unknown:
            named = ", ".join(sorted(unknown))
            raise RequestError(f"tools: expected a schema whose keywords can be kept to, found {named}", "tools")
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._lark.once(f"{self._tool.name} {reference}", lambda: self.of(self._target(reference)))
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return self._either([self._given(value) for value in schema["enum"]])
        if "const" in schema:
            return self._given(schema["const"])
        rest = {name: schema[name] for name in schema if name not in ("anyOf", "oneOf", "allOf")}
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list) and schema[name]:
                return self._either([self.of({**rest, **each}) for each in schema[name] if isinstance(each, Mapping)])
        if isinstance(schema.get("allOf"), list):
            return self.of({name: part for each in (*schema["allOf"], rest) for name, part in each.items()})
        said = schema.get("type")
        kinds = [kind for kind in (said if isinstance(said, list) else [said]) if kind in KINDS]
        kinds = kinds or ["object"] * ("properties" in schema) or ["array"] * ("items" in schema)
        return self._either([self._of_kind(kind, schema) for kind in kinds]) if kinds else self._any()

    def _of_kind(self, kind: str, schema: Schema) -> str:
        if kind == "string":
            return self._text(schema)
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._list(schema)
        limits = {name: schema[name] for name in OF_NUMBERS if name in schema}
        return self._lark.json({"type": kind, **(limits if kind in ("integer", "number") else {})}, strict=False)

    def _target(self, reference: str) -> Any:
        target: Any = self._tool.parameters
        for step in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(step) if isinstance(target, Mapping) and step else target
        return target

    def _either(self, rules: Sequence[str]) -> str:
        return f"({' | '.join(rules)})" if len(rules) > 1 else rules[0]

    def _any(self) -> str:
        kinds = [{"type": kind} for kind in KINDS]
        return self._lark.once("any value", lambda: self._either([self.of(kind) for kind in kinds]))

    # ---- Each kind ----------------------------------------------------------------------------------------------

    def _text(self, schema: Schema) -> str:
        pattern, least, most = (schema.get(name) for name in ("pattern", "minLength", "maxLength"))
        allowed = ANY
        if isinstance(pattern, str):
            allowed = _whole(pattern)
        elif least or most is not None:
            allowed = f"/(?s:.{{{least or 0},{'' if most is None else most}}})/"
        return f"{self._quote} {self._lark.until(self._quote, allowed)}"

    def _list(self, schema: Schema) -> str:
        item, least, most = self.of(schema.get("items")), schema.get("minItems") or 0, schema.get("maxItems")
        if most == 0:
            return literal("[]")
        more = "" if most is None else max(most, least) - 1
        items = item if more == 0 else f"{item} ({literal(',')} {item}){{{max(least - 1, 0)},{more}}}"
        return self._lark.rule(f"{literal('[')} {items if least else f'({items})?'} {literal(']')}")

    def _object(self, schema: Schema) -> str:
        properties, required = schema.get("properties"), schema.get("required")
        known: Schema = properties if isinstance(properties, Mapping) else {}
        others = schema.get("additionalProperties", not known)
        comma, first, rest = literal(","), '""', '""'
        if others is not False:
            pair = f"{self._lark.rule(FREE_NAME)} {literal(':')} {self.of(others)}"
            first, rest = f"({pair} ({comma} {pair})*)?", self._lark.rule(f"({comma} {pair})*")
        for name in sorted(known, key=str.lower, reverse=True):
            pair = f"{literal(f'{name}:')} {self.of(known[name])}"
            needed = isinstance(required, list) and name in required
            first = self._lark.rule(f"{pair} {rest}" + ("" if needed else f" | {first}"))
            rest = self._lark.rule(f"{comma} {pair} {rest}" if needed else f"({comma} {pair})? {rest}")
        return f"{literal('{')} {first} {literal('}')}"

    def _given(self, value: Any) -> str:
        """A value that is as it is."""
        if isinstance(value, str):
            return f"{self._quote} {literal(value)} {self._quote}"
        if isinstance(value, Mapping):
            inner = [f"{literal(f'{name}:')} {self._given(value[name])}" for name in sorted(value, key=str.lower)]
            return f"{literal('{')} {f' {literal(chr(44))} '.join(inner)} {literal('}')}"
        if isinstance(value, list):
            return f"{literal('[')} {f' {literal(chr(44))} '.join(map(self._given, value))} {literal(']')}"
        return literal(json.dumps(value))


def _whole(pattern: str) -> str:
    """What a text that the pattern is found in looks like."""
    begin = "" if pattern.startswith("^") else ANY[1:-1]
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else ANY[1:-1]
    inner = pattern.removeprefix("^")
    inner = re.sub(r"(?<!\\)/", r"\\/", inner if end else inner.removesuffix("$"))
    return f"/{begin}({inner}){end}/"
