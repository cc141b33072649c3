"""The plan of a model over several machines: which has which layers, what it costs there, how fast it would be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeflux import _core
from moeflux.cluster.cut import Figures, LayerSize, Share, Sizes, check, cut, shares_of
from moeflux.cluster.machines import Link, Machine, Machines, machines_of
from moeflux.errors import BudgetError
from moeflux.machine.memory import available
from moeflux.models.layers import RoutedExperts
from moeflux.models.variants import Variant
from moeflux.runtime.options import LoadOptions, resolved
from moeflux.runtime.plan import DEFAULT_CONTEXT, probe_of
from moeflux.sizes import parse_size, size_text
from moeflux.stores.costs import dense_sizes, embedding_bytes
from moeflux.stores.planned import PlannedStore, store_to_plan
from moeflux.stores.store import Store

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ClusterPlan", "cluster_plan", "forecast", "plan_over", "share_of_free", "sizes_of", "width_of"]

MIB = 1 << 20
PROCESS = 192 * MIB
"""What a process takes on each machine before it has anything of the model: Python, NumPy, Ray's own part."""
CHUNK = 512
ROW_BYTES = {"f32": 4.0, "bf16": 2.0, "q8": 1.125}
"""Of a number in keys and values. A scale of two bytes is for sixteen codes or more."""
COPIES = 5
"""Of the recurrent state: the session's own, and those of its checkpoints."""


