"""What an answer must be, as a grammar: JSON of a schema, or calls of tools as a family writes them.

Marks that the tokenizer has as tokens are named by their number, so nothing but that token can be one. Everywhere else
the grammar allows only ordinary tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from moeflux.serve.dsml_grammar import dsml_calls
from moeflux.serve.fields import RequestError
from moeflux.serve.gemma_grammar import gemma_call
from moeflux.serve.lark import ANY, FindToken, Lark, literal
from moeflux.serve.request import Ask, Form, Tool
from moeflux.serve.tools.families import Family
from moeflux.serve.tools.harmony import PREFIX
from moeflux.serve.tools.tagged import GLM_TAGS, MINIMAX_TAGS, QWEN_TAGS, Tags
from moeflux.serve.tools.values import Schemas
from moeflux.serve.tools.written import CLOSE, DEEPSEEK_MARKS, KIMI_MARKS, OPEN, Marks
from moeflux.text.channels import THOUGHT_END
from moeflux.text.speech import Speech

__all__ = ["grammar_of"]

FENCE = "```json"


def grammar_of(ask: Ask, family: Family, thinking: bool, template: str, find: FindToken) -> str | None:
    """The grammar of an answer in Lark's syntax, as llguidance has it; None where anything may be said. `find` gives
    the number of an added token."""
    tools = _tools_to_call(ask)
    if ask.form is None and not tools:
        return None
    if ask.form is not None and tools and ask.choice != "auto":
        raise RequestError("tool_choice: expected auto or none beside a form of the answer", "tool_choice")
    if ask.prefill:
        raise RequestError("messages: expected no beginning of an answer whose form is given", "messages")
    lark = Lark(find)
    if tools:
        calls = _calls(lark, family, tools, ask.parallel, template, after_text=ask.choice == "auto")
        body = calls if ask.choice != "auto" else f"{_maybe(lark, ask, family)} | {_before(lark, family)} ({calls})"
    else:
        assert ask.form is not None
        body = _said(lark, family, _form(lark, ask.form))
    thought = (
        f"({_message(lark, 'analysis')})? " if family.channels else _thought(lark, thinking, family.speech, template)
    )
    return lark.text(f"{thought}({body})")


def _tools_to_call(ask: Ask) -> Sequence[Tool]:
    """Those that a grammar is for: all where one must be called, or where calls must keep to a schema strictly."""
    if ask.choice.startswith("tool:"):
        return [tool for tool in ask.tools if tool.name == ask.choice.removeprefix("tool:")]
    if ask.choice == "required":
        return ask.tools
    return ask.tools if ask.choice == "auto" and any(tool.strict for tool in ask.tools) else ()


def _maybe(lark: Lark, ask: Ask, family: Family) -> str:
    """What may be said instead of a call."""
    return _said(lark, family, lark.rule(ANY) if ask.form is None else _form(lark, ask.form))


def _before(lark: Lark, family: Family) -> str:
    """What may be said before a call, where that is no part of the call's own rules."""
    if family.name == "dsml":
        return ""
    return f"({_message(lark, 'commentary')})?" if family.channels else lark.rule(ANY)


def _thought(lark: Lark, thinking: bool, speech: Speech, template: str) -> str:
    """A thought comes first: the template has begun it, or the model may, if its templates know thoughts."""
    end = lark.mark(speech.end)
    if thinking:
        return f"{lark.until(end)} {lark.SPACE} "
    start = lark.find(speech.opening) if speech.end in template else None
    label = f"{literal(speech.label)} " if speech.label else ""
    return "" if start is None else f"(<[{start}]> {label}{lark.until(end)} {lark.SPACE})? "


def _said(lark: Lark, family: Family, body: str) -> str:
    return f"{_channel(lark, 'final')} {body}" if family.channels else body


def _channel(lark: Lark, header: str) -> str:
    """The header of a message."""
    return f"{lark.mark('<|channel|>')} {literal(header)} {lark.mark('<|message|>')}"


def _message(lark: Lark, channel: str) -> str:
    """A message of any text, and what announces the next one."""
    return f"{_channel(lark, channel)} {lark.until(lark.mark(THOUGHT_END))} {_next(lark)}"


def _next(lark: Lark) -> str:
    return f"{lark.mark('<|start|>')} {literal('assistant')}"


def _form(lark: Lark, form: Form) -> str:
    schema = {"type": "object"} if form.schema is None else form.schema
    return lark.json(schema, strict=form.strict)


# ---- Calls ------------------------------------------------------------------------------------------------------


