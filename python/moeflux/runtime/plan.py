"""The plan of a model's memory, made before any is taken. `moeflux plan` prints it, and `load` goes by it.

A budget is for the whole process. The process itself, the dense weights and the sessions that were asked for take their
parts. The rest goes to expert slots. Nothing is taken later that is not in the plan.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moeflux import _core, files
from moeflux.errors import ArgumentError, BudgetError, DeviceError, FormatError, IoError
from moeflux.living import Living
from moeflux.machine.memory import available, huge_pages_unasked, resident
from moeflux.machine.remembered import Probe, remembered
from moeflux.machine.sandbox import RENDERING, encoding
from moeflux.models.model_files import files_of
from moeflux.models.tokenizer_rules import TOKENIZER, is_proportional, read_rules
from moeflux.routing.hit_rates import HitRate, hit_rate, hit_rate_of
from moeflux.routing.trace import Trace
from moeflux.runtime.options import LoadOptions, resolved, whole_number
from moeflux.runtime.plan_table import ENGINE_PARTS, NO_LIMIT, SESSION_PARTS, Plan
from moeflux.runtime.state_file import PASSING_BYTES
from moeflux.sizes import parse_size, size_text
from moeflux.stores.costs import bytes_touched
from moeflux.stores.planned import PlannedStore, store_to_plan
from moeflux.stores.store import Store

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CONTEXT_STEP", "DEFAULT_CONTEXT", "make_plan", "plan", "pricing", "probe_of"]

MIB = 1 << 20

TOKENIZER_BYTES = 64
"""What a piece of a vocabulary takes in a tokenizer.json, about, where there is none to look at."""
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")

DEFAULT_CHUNK = 512
DEVICE_CHUNK = 4096  # of a device with memory of its own, where all experts are there: many rows of each go together
LARGEST_CHUNK = 1024  # a larger one would let Ctrl-C and progress wait for too long
SMALLEST_CHUNK = 32
DEFAULT_READERS = 4
DEVICE_READERS = 12
"""Of a device with memory of its own, as far as there are cores: there, threads that read do not take them from those
that compute, and what lies in the page cache comes as fast as there are threads to copy it."""
DEFAULT_CONTEXT = 32768
SMALLEST_CONTEXT = 1024
CONTEXT_STEP = 256
MAX_SESSIONS = 4096


def plan(name: str | Path | None = None, *, trace: Trace | None = None, **options: Unpack[LoadOptions]) -> Plan:
    """The plan that `moeflux.load` would go by with the same options. Hit rates come from `trace`, if one is given.

    Besides what `load` takes, `name` may be a preset or a config.json. Of a repository, only the config is fetched. The
    plan of a store that is not here assumes that every matrix has one format.
    """
    asked = resolved(options)
    with store_to_plan(name, asked["experts_per_token"]) as store:
        return make_plan(store, asked, trace)


def make_plan(store: Store | PlannedStore, options: LoadOptions, trace: Trace | None = None) -> Plan:
    """BudgetError when the budget is below the floor, ArgumentError for what can never be."""
    return _Planner(store, options, trace).plan()


def probe_of(store: Store | PlannedStore) -> Probe | None:
    """What doctor has found for the disk that a model's experts are on, or would be."""
    return remembered(store.expert_files[0] if store.expert_files else store.path)


@contextmanager
def pricing(plan: Plan | None) -> Generator[None, None, None]:
    """Inside its `with`, a BudgetError of a model that goes by this plan says how large the budget would have to be."""
    try:
        yield
    except BudgetError as error:
        price(error, plan)
        raise


def price(error: BudgetError, plan: Plan | None) -> None:
    """The same for one that was caught."""
    if plan is None or plan.budget_bytes is None or error.missing is None:
        return
    if not plan.device_parts:  # of two memories, the error names the one
        error.needed, error.floor = plan.budget_bytes + error.missing, plan.least_bytes


LOADED: Living[_core.Engine, Plan] = Living()
"""The engines of this process that go by a plan: the budget of the next one is for all of them."""


# ---- The arithmetic ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    """The sizes that the plan chooses."""

    slots: int
    host_slots: int
    chunk: int
    context: int
    reads: Literal["direct", "buffered"]


