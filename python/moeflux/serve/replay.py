"""What was sampled comes back as it was sampled.

A client sends an answer back as text, or as the JSON of a call. Written anew by the template, that can be other tokens
than the model chose, or another text: spaces in JSON, a tag that was left out. Then nothing from there on would be
found in the cache. So the tokens of answers are kept for a while, and take the place of what the template writes for
the same answer.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeflux.errors import StateError
from moeflux.serve.events import Said
from moeflux.serve.request import Message
from moeflux.serve.tools.families import HERMES, Family
from moeflux.text.channels import ANSWER_HEAD, THOUGHT_END, THOUGHT_HEAD
from moeflux.text.chat import ChatFormat, Prompt

__all__ = ["Replay"]

KEPT_TOKENS = 4_000_000
"""Of all answers together: 16 MB."""

Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Turn:
    """One answer, from behind what announces it in the prompt to before the token that ended it."""

    tokens: np.ndarray  # int32
    thought: str
    ids: tuple[str, ...]  # of its calls


class Replay:
    def __init__(
        self, form: ChatFormat, ends: Collection[int], family: Family = HERMES, most: int = KEPT_TOKENS
    ) -> None:
        self._tokenizer = form.tokenizer
        self._ends = frozenset(ends)
        self._speech = family.speech
        self._header = _header(form)
        self._one_call = family.one_call
        thoughts = (self._speech.start, self._speech.end) if family.thought_first else ()
        self._thought_marks = {id for mark in thoughts if (id := self._tokenizer.id_of(mark)) is not None}
        self._results = None if family.result is None else [self._tokenizer.id_of(mark) for mark in family.result]
        self._thought = self._tokenizer.encode_marked(THOUGHT_HEAD) if family.channels else []
        follows = THOUGHT_END if family.channels else family.result[0] if family.result else None
        behind = None if follows is None else self._tokenizer.id_of(follows)
        self._closes = self._ends | ({behind} if behind is not None else set())  # what follows an answer in a prompt
        self._most = most
        self._count = 0
        self._turns: OrderedDict[Key, Turn] = OrderedDict()
        self._by_id: dict[str, Turn] = {}
        self._lock = threading.Lock()  # prompts are made in threads

    # ---- Keeping ------------------------------------------------------------------------------------------------

    def keep(self, prompt: Sequence[int], answer: Sequence[int], said: Said, begun: str = "") -> None:
        """An answer that its client was told in full, with what the client had begun of it."""
        begins = self._begins(prompt)
        if not begins or not answer or any(not call.complete for call in said.calls) or "\ufffd" in said.text:
            return
        # Some templates announce no answer that follows the result of a call: then this is no beginning of one.
        opened = self._tokenizer.decode(prompt[begins[-1] :])
        for mark in (self._speech.start, self._speech.end, ANSWER_HEAD):
            opened = opened.replace(mark, "")
        if opened.strip() != begun.strip():
            return
        tokens = [*prompt[begins[-1] :], *answer]
        if tokens[-1] in self._ends:
            tokens.pop()
        key = _key(said.text, ((call.name, call.arguments) for call in said.calls))
        turn = Turn(np.asarray(tokens, np.int32), said.thought, tuple(call.id for call in said.calls))
        with self._lock:
            self._put(key, turn)

    def _put(self, key: Key, turn: Turn) -> None:
        self._drop(key)
        self._turns[key] = turn
        self._by_id |= dict.fromkeys(turn.ids, turn)
        self._count += len(turn.tokens)
        while self._count > self._most and len(self._turns) > 1:
            self._drop(next(iter(self._turns)))

    def _drop(self, key: Key) -> None:
        turn = self._turns.pop(key, None)
        if turn is None:
            return
        self._count -= len(turn.tokens)
        for id in turn.ids:
            self._by_id.pop(id, None)

    # ---- Giving back --------------------------------------------------------------------------------------------

    def with_thoughts(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with the thoughts that led to calls, where the client has left them out. Whether they stand in
        the prompt is for the template to say."""
        found = []
        for message in messages:
            turn = self._by_id.get(next((call["id"] for call in message.get("tool_calls", ())), ""))
            if turn is not None and turn.thought and not message.get("reasoning_content"):
                message = {**message, "reasoning_content": turn.thought}
            found.append(message)
        return found

    def replayed(self, prompt: Prompt, messages: Sequence[Message]) -> Prompt:
        """The prompt with the tokens of answers that are known. `messages` are those that it was made of, with
        arguments as text. An answer whose thought the template leaves out stays as the template writes it."""
        said = [message for message in messages if message["role"] == "assistant"]
        written = self._written(prompt.tokens)
        # Calls that were one answer stand in several, with a result between them: they stay as the template has them.
        counts = [max(1, len(message.get("tool_calls", ()))) if self._one_call else 1 for message in said]
        if not said or len(written) != sum(counts):  # what announces answers is not where it was expected
            return prompt
        changes, place = [], 0
        for message, count in zip(said, counts, strict=True):
            begin, end = written[place]
            place += count
            turn = self._turn_of(message) if count == 1 else None
            if turn is not None and end is not None and self._keeps_thought(turn, prompt.tokens[begin:end]):
                changes.append((begin, end, turn.tokens.tolist()))
        return _changed(prompt, changes)

    def _written(self, tokens: Sequence[int]) -> list[tuple[int, int | None]]:
        """Where each answer that the template has written begins and ends. A thought in a message of its own belongs to
        the answer after it. The last header is that of the answer to come."""
        found, size = list[tuple[int, int | None]](), len(self._thought)
        begins, thought_ends = self._begins(tokens), None
        for begin, limit in itertools.pairwise(begins):
            end = next((at for at in range(begin, limit) if tokens[at] in self._closes), None)
            goes_on = thought_ends is not None and thought_ends + 1 + len(self._header) == begin
            found.append((found.pop()[0] if goes_on else begin, end))
            is_thought = bool(size) and list(tokens[begin : begin + size]) == self._thought
            thought_ends = end if is_thought else None
        return found

    def _begins(self, tokens: Sequence[int]) -> list[int]:
        """Behind what announces an answer, and behind the results after which an answer goes on."""
        found, size = _places(tokens, self._header), len(self._header)
        if self._thought_marks and size:
            return sorted({*found, *self._behind_results(tokens, found)})
        if self._results is None or not size:
            return found
        behind = (at + 1 for at, token in enumerate(tokens) if token == self._results[1])
        goes_on = (
            at
            for at in behind
            if not self._closes & {*tokens[at : at + 1]} and list(tokens[at : at + size]) != self._header
        )
        return sorted([*found, *goes_on])

    def _behind_results(self, tokens: Sequence[int], headed: Sequence[int]) -> list[int]:
        """Where the thought marks are that come first behind an answer, unless a header does. Nobody but the template
        writes them outside of answers."""
        found = []
        ends = [at for at, token in enumerate(tokens) if token in self._ends]
        for end, limit in itertools.pairwise([*ends, len(tokens)]):
            mark = next((at for at in range(end, limit) if tokens[at] in self._thought_marks), None)
            if mark is not None and not any(end < at <= mark for at in headed):
                found.append(mark)
        return found

    def _turn_of(self, message: Message) -> Turn | None:
        calls = ((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ()))
        key = _key(message.get("content") or "", calls)
        with self._lock:
            if key in self._turns:
                self._turns.move_to_end(key)
            return self._turns.get(key)

    def _keeps_thought(self, turn: Turn, written: Sequence[int]) -> bool:
        """Whether the template has written the thought, too."""
        thought, end, _ = self._tokenizer.decode(written).partition(self._speech.end)
        return not turn.thought or (bool(end) and turn.thought.strip() in thought)


