"""Conversations: the model's own template turns messages into tokens.

Nothing in a message becomes a token of its own, whatever it spells, with one exception: a marker that the template
itself looks for inside a message (`</think>` in what the model said) keeps the meaning that the template gives it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moeflux import files
from moeflux.errors import ArgumentError, FormatError, StateError
from moeflux.models.model_files import ModelFiles, files_of
from moeflux.text.speech import CHANNELS, Speech, speech_of
from moeflux.text.template import Template
from moeflux.text.thoughts import AnswerSplit
from moeflux.text.tokenizer import Tokenizer, shared_length

__all__ = ["ChatFormat", "Prompt", "check_messages", "plain_value", "template_of_ours"]

Message = dict[str, Any]
ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
MAX_DEPTH = 32  # of lists and objects in a message
OURS = {"deepseek_v32": Path(__file__).with_name("deepseek_v32.jinja")}
"""`model_type` of a model that is published with a program in place of a template -> what writes the same text."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Prompt:
    """A conversation as the model reads it."""

    text: str
    tokens: list[int]
    borders: tuple[int, ...]  # positions where a later prompt may leave this one, ascending
    thinking: bool  # the template has begun a thought, and the model continues it


class ChatFormat:
    """How one model wants conversations written."""

    def __init__(self, tokenizer: Tokenizer, templates: dict[str, str], source: str = "chat template") -> None:
        self.tokenizer = tokenizer
        self._templates = {name: Template(text, source) for name, text in templates.items()}
        self._text = "".join(templates.values())
        self._added = _Added(tokenizer.added)
        self._named = {name: tokenizer.named(name) for name in NAMED_TOKENS if tokenizer.named(name) is not None}

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer: Tokenizer) -> ChatFormat | None:
        """From chat_template.jinja, else tokenizer_config.json, else ours; None when the model has no template."""
        beside, alone = files_of(folder), "chat_template.jinja"
        if beside.has(alone):
            return cls(tokenizer, {"default": beside.text_of(alone)}, beside.where(alone))
        for name in ("chat_template.json", "tokenizer_config.json"):
            found = beside.json_of(name) if beside.has(name) else None
            template = found.get("chat_template") if isinstance(found, dict) else None
            if template is not None:
                where = beside.where(name)
                return cls(tokenizer, _named_templates(template, f"{where}: chat_template"), where)
        own = template_of_ours(beside)
        return None if own is None else cls(tokenizer, {"default": files.read_text(own)}, own.name)

    def check_thinking(self, wanted: bool | None) -> None:
        """ArgumentError if the template does not allow it: without a choice, a model always thinks or never does."""
        if wanted is None or "enable_thinking" in self._text:
            return
        always = self.speech.sign in self._text
        if wanted is not always:
            raise ArgumentError(
                f"thinking: expected a template that lets one choose, found one with which the model "
                f"{'always' if always else 'never'} thinks"
            )

    def knows(self, variable: str) -> bool:
        """Whether a template names a variable."""
        return re.search(rf"\b{re.escape(variable)}\b", self._text) is not None

    @cached_property
    def speech(self) -> Speech:
        """How the model says what it thinks."""
        return speech_of(self._text)

    @property
    def has_channels(self) -> bool:
        """Whether the model thinks and answers in channels, as gpt-oss does."""
        return self.speech is CHANNELS

    def split(self, prompt: Prompt) -> AnswerSplit:
        """Tells thoughts from the answer to a prompt."""
        return self.speech.split(prompt.thinking, ())

    @cached_property
    def marks(self) -> dict[int, str]:
        """What a split is to be given for tokens that have no text."""
        ids = {self.tokenizer.id_of(name): mark for name, mark in self.speech.marks.items()}
        return {id: mark for id, mark in ids.items() if id in self.tokenizer.special_ids}

    @property
    def text(self) -> str:
        """Of all templates."""
        return self._text

    def check_variables(self, names: Iterable[str]) -> None:
        """ArgumentError for one that no template names: it would change nothing."""
        for name in names:
            if not self.knows(name):
                raise ArgumentError(
                    f"{name}: expected system, tools, thinking or a variable of the chat template, found another name"
                )

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text. `variables` are any others that the template knows."""
        self.check_variables(variables)
        return self._render(
            check_messages(messages), _variables(tools, add_generation_prompt, enable_thinking, variables)
        )

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **variables: Any,
    ) -> Prompt:
        """The conversation as tokens, and where its messages end."""
        self.check_variables(variables)
        checked = check_messages(messages)
        given = _variables(tools, add_generation_prompt, enable_thinking, variables)
        text, tokens = self._tokens(checked, given)
        start, end = self.speech.start, self.speech.end
        opened = text.rfind(start)
        thinking = add_generation_prompt and opened > text.rfind(end) and not text[opened + len(start) :].strip()
        return Prompt(text, tokens, self._borders(checked, given, tokens), thinking)

    # ---- Tokens of the template's own only ----------------------------------------------------------------------

    def _tokens(self, messages: list[Message], given: dict[str, Any]) -> tuple[str, list[int]]:
        """Renders the text. If a message spells an added token, renders again with a barrier inside the spelling."""
        spelled = _Spellings(self._added, messages, given)
        try:
            text = self._render(messages, given)
        except StateError:  # maybe of what they spell: as a text, with barriers, it is nothing to be refused
            if not spelled.found:
                raise
            barrier = _unused_character(json.dumps([messages, given], ensure_ascii=False))
            marked = self._render_barred(spelled, spelled.found, barrier)
            return marked.replace(barrier, ""), self.tokenizer.encode_marked(marked, barrier)
        if not spelled.found:
            return text, self.tokenizer.encode_marked(text)
        barrier = _unused_character(text)
        barred = spelled.found
        marked = self._render_barred(spelled, barred, barrier)
        if marked.replace(barrier, "") != text:
            # The template looked for one of the spellings. Those that it looks for stay, unless they are special.
            special = {self.tokenizer._added[id].content for id in self.tokenizer.special_ids}
            barred = {
                each
                for each in spelled.found
                if each[1] in special or self._render_barred(spelled, {each}, barrier).replace(barrier, "") == text
            }
            marked = self._render_barred(spelled, barred, barrier)
        return marked.replace(barrier, ""), self.tokenizer.encode_marked(marked, barrier)

    def _render_barred(self, spelled: _Spellings, barred: set[tuple[str, str]], barrier: str) -> str:
        messages, given = spelled.with_barriers(barred, barrier)
        return self._render(messages, given, barrier)

    def _borders(self, messages: list[Message], given: dict[str, Any], tokens: list[int]) -> tuple[int, ...]:
        """The ends of the instructions, of the message before the last and of the last. One more border is one token
        before the end, from where the same prompt can be answered again."""
        borders = {len(tokens) - 1}
        without = given | {"add_generation_prompt": False}
        counts = {len(messages), len(messages) - 1, 1 if messages[0]["role"] in ("system", "developer") else 0}
        for count in counts - {0}:
            try:
                shorter = self._tokens(messages[:count], without)[1]
            except StateError:  # a template may refuse the beginning of a conversation
                continue
            borders.add(shared_length(shorter, tokens))
        return tuple(sorted(border for border in borders if 0 < border < len(tokens)))

    def _render(self, messages: list[Message], given: dict[str, Any], barrier: str = "") -> str:
        named = "tool_use" if given.get("tools") and "tool_use" in self._templates else "default"
        return self._templates[named].render({**self._named, **given, "messages": messages}, barrier)


def template_of_ours(beside: ModelFiles) -> Path | None:
    """The template for a model that is published without one."""
    fields = beside.json_of("config.json") if beside.has("config.json") else None
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    return OURS.get(kind) if isinstance(kind, str) else None


def _variables(
    tools: Any, add_generation_prompt: bool, enable_thinking: bool | None, variables: dict[str, Any]
) -> dict[str, Any]:
    given = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt, **variables}
    if enable_thinking is not None:
        given["enable_thinking"] = enable_thinking
    plain: dict[str, Any] = plain_value(given, "variables")
    return plain


def _named_templates(template: Any, where: str) -> dict[str, str]:
    if isinstance(template, str):
        return {"default": template}
    listed = template if isinstance(template, list) else [template]
    named = {}
    for each in listed:
        fits = isinstance(each, dict) and isinstance(each.get("name"), str) and isinstance(each.get("template"), str)
        if not fits:
            raise FormatError(f"{where}: expected a template, or a list of name and template, found {each!r:.60}")
        named[each["name"]] = each["template"]
    if "default" not in named:
        raise FormatError(f'{where}: expected one named "default", found {", ".join(named) or "none"}')
    return named


# ---- Messages ---------------------------------------------------------------------------------------------------


def check_messages(messages: Sequence[Message]) -> list[Message]:
    """A copy of the messages in plain values. An ArgumentError names what is no message. Keys whose value is None are
    left out, as transformers does it: clients send `content` and `tool_calls` as null, and templates ask whether they
    are there."""
    if isinstance(messages, (str, bytes, dict)) or not isinstance(messages, Sequence):
        raise ArgumentError(f"messages: expected a list of role and content, found {type(messages).__name__}")
    if not messages:
        raise ArgumentError("messages: expected at least one, found none")
    checked = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise ArgumentError(f"{where}: expected role and content, found {type(message).__name__}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not ROLE.fullmatch(role):
            raise ArgumentError(f'{where}: role: expected a word such as "user", found {role!r:.60}')
        if content is not None and not isinstance(content, (str, list)):
            raise ArgumentError(f"{where}: content: expected text, found {type(content).__name__}")
        plain = plain_value({name: value for name, value in message.items() if value is not None}, where)
        names = ("reasoning_content", "thinking", "reasoning")
        reasoning = next((plain[name] for name in names if name in plain), None)
        if reasoning is not None:  # clients and templates call it by three names
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        checked.append(plain)
    return checked


def plain_value(value: Any, where: str, depth: int = 0) -> Any:
    """The value, which must be one of JSON: a template could call the methods of anything else."""
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        return _unicode(value, where)
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if depth == MAX_DEPTH:
        raise ArgumentError(f"{where}: expected values nested {MAX_DEPTH} deep at most, found more")
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {_unicode(str(key), where): plain_value(each, where, depth + 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(each, where, depth + 1) for each in value]
    found: dict[type, str] = {int: "a whole number beyond 64 bits", float: "a number that is not finite"}
    raise ArgumentError(f"{where}: expected what JSON can hold, found {found.get(type(value), type(value).__name__)}")


def _unicode(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, as a terminal's surrogateescape makes them
        raise ArgumentError(
            f"{where}: expected Unicode, found {text[error.start]!r} at character {error.start}"
        ) from error
    return text


class _Added:
    """The added tokens, and characters without which a text has nothing of them. Most texts have none of those."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tokens
        self._firsts = {token[:1] for token in tokens}
        self._lasts = {token[-1:] for token in tokens}
        self._longest = max(map(len, tokens), default=0)

    def in_text(self, text: str) -> dict[str, list[int]]:
        """Token -> places inside its spellings. Templates trim, so an edge is where white space ends."""
        left, right = len(text) - len(text.lstrip()), len(text.rstrip())
        inside = any(first in text for first in self._firsts)
        edge = not self._lasts.isdisjoint(text[left : left + self._longest])
        return self._searched(text, left, right) if inside or edge else {}

    def _searched(self, text: str, left: int, right: int) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for token in self.tokens:
            places = [match.start() + 1 for match in re.finditer(f"(?={re.escape(token)})", text)]
            for size in range(1, min(len(token), right - left + 1)):
                if text.startswith(token[-size:], left):
                    places += [left + size - 1] if size > 1 else [left]
                if text.endswith(token[:size], 0, right):
                    places.append(right - size + 1)
            if places:
                found[token] = places
        return found