def _calls(lark: Lark, family: Family, tools: Sequence[Tool], parallel: bool, template: str, after_text: bool) -> str:
    marks = {"deepseek": DEEPSEEK_MARKS, "kimi": KIMI_MARKS}.get(family.name)
    tags = {"qwen-xml": QWEN_TAGS, "glm": GLM_TAGS, "minimax": MINIMAX_TAGS}.get(family.name)
    if marks is not None:
        fenced = bool(marks.kind) and FENCE in template
        one = " | ".join(_marked(lark, marks, tool, fenced) for tool in tools)
        between = literal("\n") + " " if fenced else ""
        calls = f"({one})" + (f" ({between}({one}))*" if parallel else "")
        return f"{lark.mark(marks.section)} {calls} {lark.mark(marks.section_end)}"
    if family.channels:
        one = " | ".join(_addressed(lark, tool) for tool in tools)
        return f"({one})" + (f" ({lark.mark(THOUGHT_END)} {_next(lark)} ({one}))*" if parallel else "")
    if family.name == "dsml":
        return dsml_calls(lark, tools, parallel, after_text)
    if family.name == "gemma":
        one = " | ".join(gemma_call(lark, tool) for tool in tools)
        return f"({one})" + (f" ({one})*" if parallel else "")
    one = " | ".join(_tagged(lark, tags, tool) if tags else _hermes(lark, tool) for tool in tools)
    if tags and tags.several:
        calls = f"({one})" + (f" ({one})*" if parallel else "")
        return f"{lark.mark(tags.opening)} {literal(chr(10))} {calls} {lark.mark(tags.closing)}"
    return f"({one})" + (f" ({literal(chr(10))} ({one}))*" if parallel else "")


def _arguments(lark: Lark, tool: Tool) -> str:
    """Arguments that the schema does not have would be none of the tool's."""
    schema = {"type": "object", "properties": {}, "additionalProperties": False, **tool.parameters}
    return lark.json(schema, strict=tool.strict)


def _hermes(lark: Lark, tool: Tool) -> str:
    head = literal(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
    tail = literal("}\n")
    return f"{lark.mark(OPEN)} {head} {_arguments(lark, tool)} {tail} {lark.mark(CLOSE)}"


def _addressed(lark: Lark, tool: Tool) -> str:
    """The token that ends the message ends the answer."""
    channel, constrain, message = (lark.mark(mark) for mark in ("<|channel|>", "<|constrain|>", "<|message|>"))
    header = f"{channel} {literal(f'commentary to={PREFIX}{tool.name} ')} {constrain} {literal('json')} {message}"
    return f"{header} {_arguments(lark, tool)}"


def _marked(lark: Lark, marks: Marks, tool: Tool, fenced: bool) -> str:
    call, separator, end = (lark.mark(each) for each in (marks.call, marks.separator, marks.call_end))
    arguments = _arguments(lark, tool)
    if fenced:
        head = literal(f"{tool.name}\n{FENCE}\n")
        return f"{call} {literal(marks.kind)} {separator} {head} {arguments} {literal(chr(10) + '```')} {end}"
    number = " /[0-9]{1,4}/" if marks.prefix else ""
    name = literal(f"{marks.prefix}{tool.name}" + (":" if marks.prefix else ""))
    return f"{call} {name}{number} {separator} {arguments} {end}"


def _tagged(lark: Lark, tags: Tags, tool: Tool) -> str:
    """Parameters in the order of the schema; those that are required, and any of the others."""
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required")
    names = list(properties) if isinstance(properties, Mapping) else []
    needed = set(required) if isinstance(required, list) else set()
    given = []
    for name in names:
        one = _parameter(lark, tags, tool, name)
        given.append(one if name in needed else f"({one})?")
    function = f"{tags.function}{tool.name}{tags.name_end}\n" if tags.function else f"{tool.name}\n"
    end = literal(f"{tags.function_end}\n") + " " if tags.function else ""
    if tags.several:
        return f"{literal(function)} {' '.join(given)} {end}"
    begin = literal(("\n" if tags.function else "") + function)
    return f"{lark.mark(tags.opening)} {begin} {' '.join(given)} {end}{lark.mark(tags.closing)}"


def _parameter(lark: Lark, tags: Tags, tool: Tool, name: str) -> str:
    schema = tool.parameters["properties"][name]
    kinds = Schemas({tool.name: tool.parameters}).kinds(tool.name, name)
    line = "\n" if tags.line_ends else ""
    if tags.value:
        marks = [lark.mark(each) for each in (tags.key, tags.key_end, tags.value)]
        head = f"{marks[0]} {literal(name)} {marks[1]} {literal(chr(10))} {marks[2]}"
    else:
        head = literal(f"{tags.key}{name}{tags.key_end}{line}")
    end = lark.mark(tags.value_end) if not line else literal(f"{line}{tags.value_end}\n")
    after = "" if line else f" {literal(chr(10))}"
    chosen = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(chosen, list) and chosen and all(isinstance(each, str) for each in chosen):
        return f"{head} ({' | '.join(map(literal, chosen))}) {end}{after}"
    if "string" in kinds or not isinstance(schema, Mapping):
        return f"{head} {lark.until(end)}{after}"
    root = {part: tool.parameters[part] for part in ("$defs", "definitions") if part in tool.parameters}
    return f"{head} {lark.json({**root, **schema}, strict=tool.strict)} {end}{after}"
