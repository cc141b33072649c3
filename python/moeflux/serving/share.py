"""How much of a step prompts may take, so that whoever gets an answer does not notice that they are read.

What a row of a prompt costs depends on the machine, on the model and on the other rows: the first ones bring experts of
their own into the step, the later ones find them there. So it is measured. Every few steps prompts wait for one, and
that says how long a step takes without them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

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


class PromptShare:
    """Is told what each step took, and says how many rows the next one may have for prompts."""

    def __init__(self) -> None:
        self.rows = 0
        self._plain: deque[float] = deque(maxlen=REMEMBERED)  # seconds of steps without prompts
        self._row: deque[float] = deque(maxlen=REMEMBERED)  # seconds more for each row of a prompt
        self._largest = 1  # the next piece, at most
        self._answers = 0  # in the last step without prompts
        self._since = 0  # steps with prompts since then

    def note(self, seconds: float, answers: int, rows: int) -> None:
        """A step that evaluated a token for each of so many answers, and so many rows of prompts."""
        if not answers:
            return  # nobody waits: prompts take all there is
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
        self.rows = 0 if self._since >= STEPS or others or not self._plain else self._next()

    def _next(self) -> int:
        spare = (LONGEST - 1) * _low(self._plain)
        each = _high(self._row) if self._row else 0.0
        return max(1, self._largest if each * self._largest <= spare else int(spare / each))


def _low(seconds: Collection[float]) -> float:
    """The second least of five."""
    return sorted(seconds)[len(seconds) // 4]


def _high(seconds: Collection[float]) -> float:
    """The second greatest of five: the greatest may be an accident."""
    return sorted(seconds)[-1 - len(seconds) // 4]
