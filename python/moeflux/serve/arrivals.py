"""The answers of an exchange become text for the client, at the moments when something is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from moeflux.serve.desk import Begun
from moeflux.serve.events import Event
from moeflux.serve.metrics import Metrics
from moeflux.serve.request import Ending, TokenLogprob

__all__ = ["Arrivals", "Beat", "Part"]

Part = tuple[int, Sequence[Event], Sequence[TokenLogprob], "Ending | None"]
"""Which answer, what comes of it, and how it ends if it does."""


class Beat:
    """The moment at which all streams that have just told something may tell more. The event loop wakes once for it."""

    FEW, SLOWEST = 5, 3
    """So many streams cost an engine of two cores nothing to speak of. Those of more are told less often, up to so many
    times: it is the parts of all streams that cost."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: list[Callable[[], None]] = []
        self.streams = 0

    @property
    def seconds(self) -> float:
        """How long a stream waits before it tells more."""
        return self._seconds * min(max(1.0, self.streams / self.FEW), self.SLOWEST)

    def join(self, look: Callable[[], None], at: float) -> None:
        """Calls this then, or sooner when others came first; `seconds` from now at the latest."""
        if not self._waiting:
            asyncio.get_running_loop().call_at(at, self._strike)
        self._waiting.append(look)

    def _strike(self) -> None:
        waiting, self._waiting = self._waiting, []
        for look in waiting:
            look()


class Arrivals:
    """Iterates over what `write` did not take. No task wakes for what it took, which is nearly everything."""

    def __init__(
        self,
        begun: Sequence[Begun],
        metrics: Metrics,
        beat: Beat,
        tell: Callable[[Part], str],
        write: Callable[[str], bool],
    ) -> None:
        self._begun = begun
        self._left = dict(enumerate(begun))
        self._metrics = metrics
        self._beat = beat
        self._tell = tell
        self._write = write
        self._clock = asyncio.get_running_loop().time
        self._next_at = 0.0
        self._changed = asyncio.Event()
        self._waits = True  # the task has sent what it was given, and waits for more
        self._untold = ""
        self._error: Exception | None = None

    async def __aiter__(self) -> AsyncIterator[str]:
        self._beat.streams += 1
        try:
            for each in self._begun:
                each.handle.follow(self._come)
            while self._left or self._untold:
                await self._changed.wait()
                self._changed.clear()
                self._waits = False
                # More may have come since that was refused, and nobody tells of it again.
                text, self._untold = self._untold + ("" if self._error else self._new()), ""
                if text:
                    yield text
                if self._error is not None:
                    raise self._error
                self._waits = True
        finally:
            self._beat.streams -= 1
            self._waits = False
            if self._left:
                for each in self._begun:
                    each.handle.cancel()

    def _come(self) -> None:
        if self._clock() < self._next_at and not self._is_all_here():
            self._beat.join(self._look, self._next_at)
        else:
            self._look()

    def _is_all_here(self) -> bool:
        """Nothing more will come that could be told with it."""
        return all(each.handle.finish is not None for each in self._left.values())

    def _look(self) -> None:
        self._next_at = self._clock() + self._beat.seconds
        if self._waits and not self._untold:
            text = self._new()
            if text and not self._write(text):
                self._untold = text
            if self._left and not self._untold and self._error is None:
                return
        self._changed.set()

    def _new(self) -> str:
        """What has come since the last time, as it is told. An error comes after what was there before it."""
        text = ""
        try:
            for part in self._parts():
                text += self._tell(part)
        except Exception as error:
            self._error = error
        return text

    def _parts(self) -> Iterator[Part]:
        for index, each in list(self._left.items()):
            pieces = each.handle.arrived()
            while pieces:
                self._metrics.tokens(len(pieces))
                yield index, *each.answer.take(pieces), None
                pieces = [] if each.handle.finish is None else each.handle.arrived()
            if pieces is None:
                del self._left[index]
                assert each.handle.finish is not None
                events, ending = each.answer.finish(each.handle.finish, each.handle.stop_string)
                yield index, events, [], ending
