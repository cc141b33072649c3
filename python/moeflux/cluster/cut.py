"""Cutting a model's layers into ranges, one for each machine, by what each machine's memory and disk can do.

A token passes through the ranges one after the other, and several sessions keep all machines busy. So what decides is
the slowest machine: its time for a token is the time of passing over its weights at the rate of its memory, and of
reading those experts of its layers that have no place there. The router is taken to pick evenly, as in a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from moeflux.errors import ArgumentError, BudgetError
from moeflux.sizes import size_text

__all__ = ["DISK", "MEMORY_RATE", "Figures", "LayerSize", "Share", "Sizes", "check", "cut"]

DISK = 1e9
MEMORY_RATE = 10e9
"""Bytes a second where nobody has measured."""


@dataclass(frozen=True)
class LayerSize:
    dense: int  # bytes that stay in memory
    experts: int = 0  # how many
    slot: int = 0  # bytes of one in memory
    picked: int = 0  # by a token
    state: int = 0  # of all sessions


@dataclass(frozen=True)
class Sizes:
    """Of a model, in bytes."""

    layers: tuple[LayerSize, ...]
    first: int = 0  # of what only the first machine has: the embedding
    last: int = 0  # of what only the last one has: the last norm and the output matrix
    row: int = 0  # of the embedding, which is all that a token reads of it
    process: int = 0  # of a process on each: Python, libraries, intermediate numbers

    def __post_init__(self) -> None:
        if not self.layers:
            raise ArgumentError("layers: expected at least one, found none")


@dataclass(frozen=True)
class Figures:
    """Of a machine."""

    name: str
    memory: int | None = None  # bytes that the process there may have; None: no limit
    disk: float | None = None
    memory_rate: float | None = None


@dataclass(frozen=True)
class Share:
    """A machine's part of a model, and what a token costs there."""

    name: str
    layers: tuple[int, int]
    memory: int | None
    process: int
    dense: int
    state: int
    experts: int
    slots: int
    slot: int
    needed: int  # the least bytes with which it runs
    read: float  # bytes a token
    touched: float  # bytes a token, of what is in memory or comes there
    read_seconds: float
    compute_seconds: float

    @property
    def seconds(self) -> float:
        return self.read_seconds + self.compute_seconds

    @property
    def lacking(self) -> int:
        return 0 if self.memory is None else max(0, self.needed - self.memory)

    @property
    def total(self) -> int:
        return self.process + self.dense + self.state + self.slots * self.slot


def cut(sizes: Sizes, machines: Sequence[Figures]) -> tuple[Share, ...]:
    """The cut whose slowest machine is fastest; among those, the one in which a token takes the least time. Every
    machine gets a layer or more, in the order given. BudgetError says which machine lacks what when none fits."""
    count = len(sizes.layers)
    if not 1 <= len(machines) <= count:
        raise ArgumentError(f"machines: expected 1 to {count} for {count} layers, found {len(machines)}")
    table = _Table(sizes)
    # First how little memory the worst machine can lack and how fast the slowest can be, then the shortest way.
    lacking, slowest = _worst(table, machines)
    shares = _shortest(table, machines, lacking, slowest)
    check(shares)
    return shares


def check(shares: Sequence[Share]) -> None:
    """BudgetError for a cut that does not fit."""
    short = [share for share in shares if share.lacking]
    if not short:
        return
    error = BudgetError("; ".join(_short_text(share) for share in short))
    error.missing = max(share.lacking for share in short)
    raise error


def shares_of(sizes: Sizes, machines: Sequence[Figures], ranges: Sequence[tuple[int, int]]) -> tuple[Share, ...]:
    """Those of a cut that somebody has made. ArgumentError unless every layer has one place."""
    table, at = _Table(sizes), 0
    for machine, (first, end) in zip(machines, ranges, strict=True):
        if first != at or end <= first:
            raise ArgumentError(
                f"machine {machine.name}: layers: expected to begin at {at} and to have one or more, "
                f"found {first} to {end}"
            )
        at = end
    if at != len(sizes.layers):
        raise ArgumentError(f"layers: expected all {len(sizes.layers)} to be on some machine, found {at}")
    return tuple(table.share(machine, *layers) for machine, layers in zip(machines, ranges, strict=True))


