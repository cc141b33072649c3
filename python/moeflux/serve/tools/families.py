"""The families of models by how they write calls of tools, told from the chat template."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from moeflux.serve.tools.reader import Reader
from moeflux.serve.tools.tagged import GLM_TAGS, QWEN_TAGS, TaggedReader
from moeflux.serve.tools.values import Schemas
from moeflux.serve.tools.written import DEEPSEEK_MARKS, KIMI_MARKS, HermesReader, MarkedReader

__all__ = ["FAMILIES", "HERMES", "Family", "family_of", "new_id"]


@dataclass(frozen=True)
class Family:
    name: str
    sign: str  # that only templates of this family have
    openers: tuple[str, ...]  # a call begins with one, also where a thought was not closed before it
    reader: Callable[[Schemas, Callable[[], str]], Reader]


HERMES = Family("hermes", '"arguments"', ("<tool_call>",), HermesReader)
FAMILIES = (
    Family("qwen-xml", QWEN_TAGS.function, ("<tool_call>",), lambda schemas, id: TaggedReader(schemas, id, QWEN_TAGS)),
    Family("glm", GLM_TAGS.key, ("<tool_call>",), lambda schemas, id: TaggedReader(schemas, id, GLM_TAGS)),
    Family(
        "deepseek",
        DEEPSEEK_MARKS.call,
        (DEEPSEEK_MARKS.section, DEEPSEEK_MARKS.call),
        lambda schemas, id: MarkedReader(schemas, id, DEEPSEEK_MARKS),
    ),
    Family(
        "kimi",
        KIMI_MARKS.call,
        (KIMI_MARKS.section, KIMI_MARKS.call),
        lambda schemas, id: MarkedReader(schemas, id, KIMI_MARKS),
    ),
    HERMES,
)


def family_of(template: str) -> Family:
    """By the text of the chat template. What writes no calls, or calls of no known kind, is asked to write Hermes'."""
    return next((family for family in FAMILIES if family.sign in template), HERMES)


def new_id() -> str:
    """Of a call. Nobody can guess it, so what comes back with it is what was said here."""
    return f"call_{secrets.token_hex(12)}"
