"""How much of a step prompts may take, so that whoever gets an answer does not notice that they are read.

What a row of a prompt costs depends on the machine, on the model and on the other rows: the first ones bring experts of
their own into the step, the later ones find them there. So it is measured. Every few steps prompts wait for one, and
that says how long a step takes without them.

A short prompt is read at once instead, where that takes a moment only. In pieces of a few rows, requests that come
together would begin one after the other, and each row would bring its experts into a step of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

__all__ = ["PromptShare"]

LONGEST = 1.7
"""How long a step with prompts should take, of one without. What is promised is twice as long; the rest is for steps
that take longer than the one before."""
STEPS = 8
"""With prompts, until one without."""
REMEMBERED = 5
"""Steps of either kind. What one takes goes up and down, and other programs add to it. Were the middle to count,
prompts would have too much now and then, and just those steps are what answers notice. So a step without prompts counts
as it is when it is short, and a row as it is when it costs much."""

PAUSE = 0.1
"""The seconds of a step that reads short prompts at once: nobody who reads an answer notices that it stands so long."""
PAUSES = 4
"""That may follow one another. Requests often come together."""
STEPS_FOR_A_PAUSE = 100
"""Beside answers, until there is one more. So the 99th percentile of the time between two tokens keeps the promise. A
pause takes no longer than all of these steps, so their sum keeps it, too."""


class PromptShare:
    """Is told what each step took, and says how many rows the next one may have for prompts."""

    def __init__(self, most: int) -> None:
        self._most = most  # rows of a step
        self._rows = 0
        self._pauses = float(PAUSES)
        self._read: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # rows and seconds of steps that nobody minded
        self._plain: deque[float] = deque(maxlen=REMEMBERED)  # seconds of steps without prompts
        self._row: deque[float] = deque(maxlen=REMEMBERED)  # seconds more for each row of a prompt
        self._largest = 1  # the next piece, at most
        self._answers = 0  # in the last step without prompts
        self._since = 0  # steps with prompts since then

    def rows(self, unread: Sequence[int]) -> int:
        """Of the next step. `unread` has what each prompt still needs, in the order in which they are read."""
        if not unread or self._rows >= sum(unread) or self._pauses < 1:
            return self._rows
        at_once = min(self._rows_at_once(), sum(unread), self._most)
        return at_once if at_once >= unread[0] else self._rows

    def note(self, seconds: float, answers: int, rows: int) -> None:
        """A step that evaluated a token for each of so many answers, and so many rows of prompts."""
        if rows and (not answers or rows > self._rows):
            self._read.append((rows, seconds))
        if not answers:
            return  # nobody waits: prompts take all there is
        if rows > self._rows:
            self._pauses -= 1
            return  # it says nothing of steps with a few rows
        self._pauses = min(self._pauses + 1 / STEPS_FOR_A_PAUSE, PAUSES)
        others = abs(answers - self._answers) > self._answers // 4
        if not rows:
            if others:
                self._plain.clear()  # what a row costs is a guess that is still of use
            self._plain.append(seconds)
            self._answers, self._since, others = answers, 0, False
        elif self._plain:
            self._row.append(max(seconds - _low(self._plain), 0.0) / rows)
            self._largest = rows + 1 + rows // 4
            self._since += 1
        self._rows = 0 if self._since >= STEPS or others or not self._plain else self._next()

    def _next(self) -> int:
        spare = (LONGEST - 1) * _low(self._plain)
        each = _high(self._row) if self._row else 0.0
        return max(1, self._largest if each * self._largest <= spare else int(spare / each))

    def _rows_at_once(self) -> int:
        """As many as a pause is long enough for, going by steps that had rows enough: twice as many rows take at most
        twice as long, and half as many may take as long."""
        pause = min([PAUSE, *(STEPS_FOR_A_PAUSE * plain for plain in self._plain)])
        return max((rows * int(pause / max(seconds, 1e-6)) for rows, seconds in self._read), default=0)


def _low(seconds: Collection[float]) -> float:
    """The second least of five."""
    return sorted(seconds)[len(seconds) // 4]


def _high(seconds: Collection[float]) -> float:
    """The second greatest of five: the greatest may be an accident."""
    return sorted(seconds)[-1 - len(seconds) // 4]
