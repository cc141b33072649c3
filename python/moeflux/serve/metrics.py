"""Numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from moeflux.serve.protocols import Handle, Scheduler, ServedModel

__all__ = ["Metrics", "labelled"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class Metrics:
    def __init__(self, scheduler: Scheduler, model: ServedModel) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "moeflux_requests", "Requests by path and status.", ("path", "status"), registry=self.registry
        )
        self._first = Histogram(
            "moeflux_first_token_seconds", "From a request to its first token.", buckets=SECONDS, registry=self.registry
        )
        self._between = Histogram(
            "moeflux_between_tokens_seconds",
            "From a token to the next, a mean for each answer.",
            buckets=SECONDS,
            registry=self.registry,
        )
        counted = {
            "prompt_tokens": "Of prompts.",
            "reused_tokens": "Of prompts that were evaluated already.",
            "expert_hits": "Experts that were in memory when they were needed, in the device's where it has its own.",
            "expert_misses": "Experts that were not.",
            "host_hits": "Of these, for a device with memory of its own, that were in the host's.",
            "read_bytes": "Read of experts.",
            "copied_bytes": "Of experts, copied to a device with memory of its own.",
            "drafted_tokens": "Evaluated because they were likely to come next.",
            "accepted_tokens": "Of these, that came.",
        }
        self._counted = {
            name: Counter(f"moeflux_{name}", what, registry=self.registry) for name, what in counted.items()
        }
        self._now = _Now(scheduler, model)
        self.registry.register(self._now)

    def request(self, path: str, status: int) -> None:
        self._requests.labels(path, str(status)).inc()

    def tokens(self, count: int) -> None:
        """In the event loop alone: a Counter is for all threads, which would be paid for each token."""
        self._now.tokens += count

    def answer(self, handle: Handle) -> None:
        """One that has ended."""
        stats = handle.stats
        if stats.tokens:
            self._first.observe(stats.prompt_seconds)
        if stats.tokens > 1:
            self._between.observe(stats.seconds / (stats.tokens - 1))
        for name, value in (
            ("prompt_tokens", stats.prompt_tokens),
            ("reused_tokens", stats.reused_tokens),
            ("expert_hits", stats.expert_hits),
            ("expert_misses", stats.expert_misses),
            ("host_hits", stats.host_hits),
            ("read_bytes", stats.bytes_read),
            ("copied_bytes", stats.bytes_copied),
            ("drafted_tokens", stats.drafted),
            ("accepted_tokens", stats.accepted),
        ):
            self._counted[name].inc(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Now:
    """What is asked for when somebody looks: the line, memory against the plan, and tokens."""

    def __init__(self, scheduler: Scheduler, model: ServedModel) -> None:
        self.tokens = 0
        self._scheduler = scheduler
        self._model = model

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("moeflux_tokens", "Of answers.", value=self.tokens)
        numbers: dict[str, Any] = self._scheduler.numbers
        for name, value in numbers.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield GaugeMetricFamily(f"moeflux_scheduler_{name}", f"{name} of the scheduler.", value=value)
        memory = self._model.memory
        planned = GaugeMetricFamily("moeflux_memory_planned_bytes", "By purpose.", labels=("purpose",))
        for name, size in memory.planned.items():
            planned.add_metric((name,), size)
        yield planned
        held = GaugeMetricFamily("moeflux_memory_held_bytes", "By purpose.", labels=("purpose",))
        for name, size in memory.held.items():
            held.add_metric((name,), size)
        yield held
        if memory.device_held:
            there = GaugeMetricFamily("moeflux_memory_device_planned_bytes", "Of the plan.", labels=("purpose",))
            for name, size in memory.device_planned.items():
                there.add_metric((name,), size)
            yield there
            yield GaugeMetricFamily(
                "moeflux_memory_device_held_bytes", "In a device's own memory.", value=memory.device_held
            )
        slots = GaugeMetricFamily("moeflux_expert_slots", "Places for experts.", labels=("memory",))
        filled = GaugeMetricFamily("moeflux_expert_slots_filled", "Those that have one.", labels=("memory",))
        for where, each in memory.slots.items():
            slots.add_metric((where,), each.count)
            filled.add_metric((where,), each.filled)
        yield slots
        yield filled
        yield GaugeMetricFamily("moeflux_memory_resident_bytes", "Of the whole process.", value=memory.resident)


def labelled(texts: Mapping[str, bytes], label: str) -> bytes:
    """The numbers of several, each with its name as a label."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            one = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                one.add_sample(sample.name, {**sample.labels, label: name}, sample.value)
    return generate_latest(_Given(families.values()))


class _Given(CollectorRegistry):
    """Of numbers that were collected elsewhere."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families
