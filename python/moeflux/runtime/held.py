"""What a loaded model holds of memory, beside what was planned."""

from __future__ import annotations

from dataclasses import dataclass

from moeflux.sizes import size_text

__all__ = ["Memory", "Slots"]


@dataclass(frozen=True)
class Slots:
    """Places for experts."""

    count: int
    filled: int  # that have one now


@dataclass(frozen=True)
class Memory:
    """Bytes by their purpose: planned when the model was loaded, and held now by the model and its sessions.

    The system gives pages only to what is used, so physical memory may have less than what is held.
    """

    planned: dict[str, int]
    held: dict[str, int]
    budget: int | None
    resident: int  # of the whole process, now
    peak: int  # of the whole process, since it began
    device_planned: dict[str, int]  # the part of it that is in a device's own memory; empty where there is none
    device_held: int
    device_budget: int | None
    slots: dict[str, Slots]  # of experts, by whose memory they are in: "device" or "host"; where both, those come first

    @property
    def total(self) -> int:
        """Held by the model and its sessions."""
        return sum(self.held.values())

    def __str__(self) -> str:
        lines = [f"{'':<20}{'planned':>12}{'held':>12}"]
        for name in {**self.planned, **self.held}:
            planned, held = self.planned.get(name), self.held.get(name)
            cells = ["" if size is None else size_text(size) for size in (planned, held)]
            if planned or held:
                lines.append(f"{name:<20}{cells[0]:>12}{cells[1]:>12}".rstrip())
        lines.append(f"{'in all':<20}{size_text(sum(self.planned.values())):>12}")
        if self.device_held:
            there = size_text(sum(self.device_planned.values())) if self.device_planned else ""
            lines.append(f"{'of the device':<20}{there:>12}{size_text(self.device_held):>12}")
        lines += [f"slots, {where:<13}{each.count:>12}{each.filled:>12}" for where, each in self.slots.items()]
        lines.append(f"{'resident':<20}{'':>12}{size_text(self.resident):>12}")
        lines.append(f"{'  at its peak':<20}{'':>12}{size_text(self.peak):>12}")
        return "\n".join(lines)