def _changed(prompt: Prompt, changes: Sequence[tuple[int, int, list[int]]]) -> Prompt:
    """The prompt with other tokens from one place to another. Borders move along; one inside such a place is where it
    begins."""
    tokens: list[int] = []
    borders = list[int]()
    done = 0
    for begin, end, new in [*changes, (len(prompt.tokens), len(prompt.tokens), [])]:
        moved = len(tokens) - done
        borders += [min(border, begin) + moved for border in prompt.borders if done <= border < max(end, done + 1)]
        tokens += [*prompt.tokens[done:begin], *new]
        done = end
    return Prompt(prompt.text, tokens, tuple(sorted({border for border in borders if border > 0})), prompt.thinking)


def _header(form: ChatFormat) -> list[int]:
    """What the template writes before an answer, up to where the model or a thought may begin. Messages cannot contain
    it, for it has a token of the template's own; where it has none, nothing is found."""
    said = [{"role": "user", "content": "x"}]
    try:
        without, whole = (form.encode(said, add_generation_prompt=wanted) for wanted in (False, True))
    except StateError:
        return []
    text = whole.text[_shared_text(without.text, whole.text) :]
    text = text.partition(form.speech.start)[0].partition(form.speech.end)[0].rstrip()
    tokens = form.tokenizer.encode_marked(text)
    added = {form.tokenizer.id_of(token) for token in form.tokenizer.added}
    return tokens if added & {*tokens} else []


def _shared_text(one: str, other: str) -> int:
    count = min(len(one), len(other))
    return next((place for place in range(count) if one[place] != other[place]), count)


def _places(tokens: Sequence[int], header: Sequence[int]) -> list[int]:
    """Where the tokens go on behind each header."""
    size, first = len(header), header[0] if header else None
    if not size:
        return []
    return [
        at + size for at, token in enumerate(tokens) if token == first and list(tokens[at : at + size]) == list(header)
    ]


def _key(text: str, calls: Iterable[tuple[str, str]]) -> Key:
    """What an answer says, whatever the white space around it and in its JSON."""
    return text.strip(), tuple((name, _canonical(arguments)) for name, arguments in calls)


def _canonical(arguments: str) -> str:
    try:
        value: Any = json.loads(arguments)
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
