"""Experts in the host's slots that the CPU computes, beside an NVIDIA GPU: the emulated one, or with --on-cuda=real
that of this machine. Whoever computes an expert changes no bit, and whatever fails leaves a session as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import moeflux
from emulator import cuda_gpu
from moeflux import BudgetError, Cancel, Cancelled, DeviceError, Variant, plan
from moeflux.conversion.synth import synth
from support.engine import NEXT, evaluate, steps, survive, tokens
from support.metal import needs_device
from support.tiny_stores import gemma4, gpt_oss, hybrid

pytestmark = [needs_device, pytest.mark.usefixtures("any_gpu")]


def wide(variant: Variant) -> Variant:
    """With experts that have whole groups of 64 columns in each of their matrices."""
    layers = (replace(layer, feed_forward=replace(layer.feed_forward, intermediate=64)) for layer in variant.layers)
    return replace(variant, layers=tuple(layers))


VARIANT = wide(hybrid(layer_kinds=("linear", "full"), mlp_kinds=("moe",) * 2, vocab_size=384, num_experts=6))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts-on-cpu") / "hybrid"
    synth(path, VARIANT)
    return path


def load(path: Path, cpu_experts: str = "all", **options: object) -> moeflux.Model:
    defaults = {"backend": "cuda", "context": 64, "chunk": 16, "threads": 2, "readers": 2, "memory": None}
    return moeflux.load(path, cpu_experts=cpu_experts, **{**defaults, **options})  # type: ignore[arg-type]


def use(model: moeflux.Model) -> np.ndarray:
    """Of one session, and of two that take turns and go together."""
    with model.session() as session, model.session() as other:
        found = [evaluate(session), other.prefill(tokens(9, seed=2), logits="all")]
        for token in tokens(4, seed=4):
            found += [steps(session, [token]), steps(other, [token])]
        found += [each.numpy()[None] for each in model.evaluate([(session, [5]), (other, [6])])]
        return np.concatenate([*found, steps(session, NEXT)])


@pytest.fixture(scope="module")
def expected(store: Path, on_cuda: str | None) -> np.ndarray:
    """With every expert on the device."""
    if on_cuda != "real":
        cuda_gpu.install()
    with load(store) as model:
        return use(model)


@pytest.mark.parametrize("look_ahead", ["on", "off"])
@pytest.mark.parametrize("which", ["off", "auto", "all"])
def test_whoever_computes_an_expert_changes_no_bit(
    store: Path, expected: np.ndarray, which: str, look_ahead: str
) -> None:
    """Also where batches come late: outputs are few enough to go as words of a launch, which would be taken before they
    are made."""
    for slots, host_slots, threads in ((4, 12, 3), (4, 3, 1), (9, 12, 2)):
        options = {"expert_slots": slots, "host_slots": host_slots, "look_ahead": look_ahead, "threads": threads}
        with cuda_gpu.emulating(delay=200), load(store, which, **options) as model:
            assert (f"experts on the CPU {which}" in model._engine.describe()) == (which != "off")
            assert np.array_equal(use(model), expected), (slots, host_slots, which, look_ahead)
            assert model._engine.held == model._engine.memory.total


@pytest.mark.parametrize(
    "variant", [wide(gemma4(vocab_size=384)), wide(gpt_oss(vocab_size=384))], ids=["framed", "biases"]
)
def test_other_layers(tmp_path: Path, variant: Variant) -> None:
    """Where the sum of the experts has norms around it; and experts with biases, which are all moved."""
    store = tmp_path / "store"
    synth(store, variant)
    count = variant.experts.count * len(variant.moe_layers)
    with load(store) as model:
        wanted = use(model)
    options = {"expert_slots": 2 * variant.experts.per_token, "host_slots": count}
    with load(store, **options) as model, model.session() as session:
        assert np.array_equal(use(model), wanted)
        session.prefill(tokens(40))
        steps(session, tokens(8, seed=5))
        assert (session.total_stats.experts_on_cpu > 0) == (variant.model_type != "gpt_oss")


@pytest.mark.parametrize("look_ahead", ["on", "off"])
@pytest.mark.parametrize("which", ["off", "all"])
def test_an_expert_on_the_cpu_is_not_moved(store: Path, which: str, look_ahead: str) -> None:
    options = {"expert_slots": 4, "host_slots": 12, "look_ahead": look_ahead}
    with load(store, which, **options) as model, model.session() as session:
        for seed in range(3):  # reads all that there is
            session.clear()
            session.prefill(tokens(40, seed=seed))
        before = session.total_stats
        steps(session, tokens(6, seed=4))
        after = session.total_stats
    names = ("expert_misses", "host_hits", "experts_on_cpu", "bytes_copied", "bytes_read")
    misses, host_hits, on_cpu, copied, read = (getattr(after, name) - getattr(before, name) for name in names)
    assert misses == host_hits > 0 and read == 0
    assert on_cpu == (misses if which == "all" else 0)
    assert (copied == 0) == (which == "all")


def test_without_slots_in_the_host_the_cpu_computes_nothing(store: Path) -> None:
    for options in ({}, {"expert_slots": 4}):
        with load(store, **options) as model:
            assert "on the CPU" not in model._engine.describe()
            use(model)
            assert model._engine.held == model._engine.memory.total


def test_the_plan_counts_what_experts_on_the_cpu_need(store: Path) -> None:
    options = {"backend": "cuda", "memory": None, "context": 64, "expert_slots": 4, "host_slots": 12}
    without, with_them = (plan(store, cpu_experts=which, **options).parts for which in ("off", "all"))
    assert with_them["read buffers"] > without["read buffers"]
    assert {**with_them, "read buffers": 0} == {**without, "read buffers": 0}


def test_both_budgets_are_kept(store: Path) -> None:
    limits = {"backend": "cuda", "context": 64, "chunk": 16, "threads": 2, "readers": 2, "sessions": 2}
    whole = plan(store, memory="1TB", cpu_experts="all", **limits)
    budget = whole.device_floor_bytes + 2 * whole.slot_bytes
    with load(store, memory="1TB", device_memory=budget, sessions=2) as model:
        assert model.plan.host_slots == 12 and "on the CPU" in model._engine.describe()
        use(model)
        engine = model._engine
        assert 0 < engine.held_by_device <= model.plan.device_bytes <= budget
        assert engine.held - engine.held_by_device <= model.plan.host_bytes
        del engine  # or it would be another model beside the next
    with pytest.raises(BudgetError, match="device_memory: expected at least"):
        load(store, memory="1TB", device_memory=whole.device_floor_bytes - 1, sessions=2)


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuMemcpyBatchAsync_v2", "cuLaunchKernel"])
@pytest.mark.parametrize("which", ["auto", "all"])
def test_a_call_that_fails_beside_experts_on_the_cpu(store: Path, on_cuda: str | None, call: str, which: str) -> None:
    """Nobody waits for what never comes, and what follows is right."""
    if on_cuda == "real":
        pytest.skip("the driver of a GPU does not fail when it is told to")
    failed = False
    with load(store, which, expert_slots=4, host_slots=12, look_ahead="off") as model:
        with model.session(max_context=32) as session:
            wanted = evaluate(session)
        for number in (0, 3, 7, 25):
            with cuda_gpu.emulating(fail_at=number, fail_in=call.encode(), delay=100):
                failed |= survive(model, DeviceError, wanted)
    assert failed or which == "auto" or call == "cuMemcpyBatchAsync_v2"  # the CPU may be too slow to be chosen


def test_a_call_that_is_given_up(store: Path, expected: np.ndarray) -> None:
    with load(store, expert_slots=4, host_slots=12) as model:
        with model.session() as session:
            session.prefill(tokens(40))
            cancel = Cancel()
            cancel.set()
            with pytest.raises(Cancelled):
                session.prefill(tokens(3), cancel=cancel)
        assert np.array_equal(use(model), expected)
