"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from moeflux.errors import ArgumentError

__all__ = ["StopText"]


class StopText:
    """Lets a text through up to the stop string that is complete first, and holds back what may be the start of one.

    What comes through does not depend on where the text was cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or any(not isinstance(stop, str) or not stop for stop in stops):
            raise ArgumentError(f"stop: expected a list of texts, none of them empty, found {stops!r:.60}")
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """(text that is certain, the stop string that follows it, if any)"""
        if not self._stops:
            return text, None
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)  # the one that is complete first, and of several the longest
            text, self._held = self._held[:at], ""
            return text, stop
        keep = max(self._overlap(stop) for stop in self._stops)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text, None

    def finish(self) -> str:
        """The text that was held back, when no more text comes."""
        text, self._held = self._held, ""
        return text

    def _overlap(self, stop: str) -> int:
        """How many characters at the end of the text may be the beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
