"""A plan: its values, and the table of them that `moeflux plan` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from moeflux.machine.remembered import Probe
from moeflux.sizes import size_text

__all__ = ["ENGINE_PARTS", "NO_LIMIT", "SESSION_PARTS", "Plan"]

NO_LIMIT = 1 << 62

ENGINE_PARTS = {
    "dense weights": "dense_weights",
    "expert slots": "expert_slots",
    "host slots": "host_slots",
    "scratch": "scratch",
    "read buffers": "read_buffers",
    "tables": "tables",
    "n-gram rows": "ngram_rows",
    "loading": "loading",
}
SESSION_PARTS = {
    "keys and values": "rows",
    "recurrent state": "recurrent",
    "checkpoints": "checkpoints",
    "tokens and logits": "tokens",
}
"""Names for people, and those of `_core.Footprint`."""


@dataclass(frozen=True)
class Plan:
    """Sizes are bytes."""

    model: str
    note: str  # the assumptions about a model that is not here yet; empty for one that is
    parts: dict[str, int]  # in physical memory once everything is in use; their sum is total_bytes
    device_parts: dict[str, int]  # what of them is in a device's own memory; empty for a device without
    budget_bytes: int | None  # of the host's memory. None: no limit was asked for
    budget_source: str
    device_budget_bytes: int | None  # of the device's own; None if there is none, or no limit
    device_budget_source: str
    device: int  # its number, of several GPUs
    floor_bytes: int  # the least budget for this context and so many sessions
    device_floor_bytes: int
    least_bytes: int  # the least for this model: one session of a short context

    slots: int  # in the device's memory, where it has its own
    host_slots: int  # in the host's, below those
    experts: int  # of all layers that are loaded
    slot_bytes: int
    context: int  # of each session
    sessions: int
    kv_dtype: str
    chunk: int
    threads: int
    readers: int
    reads: Literal["direct", "buffered"]
    reads_reason: str

    hit_rate: float
    hit_rate_source: str
    bytes_touched_per_token: int  # dense weights and experts
    expert_bytes_per_token: int  # the part of them that belongs to experts
    bytes_read_per_token: float  # the part of those that is in no slot
    bytes_copied_per_token: float  # the part that is in no slot of a device with memory of its own
    read_seconds: float | None  # per token; None when nobody has measured this disk
    compute_seconds: float | None
    probe: Probe | None

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def device_bytes(self) -> int:
        """The part of the total that is in a device's own memory."""
        return sum(self.device_parts.values())

    @property
    def host_bytes(self) -> int:
        return self.total_bytes - self.device_bytes

    @property
    def model_bytes(self) -> int:
        """The part of the total that belongs to this model, its sessions and answers, and its tokenizer."""
        own = ("text", "encoder", "choosing", "passing states", *ENGINE_PARTS, *SESSION_PARTS)
        return sum(self.parts.get(name, 0) for name in own)

    @property
    def device_model_bytes(self) -> int:
        return sum(self.device_parts.get(name, 0) for name in (*ENGINE_PARTS, *SESSION_PARTS))

    @property
    def unspent_bytes(self) -> int:
        """The rest of the budget. More sessions, or longer ones, may have it."""
        return 0 if self.budget_bytes is None else self.budget_bytes - self.host_bytes

    @property
    def device_unspent_bytes(self) -> int:
        """The same of a device's own memory."""
        return 0 if self.device_budget_bytes is None else self.device_budget_bytes - self.device_bytes

    @property
    def session_bytes(self) -> int:
        return sum(self.parts[name] for name in SESSION_PARTS)

    @property
    def session_limit(self) -> int:
        """What all sessions may take together, of the device's memory where it has its own; 0: no limit."""
        if not self.device_parts:
            return 0 if self.budget_bytes is None else self.session_bytes + self.unspent_bytes
        there = sum(self.device_parts[name] for name in SESSION_PARTS)
        return 0 if self.device_budget_bytes is None else there + self.device_unspent_bytes

    @property
    def host_session_limit(self) -> int:
        """There, what they may take of the host's. 0: the other limit is for all."""
        if not self.device_parts:
            return 0
        if self.budget_bytes is None:
            return 0 if self.device_budget_bytes is None else NO_LIMIT
        there = sum(self.device_parts[name] for name in SESSION_PARTS)
        return self.session_bytes - there + self.unspent_bytes

    @property
    def tokens_per_second(self) -> float | None:
        if self.read_seconds is None or self.compute_seconds is None:
            return None
        return 1 / (self.read_seconds + self.compute_seconds)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        for parts in ("parts", "device_parts"):
            values[parts] = {name.replace(" ", "_"): size for name, size in values[parts].items()}
        values["probe"] = asdict(self.probe) | {"when": self.probe.when.isoformat()} if self.probe else None
        return {
            "total_bytes": self.total_bytes,
            "unspent_bytes": self.unspent_bytes,
            "host_bytes": self.host_bytes,
            "device_bytes": self.device_bytes,
            "device_unspent_bytes": self.device_unspent_bytes,
            **values,
            "tokens_per_second": self.tokens_per_second,
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))


