"""The grammar of calls as DeepSeek-V3.2 writes them: parameters in the order of the schema, each with whether its value
is a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeflux.serve.lark import ANY, Lark, escaped, literal
from moeflux.serve.request import Tool
from moeflux.serve.tools.tagged import DSML, DSML_TAGS
from moeflux.serve.tools.values import Schemas

__all__ = ["dsml_calls"]


def dsml_calls(lark: Lark, tools: Sequence[Tool], parallel: bool, after_text: bool) -> str:
    """`after_text`: any text may come first."""
    one = " | ".join(_call(lark, tool) for tool in tools)
    calls = f"({one})" + (f" ({one})*" if parallel else "")
    opening = (_text if after_text else _written)(lark, DSML_TAGS.opening)
    return f"{opening} {literal(chr(10))} {calls} {_written(lark, DSML_TAGS.closing)}"


def _call(lark: Lark, tool: Tool) -> str:
    properties, required = (tool.parameters.get(each) for each in ("properties", "required"))
    needed = set(required) if isinstance(required, list) else set()
    given = []
    for name in properties if isinstance(properties, Mapping) else ():
        one = _parameter(lark, tool, name)
        given.append(one if name in needed else f"({one})?")
    begin = _written(lark, f"{DSML_TAGS.function}{tool.name}{DSML_TAGS.name_end}\n")
    return f"{begin} {' '.join(given)} {_written(lark, DSML_TAGS.function_end)} {literal(chr(10))}"


def _parameter(lark: Lark, tool: Tool, name: str) -> str:
    schema = tool.parameters["properties"][name]
    is_text = "string" in Schemas({tool.name: tool.parameters}).kinds(tool.name, name)
    head = _written(lark, f'{DSML_TAGS.key}{name}" string="{"true" if is_text else "false"}">')
    chosen = schema.get("enum") if isinstance(schema, Mapping) else None
    end = f"{_written(lark, DSML_TAGS.value_end)} {literal(chr(10))}"
    if isinstance(chosen, list) and chosen and all(isinstance(each, str) for each in chosen):
        return f"{head} ({' | '.join(map(literal, chosen))}) {end}"
    if is_text or not isinstance(schema, Mapping):
        return f"{head} {_text(lark, DSML_TAGS.value_end)} {literal(chr(10))}"
    root = {part: tool.parameters[part] for part in ("$defs", "definitions") if part in tool.parameters}
    return f"{head} {lark.json({**root, **schema}, strict=tool.strict)} {end}"


def _written(lark: Lark, tag: str) -> str:
    """A tag, with the token that may be in it."""
    before, _, after = tag.partition(DSML)
    return f"{literal(before)} {lark.mark(DSML)} {literal(after)}"


def _text(lark: Lark, end: str) -> str:
    """Any text, and the tag that ends it."""
    before, _, after = end.partition(DSML)
    if lark.find(DSML) is None:
        return lark.until(literal(end))
    return f"{lark.rule(f'{ANY[:-1]}{escaped(before)}/')} {lark.mark(DSML)} {literal(after)}"
