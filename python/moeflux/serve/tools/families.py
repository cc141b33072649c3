"""The families of models by how they write calls of tools, told from the chat template."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moeflux.serve.tools import gemma
from moeflux.serve.tools.harmony import EFFORTS, HarmonyReader, arranged, described
from moeflux.serve.tools.reader import Reader
from moeflux.serve.tools.tagged import DSML, DSML_TAGS, GLM_TAGS, MINIMAX_TAGS, QWEN_TAGS, TaggedReader
from moeflux.serve.tools.values import Schemas
from moeflux.serve.tools.written import CLOSE, DEEPSEEK_MARKS, KIMI_MARKS, OPEN, HermesReader, MarkedReader
from moeflux.text.speech import CHANNELS, GEMMA, TAGS, Speech, speech_of

__all__ = ["FAMILIES", "HERMES", "Family", "family_of", "new_id"]


@dataclass(frozen=True)
class Family:
    name: str
    sign: str  # that only templates of this family have
    openers: tuple[str, ...]  # a call begins with one, also where a thought was not closed before it
    marks: tuple[str, ...]  # that tokenizers have as tokens, and some hide as special ones
    reader: Callable[[Schemas, Callable[[], str]], Reader]
    example: str = '<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>'  # for templates that show none
    speech: Speech = TAGS
    arguments_as_text: bool = False  # templates add them to a text
    numbered_ids: bool = False  # templates write ids, and models expect functions.NAME:NUMBER there
    one_call: bool = False  # templates write one call of a message
    messages: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]] = list  # as templates take them
    tools: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]] = list
    efforts: Mapping[str, str] = field(default_factory=dict)  # of reasoning, that templates call otherwise
    result: tuple[str, str] | None = None  # marks around a result, where the answer goes on behind results
    thought_first: bool = False  # templates announce an answer behind results by a thought, or the end of one, alone

    @property
    def channels(self) -> bool:
        """Whether thoughts and answers are messages of their own, each with a header."""
        return self.speech is CHANNELS

    def heard(self, text: str) -> str:
        """What the reader is given for a text with marks."""
        return self.speech.marks.heard(text)


PAIR = (OPEN, CLOSE)
HERMES = Family("hermes", '"arguments"', (OPEN,), PAIR, HermesReader)
FAMILIES = (
    Family(
        "qwen-xml",
        QWEN_TAGS.function,
        (OPEN,),
        PAIR,
        lambda schemas, id: TaggedReader(schemas, id, QWEN_TAGS),
    ),
    Family(
        "glm",
        GLM_TAGS.key,
        (OPEN,),
        (*PAIR, GLM_TAGS.key, GLM_TAGS.key_end, GLM_TAGS.value, GLM_TAGS.value_end),
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
        "dsml",
        DSML_TAGS.opening,
        (DSML_TAGS.opening,),
        (DSML,),
        lambda schemas, id: TaggedReader(schemas, id, DSML_TAGS),
        thought_first=True,
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
        CHANNELS.sign,
        (),
        (),
        HarmonyReader,
        example="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>OBJECT<|call|>",
        speech=CHANNELS,
        one_call=True,
        messages=arranged,
        tools=described,
        efforts=EFFORTS,
    ),
    Family(
        "gemma",
        gemma.CALL_NAME,
        (gemma.CALL,),
        (),
        gemma.GemmaReader,
        example=f"{gemma.CALL_NAME}call:NAME{{PARAMETER:VALUE}}{gemma.CALL_END_NAME}",
        speech=GEMMA,
        messages=gemma.arranged,
        tools=gemma.described,
        result=gemma.RESULT_NAMES,
    ),
    HERMES,
)


def family_of(template: str) -> Family:
    """By the text of the chat template. What writes no calls, or calls of no known kind, is asked to write Hermes'."""
    found = next((family for family in FAMILIES if family.sign in template), HERMES)
    speech = speech_of(template)
    return found if found.speech is speech else replace(found, speech=speech)


def new_id() -> str:
    """Of a call. Nobody can guess it, so what comes back with it is what was said here."""
    return f"call_{secrets.token_hex(12)}"
