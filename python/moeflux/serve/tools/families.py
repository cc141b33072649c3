"""The families of models by how they write calls of tools, told from the chat template."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moeflux.serve.tools.harmony import EFFORTS, HarmonyReader, arranged, described
from moeflux.serve.tools.reader import Reader
from moeflux.serve.tools.tagged import GLM_TAGS, MINIMAX_TAGS, QWEN_TAGS, TaggedReader
from moeflux.serve.tools.values import Schemas
from moeflux.serve.tools.written import CLOSE, DEEPSEEK_MARKS, KIMI_MARKS, OPEN, HermesReader, MarkedReader
from moeflux.text.channels import MARKS, SIGN, heard

__all__ = ["FAMILIES", "HERMES", "Family", "family_of", "new_id"]


@dataclass(frozen=True)
class Family:
    name: str
    sign: str  # that only templates of this family have
    openers: tuple[str, ...]  # a call begins with one, also where a thought was not closed before it
    marks: tuple[str, ...]  # that tokenizers have as tokens, and some hide as special ones
    reader: Callable[[Schemas, Callable[[], str]], Reader]
    example: str = '<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>'  # for templates that show none
    arguments_as_text: bool = False  # templates add them to a text
    numbered_ids: bool = False  # templates write ids, and models expect functions.NAME:NUMBER there
    channels: bool = False  # thoughts and answers are messages of their own, each with a header
    one_call: bool = False  # templates write one call of a message
    heard: Callable[[str], str] = str  # what the reader is given for the text of a mark
    messages: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]] = list  # as templates take them
    tools: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]] = list
    efforts: Mapping[str, str] = field(default_factory=dict)  # of reasoning, that templates call otherwise


TAGS = (OPEN, CLOSE)
HERMES = Family("hermes", '"arguments"', (OPEN,), TAGS, HermesReader)
FAMILIES = (
    Family(
        "qwen-xml",
        QWEN_TAGS.function,
        (OPEN,),
        TAGS,
        lambda schemas, id: TaggedReader(schemas, id, QWEN_TAGS),
    ),
    Family(
        "glm",
        GLM_TAGS.key,
        (OPEN,),
        (*TAGS, GLM_TAGS.key, GLM_TAGS.key_end, GLM_TAGS.value, GLM_TAGS.value_end),
        lambda schemas, id: TaggedReader(schemas, id, GLM_TAGS),
    ),
    Family(
        "minimax",
        MINIMAX_TAGS.opening,
        (MINIMAX_TAGS.opening,),
        (MINIMAX_TAGS.opening, MINIMAX_TAGS.closing),
        lambda schemas, id: TaggedReader(schemas, id, MINIMAX_TAGS),
    ),
    Family(
        "deepseek",
        DEEPSEEK_MARKS.call,
        (DEEPSEEK_MARKS.section, DEEPSEEK_MARKS.call),
        DEEPSEEK_MARKS.tokens,
        lambda schemas, id: MarkedReader(schemas, id, DEEPSEEK_MARKS),
        example=DEEPSEEK_MARKS.example,
        arguments_as_text=True,
    ),
    Family(
        "kimi",
        KIMI_MARKS.call,
        (KIMI_MARKS.section, KIMI_MARKS.call),
        KIMI_MARKS.tokens,
        lambda schemas, id: MarkedReader(schemas, id, KIMI_MARKS),
        arguments_as_text=True,
        numbered_ids=True,
    ),
    Family(
        "harmony",
        SIGN,
        (),
        tuple(MARKS),
        HarmonyReader,
        example="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>OBJECT<|call|>",
        channels=True,
        one_call=True,
        heard=heard,
        messages=arranged,
        tools=described,
        efforts=EFFORTS,
    ),
    HERMES,
)


def family_of(template: str) -> Family:
    """By the text of the chat template. What writes no calls, or calls of no known kind, is asked to write Hermes'."""
    return next((family for family in FAMILIES if family.sign in template), HERMES)


def new_id() -> str:
    """Of a call. Nobody can guess it, so what comes back with it is what was said here."""
    return f"call_{secrets.token_hex(12)}"
