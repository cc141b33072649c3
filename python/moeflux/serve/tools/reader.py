"""Reading an answer that comes in pieces. What comes out does not depend on where it was cut."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Generator
from typing import Protocol

from moeflux.serve.events import Arguments, CallBegin, CallEnd, Event, Text
from moeflux.serve.tools.values import Schemas

__all__ = ["NAME", "ObjectText", "Reader", "Wait"]

NAME = re.compile(r"[A-Za-z0-9_][\w.:/-]{0,255}", re.ASCII)
"""What may be the name of a tool."""

Wait = Generator[None, None, None]
"""A part of the reading. Each `yield` waits for more text."""


class ObjectText(Protocol):
    """Makes JSON of one object, as it comes."""

    def add(self, text: str) -> tuple[str, str | None]:
        """(JSON that is certain, the text after the end, or None if that has not come)"""

    def close(self) -> str:
        """The rest of the JSON, where the text ended before the object did."""


class Reader:
    """Turns what a model writes into text and calls. Nothing that a model writes is an error: what cannot be read as a
    call is text. White space around calls is neither."""

    def __init__(self, schemas: Schemas, new_id: Callable[[], str]) -> None:
        self._schemas = schemas
        self._new_id = new_id
        self._left = ""  # not read yet
        self._ended = self._cut = False
        self._events: list[Event] = []
        self._space = ""  # before what may be a call
        self._after = ""  # text that was inside a call and is no part of it
        self._calls = 0
        self._said = False  # there was text since the last call
        self._work = self._read()

    def add(self, text: str) -> list[Event]:
        """What is certain now."""
        self._left += text
        return self._go_on()

    def finish(self, cut: bool = False) -> list[Event]:
        """The rest, when no more text comes. `cut`: the model did not end its answer, so a call that is open stays
        unfinished. Otherwise the model forgot to close it, and it is closed here."""
        self._ended, self._cut = True, cut
        return self._go_on()

    def _go_on(self) -> list[Event]:
        next(self._work, None)
        events, self._events = self._events, []
        return events

    @abstractmethod
    def _read(self) -> Wait:
        """The whole answer."""

    # ---- Taking text --------------------------------------------------------------------------------------------

    def _until(self, markers: tuple[str, ...], say: Callable[[str], object]) -> Generator[None, None, str]:
        """Gives the text before the first of the markers to `say`, as it comes. Returns the marker, which is taken off
        too, or "" at the end."""
        while True:
            found = [(at, -len(marker), marker) for marker in markers if (at := self._left.find(marker)) >= 0]
            if found:
                at, _, marker = min(found)
                say(self._take(at))
                self._take(len(marker))
                return marker
            keep = 0 if self._ended else max(_overlap(self._left, marker) for marker in markers)
            say(self._take(len(self._left) - keep))
            if self._ended:
                return ""
            yield

    def _ahead(self, markers: tuple[str, ...]) -> Generator[None, None, str | None]:
        """Which of the markers follows, white space aside: "" if nothing follows, None if something else does. Takes
        nothing off."""
        while True:
            rest = self._left.lstrip()
            for marker in markers:
                if rest.startswith(marker):
                    return marker
            if self._ended:
                return None if rest else ""
            if not any(marker.startswith(rest) for marker in markers):
                return None
            yield

    def _match(self, pattern: re.Pattern[str], stop: re.Pattern[str]) -> Generator[None, None, re.Match[str] | None]:
        """Takes off what the pattern matches; None, and nothing taken, where it does not by the time that `stop` is
        found or the text ends."""
        while True:
            stopped = stop.search(self._left)
            if stopped or self._ended:
                match = pattern.match(self._left)
                if match:
                    self._take(match.end())
                return match
            yield

    def _take(self, count: int) -> str:
        text, self._left = self._left[:count], self._left[count:]
        return text

    def _take_space(self) -> Wait:
        while True:
            self._left = self._left.lstrip()
            if self._left or self._ended:
                return
            yield

    # ---- Telling what it was ------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """Text. White space waits for what follows: beside a call it is dropped."""
        text = self._space + text
        if self._calls and not self._said:
            text = text.lstrip()
        ready = text.rstrip()
        self._space = text[len(ready) :]
        if ready:
            self._said = True
            self._events.append(Text(ready))

    def _end_text(self) -> None:
        if self._space and not self._calls:
            self._events.append(Text(self._space))
        self._space = ""

    def _begin(self, name: str) -> None:
        self._space = ""
        self._calls += 1
        self._said = False
        self._events.append(CallBegin(self._new_id(), name))

    def _stream_object(self, text: ObjectText) -> Generator[None, None, bool]:
        """Tells the object that the rest begins with, as `text` makes JSON of it. False if the answer ended inside it;
        the call is then over."""
        while True:
            said, rest = text.add(self._take(len(self._left)))
            self._argue(said)
            if rest is not None:
                self._left = rest
                return True
            if self._ended:
                if not self._cut:
                    self._argue(text.close())
                self._end(not self._cut)
                return False
            yield

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(Arguments(text))

    def _end(self, complete: bool) -> None:
        """The call is over. Text from inside it follows."""
        self._events.append(CallEnd(complete))
        after, self._after = self._after.strip(), ""
        self._say(after)

    def _keep_for_later(self, text: str) -> None:
        self._after += text


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of the text may be the beginning of the marker."""
    longest = min(len(marker) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