# ---- The search -------------------------------------------------------------------------------------------------


class _Table:
    """Sums over the layers before each, so that a range costs nothing to look at."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.count = len(sizes.layers)
        layers = sizes.layers
        self._dense, self._state, self._experts, self._picked, self._picked_bytes = (
            list(accumulate(values, initial=0))
            for values in (
                (layer.dense for layer in layers),
                (layer.state for layer in layers),
                (layer.experts for layer in layers),
                (layer.picked for layer in layers),
                (layer.picked * layer.slot for layer in layers),
            )
        )

    def share(self, machine: Figures, first: int, end: int) -> Share:
        sizes = self.sizes
        begins, ends = first == 0, end == self.count
        dense = self._dense[end] - self._dense[first] + begins * sizes.first + ends * sizes.last
        state, experts = self._state[end] - self._state[first], self._experts[end] - self._experts[first]
        picked_bytes = self._picked_bytes[end] - self._picked_bytes[first]
        slot = max(layer.slot for layer in sizes.layers[first:end])
        picked = max(layer.picked for layer in sizes.layers[first:end])
        fixed = sizes.process + dense + state
        least = min(experts, 2 * picked)
        slots = experts
        if machine.memory is not None and slot:
            slots = min(experts, max(least, (machine.memory - fixed) // slot))
        read = picked_bytes * (1 - slots / experts) if experts else 0.0
        touched = dense - begins * (sizes.first - sizes.row) + picked_bytes
        return Share(
            machine.name, (first, end), machine.memory, sizes.process, dense, state, experts, slots, slot,
            fixed + least * slot, read, touched, read / (machine.disk or DISK),
            touched / (machine.memory_rate or MEMORY_RATE),
        )  # fmt: skip


def _worst(table: _Table, machines: Sequence[Figures]) -> tuple[int, float]:
    """The least that the worst machine lacks, and with that the least time of the slowest."""
    none = (math.inf, math.inf)
    best: list[tuple[float, float]] = [(0, 0.0)] + [none] * table.count  # of the first machines, with so many layers
    for place, machine in enumerate(machines):
        left = len(machines) - place - 1
        after = [none] * (table.count + 1)
        for end in range(place + 1, table.count - left + 1):
            for first in range(place, end):
                share = table.share(machine, first, end)
                lacking, seconds = best[first]
                after[end] = min(after[end], (max(lacking, share.lacking), max(seconds, share.seconds)))
        best = after
    lacking, seconds = best[table.count]
    return int(lacking), seconds


def _shortest(table: _Table, machines: Sequence[Figures], lacking: int, slowest: float) -> tuple[Share, ...]:
    """The least time of a token in which no machine lacks more and none is slower. Where machines lack memory, time
    does not matter."""
    limit = math.inf if lacking else slowest * (1 + 1e-9)
    best: dict[int, tuple[float, tuple[Share, ...]]] = {0: (0.0, ())}
    for place, machine in enumerate(machines):
        left = len(machines) - place - 1
        after: dict[int, tuple[float, tuple[Share, ...]]] = {}
        for end in range(place + 1, table.count - left + 1):
            for first, (seconds, shares) in best.items():
                if first >= end:
                    continue
                share = table.share(machine, first, end)
                if share.lacking > lacking or share.seconds > limit:
                    continue
                if end not in after or seconds + share.seconds < after[end][0]:
                    after[end] = seconds + share.seconds, (*shares, share)
        best = after
    return best[table.count][1]


def _short_text(share: Share) -> str:
    first, end = share.layers
    parts = (
        f"{size_text(share.process)} process, {size_text(share.dense)} dense weights, {size_text(share.state)} "
        f"sessions, {size_text(share.needed - share.process - share.dense - share.state)} expert slots"
    )
    return (
        f"machine {share.name}: memory: expected at least {share.needed} bytes ({size_text(share.needed)}) for layers "
        f"{first} to {end - 1}: {parts}; found {share.memory} bytes ({size_text(share.memory or 0)}), "
        f"{size_text(share.lacking)} too little"
    )
