"""What a model says, split into thoughts and answer as it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

__all__ = ["AnswerSplit", "ReasoningSplit"]


class AnswerSplit(Protocol):
    """Splits what a model says into thoughts and answer as it comes."""

    @property
    def thinking(self) -> bool: ...
    def keeps(self, text: str) -> bool: ...
    def add(self, text: str) -> Sequence[tuple[bool, str]]: ...
    def finish(self) -> Iterator[tuple[bool, str]]: ...


class ReasoningSplit:
    """Splits what a model says into thoughts and answer as it comes. Markers and line ends around them are neither."""

    def __init__(
        self,
        thinking: bool,
        start: str = "<think>",
        end: str = "</think>",
        breaks: Sequence[str] = (),
        label: str = "",
    ) -> None:
        """`breaks` end a thought, too, and belong to the answer. `label` may follow the start, and says nothing."""
        self._thinking = thinking
        self._start = start
        self._end = end
        self._breaks = breaks
        self._signs = frozenset(marker[0] for marker in (start, end, *breaks))
        self._label = label
        self._labelled = not thinking  # the label may come with the next thought
        self._held = ""
        self._fresh = True  # nothing of this part has been said yet

    @property
    def thinking(self) -> bool:
        """Whether what comes now is a thought, as far as that is known."""
        return self._thinking

    @property
    def _settled(self) -> bool:
        """Whether no thought can begin any more: that is most of an answer."""
        return not (self._thinking or self._fresh)

    def keeps(self, text: str) -> bool:
        """Whether no part of this text changes `thinking`. What a token costs goes by this: nearly all text has no
        marker."""
        return self._settled or self._signs.isdisjoint(self._held + text)

    def add(self, text: str) -> Sequence[tuple[bool, str]]:
        """(is it a thought, text) as far as it is certain."""
        self._held += text
        if self._settled:
            text, self._held = self._held, ""
            return ((False, text),) if text else ()
        return tuple(self._split())

    def _split(self) -> Iterator[tuple[bool, str]]:
        while not self._label_comes():
            markers = (self._end, *self._breaks) if self._thinking else (self._start,)
            at, marker = min(
                ((at, marker) for marker in markers if (at := self._held.find(marker)) >= 0), default=(-1, "")
            )
            # A thought begins at the start of an answer, not in the middle of it.
            if at < 0 or (not self._thinking and not (self._fresh and not self._held[:at].strip())):
                yield from self._certain(markers)
                return
            before = self._held[:at].rstrip("\n") if self._thinking else ""
            yield from self._say(before)
            self._held = self._held[at if marker in self._breaks else at + len(marker) :]
            self._thinking = not self._thinking
            self._fresh = self._labelled = True

    def _label_comes(self) -> bool:
        """Whether a label may be on its way. One that is there is taken off."""
        if self._thinking and self._labelled:
            if len(self._held) < len(self._label) and self._label.startswith(self._held):
                return True
            self._held = self._held.removeprefix(self._label)
            self._labelled = False
        return False

    def _certain(self, markers: Sequence[str]) -> Iterator[tuple[bool, str]]:
        keep = self._uncertain(markers)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        yield from self._say(ready)

    def finish(self) -> Iterator[tuple[bool, str]]:
        yield from self._say(self._held.rstrip("\n") if self._thinking else self._held)
        self._held = ""

    def _uncertain(self, markers: Sequence[str]) -> int:
        """How many characters at the end may be the beginning of a marker, or what is dropped before it."""
        longest = max(self._overlap(marker) for marker in markers)
        rest = self._held[: len(self._held) - longest]
        return longest + len(rest) - len(rest.rstrip("\n" if self._thinking else None))

    def _overlap(self, marker: str) -> int:
        sizes = range(min(len(marker) - 1, len(self._held)), 0, -1)
        return next((size for size in sizes if self._held.endswith(marker[:size])), 0)

    def _say(self, text: str) -> Iterator[tuple[bool, str]]:
        if self._fresh:
            text = text.lstrip("\n")
        if text:
            self._fresh = False
            yield self._thinking, text
