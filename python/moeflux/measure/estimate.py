"""How fast a model would run that is not here yet: what `moeflux bench` says before a download or a conversion.

It runs nothing of the model. The plan says how many bytes a token and a chunk of a prompt read, and doctor has measured
how fast this disk and this memory give them, or does so now.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeflux.measure.doctor import examine
from moeflux.progress import Progress, Silent
from moeflux.runtime.options import LoadOptions
from moeflux.runtime.plan import plan
from moeflux.runtime.plan_table import Plan
from moeflux.sizes import size_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True)
class Estimate:
    plan: Plan

    @property
    def bytes_read_per_chunk(self) -> int:
        """The most: a chunk reads every expert that is in no slot, once."""
        return (self.plan.experts - self.plan.slots) * self.plan.slot_bytes

    def to_dict(self) -> dict[str, Any]:
        return {"estimate": True, "bytes_read_per_chunk": self.bytes_read_per_chunk, **self.plan.to_dict()}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def estimate(
    name: str | Path | None = None, *, progress: Progress | None = None, **options: Unpack[LoadOptions]
) -> Estimate:
    """`name` and `options` are those of `moeflux.plan`. The disk is that of the current folder."""
    planned = plan(name, **options)
    if planned.probe is None:
        examine(Path(), quick=True, progress=progress or Silent())
        planned = plan(name, **options)
    return Estimate(planned)


# ---- As text ----------------------------------------------------------------------------------------------------


def _lines(found: Estimate) -> list[str]:
    plan = found.plan
    budget = "no limit" if plan.budget_bytes is None else f"{size_text(plan.budget_bytes)}, {plan.budget_source}"
    rows = [
        ("model", plan.model),
        ("estimate", plan.note),
        ("memory", f"{size_text(plan.host_bytes)} of {budget}"),
        *_device_rows(plan),
        ("experts", f"{plan.slots} of {plan.experts} in memory; {plan.hit_rate:.1%} are found, {plan.hit_rate_source}"),
        ("decode", _decode(plan)),
        ("prefill", _prefill(found)),
    ]
    if plan.probe is not None:
        when = plan.probe.when.date().isoformat()
        rows.append(("measured", f"{when}, on the disk of this folder (moeflux doctor)"))
    text = "Nothing was run. The estimate leaves out what computing takes beyond reading the weights once a token."
    return [*(f"{label:<20}{value}" for label, value in rows), "", text]


def _device_rows(plan: Plan) -> list[tuple[str, str]]:
    """Of a device with memory of its own."""
    if not plan.device_parts:
        return []
    budget = "no limit" if plan.device_budget_bytes is None else size_text(plan.device_budget_bytes)
    copied = f"{size_text(round(plan.bytes_copied_per_token))} a token are copied there"
    return [("device memory", f"{size_text(plan.device_bytes)} of {budget}, {plan.device_budget_source}; {copied}")]


def _decode(plan: Plan) -> str:
    if plan.tokens_per_second is None or plan.read_seconds is None or plan.compute_seconds is None:
        return "unknown: what `moeflux doctor` measures could not be remembered"
    return (
        f"about {plan.tokens_per_second:.3g} tokens/s: {1000 * plan.read_seconds:.3g} ms for "
        f"{size_text(plan.bytes_read_per_token)} from the disk, {1000 * plan.compute_seconds:.3g} ms for "
        f"{size_text(plan.bytes_touched_per_token)} from memory"
    )


def _prefill(found: Estimate) -> str:
    plan = found.plan
    read = f"a chunk of {plan.chunk} tokens reads at most {size_text(found.bytes_read_per_chunk)}"
    if plan.probe is None:
        return read
    return f"{read}, {found.bytes_read_per_chunk / plan.probe.disk_bytes_per_second:.3g} s; computing comes on top"
