"""Calls whose arguments stand between tags, each value by itself and without quotes: Qwen3-Coder, Qwen3.5, GLM,
MiniMax-M2 and DeepSeek-V3.2."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass

from moeflux.serve.tools.reader import NAME, Wait
from moeflux.serve.tools.values import JsonText, Schemas, escaped, value_of
from moeflux.serve.tools.written import CLOSE, OPEN, HermesReader

__all__ = ["DSML", "DSML_TAGS", "GLM_TAGS", "MINIMAX_TAGS", "QWEN_TAGS", "TaggedReader", "Tags"]


@dataclass(frozen=True)
class Tags:
    function: str  # before the name; "": the name follows what opens a call
    function_end: str
    key: str
    key_end: str
    value: str  # between key and value
    value_end: str
    line_ends: bool  # a value stands on lines of its own
    name_end: str = ">"
    opening: str = OPEN
    closing: str = CLOSE
    typed: bool = False  # behind a key stands whether its value is a text

    @property
    def several(self) -> bool:
        """Whether what is opened holds all calls of an answer, and never JSON."""
        return self.opening != OPEN


QWEN_TAGS = Tags("<function=", "</function>", "<parameter=", ">", "", "</parameter>", True)
GLM_TAGS = Tags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", False)
MINIMAX_TAGS = Tags(
    '<invoke name="', "</invoke>", '<parameter name="', '">', "", "</parameter>", False,
    name_end='">', opening="<minimax:tool_call>", closing="</minimax:tool_call>",
)  # fmt: skip
DSML = "\uff5cDSML\uff5c"
"""In all tags of DeepSeek-V3.2, whose tokenizer may have it as a token."""
DSML_TAGS = Tags(
    f'<{DSML}invoke name="', f"</{DSML}invoke>", f'<{DSML}parameter name="', '">', "", f"</{DSML}parameter>", False,
    name_end='">', opening=f"<{DSML}function_calls>", closing=f"</{DSML}function_calls>", typed=True,
)  # fmt: skip
TYPED_KEY = re.compile(r'(.*?)"\s+string="(true|false)', re.DOTALL)
NOT_TEXTS = frozenset({"integer", "number", "boolean", "null", "array", "object"})
NAME_AT = re.compile(rf"\s*({NAME.pattern})\"?[ \t]*(?:>|(?=[\n<])|\Z)", re.ASCII)
NAME_STOPS = re.compile(r"[^\s][^>\n<]*[>\n<]")


class TaggedReader(HermesReader):
    """Some models of these families write Hermes' JSON now and then, so that is read too."""

    def __init__(self, schemas: Schemas, new_id: Callable[[], str], tags: Tags) -> None:
        self._tags = tags
        super().__init__(schemas, new_id)

    def _read(self) -> Wait:
        tags = self._tags
        openers = (tags.opening, tags.function) if tags.function else (tags.opening,)
        while True:
            opener = yield from self._until(openers, self._say)
            if not opener:
                self._end_text()
                return
            name = yield from self._opened(opener)
            if name:
                self._begin(name)
                yield from self._arguments(name)

    # ---- The name -----------------------------------------------------------------------------------------------

    def _opened(self, opener: str) -> Generator[None, None, str]:
        """The name of the tool, or "" when there is no call to go on with."""
        function, raw = self._tags.function, opener
        if opener == self._tags.opening:
            begins = (() if self._tags.several else ("{",)) + ((function,) if function else ())
            ahead = yield from self._ahead(begins)
            if ahead == "{":
                yield from self._json_call()
                return ""
            if function and ahead != function:
                self._say(raw)
                return ""
            if function:
                raw += self._take(len(self._left) - len(self._left.lstrip()) + len(function))
        match = yield from self._match(NAME_AT, NAME_STOPS)
        if match and (yield from self._is_call(match[1], opener)):
            return str(match[1])
        self._say(raw + (match[0] if match else ""))
        return ""

    def _is_call(self, name: str, opener: str) -> Generator[None, None, bool]:
        """What lacks a part of a call's beginning is one only if there is such a tool: it may be a text about calls."""
        if name in self._schemas:
            return True
        if self._tags.function:
            return opener == self._tags.opening
        return (yield from self._ahead((self._tags.key, self._tags.closing))) is not None

    # ---- Arguments ----------------------------------------------------------------------------------------------

    def _arguments(self, name: str) -> Wait:
        tags, given = self._tags, set[str]()
        ends = tuple(end for end in (tags.function_end, tags.closing) if end)
        if tags.typed and (yield from self._ahead(("{",))) == "{":  # JSON in place of parameters
            yield from self._take_space()
            if (yield from self._stream_object(JsonText())):
                yield from self._until((tags.function_end,), self._keep_for_later)
                yield from self._after_function()
                self._end(True)
            return
        while True:
            marker = yield from self._until((tags.key, *ends, tags.opening), self._keep_for_later)
            if marker != tags.key:
                break
            key, kinds = yield from self._key(name)
            if self._ended and not self._left and self._cut:
                self._end(False)
                return
            self._argue(("{" if not given else ", ") + f'"{escaped(key)}": ')
            given.add(key)
            if not (yield from self._value(name, kinds, given)):
                self._end(False)
                return
        complete = bool(marker) or not self._cut
        if complete:
            self._argue("}" if given else "{}")
        if marker == tags.opening:  # the next call, and this one was not closed
            self._left = tags.opening + self._left
        elif tags.function_end and marker == tags.function_end:
            yield from self._after_function()
        self._end(complete)

    def _after_function(self) -> Wait:
        tags = self._tags
        follows = yield from self._ahead((tags.closing, *((tags.function,) if tags.several else ())))
        if follows == tags.closing:
            yield from self._until((tags.closing,), str)
        elif follows:  # the next call, as if it were opened like the first
            self._left = tags.opening + self._left

    def _key(self, name: str) -> Generator[None, None, tuple[str, frozenset[str]]]:
        """The name of a parameter and the kinds of value that it may have, and what stands between that and the
        value."""
        parts: list[str] = []
        tags = self._tags
        marker = yield from self._until((tags.key_end, tags.value or "\n"), parts.append)
        if tags.value and marker == tags.key_end and (yield from self._ahead((tags.value,))) == tags.value:
            yield from self._until((tags.value,), str)
        key = "".join(parts).strip()
        typed = TYPED_KEY.fullmatch(key) if tags.typed else None
        if typed:
            return typed[1], frozenset({"string"}) if typed[2] == "true" else NOT_TEXTS
        return key, self._schemas.kinds(name, key)

    def _value(self, name: str, kinds: frozenset[str], given: set[str]) -> Generator[None, None, bool]:
        """Tells the value. False if the answer was cut inside it."""
        value = _Value(self._tags.line_ends, kinds, self._argue)
        while True:
            marker = yield from self._until(self._value_ends, value.add)
            if not marker and self._cut:
                value.leave()
                return False
            if (yield from self._ends_value(marker, name, given)):
                value.end()
                return True
            value.add(marker)

    @property
    def _value_ends(self) -> tuple[str, ...]:
        tags = self._tags
        return tuple(end for end in (tags.value_end, tags.key, tags.function_end, tags.closing) if end)

    def _ends_value(self, marker: str, name: str, given: set[str]) -> Generator[None, None, bool]:
        """Whether a tag ends a value, or is part of it: people have models write about such tags. What a closing tag
        must be followed by decides. An opening tag ends the value before it, unclosed, if it names a parameter of the
        tool that is not given yet."""
        tags = self._tags
        if not marker:
            return True
        if marker == tags.value_end:
            ends = tuple(end for end in (tags.key, tags.function_end, tags.closing) if end)
            return (yield from self._ahead(ends)) is not None
        if marker == tags.key:
            return (yield from self._opens_known(name, given))
        after: tuple[str, ...] = (tags.closing, tags.opening) if marker == tags.function_end else (tags.opening,)
        if marker == tags.function_end and tags.several:
            after = (*after, tags.function)
        ended = (yield from self._ahead(after)) is not None
        if ended:
            self._left = marker + self._left
        return ended

    def _opens_known(self, name: str, given: set[str]) -> Generator[None, None, bool]:
        known = self._schemas.names(name) - given
        end = '"' if self._tags.typed else self._tags.key_end
        spelled = tuple(each + end for each in known)
        found = bool(spelled) and bool((yield from self._ahead(spelled)))
        if found:
            self._left = self._tags.key + self._left
        return found


class _Value:
    """One value, told as it comes if it is a text, or else at its end."""

    def __init__(self, line_ends: bool, kinds: frozenset[str], tell: Callable[[str], object]) -> None:
        self._trims = line_ends
        self._text_only = kinds == {"string"}
        self._kinds = kinds
        self._tell = tell
        self._held = ""
        self._begun = False

    def add(self, text: str) -> None:
        self._held += text
        if not self._text_only or not self._held:
            return
        if not self._begun:
            self._begun = True
            self._tell('"')
            if self._trims:
                self._held = self._held.removeprefix("\n")
        keep = 1 if self._trims and self._held.endswith("\n") else 0
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._tell(escaped(ready))

    def end(self) -> None:
        if self._text_only:
            rest = self._held if not self._trims else self._held.removesuffix("\n")
            self._tell(("" if self._begun else '"') + escaped(rest) + '"')
            return
        text = self._held.removeprefix("\n").removesuffix("\n") if self._trims else self._held
        self._tell(value_of(text, self._kinds))

    def leave(self) -> None:
        """The answer was cut here."""
        if self._text_only and not self._begun:
            self._tell('"')
        elif self._text_only:
            self._tell(escaped(self._held))