class _Spellings:
    """Where messages and variables spell added tokens: whole, or at an edge where another text could complete them."""

    def __init__(self, added: _Added, messages: list[Message], given: dict[str, Any]) -> None:
        self._added = added
        self._messages = messages
        self._given = given
        self.found: set[tuple[str, str]] = set()  # role (or "") and token
        self._each_text(self._find)

    def _find(self, role: str, text: str) -> str:
        self.found.update((role, token) for token in self._added.in_text(text))
        return text

    def with_barriers(self, barred: set[tuple[str, str]], barrier: str) -> tuple[list[Message], dict[str, Any]]:
        def bar(role: str, text: str) -> str:
            spelled = self._added.in_text(text)
            places = {place for token, at in spelled.items() if (role, token) in barred for place in at}
            for place in sorted(places, reverse=True):
                text = text[:place] + barrier + text[place:]
            return text

        return self._each_text(bar)

    def _each_text(self, change: Any) -> tuple[list[Message], dict[str, Any]]:
        def walk(role: str, value: Any) -> Any:
            if isinstance(value, str):
                return change(role, value)
            if isinstance(value, dict):
                return {change(role, key): walk(role, each) for key, each in value.items()}
            return [walk(role, each) for each in value] if isinstance(value, list) else value

        messages = []
        for message in self._messages:
            rest = {name: value for name, value in message.items() if name != "role"}
            messages.append({"role": message["role"], **walk(message["role"], rest)})
        return messages, walk("", self._given)


def _unused_character(text: str) -> str:
    """A private-use character that the text does not have. It is in the rendered text for a moment only."""
    return next(chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in text)
