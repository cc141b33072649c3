"""Calls of tools that somebody else wrote, as each family writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["keeps_to", "written"]

BAR, LOW = "\uff5c", "\u2581"


def _mark(name: str) -> str:
    return f"<{BAR}{name.replace(' ', LOW)}{BAR}>"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _of_gemma(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_of_gemma(value[name])}" for name in sorted(value, key=str.lower)) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(_of_gemma, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def written(family: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """`calls` have a name and arguments."""
    pairs = [(call["name"], call["arguments"], json.dumps(call["arguments"], ensure_ascii=False)) for call in calls]
    if family == "hermes":
        form = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
        return "\n".join(form.format(name, text) for name, _, text in pairs)
    if family == "qwen-xml":
        form = "<parameter={}>\n{}\n</parameter>\n"
        inner = ["".join(form.format(name, _plain(value)) for name, value in each.items()) for _, each, _ in pairs]
        return "\n".join(
            f"<tool_call>\n<function={name}>\n{text}</function>\n</tool_call>"
            for (name, _, _), text in zip(pairs, inner, strict=True)
        )
    if family == "glm":
        form = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
        inner = ["".join(form.format(name, _plain(value)) for name, value in each.items()) for _, each, _ in pairs]
        return "\n".join(
            f"<tool_call>{name}\n{text}</tool_call>" for (name, _, _), text in zip(pairs, inner, strict=True)
        )
    if family == "minimax":
        form = '<parameter name="{}">{}</parameter>\n'
        inner = ["".join(form.format(name, _plain(value)) for name, value in each.items()) for _, each, _ in pairs]
        made = [f'<invoke name="{name}">\n{text}</invoke>\n' for (name, _, _), text in zip(pairs, inner, strict=True)]
        return f"<minimax:tool_call>\n{''.join(made)}</minimax:tool_call>"
    if family == "kimi":
        form = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
        inner = [form.format(name, number, text) for number, (name, _, text) in enumerate(pairs)]
        return f"<|tool_calls_section_begin|>{''.join(inner)}<|tool_calls_section_end|>"
    if family == "harmony":
        form = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
        return "<|end|><|start|>assistant".join(form.format(name, text) for name, _, text in pairs)
    if family == "gemma":
        return "".join(f"<|tool_call>call:{name}{_of_gemma(each)}<tool_call|>" for name, each, _ in pairs)
    if family == "dsml":
        own = f"{BAR}DSML{BAR}"
        form = f'<{own}parameter name="{{}}" string="{{}}">{{}}</{own}parameter>\n'
        inner = ["".join(form.format(name, json.dumps(isinstance(value, str)), _plain(value))
                         for name, value in each.items()) for _, each, _ in pairs]  # fmt: skip
        made = [f'<{own}invoke name="{name}">\n{text}</{own}invoke>\n'
                for (name, _, _), text in zip(pairs, inner, strict=True)]  # fmt: skip
        return f"<{own}function_calls>\n{''.join(made)}</{own}function_calls>"
    assert family == "deepseek"
    inner = [f"{_mark('tool call begin')}{name}{_mark('tool sep')}{text}{_mark('tool call end')}"
             for name, _, text in pairs]  # fmt: skip
    return f"{_mark('tool calls begin')}{''.join(inner)}{_mark('tool calls end')}"


KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
}  # fmt: skip


def keeps_to(value: Any, schema: Mapping[str, Any]) -> bool:
    """For the keywords that the cases have; another one is a KeyError."""
    for keyword, said in schema.items():
        if not {
            "type": lambda said: isinstance(value, KINDS[said]) and (said == "boolean" or not isinstance(value, bool)),
            "enum": lambda said: value in said,
            "items": lambda said: all(keeps_to(each, said) for each in value),
            "properties": lambda said: all(keeps_to(value[name], said[name]) for name in said if name in value),
            "required": lambda said: all(name in value for name in said),
            "minimum": lambda said: value >= said,
            "maximum": lambda said: value <= said,
        }[keyword](said):
            return False
    return True
