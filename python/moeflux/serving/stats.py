"""What a scheduler has done so far."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moeflux.sizes import size_text

__all__ = ["Counts", "SchedulerStats", "Times"]

KEPT = 4096


@dataclass
class Counts:
    accepted: int = 0
    refused: int = 0
    ended: int = 0  # in whatever way
    cancelled: int = 0
    timed_out: int = 0
    failed: int = 0
    put_aside: int = 0
    evaluated_tokens: int = 0  # of prompts
    reused_tokens: int = 0  # of prompts, and of answers that went on after they were put aside
    tokens: int = 0  # chosen
    drafted_tokens: int = 0  # by speculation, for answers that have ended or were put aside
    drafts_accepted: int = 0  # of these, that were chosen


class Times:
    """The last few thousand seconds of one kind."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=KEPT)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def mean(self) -> float | None:
        return float(np.mean(self._seconds.copy())) if self._seconds else None

    def percentile(self, percent: float) -> float | None:
        return float(np.percentile(self._seconds.copy(), percent)) if self._seconds else None


@dataclass
class SchedulerStats(Counts):
    """Times are seconds; None until there is one. Percentiles are of the last 4096."""

    waiting: int = 0
    running: int = 0
    idle: int = 0  # branches in memory that nobody runs in
    saved: int = 0  # states on disk
    saved_bytes: int = 0
    first_token_p50: float | None = None  # from `submit`
    first_token_p99: float | None = None
    between_tokens_p50: float | None = None
    between_tokens_p99: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        drafts = f" ({self.drafts_accepted} of {self.drafted_tokens} drafts)" if self.drafted_tokens else ""
        return (
            f"{self.running} run, {self.waiting} wait, {self.ended} ended of {self.accepted} ({self.refused} refused); "
            f"prompts: {self.evaluated_tokens} tokens evaluated, {self.reused_tokens} reused; "
            f"answers: {self.tokens} tokens{drafts}, first after {_times(self.first_token_p50, self.first_token_p99)}, "
            f"next after {_times(self.between_tokens_p50, self.between_tokens_p99)}; "
            f"{self.idle} idle in memory, {self.saved} on disk ({size_text(self.saved_bytes)})"
        )


def _times(middle: float | None, high: float | None) -> str:
    return "no time yet" if middle is None or high is None else f"{middle:.3f} s (p99 {high:.3f} s)"
