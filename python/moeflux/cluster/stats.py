"""What evaluating has cost, on all stages together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

__all__ = ["COUNTED", "FarStats"]


@dataclass(frozen=True)
class FarStats:
    """Has what `_core.StepStats` has. `seconds` are of the call; all else is summed over the stages."""

    tokens: int = 0
    seconds: float = 0.0
    compute_seconds: float = 0.0
    read_wait_seconds: float = 0.0
    router_seconds: float = 0.0
    beside_seconds: float = 0.0
    arrived_seconds: float = 0.0
    read_busy_seconds: float = 0.0
    bytes_read: int = 0
    expert_hits: int = 0
    expert_misses: int = 0
    experts_on_cpu: int = 0
    host_hits: int = 0
    bytes_copied: int = 0
    ngram_hits: int = 0
    ngram_misses: int = 0
    submissions: int = 0
    waits: int = 0
    look_ahead_reads: int = 0
    look_ahead_used: int = 0
    look_ahead_wasted_bytes: int = 0
    drafted: int = 0
    accepted: int = 0
    look_ahead_pays: bool | None = None
    drafts_pay: bool | None = None

    @classmethod
    def of(cls, stages: Sequence[Mapping[str, float]], tokens: int, seconds: float) -> FarStats:
        """`stages` have what each has COUNTED."""
        summed = {name: sum(stage.get(name, 0) for stage in stages) for name in COUNTED}
        return cls(tokens=tokens, seconds=seconds, **summed)  # type: ignore[arg-type]

    def plus(self, other: FarStats) -> FarStats:
        names = ("tokens", "seconds", *COUNTED)
        return FarStats(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def look_ahead_recall(self) -> float:
        wanted = self.look_ahead_used + self.expert_misses
        return self.look_ahead_used / wanted if wanted else 0.0

    @property
    def look_ahead_precision(self) -> float:
        return self.look_ahead_used / self.look_ahead_reads if self.look_ahead_reads else 0.0


COUNTED = tuple(
    each.name
    for each in fields(FarStats)
    if each.name not in ("tokens", "seconds") and not each.name.endswith(("_pays", "_pay"))
)
"""What a stage tells of its evaluations, and what is summed over all."""
