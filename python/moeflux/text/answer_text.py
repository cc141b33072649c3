"""The text of an answer whose tokens come one by one, up to the stop string that ends it."""

from __future__ import annotations

from collections.abc import Sequence

from moeflux.text.stop_text import StopText
from moeflux.text.tokenizer import TextStream

__all__ = ["AnswerText"]


class AnswerText:
    def __init__(self, stream: TextStream | None, stops: Sequence[str] = ()) -> None:
        """Without a stream, tokens have no text."""
        self.stop_string: str | None = None  # that was found
        self._stream = stream
        self._stops = StopText(stops)

    def add(self, token: int) -> str:
        """The text that becomes certain with a token. One that is no text ends what was before it, also for stop
        strings: what they hold back belongs there."""
        if self._stream is not None and self._stream.hides(token):
            return self._stops.finish()
        text, self.stop_string = self._stops.add("" if self._stream is None else self._stream.add(token))
        return text

    def finish(self) -> str:
        """The text that was held back, now that nothing follows."""
        text, self.stop_string = self._stops.add("" if self._stream is None else self._stream.finish())
        return text if self.stop_string is not None else text + self._stops.finish()
