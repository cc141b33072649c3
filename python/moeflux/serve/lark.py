"""Grammars in the making, in Lark's syntax as llguidance has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["ANY", "FindToken", "Lark", "escaped", "json_rule", "literal"]

ANY = "/(?s:.*)/"

FindToken = Callable[[str], int | None]


def json_rule(schema: Mapping[str, Any], strict: bool) -> str:
    """A schema inside a grammar. There is one space after a colon or a comma and none elsewhere: where white space is
    free, a small model writes nothing else. Not `strict`: what cannot be kept to is left to the model."""
    options: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    if not strict:
        options |= {"lenient": True, "coerce_one_of": True}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


class Lark:
    """A grammar in the making: rules by what they are."""

    SPACE = r"/[ \n]{0,4}/"

    def __init__(self, find: FindToken) -> None:
        self.find = find
        self._rules: dict[str, str] = {}
        self._named: dict[str, str] = {}
        self._bodies: list[str] = []

    def rule(self, body: str, options: str = "") -> str:
        """The name of a rule."""
        key = f"{options}: {body}"
        name = self._rules.setdefault(key, f"r{len(self._rules)}")
        return name

    def once(self, what: str, body: Callable[[], str]) -> str:
        """The name of a rule that may be part of itself; `what` tells it from others."""
        if what not in self._named:
            self._named[what] = f"s{len(self._named)}"
            made = body()
            self._bodies.append(f"{self._named[what]}: {made}")
        return self._named[what]

    def json(self, schema: Mapping[str, Any], *, strict: bool) -> str:
        return self.rule(json_rule(schema, strict))

    def mark(self, text: str) -> str:
        """A token if there is one, or else its letters."""
        found = self.find(text)
        return f"<[{found}]>" if found is not None else literal(text)

    def until(self, end: str, text: str = ANY) -> str:
        """A text that matches, and the mark that ends it."""
        if end.startswith("<["):
            return f"{self.rule(text)} {end}"
        return self.rule(f"{text[:-1]}{escaped(json.loads(end))}/", "[lazy]")

    def text(self, start: str) -> str:
        rules = [f"{name}{key}" for key, name in self._rules.items()]
        return "\n".join([f"start: {start}", *rules, *self._bodies])


def literal(text: str) -> str:
    return json.dumps(text)


def escaped(text: str) -> str:
    """A text as a regular expression has it."""
    return "".join(c if c.isalnum() or c in "<>= \u2581\uff5c" else {"\n": r"\n"}.get(c, f"\\{c}") for c in text)
