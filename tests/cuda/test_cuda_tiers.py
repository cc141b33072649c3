"""Two memories on an NVIDIA GPU: the emulated one, or with --on-cuda=real that of this machine. Engines share it with
each other and with torch, both budgets are kept, and neither changes a bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moeflux
from emulator import cuda_gpu
from moeflux import BudgetError, DeviceError, plan
from moeflux.conversion.synth import synth
from support.engine import evaluate, tokens
from support.metal import needs_device
from support.tiny_stores import hybrid

pytestmark = [needs_device, pytest.mark.usefixtures("any_gpu")]

VARIANT = hybrid(layer_kinds=("linear", "full"), mlp_kinds=("moe",) * 2, vocab_size=384, num_experts=6)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda-tiers") / "hybrid"
    synth(path, VARIANT)
    return path


def load(path: Path, **options: object) -> moeflux.Model:
    defaults = {"backend": "cuda", "context": 64, "chunk": 16, "threads": 1, "readers": 2, "memory": None}
    return moeflux.load(path, **{**defaults, **options})  # type: ignore[arg-type]


def use(model: moeflux.Model) -> np.ndarray:
    with model.session() as session:
        return evaluate(session)


def test_neither_number_of_slots_changes_a_bit(store: Path) -> None:
    with load(store) as model:
        expected = use(model)
    for slots, host_slots, look_ahead in ((4, 3, "on"), (4, 12, "off"), (9, 12, "on"), (5, 1, "off")):
        with load(store, expert_slots=slots, host_slots=host_slots, look_ahead=look_ahead) as model:
            assert np.array_equal(use(model), expected), (slots, host_slots, look_ahead)
            assert model._engine.held == model._engine.memory.total


def test_a_driver_that_takes_one_copy_at_a_time(store: Path, on_cuda: str | None) -> None:
    if on_cuda == "real":
        pytest.skip("the driver of a GPU is as it is")
    with load(store) as model:
        expected = use(model)
    calls = []
    for version in (13000, 12000):
        with cuda_gpu.emulating(driver_version=version, fail_in=b"cuMemcpyBatchAsync_v2"):
            with load(store, expert_slots=4, host_slots=12) as model:
                assert np.array_equal(use(model), expected)
            calls.append(cuda_gpu.calls())
    assert calls[0] > 0 and calls[1] == 0


def test_both_budgets_are_kept(store: Path) -> None:
    whole = plan(store, backend="cuda", memory="1TB", context=64, chunk=16, threads=1, readers=2, sessions=2)
    floor = whole.device_floor_bytes
    budget = floor + 2 * whole.slot_bytes
    with load(store, memory="1TB", device_memory=budget, sessions=2) as model:
        assert model.plan.device_bytes <= budget and 4 <= model.plan.slots < 12 and model.plan.host_slots == 12
        use(model)
        engine = model._engine
        assert 0 < engine.held_by_device <= model.plan.device_bytes
        assert engine.held - engine.held_by_device <= model.plan.host_bytes
        kept = [model.session()]
        with pytest.raises(BudgetError, match="of the device's memory"):
            kept.extend(model.session() for _ in range(100))
        for session in kept:
            session.close()
        del engine  # or it would be another model beside the next
    with pytest.raises(BudgetError, match=f"device_memory: expected at least {floor} bytes"):
        load(store, memory="1TB", device_memory=floor - 1, sessions=2)


def _kept_from_children() -> int:
    """Bytes of this process that a child made by fork does not get."""
    kept = size = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Size":
            size = int(value.split()[0]) << 10
        elif name == "VmFlags" and "dc" in value.split():
            kept += size
    return kept


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such memory")
def test_large_pinned_memory_is_the_systems(tmp_path: Path, on_cuda: str | None) -> None:
    """Pinned when it is there, and no child that is forked shares it: what the host writes would go to a copy, and the
    GPU would read the old. Where the driver refuses, the driver's own memory does."""
    store = tmp_path / "store"
    synth(store, hybrid(layer_kinds=("linear", "full"), mlp_kinds=("moe",) * 2, vocab_size=384, num_experts=160))
    with load(store) as model:
        expected = use(model)
    before = _kept_from_children()

    def kept() -> int:
        with load(store, expert_slots=40, host_slots=320) as model:
            engine = model._engine
            assert engine.memory.host_slots == 320 << 13 and engine.held == engine.memory.total
            assert np.array_equal(use(model), expected)
            return _kept_from_children() - before

    whole = kept()
    assert whole >= 320 << 13
    assert _kept_from_children() == before
    if on_cuda == "real":
        return
    with cuda_gpu.emulating(fail_in=b"cuMemHostRegister_v2"):
        kept()
        count = cuda_gpu.calls()
    assert count > 0
    for number in range(count):
        with cuda_gpu.emulating(fail_at=number, fail_in=b"cuMemHostRegister_v2"):
            assert kept() < whole
    with cuda_gpu.emulating(fail_at=0, fail_in=b"cuMemHostAlloc"), pytest.raises(DeviceError, match="pinned host"):
        load(store)


def test_two_engines_on_one_gpu(store: Path) -> None:
    with load(store) as first, load(store, expert_slots=4, host_slots=6) as second:
        expected = use(first)
        assert np.array_equal(use(second), expected)
        one, other = first.session(), second.session()
        logits = [one.prefill(tokens(9)).numpy(), other.prefill(tokens(9)).numpy()]
        for token in tokens(6, seed=4):
            logits += [one.step(token).numpy(), other.step(token).numpy()]
        for mine, its in zip(logits[::2], logits[1::2], strict=True):
            assert np.array_equal(mine, its)
        one.close(), other.close()


BESIDE_TORCH = """
import threading
import numpy as np, torch, moeflux
def product():
    x = torch.arange(1 << 20, dtype=torch.float32, device="cuda").reshape(1024, 1024) / (1 << 20)
    return (x @ x).cpu().numpy()
before = product()
options = {"backend": "cuda", "context": 64, "chunk": 16, "memory": None}
with moeflux.load(STORE, **options) as model:
    session = model.session()
    expected = [session.prefill([1, 2, 3, 4]).numpy().copy()]
    expected += [session.step(token).numpy().copy() for token in range(40)]
    session.close()
done = threading.Event()
def take_and_give_back():  # which waits for all that the GPU does
    while not done.is_set():
        torch.empty(1 << 24, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
other = threading.Thread(target=take_and_give_back, daemon=True)
other.start()
stream = torch.cuda.Stream()
with moeflux.load(STORE, expert_slots=4, host_slots=6, **options) as model:
    session = model.session()
    with torch.cuda.stream(stream):
        beside = product()
        logits = [session.prefill([1, 2, 3, 4]).numpy().copy()]
        logits += [session.step(token).numpy().copy() for token in range(40)]
    session.close()
done.set()
other.join()
assert np.array_equal(logits, expected) and np.array_equal(before, beside) and np.array_equal(before, product())
print("alike")
"""


def test_torch_in_the_same_process(store: Path, on_cuda: str | None) -> None:
    if on_cuda != "real":
        pytest.skip("it needs a GPU, with --on-cuda=real")
    pytest.importorskip("torch")
    script = f"STORE = {str(store)!r}\n{BESIDE_TORCH}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "alike\n"), done.stderr
