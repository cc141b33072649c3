"""A plan: its values, and the table of them that `moeflux plan` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from moeflux.machine.remembered import Probe
from moeflux.sizes import size_text

__all__ = ["ENGINE_PARTS", "SESSION_PARTS", "Plan"]

ENGINE_PARTS = {
    "dense weights": "dense_weights",
    "expert slots": "expert_slots",
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
    budget_bytes: int | None  # None: no limit was asked for
    budget_source: str
    floor_bytes: int  # the least budget for this context and so many sessions
    least_bytes: int  # the least for this model: one session of a short context

    slots: int
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
    read_seconds: float | None  # per token; None when nobody has measured this disk
    compute_seconds: float | None
    probe: Probe | None

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def model_bytes(self) -> int:
        """The part of the total that belongs to this model, its sessions and answers, and its tokenizer."""
        own = ("text", "encoder", "choosing", "passing states", *ENGINE_PARTS, *SESSION_PARTS)
        return sum(self.parts.get(name, 0) for name in own)

    @property
    def unspent_bytes(self) -> int:
        """The rest of the budget. More sessions, or longer ones, may have it."""
        return 0 if self.budget_bytes is None else self.budget_bytes - self.total_bytes

    @property
    def session_bytes(self) -> int:
        return sum(self.parts[name] for name in SESSION_PARTS)

    @property
    def session_limit(self) -> int:
        """What all sessions may take together; 0 when there is no limit."""
        return 0 if self.budget_bytes is None else self.session_bytes + self.unspent_bytes

    @property
    def tokens_per_second(self) -> float | None:
        if self.read_seconds is None or self.compute_seconds is None:
            return None
        return 1 / (self.read_seconds + self.compute_seconds)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["parts"] = {name.replace(" ", "_"): size for name, size in self.parts.items()}
        values["probe"] = asdict(self.probe) | {"when": self.probe.when.isoformat()} if self.probe else None
        return {
            "total_bytes": self.total_bytes,
            "unspent_bytes": self.unspent_bytes,
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
        "scratch": f"prefill in chunks of {plan.chunk} tokens",
        "read buffers": f"{plan.readers} threads that read",
        "tables": "which expert is where",
        "n-gram rows": "those of this chunk and the next, of tables that stay on the disk",
        "loading": "dense weights on their way to the device's memory, while the model is loaded",
        "keys and values": per_session,
        "checkpoints": "copies of the recurrent state, to go back to",
    }
    rows = [("model", plan.model, "")]
    if plan.budget_bytes is not None:
        rows.append(("budget", size_text(plan.budget_bytes), plan.budget_source))
    rows.append(("floor", size_text(plan.floor_bytes), "less is refused"))
    rows += [(f"  {name}", size_text(size), meanings.get(name, "")) for name, size in plan.parts.items() if size]
    rows.append(("total", size_text(plan.total_bytes), "the most in physical memory"))
    if plan.budget_bytes is not None:
        rows.append(("unspent", size_text(plan.unspent_bytes), "for more sessions, or longer ones"))
    lines = [f"{label:<20}{size:>12}  {meaning}".rstrip() for label, size, meaning in rows[1:]]
    note = [f"{'note':<20}{plan.note}"] if plan.note else []
    return [f"{'model':<20}{plan.model}", *note, *lines, "", *_speed_lines(plan)]


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