# ---- As text ----------------------------------------------------------------------------------------------------


def _lines(plan: Plan) -> list[str]:
    per_session = f"{plan.sessions} x {plan.context} tokens, {plan.kv_dtype}"
    meanings = {
        "process": f"Python, libraries, what this process has already, {plan.threads + plan.readers} threads",
        "text": "the tokenizer, once it is asked for",
        "encoder": "a process of its own for this tokenizer, once it is asked for; never more",
        "choosing": "which token comes next, for an answer in each session",
        "passing states": "parts of those on their way to or from a scheduler's disk",
        "renderer": "a process of its own for the chat template, once it is asked for; never more",
        "dense weights": "all but the routed experts, read once",
        "expert slots": f"{plan.slots} of {plan.experts} experts ({plan.slots / max(1, plan.experts):.1%}), "
        f"{size_text(plan.slot_bytes)} each",
        "host slots": f"{plan.host_slots} experts ({plan.host_slots / max(1, plan.experts):.1%}), pinned",
        "scratch": f"prefill in chunks of {plan.chunk} tokens",
        "read buffers": f"{plan.readers} threads that read",
        "tables": "which expert is where",
        "n-gram rows": "those of this chunk and the next, of tables that stay on the disk",
        "loading": "dense weights on their way to the device's memory, while the model is loaded",
        "keys and values": per_session,
        "checkpoints": "copies of the recurrent state, to go back to",
    }
    rows: list[tuple[str, int, int, str]] = []  # label, in all, of that on the device, meaning
    if plan.budget_bytes is not None or plan.device_budget_bytes is not None:
        source = plan.budget_source
        if plan.device_parts:
            source = f"{source}; of the device: {plan.device_budget_source}"
        rows.append(("budget", *_both(plan.budget_bytes, plan.device_budget_bytes), source))
    rows.append(("floor", *_both(plan.floor_bytes, plan.device_floor_bytes), "less is refused"))
    for name, size in plan.parts.items():
        if size:
            rows.append((f"  {name}", size, plan.device_parts.get(name, 0), meanings.get(name, "")))
    rows.append(("total", plan.total_bytes, plan.device_bytes, "the most in physical memory"))
    if plan.budget_bytes is not None or plan.device_budget_bytes is not None:
        unspent = _both(plan.unspent_bytes, plan.device_unspent_bytes)
        rows.append(("unspent", *unspent, "for more sessions, or longer ones"))
    note = [f"{'note':<20}{plan.note}"] if plan.note else []
    heading = [f"{'':<20}{'host':>12}{'device':>12}"] if plan.device_parts else []
    return [
        f"{'model':<20}{plan.model}",
        *note,
        *heading,
        *(_line(plan, *row) for row in rows),
        "",
        *_speed_lines(plan),
    ]


def _both(host: int | None, device: int | None) -> tuple[int, int]:
    """In all, and of that on the device. A limit that there is not is shown as nothing."""
    return (host or 0) + (device or 0), device or 0


def _line(plan: Plan, label: str, total: int, device: int, meaning: str) -> str:
    sizes = [total - device, device] if plan.device_parts else [total]
    cells = "".join(f"{size_text(size) if size else '-':>12}" for size in sizes)
    return f"{label:<20}{cells}  {meaning}".rstrip()


def _speed_lines(plan: Plan) -> list[str]:
    cached = "past the page cache" if plan.reads == "direct" else "through the page cache, which is not counted here"
    rows = [
        ("reads", f"{plan.reads}, {plan.readers} readers: {cached} ({plan.reads_reason})"),
        ("hit rate", f"{plan.hit_rate:.1%}, {plan.hit_rate_source}"),
        (
            "read per token",
            f"{size_text(round(plan.bytes_read_per_token))} of the {size_text(plan.expert_bytes_per_token)} "
            "that its experts have",
        ),
    ]
    if plan.device_parts:
        rows.append(("copied per token", f"{size_text(round(plan.bytes_copied_per_token))}, to the device's memory"))
    if plan.probe is None or plan.read_seconds is None or plan.compute_seconds is None:
        where = "here" if plan.note else "on its folder"
        rows.append(("speed", f"unknown: this disk was never measured; `moeflux doctor` {where} does"))
    else:
        rate, when = plan.probe.disk_bytes_per_second, plan.probe.when.date().isoformat()
        rows.append(
            (
                "speed",
                f"about {plan.tokens_per_second:.3g} tokens/s: {1000 * plan.read_seconds:.3g} ms reading at "
                f"{size_text(round(rate))}/s, {1000 * plan.compute_seconds:.3g} ms computing at memory speed "
                f"(doctor, {when})",
            )
        )
    return [f"{label:<20}{text}" for label, text in rows]