class _Planner:
    def __init__(self, store: Store | PlannedStore, options: LoadOptions, trace: Trace | None) -> None:
        self.store, self.options, self.trace, self.variant = store, options, trace, store.variant
        if options["speculate"] not in ("auto", "mtp"):
            self.variant = self.variant.without_draft()
        first, last = options["layers"] or (0, 0)
        self.directory = store.directory.part(first, last) if options["layers"] else store.directory
        self.layers = range(first, last or self.variant.num_layers)
        is_part = len(self.layers) < self.variant.num_layers
        moe_layers = [layer for layer in self.variant.moe_layers if layer in self.layers or not is_part]
        self.experts = self.variant.experts.count * len(moe_layers)
        self.beside = files_of(store.path) if isinstance(store, Store) else None
        self.probe = probe_of(store)
        self.free = available()
        self.threads = whole_number("threads", options["threads"], 1024) or _cores()
        self.apart = _core.has_own_memory(options["backend"])
        unknown = max(DEFAULT_READERS, min(_cores(), DEVICE_READERS)) if self.apart else DEFAULT_READERS
        default_readers = self.probe.readers if self.probe else unknown
        self.readers = whole_number("readers", options["readers"], 256) or default_readers
        self.sessions = whole_number("sessions", options["sessions"], MAX_SESSIONS) or 1
        self.context = whole_number("context", options["context"], self.variant.max_context)
        self.chunk = whole_number("chunk", options["chunk"], 8192)
        self.ring_depth = whole_number("ring_depth", options["ring_depth"], 16) or 2
        slots = whole_number("expert_slots", options["expert_slots"], 1 << 31)
        self.slots = min(slots, self.experts) if slots else None
        self.host_slots = whole_number("host_slots", options["host_slots"], 1 << 31)
        self.check_apart()
        self.loaded = LOADED.items()
        choosing = self.sessions * _core.sampler_bytes(self.variant.vocab_size)
        self.fixed = self.process_parts() | {"choosing": choosing, "passing states": PASSING_BYTES}
        self.budget, self.source = self.within_gpu(*self.budget_of(options["memory"]))
        self.device_budget, self.device_source = self.device_budget_of(options["device_memory"])
        beside = [plan for _, plan in self.loaded if plan.device == options["device"]]
        others = sum(plan.device_model_bytes for plan in beside)
        self.device_fixed = {"other models": others} if self.apart and others else {}
        self.direct_works = all(_core.supports_direct(file) for file in store.expert_files)

    def process_parts(self) -> dict[str, int]:
        """What the process holds already, what libraries may still take, and the stacks of threads. It grows in coarse
        steps, so that a plan printed in one process holds in another. The part of other models is counted with them."""
        # A stack is one mapping of megabytes. Its first touch may bring a huge page.
        stack = 5 * MIB // 2 if huge_pages_unasked() else MIB // 2
        own = resident().now - sum(engine.held - engine.held_by_device for engine, _ in self.loaded)
        process = _round_up(own + 16 * MIB + stack * (self.threads + self.readers), 32 * MIB)
        others = [plan for _, plan in self.loaded]
        parts = {"process": max([process, *(plan.parts["process"] for plan in others)]), "text": self.text_part()}
        parts["encoder"] = self.encoder_part()
        parts["renderer"] = max([self.renderer_part(), *(plan.parts.get("renderer", 0) for plan in others)])
        held = sum(plan.model_bytes - plan.device_model_bytes for plan in others)
        return parts | {"other models": held} if others else parts

    def text_part(self) -> int:
        """The tokenizer is loaded when somebody asks for text. Reading its file takes the most: 10 to 12 times its size
        were measured on vocabularies of 150,000 tokens and more."""
        if self.beside is None:
            size = TOKENIZER_BYTES * self.variant.vocab_size
        else:
            size = self.beside.size(TOKENIZER) if self.beside.has(TOKENIZER) else 0
        return 8 * MIB + 16 * size if size else 0

    def encoder_part(self) -> int:
        """A process of its own that makes tokens, for a tokenizer that may take unlimited time in this one."""
        path = self.store.path / TOKENIZER
        status = None if self.beside is None or self.beside.made else files.status_of(path)
        return 0 if status is None else _encoder_bytes(path, status.st_size, status.st_mtime_ns)

    def renderer_part(self) -> int:
        """A process of its own that renders the chat templates of all models of this process."""
        is_rendered = self.beside is None or any(map(self.beside.has, TEMPLATE_FILES))
        return RENDERING.max_resident if is_rendered else 0

    def budget_of(self, memory: int | str | None) -> tuple[int | None, str]:
        if memory is None:
            return None, "no limit"
        if memory != "auto":
            return parse_size("memory", memory), "asked for"
        own = resident().anonymous
        # A reserve for everybody else's next needs: a tenth, but neither nothing nor gigabytes.
        reserve = min(max(self.free.bytes // 10, 64 * MIB), 2048 * MIB)
        source = f"auto: {size_text(self.free.bytes)} {self.free.source}, and {size_text(own)} that this process has"
        return max(1, self.free.bytes + own - reserve), f"{source}, less a reserve of {size_text(reserve)}"

    def within_gpu(self, budget: int | None, source: str) -> tuple[int | None, str]:
        """A GPU that shares the memory may use only a part of it. What the model holds must lie within that part."""
        if budget is None or self.apart:
            return budget, source
        allowed = _core.device_memory(self.options["backend"], self.options["device"])
        if allowed is None:
            return budget, source
        limit = allowed + sum(self.fixed.values())
        return (limit, f"{source}, less what the GPU may not use") if limit < budget else (budget, source)

    def check_apart(self) -> None:
        """What is only for a device with memory of its own."""
        if self.apart:
            return
        for name in ("host_slots", "device_memory"):
            if self.options[name] not in (None, "auto"):
                raise ArgumentError(
                    f'{name}: expected a device with memory of its own, as backend="cuda" has, found one whose '
                    "memory is the host's"
                )

    def device_budget_of(self, memory: int | str | None) -> tuple[int | None, str]:
        """Of the memory of a device that has its own."""
        if not self.apart or memory is None:
            return None, "no limit"
        if memory != "auto":
            return parse_size("device_memory", memory), "asked for"
        try:
            allowed = _core.device_memory(self.options["backend"], self.options["device"])
        except DeviceError as error:
            raise DeviceError(f"{error}; a plan for one that is not here needs device_memory") from None
        if allowed is None:
            return None, "no limit"
        own = sum(engine.held_by_device for engine, plan in self.loaded if plan.device == self.options["device"])
        return allowed + own, "auto: what is free there, and what this process has, less a margin"

    # ---- Sizes ----

    def parts(self, choice: _Choice) -> dict[str, int]:
        return self.fixed | self.model_parts(_core.footprint, choice)

    def device_parts(self, choice: _Choice) -> dict[str, int]:
        """What of them is in the memory of a device that has its own."""
        return self.device_fixed | self.model_parts(_core.device_footprint, choice) if self.apart else {}

    def model_parts(self, footprint: Callable[..., _core.Footprint], choice: _Choice) -> dict[str, int]:
        sizes = footprint(
            self.directory,
            backend=self.options["backend"],
            readers=self.readers,
            expert_slots=choice.slots,
            host_slots=choice.host_slots,
            ring_depth=self.ring_depth,
            chunk=choice.chunk,
            reads=choice.reads,
            cache=self.options["cache"],
            cpu_experts=self.options["cpu_experts"],
            speculate=self.options["speculate"],
            verify_reads=self.options["verify_reads"],
            max_context=choice.context,
            kv_dtype=self.options["kv_dtype"],
        )
        engine = {name: getattr(sizes, field) for name, field in ENGINE_PARTS.items()}
        return engine | {k: self.sessions * getattr(sizes, field) for k, field in SESSION_PARTS.items()}

    def total(self, choice: _Choice) -> int:
        """Of the host's memory."""
        there = sum(self.model_parts(_core.device_footprint, choice).values()) if self.apart else 0
        return sum(self.parts(choice).values()) - there

    def device_total(self, choice: _Choice) -> int:
        return sum(self.device_parts(choice).values())

    def fits(self, choice: _Choice) -> bool:
        fits = self.budget is None or self.total(choice) <= self.budget
        return fits and (self.device_budget is None or self.device_total(choice) <= self.device_budget)

    def where_slots_are(self, choice: _Choice) -> dict[str, int]:
        """The parts of the memory that expert slots share with everything else."""
        return self.device_parts(choice) if self.apart else self.parts(choice)

    def spare(self, choice: _Choice) -> int:
        """What is left there."""
        budget = self.device_budget if self.apart else self.budget
        return NO_LIMIT if budget is None else budget - sum(self.where_slots_are(choice).values())

    def session_part(self, choice: _Choice) -> int:
        parts = self.where_slots_are(choice)
        return sum(parts[name] for name in SESSION_PARTS)

    # ---- Choosing ----

    def plan(self) -> Plan:
        default_context = self.context or min(self.variant.max_context, DEFAULT_CONTEXT)
        is_there = self.device_budget is not None and (self.slots or self.experts) == self.experts
        default_chunk = DEVICE_CHUNK if is_there else DEFAULT_CHUNK
        full = self.choice(self.slots or self.experts, self.chunk or default_chunk, default_context)
        least, small = self.least()
        floor = least if self.apart else min(least, small, key=self.total)
        if not (self.fits(least) or self.fits(small)):
            raise self.too_little(floor)
        if self.budget is None and self.device_budget is None:
            return self.finished(full, floor)
        while not self.chunk and full.chunk > SMALLEST_CHUNK and not self.fits(full):
            full = _with(full, chunk=full.chunk // 2)
        if self.fits(full):
            return self.finished(full, floor)
        choice = self.with_chunk(self.with_context(least if self.fits(least) else small, default_context))
        return self.finished(self.with_host_slots(self.with_slots(choice)), floor)

    def least(self) -> tuple[_Choice, _Choice]:
        """The choices with the fewest slots and with all of them. The experts of a small model may take less memory
        than the buffers for reading them again and again."""
        chunk = self.chunk or SMALLEST_CHUNK
        context = self.context or min(self.variant.max_context, SMALLEST_CONTEXT)
        slots = self.slots or min(self.experts, 2 * self.variant.experts.per_token)
        return self.choice(slots, chunk, context), self.choice(self.slots or self.experts, chunk, context)

    def least_budget(self) -> int:
        """The smallest budget that this model runs with: one session of a short context, the smallest chunks, the
        fewest slots."""
        chosen: LoadOptions = {"memory": None, "context": None, "sessions": 1, "expert_slots": None, "chunk": None}
        bare: LoadOptions = {**self.options, **chosen, "device_memory": None, "host_slots": None}
        planner = _Planner(self.store, bare, None)
        return min(planner.total(choice) for choice in planner.least())

    def choice(self, slots: int, chunk: int, context: int) -> _Choice:
        below = min(self.host_slots or 0, self.experts) if slots < self.experts else 0
        return _Choice(slots, below, chunk, context, self.reads(slots < self.experts)[0])

    def with_context(self, least: _Choice, default: int) -> _Choice:
        """The longest context that leaves half of the memory to experts, and enough for the fewest slots."""
        if self.context:
            return least
        fewest = self.where_slots_are(least)["expert slots"]
        room = self.spare(least) + fewest + self.session_part(least)
        limit = min(room // 2, room - fewest)
        steps = range(least.context // CONTEXT_STEP + 1, default // CONTEXT_STEP + 1)

        def is_short(step: int) -> bool:
            longer = _with(least, context=step * CONTEXT_STEP)
            return self.session_part(longer) <= limit and self.fits(longer)

        fitting = _last(steps, is_short)
        return least if fitting is None else _with(least, context=fitting * CONTEXT_STEP)

    def with_chunk(self, choice: _Choice) -> _Choice:
        """The largest chunk whose scratch takes at most a quarter of what it shares with the experts: a large chunk
        reads each expert once for many tokens, but takes room from experts."""
        if self.chunk:
            return choice
        parts = self.where_slots_are(choice)
        room = self.spare(choice) + parts["scratch"] + parts["expert slots"]
        chunk = LARGEST_CHUNK
        while chunk > choice.chunk:
            larger = _with(choice, chunk=chunk)
            if self.where_slots_are(larger)["scratch"] <= room // 4 and self.fits(larger):
                return larger
            chunk //= 2
        return choice

    def with_slots(self, choice: _Choice) -> _Choice:
        if self.slots:
            return choice
        counts = range(choice.slots + 1, self.experts + 1)
        slots = _last(counts, lambda count: self.fits(_with(choice, slots=count)))
        return choice if slots is None else _with(choice, slots=slots)

    def with_host_slots(self, choice: _Choice) -> _Choice:
        if self.host_slots or not self.apart or choice.slots == self.experts:
            return choice
        slots = _last(range(1, self.experts + 1), lambda count: self.fits(_with(choice, host_slots=count)))
        return choice if slots is None else _with(choice, host_slots=slots)

    def reads(self, streams: bool) -> tuple[Literal["direct", "buffered"], str]:
        """How experts are read, and why."""
        probed = self.probe is not None and self.probe.reads == "buffered" and not self.free.limited
        mode, reason = _core.chosen_reads(
            self.options["reads"],
            streams=streams,
            direct_works=self.direct_works,
            buffered_is_faster=probed,
            crowds_out=self.experts * self.directory.experts.bytes > self.free.bytes // 4,
        )
        return "direct" if mode == "direct" else "buffered", reason

    # ---- What comes out ----

    def hit_rate(self, slots: int) -> HitRate:
        fingerprint = self.store.fingerprint
        if self.trace is not None:
            return hit_rate_of(self.trace, fingerprint, self.options["cache"], slots)
        return hit_rate(fingerprint, self.options["cache"], slots, self.experts)

    def known_slots(self, choice: _Choice) -> int:
        """How many slots would find as many experts as both memories do. An expert in a device slot gives up its host
        slot first, but nothing comes back from the device: about half of the host slots have experts of their own."""
        return min(self.experts, max(choice.host_slots, choice.slots + choice.host_slots // 2))

    def other_device_parts(self) -> dict[str, int]:
        """`parts` has what is in either memory."""
        return {name: self.fixed.get(name, 0) + size for name, size in self.device_fixed.items()}

    def finished(self, choice: _Choice, floor: _Choice) -> Plan:
        options, probe = self.options, self.probe
        reads, reason = self.reads(choice.slots < self.experts)
        choice = _with(choice, reads=reads)
        dense, touched = bytes_touched(self.store.variant, self.directory, self.layers)
        rate = self.hit_rate(self.known_slots(choice))
        copied = (1 - self.hit_rate(choice.slots).value) * touched if self.apart else 0
        read = (1 - rate.value) * touched
        everything = dense + touched
        return Plan(
            model=self.variant.name,
            note=self.store.note if isinstance(self.store, PlannedStore) else "",
            parts=self.parts(choice) | self.other_device_parts(),
            device_parts=self.device_parts(choice),
            budget_bytes=self.budget,
            budget_source=self.source,
            device_budget_bytes=self.device_budget,
            device_budget_source=self.device_source,
            device=options["device"],
            floor_bytes=self.total(floor),
            device_floor_bytes=self.device_total(floor),
            least_bytes=self.least_budget(),
            slots=choice.slots,
            host_slots=choice.host_slots,
            experts=self.experts,
            slot_bytes=_core.slot_bytes(self.directory),
            context=choice.context,
            sessions=self.sessions,
            kv_dtype=options["kv_dtype"],
            chunk=choice.chunk,
            threads=self.threads,
            readers=self.readers,
            reads=reads,
            reads_reason=reason,
            hit_rate=rate.value,
            hit_rate_source=rate.source,
            bytes_touched_per_token=everything,
            expert_bytes_per_token=touched,
            bytes_read_per_token=read,
            bytes_copied_per_token=copied,
            read_seconds=read / probe.disk_bytes_per_second if probe else None,
            compute_seconds=everything / probe.memory_bytes_per_second if probe else None,
            probe=probe,
        )

    def too_little(self, least: _Choice) -> BudgetError:
        there = self.device_budget is not None and self.device_total(least) > self.device_budget
        if there:
            what, parts, floor = "device_memory", self.device_parts(least), self.device_total(least)
            budget, source = self.device_budget or 0, self.device_source
        else:
            device = self.device_parts(least)
            parts = {name: size - device.get(name, 0) for name, size in self.parts(least).items()}
            what, floor, budget, source = "memory", self.total(least), self.budget or 0, self.source
        listed = ", ".join(f"{size_text(size)} {name}" for name, size in parts.items() if size)
        hint = "a shorter context, fewer sessions or bf16 keys and values need less" if self.context else ""
        error = BudgetError(
            f"{what}: expected at least {floor} bytes ({size_text(floor)}), the floor of {self.variant.name} with "
            f"{self.sessions} x {least.context} tokens: {listed}; found {budget} bytes ({size_text(budget)}), {source}"
            f"{'; ' if hint else ''}{hint}"
        )
        if not there:
            error.needed, error.floor, error.missing = floor, self.least_budget(), floor - budget
        return error


@functools.lru_cache(maxsize=16)
def _encoder_bytes(path: Path, size: int, changed: int) -> int:
    """Looks into a file of that size, last changed then: half a second for the largest, so once."""
    try:
        proportional = is_proportional(read_rules(files.read_bytes(path), str(path)))
    except (FormatError, IoError):  # it is refused when somebody asks for text
        return 0
    return 0 if proportional else encoding(size).max_resident


def _with(choice: _Choice, **changes: Any) -> _Choice:
    return _Choice(**(asdict(choice) | changes))


def _last(candidates: range, fits: Callable[[int], bool]) -> int | None:
    """The last candidate that fits, if all before it fit too."""
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        if fits(candidates[middle]):
            low = middle + 1
        else:
            high = middle
    return candidates[low - 1] if low else None


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _cores() -> int:
    """The cores that this process may use: the engine makes as many threads unless it is told otherwise."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