@dataclass(frozen=True)
class ClusterPlan:
    """Sizes are bytes, times are seconds. What each machine really takes is in its own plan, made when it loads."""

    model: str
    note: str
    shares: tuple[Share, ...]
    link: Link
    row_bytes: int  # of a hidden row
    logits_bytes: int
    context: int
    sessions: int
    kv_dtype: str

    budget_bytes: None = None  # each machine has its own
    device_budget_bytes: None = None
    least_bytes: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """By machine."""
        return {share.name: share.total for share in self.shares}

    @property
    def device_parts(self) -> dict[str, int]:
        """Those are in the plan that each machine makes."""
        return {}

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def hop_seconds(self) -> float:
        """Of a token: its id to the first machine, a row to each further one, logits to the machine that asked."""
        between = (len(self.shares) - 1) * self.link.takes(self.row_bytes)
        return self.link.takes(4) + between + self.link.takes(self.logits_bytes)

    @property
    def token_seconds(self) -> float:
        return self.hop_seconds + sum(share.seconds for share in self.shares)

    @property
    def slowest(self) -> Share:
        return max(self.shares, key=lambda share: share.seconds)

    def tokens_per_second(self, sessions: int) -> float:
        """Of all sessions together, each of which has one token at a time on its way. Tokens that pass a machine
        together share its reads, which makes it faster than this; nothing here counts on it."""
        busiest = max(self.slowest.seconds, self.link.takes(self.logits_bytes) - self.link.seconds)
        return min(sessions / self.token_seconds, 1 / busiest)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["shares"] = [{**asdict(share), "seconds": share.seconds, "total": share.total} for share in self.shares]
        return {
            **values,
            "total_bytes": self.total_bytes,
            "hop_seconds": self.hop_seconds,
            "token_seconds": self.token_seconds,
            "tokens_per_second": self.tokens_per_second(1),
            "tokens_per_second_of_many": self.tokens_per_second(2 * len(self.shares)),
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def cluster_plan(name: str | Path | None, machines: object, **options: Unpack[LoadOptions]) -> ClusterPlan:
    """The plan for a model, or one that is not here yet, over these machines: what `moeflux plan --machines` prints."""
    given, asked = machines_of(machines), resolved(options)
    with store_to_plan(name, asked["experts_per_token"]) as store:
        return plan_over(store, given, asked)


def plan_over(store: Store | PlannedStore, given: Machines, asked: LoadOptions) -> ClusterPlan:
    variant = store.variant.without_draft()
    context = asked["context"] or min(variant.max_context, DEFAULT_CONTEXT)
    sizes = sizes_of(store, context, asked["sessions"], asked["kv_dtype"])
    if any(_has_own_memory(each, asked) for each in given.machines):  # where no process lies
        sizes = replace(sizes, process=sizes.process - PROCESS)
    machines = [_figures(each, store, asked, given.machines) for each in given.machines]
    ranges = [each.layers for each in given.machines if each.layers is not None]
    if ranges:
        shares = shares_of(sizes, machines, ranges)
        check(shares)
    else:
        shares = cut(sizes, machines)
    return ClusterPlan(
        model=variant.name,
        note=store.note if isinstance(store, PlannedStore) else "",
        shares=shares,
        link=given.link,
        row_bytes=4 * width_of(variant),
        logits_bytes=4 * variant.vocab_size,
        context=context,
        sessions=asked["sessions"],
        kv_dtype=asked["kv_dtype"],
    )


def width_of(variant: Variant) -> int:
    """Numbers of a hidden row."""
    return variant.hidden_size * (variant.streams.count if variant.streams else 1)


def _figures(machine: Machine, store: Store | PlannedStore, asked: LoadOptions, all_: Sequence[Machine]) -> Figures:
    """What the file says of it, or, of this machine, what doctor has found."""
    memory = machine.memory if machine.memory is not None else asked["memory"]
    limit = None if memory is None else 0 if memory == "auto" else parse_size("memory", memory)
    disk, memory_rate = machine.disk, machine.memory_rate
    if _has_own_memory(machine, asked):
        own = asked["device_memory"]
        allowed = _core.device_memory(asked["backend"], machine.options["device"])
        limit = allowed if own == "auto" else None if own is None else parse_size("device_memory", own)
    elif machine.node is None:
        if limit == 0:  # those on this machine share what is free
            limit = share_of_free(available().bytes, sum(each.node is None for each in all_))
        probe = probe_of(store)
        disk = disk or (probe.disk_bytes_per_second if probe else None)
        memory_rate = memory_rate or (probe.memory_bytes_per_second if probe else None)
    return Figures(machine.name, limit or None, disk, memory_rate)


def _has_own_memory(machine: Machine, asked: LoadOptions) -> bool:
    """Whether its part lies in the memory of a GPU of this machine."""
    return "device" in machine.options and _core.has_own_memory(asked["backend"])


def share_of_free(free: int, processes: int) -> int:
    """The budget of each, where so many processes of a machine share what is free there. A tenth is left to others."""
    return free * 9 // 10 // processes


# ---- Sizes ------------------------------------------------------------------------------------------------------


def sizes_of(store: Store | PlannedStore, context: int, sessions: int, kv_dtype: str) -> Sizes:
    """What each layer of a model takes, with so many sessions of so many tokens."""
    variant, directory = store.variant.without_draft(), store.directory
    dense = dense_sizes(directory)
    states = _state_bytes(variant, context, kv_dtype)
    layers = []
    for number, layer in enumerate(variant.layers):
        own = sum(size for name, size in dense.items() if name.startswith(f"model.layers.{number}."))
        experts = layer.feed_forward if isinstance(layer.feed_forward, RoutedExperts) else None
        layers.append(
            LayerSize(
                dense=own,
                experts=experts.count if experts else 0,
                slot=directory.experts_of(number).bytes if experts else 0,
                picked=experts.per_token if experts else 0,
                state=sessions * states[number],
            )
        )
    embedding = embedding_bytes(dense)
    others = sum(size for name, size in dense.items() if not name.startswith(("model.layers.", "model.embed_tokens.")))
    scratch = _core.footprint(directory, expert_slots=2 * variant.experts.per_token, chunk=CHUNK, max_context=1024)
    return Sizes(
        tuple(layers),
        first=embedding,
        last=others + (embedding if variant.tied_embeddings else 0),
        row=embedding // variant.vocab_size,
        process=PROCESS + scratch.scratch + scratch.read_buffers,
    )


def _state_bytes(variant: Variant, context: int, kv_dtype: str) -> list[int]:
    """Of a session, by layer."""
    sizes = [0.0] * variant.num_layers
    shapes = variant.state(context)
    for layer, name, rows, *_ in _core.state_pieces(variant.to_json()):
        count = math.prod(shapes[layer, name])
        sizes[layer] += count * (ROW_BYTES[kv_dtype] if rows else 4 * COPIES)
    return [math.ceil(size) for size in sizes]


# ---- What so many machines would do -----------------------------------------------------------------------------


def forecast(
    name: str | Path, counts: Sequence[int], machine: Machine, link: Link, **options: Unpack[LoadOptions]
) -> list[ClusterPlan | None]:
    """The plan over so many machines of one kind, for each count; None where the model does not fit."""
    plans: list[ClusterPlan | None] = []
    for count in counts:
        alike = tuple(
            Machine(f"{number}", f"{number}", memory=machine.memory, disk=machine.disk, memory_rate=machine.memory_rate)
            for number in range(1, count + 1)
        )
        try:
            plans.append(cluster_plan(name, Machines(alike, link=link), **options))
        except BudgetError:
            plans.append(None)
    return plans


# ---- As text ----------------------------------------------------------------------------------------------------


def _lines(plan: ClusterPlan) -> list[str]:
    lines = [f"{'model':<20}{plan.model}"]
    if plan.note:
        lines.append(f"{'note':<20}{plan.note}")
    lines += [
        f"{'sessions':<20}{plan.sessions} x {plan.context} tokens, {plan.kv_dtype}",
        "",
        f"{'machine':<20}{'layers':<10}{'memory':>11}{'dense':>11}{'sessions':>11}{'experts there':>15}"
        f"{'read/token':>12}{'ms/token':>10}",
    ]
    for share in plan.shares:
        there = f"{share.slots / share.experts:.1%}" if share.experts else "-"
        lines.append(
            f"{share.name:<20}{f'{share.layers[0]}-{share.layers[1] - 1}':<10}{size_text(share.total):>11}"
            f"{size_text(share.dense):>11}{size_text(share.state):>11}{there:>15}{size_text(share.read):>12}"
            f"{1000 * share.seconds:>10.3g}"
        )
    several = 2 * len(plan.shares)
    hops = f"{1000 * plan.hop_seconds:.3g} ms for {len(plan.shares) + 1} hops of {size_text(plan.row_bytes)} rows"
    lines += [
        "",
        f"{'in all':<20}{size_text(plan.total_bytes)}",
        f"{'a token':<20}{1000 * plan.token_seconds:.3g} ms, of which {hops}, "
        f"and logits of {size_text(plan.logits_bytes)}",
        f"{'one session':<20}about {plan.tokens_per_second(1):.3g} tokens/s",
        f"{f'{several} sessions':<20}about {plan.tokens_per_second(several):.3g} tokens/s; machine {plan.slowest.name} "
        "is the slowest",
    ]
    return lines
