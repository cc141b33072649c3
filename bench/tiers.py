"""Experts in three tiers on a GPU with memory of its own: how long a step takes with some of the experts in its slots,
some in the host's, and the rest on the disk, beside the two bounds: the copies alone, and a step with all experts in
its slots. Where steps read, reads of experts alone take turns with them, and the share of their rate is told.

    python bench/tiers.py STORE [--device 1 0.25] [--host 0 1 0.25] [--look-ahead off on] [--steps 48] [--context 1000]
                           [--cpu-experts off auto all]

Shares are of all experts; a share of 0 of `--host` means one host slot, so all but that comes from the disk. Prints a
line of JSON for each setting.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import moeflux
from moeflux import _core
from moeflux.stores.store import open_store

PROBE_SECONDS = 1.0
PROBE_BYTES = 1 << 30  # beyond what a processor's caches hold, and soon made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--device", type=float, nargs="+", default=[1.0, 0.25])
    parser.add_argument("--host", type=float, nargs="+", default=[0.0, 0.25, 1.0])
    parser.add_argument("--look-ahead", nargs="+", choices=("off", "on", "auto"), default=["off", "on"])
    parser.add_argument("--cpu-experts", nargs="+", choices=("off", "auto", "all"), default=["off"])
    parser.add_argument("--reads", default="auto")
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--context", type=int, default=1000)
    arguments = parser.parse_args()
    with open_store(arguments.store) as store:
        slot = _core.slot_bytes(store.directory)
        experts = store.variant.experts.count * len(store.variant.moe_layers)
    bus = bus_rate(slot)
    print(json.dumps({"slot_bytes": slot, "experts": experts, "bus_bytes_per_second": bus}), flush=True)
    resident: float | None = None
    for device, host in itertools.product(sorted(arguments.device, reverse=True), arguments.host):
        if device >= 1 and host != arguments.host[0]:  # there are no host slots then
            continue
        ways = itertools.product(arguments.look_ahead, arguments.cpu_experts) if device < 1 else [("off", "off")]
        for look_ahead, cpu_experts in ways:
            options: dict[str, Any] = {
                "expert_slots": max(16, round(device * experts)),
                "host_slots": max(1, round(host * experts)) if device < 1 else None,
                "look_ahead": look_ahead,
                "cpu_experts": cpu_experts,
                "reads": arguments.reads,
                "readers": arguments.readers,
            }
            reads_alone = partial(bare_rate, arguments.store, options) if host < 1 and device < 1 else None
            found = measured(arguments.store, arguments.context, arguments.steps, options, reads_alone)
            if device >= 1:
                resident = found["step_seconds"]
            found |= {"device": device, "host": host, "look_ahead": look_ahead, "cpu_experts": cpu_experts}
            if bus and resident and device < 1:
                copies = found["copied_per_step"] / bus
                found |= {"copies_alone_seconds": copies, "resident_seconds": resident}
                found["over_the_bound"] = found["step_seconds"] / max(copies, resident)
            print(json.dumps(found), flush=True)


def measured(
    store: Path, context: int, steps: int, options: dict[str, Any], reads_alone: Callable[[int], float] | None
) -> dict[str, Any]:
    """Medians over the steps behind a prompt. The first steps, after which caches and graphs are warm, do not count."""
    begun = time.perf_counter()
    with moeflux.load(store, memory=None, backend="cuda", context=context + 3 * steps, **options) as model:
        loaded = time.perf_counter() - begun
        rng = np.random.default_rng(5)
        prompt = [int(token) for token in rng.integers(0, model.variant.vocab_size, context)]
        session = model.session()
        session.prefill(prompt)
        session.clear()
        begun = time.perf_counter()  # again, with the experts where they are now
        session.prefill(prompt)
        prefill = time.perf_counter() - begun
        times: list[float] = []
        bare: list[float] = []
        before = session.total_stats
        for step in range(2 * steps):
            if step == steps:
                times, bare, before = [], [], session.total_stats
            if reads_alone and step % max(1, steps // 3) == 0:
                bare.append(reads_alone(step))
            begun = time.perf_counter()
            session.step(int(rng.integers(0, model.variant.vocab_size))).argmax()
            times.append(time.perf_counter() - begun)
        after = session.total_stats
        seconds = sum(times)

        def each(name: str) -> float:
            return (getattr(after, name) - getattr(before, name)) / steps

        found = {
            "step_seconds": statistics.median(times),
            "tokens_per_second": 1 / statistics.median(times),
            "prefill_tokens_per_second": context / prefill,
            "load_seconds": loaded,
            "hits_per_step": each("expert_hits"),
            "misses_per_step": each("expert_misses"),
            "host_hits_per_step": each("host_hits"),
            "experts_on_cpu_per_step": each("experts_on_cpu"),
            "copied_per_step": each("bytes_copied"),
            "read_per_step": each("bytes_read"),
            "copied_bytes_per_second": each("bytes_copied") * steps / seconds,
            "read_bytes_per_second": each("bytes_read") * steps / seconds,
            "waiting_share": each("read_wait_seconds") * steps / seconds,
            "router_share": each("router_seconds") * steps / seconds,
            "recording_share": each("beside_seconds") * steps / seconds,
            "look_ahead_used": each("look_ahead_used"),
            "look_ahead_reads": each("look_ahead_reads"),
            "engine": repr(model),
        }
        if bare and found["read_per_step"]:
            found["bare_read_bytes_per_second"] = statistics.median(bare)
            found["share_of_bare_read"] = found["read_bytes_per_second"] / statistics.median(bare)
        session.close()
    gc.collect()
    return found


def bare_rate(store: Path, options: dict[str, Any], seed: int) -> float:
    """Bytes per second of the engine's readers when they do nothing but read random experts, into as many slots, or
    into as many of them as no cache holds."""
    mode = "buffered" if options["reads"] == "buffered" else "direct"
    with open_store(store) as opened:
        slots = min(options["host_slots"], PROBE_BYTES // _core.slot_bytes(opened.directory))
        _, count, seconds = _core.probe_expert_reads(
            opened.directory, mode, options["readers"], PROBE_SECONDS, seed, slots
        )
    return float(count / seconds)


def bus_rate(slot: int) -> float | None:
    """Bytes per second of copies of one expert each, from pinned memory; None without torch, which makes them."""
    try:
        import torch
    except ImportError:
        return None
    count = 64
    host = torch.empty((count, slot), dtype=torch.uint8, pin_memory=True)
    device = torch.empty((count, slot), dtype=torch.uint8, device="cuda")
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for i in range(count):
            device[i].copy_(host[i], non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return count * slot / best


if __name__ == "__main__":
    main()
