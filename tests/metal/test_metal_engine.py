"""The engine on the emulated GPU, through the product's own glue. It is held to the oracle, to itself, and to its
promises when command buffers fail. Metal objects are counted after every test."""

from __future__ import annotations

import gc
import itertools
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from emulator import gpu
from moeflux import BudgetError, DeviceError, FormatError, IoError, StateError, _core, oracle
from moeflux.conversion.synth import synth
from moeflux.runtime.plan import plan
from moeflux.stores.store import open_store
from moeflux.text.sampling import Sampler, Sampling
from support.engine import FIRST, NEXT, SECOND, evaluate, load_faulty, steps, survive, tokens
from support.flat import changed
from support.made_stores import Stores, stores_in
from support.metal import needs_device
from support.mlx_folder import write_mlx_folder
from support.tiny_stores import deepseek_v2, gemma4, glm, gpt_oss, hybrid, latent, minimax

pytestmark = needs_device

VOCAB = 384  # what FIRST, SECOND and NEXT are from
VARIANTS = {
    "hybrid": hybrid(layer_kinds=("linear", "full"), mlp_kinds=("moe",) * 2, vocab_size=VOCAB, num_experts=6),
    "rows": hybrid(
        "qwen3_moe", layer_kinds=("full",) * 2, mlp_kinds=("moe",) * 2, vocab_size=VOCAB, num_experts=6,
        attention_gate=False, shared_expert="none", shared_intermediate=0, linear_key_heads=0, linear_value_heads=0,
        linear_key_dim=0, linear_value_dim=0, conv_kernel=0, rotary_dim=16,
    ),
    "latent": latent(layer_kinds=("full",) * 2, mlp_kinds=("dense", "moe"), vocab_size=VOCAB, num_experts=8,
                     num_groups=4, groups_per_token=2),
    "biases": glm(vocab_size=VOCAB, num_experts=6),
    "joint norms": minimax(vocab_size=VOCAB),
    "groups of a softmax": deepseek_v2(vocab_size=VOCAB, num_experts=8),
    "windows": gpt_oss(vocab_size=VOCAB, num_experts=6),
    "frames": gemma4(vocab_size=VOCAB, num_experts=6),
}  # fmt: skip
NAMES = ("hybrid", "rows", "latent")
COSINE = 0.99999


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    return stores_in(tmp_path_factory.mktemp("metal"), VARIANTS)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Everything of Metal's that a test made is gone when it ends."""
    gpu.install()
    yield
    gc.collect()
    assert gpu.live_objects() == 0


def load(folder: Path, **options: Any) -> moeflux.Model:
    return load_faulty(folder, **{"backend": "metal", "look_ahead": "off"} | options)


def everything(folder: Path, **options: Any) -> np.ndarray:
    return evaluate(load(folder, **options).session(max_context=32))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


# ---- The right numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_prefill_and_steps_meet_the_oracle(store: Stores, name: str) -> None:
    ids = tokens(24, vocab=VOCAB)
    session = load(store(name), chunk=9).session(max_context=64)
    found = np.concatenate([session.prefill(ids[:16], logits="all"), steps(session, ids[16:])])
    with open_store(store(name)) as weights:
        expected = oracle.Session(weights.variant, weights).prefill(ids)
    assert min(cosine(a, b) for a, b in zip(found, expected, strict=True)) >= COSINE
    assert np.abs(found - expected).max() <= 1e-3 * np.ptp(expected)
    assert (found.argmax(1) == expected.argmax(1)).all()


@pytest.mark.parametrize("name", NAMES)
def test_long_contexts_meet_the_oracle(store: Stores, name: str) -> None:
    """Several spans of the cache, side by side in a step."""
    ids = tokens(520, vocab=VOCAB)
    with open_store(store(name)) as weights:
        truth = oracle.Session(weights.variant, weights)
        truth.prefill(ids)
        expected = truth.step(3)
    cpu = load_faulty(store(name), chunk=256).session(max_context=600)
    cpu.prefill(ids)
    session = load(store(name)).session(max_context=600)
    session.restore(cpu.snapshot())
    assert cosine(session.step(3).numpy(), expected) >= COSINE


def sampled(folder: Path, seed: int, **options: Any) -> list[int]:
    """What a model writes behind FIRST, with a warm temperature."""
    session = load_faulty(folder, **options).session(max_context=64)
    sampler = Sampler(Sampling(temperature=1.0, top_k=50, seed=seed), VOCAB, FIRST)
    logits, found = session.prefill(FIRST), []
    for _ in range(24):
        found.append(sampler.choose(logits).token)
        logits = session.step(found[-1])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_text_as_on_the_cpu(store: Stores, name: str) -> None:
    texts = [sampled(store(name), seed, backend="metal") for seed in (1, 2)]
    assert texts == [sampled(store(name), seed, backend="cpu") for seed in (1, 2)]
    assert texts[0] != texts[1]


def test_top_k_and_argmax(store: Stores) -> None:
    session = load(store("rows")).session(max_context=32)
    logits = session.prefill(FIRST)
    values = logits.numpy()
    ids, best = logits.top_k(9)
    order = np.argsort(-values, kind="stable")[:9]
    assert ids.tolist() == order.tolist() and best.tolist() == values[order].tolist()
    assert logits.argmax() == order[0]


# ---- The same bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_is_prefill(store: Stores, name: str) -> None:
    ids = tokens(21, vocab=VOCAB)
    stepped = steps(load(store(name)).session(max_context=32), ids)
    for chunk in (4, 21):
        at_once = load(store(name), chunk=chunk).session(max_context=32).prefill(ids, logits="all")
        assert np.array_equal(at_once, stepped)


SETTINGS: tuple[dict[str, Any], ...] = (
    {"expert_slots": 2},
    {"expert_slots": 3, "ring_depth": 1, "look_ahead": "on"},
    {"expert_slots": 5, "ring_depth": 4, "look_ahead": "on", "cache": "lfu", "readers": 3},
    {"expert_slots": 4, "cache": "none", "reads": "direct"},
    {"deferred": True, "expert_slots": 3},
)


@pytest.mark.parametrize("name", NAMES)
def test_settings_change_no_bit(store: Stores, name: str) -> None:
    expected = everything(store(name))
    for settings in SETTINGS:
        assert np.array_equal(everything(store(name), **settings), expected), settings


@pytest.mark.parametrize("order", (1, 20, 21))
@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_threads_and_dispatches_changes_no_bit(store: Stores, name: str, order: int) -> None:
    """Dispatches with no barrier between them run in any order: one that is missing shows."""
    expected = everything(store(name))
    with gpu.emulating(order=order):
        assert np.array_equal(everything(store(name), expert_slots=3), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_late_gpu_changes_no_bit(store: Stores, name: str) -> None:
    """The host is far ahead of it, and may touch nothing that is still to be used."""
    expected = everything(store(name))
    with gpu.emulating(delay=3000):
        assert np.array_equal(everything(store(name), expert_slots=3, ring_depth=4, look_ahead="on"), expected)


def test_a_narrow_gpu_changes_no_bit(store: Stores) -> None:
    expected = everything(store("hybrid"))
    with gpu.emulating(max_threads=256):
        assert np.array_equal(everything(store("hybrid")), expected)


@pytest.mark.parametrize("name", NAMES)
def test_long_batches_depart_in_parts(store: Stores, name: str) -> None:
    """So that no command buffer runs long. The same bits, and one that fails is the batch's failure."""
    ids = tokens(40, vocab=VOCAB)
    expected = load(store(name), chunk=40).session(max_context=64).prefill(ids, logits="all")
    gpu.install(max_work=30_000)
    try:
        with gpu.emulating(order=21, delay=100):
            session = load(store(name), chunk=40).session(max_context=64)
            assert np.array_equal(session.prefill(ids, logits="all"), expected)
            assert gpu.commits() > 3 * session.stats.submissions
        with gpu.emulating(fail_at=3), pytest.raises(DeviceError, match="told to fail"):
            load(store(name), chunk=40).session(max_context=64).prefill(ids)
    finally:
        gpu.install()


@pytest.mark.parametrize("kv_dtype", ("f32", "bf16", "q8"))
@pytest.mark.parametrize("name", NAMES)
def test_going_back_and_going_on(store: Stores, tmp_path: Path, name: str, kv_dtype: str) -> None:
    model = load(store(name))
    session = model.session(max_context=32, kv_dtype=kv_dtype)
    session.prefill(FIRST)
    session.checkpoint()
    expected = steps(session, SECOND)
    assert session.rewind(len(FIRST)) == len(FIRST)
    session.snapshot().save(tmp_path / "saved.moeflux")
    assert np.array_equal(steps(session, SECOND), expected)
    other = model.session(max_context=64, kv_dtype=kv_dtype)
    other.prefill(NEXT)
    other.restore(tmp_path / "saved.moeflux")
    assert np.array_equal(steps(other, SECOND), expected)


@pytest.mark.parametrize("name", NAMES)
def test_sessions_take_turns(store: Stores, name: str) -> None:
    model = load(store(name), expert_slots=4)
    alone = everything(store(name))
    one, two = model.session(max_context=32), model.session(max_context=32)
    found = [[one.prefill(FIRST, logits="all")], [two.prefill(FIRST, logits="all")]]
    for session, rows in zip((two, one), reversed(found), strict=True):
        rows.append(session.prefill(SECOND, logits="all"))
    for token in NEXT:
        for session, rows in zip((one, two), found, strict=True):
            rows.append(session.step(token).numpy()[None])
    for rows in found:
        assert np.array_equal(np.concatenate(rows), alone)


# ---- What fails -----------------------------------------------------------------------------------------------------


FAILING: dict[str, dict[str, Any]] = {
    "streaming": {"expert_slots": 4, "ring_depth": 1},
    "ahead": {"expert_slots": 4, "ring_depth": 3, "look_ahead": "on"},
    "in memory": {},
}


@pytest.mark.parametrize("how", FAILING)
@pytest.mark.parametrize("name", NAMES)
def test_every_command_buffer_that_fails(store: Stores, name: str, how: str) -> None:
    """Of prefills and of steps, half of it done. The call says so; nothing wrong stays; the GPU is used again. Every
    second fails in turn, in memory the others than when experts are read."""
    expected = everything(store(name))
    for number in itertools.count(how == "in memory", 2):
        with gpu.emulating(fail_at=number, delay=200 if number % 3 else 0):
            failed = survive(load(store(name), **FAILING[how]), DeviceError, expected)
            assert failed or gpu.commits() <= number  # there was none of this number
        if not failed:
            break
    assert number > 6


@pytest.mark.parametrize("name", NAMES)
def test_every_op_that_fails(store: Stores, name: str) -> None:
    expected = everything(store(name))
    for number in itertools.count(1, 23):
        if not survive(load(store(name), expert_slots=4, fail_at_op=number), DeviceError, expected):
            assert number > 100
            break


@pytest.mark.parametrize("kind", ("error", "end_of_file", "short_read"))
def test_reads_that_fail(store: Stores, kind: str) -> None:
    expected = everything(store("hybrid"))
    for slots in (3, 5):  # in a step, too few for two layers at a time, and enough
        failed = 0
        for number in range(1, 26, 4):
            fault = _core.FaultPlan(kind, number)
            with gpu.emulating(delay=200):
                failed += survive(load(store("hybrid"), expert_slots=slots, fault=fault), IoError, expected)
        assert failed > 3 if kind != "short_read" else failed == 0


def test_reads_that_fail_where_nobody_asked(store: Stores) -> None:
    """Whoever needs the expert meets the error; nobody else does."""
    expected = everything(store("hybrid"))
    failed = [
        survive(load(store("hybrid"), fault=_core.FaultPlan("error", n)), IoError, expected) for n in range(1, 13)
    ]
    assert True in failed and False in failed


def test_a_batch_that_nobody_lets_go_on_is_found(store: Stores) -> None:
    """The emulated device does not hang: whoever forgets to raise an event is told."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from emulator import gpu
from support.engine import load_faulty, Path
gpu.install()
session = load_faulty(Path({str(store("hybrid"))!r}), backend="metal", expert_slots=2).session(max_context=32)
session.prefill([1, 2, 3])
with gpu.emulating(deaf=True, patience=500):
    for token in range(8):
        session.step(token)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGABRT
    assert "a deadlock: a command buffer waits for 1 of an event that stays at 0" in done.stderr


def test_what_the_gpu_says_is_told(store: Stores) -> None:
    session = load(store("hybrid")).session(max_context=32)
    session.prefill(FIRST)
    with gpu.emulating(fail_at=1):  # the second of two: one layer's experts are all in memory, the other's are not
        with pytest.raises(DeviceError, match=r"the GPU failed: told to fail \(MTLCommandBufferErrorDomain 3\)"):
            session.step(1)
        with pytest.raises(StateError, match=r"the GPU failed.*clear it or restore"):
            session.step(1)


TOO_FEW = r"kernel \w+: expected room for 256 threads in a threadgroup, an emulated GPU has it for 128"
REFUSED = r"elementwise\.metal: combine makes no pipeline: told to refuse"


@pytest.mark.parametrize(("how", "said"), [({"max_threads": 128}, TOO_FEW), ({"refused": b"combine"}, REFUSED)])
def test_a_kernel_that_the_gpu_cannot_run(store: Stores, how: dict[str, Any], said: str) -> None:
    """Loading finds out, and no text ends in the middle: the CPU does the work, and one sentence says why."""
    gpu.install(preferred=True)
    try:
        with gpu.emulating(**how):
            with pytest.raises(DeviceError, match=said):
                load(store("rows"))
            with pytest.warns(UserWarning, match=f"^Metal does not work here, the CPU does the work: {said}") as told:
                model = moeflux.load(store("rows"), memory=None)
        assert len(told) == 1 and "cpu" in repr(model)
        assert model.session(max_context=32).prefill(FIRST).numpy().shape == (VOCAB,)
    finally:
        gpu.install()


@pytest.mark.parametrize("kernel", ("rms_norm", "matvec_4", "expert_down_4", "attention_merge", "gated_delta", "top_k"))
def test_loading_makes_every_kernel_ready(store: Stores, kernel: str) -> None:
    """Also those that this model does without."""
    with gpu.emulating(refused=kernel.encode()), pytest.raises(DeviceError, match=f"{kernel} makes no pipeline"):
        load(store("rows"))


def test_the_working_set_is_a_limit(store: Stores) -> None:
    memory = load(store("rows"))._engine.memory
    held = memory.dense_weights + memory.expert_slots + memory.scratch
    with (
        gpu.emulating(working_set=int(held / 0.8) - 8192),
        pytest.raises(BudgetError, match=r"expected at most .*, which is left of the .* that an emulated GPU may use"),
    ):
        load(store("rows"))


def test_a_plan_keeps_within_the_working_set(store: Stores) -> None:
    whole = plan(store("rows"), memory="20GB", backend="metal", context=100)
    device = sum(whole.parts[part] for part in ("dense weights", "expert slots", "scratch"))
    with gpu.emulating(working_set=int(device / 0.8)):
        held = plan(store("rows"), memory="20GB", backend="metal", context=100)
    assert held.budget_bytes < whole.budget_bytes and held.budget_source.endswith("less what the GPU may not use")
    # What the GPU holds nothing of. Models that other tests have left count as the last.
    beside = ("process", "text", "renderer", "passing states", "other models")
    assert sum(bytes for part, bytes in held.parts.items() if part not in beside) <= device
    assert plan(store("rows"), memory="20GB", backend="cpu", context=100).budget_bytes == 20_000_000_000


def test_models_that_no_kernel_can_run(tmp_path: Path) -> None:
    synth(tmp_path / "wide", hybrid(layer_kinds=("full",), mlp_kinds=("moe",), head_dim=544, vocab_size=VOCAB))
    session = load(tmp_path / "wide").session(max_context=32)
    with pytest.raises(FormatError, match="metal: expected attention over at most 512 dimensions, found 544"):
        session.prefill(FIRST)


# ---- Promises -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_what_was_said(store: Stores, name: str) -> None:
    with open_store(store(name)) as opened:
        said = _core.footprint(opened.directory, backend="metal", expert_slots=3, chunk=16, readers=1, max_context=100)
    engine = (model := load(store(name), expert_slots=3))._engine
    assert engine.held == engine.memory.total == engine.memory.engine
    session = model.session(max_context=100)
    assert engine.memory.rows == 0, "rows are taken as they are used"
    session.prefill(tokens(40, vocab=VOCAB))
    for part in ("dense_weights", "expert_slots", "scratch", "rows", "recurrent", "checkpoints", "tokens"):
        assert getattr(engine.memory, part) == getattr(said, part), part
    before = engine.held
    session.prefill(tokens(40, vocab=VOCAB))
    session.step(1).top_k(20)
    assert engine.held == before == engine.memory.total


@pytest.mark.parametrize("slots", (2, 5))
@pytest.mark.parametrize("name", NAMES)
def test_a_streaming_step_submits_and_waits_once_a_layer(store: Stores, name: str, slots: int) -> None:
    """And once for the end."""
    model = load(store(name), expert_slots=slots)
    session = model.session(max_context=32)
    session.prefill(FIRST)
    layers = len(model.variant.moe_layers)
    with gpu.emulating(delay=500):
        for token in (*SECOND, *NEXT):
            before = gpu.commits()
            session.step(token)
            assert (session.stats.submissions, session.stats.waits) == (layers + 1, layers + 1)
            assert gpu.commits() - before == layers + 1
    assert session.total_stats.expert_misses > 0


@pytest.mark.parametrize("name", NAMES)
def test_every_expert_is_soon_in_memory(store: Stores, name: str) -> None:
    """Where each has a slot, those that nobody asks for are read behind the others: soon a step is one submission,
    whatever was picked before."""
    model = load(store(name))
    session = model.session(max_context=32)
    for _ in range(1000):
        session.clear()
        session.prefill([1])
        session.step(2)
        if session.stats.submissions == 1:
            break
        time.sleep(0.005)
    assert (session.stats.submissions, session.stats.waits) == (1, 1)
    with open_store(store(name)) as opened:
        experts = model.variant.experts.count * len(model.variant.moe_layers)
        assert session.total_stats.bytes_read == experts * opened.directory.experts.bytes


def is_mapped(file: Path) -> bool:
    return str(file) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_used_where_they_lie(store: Stores, name: str) -> None:
    """The same bits where the device would not have it."""
    weights = store(name) / "model_weights.bin"
    model = load(store(name), expert_slots=4)
    assert is_mapped(weights)
    in_place = evaluate(model.session(max_context=32))
    del model
    gc.collect()
    assert not is_mapped(weights)
    with gpu.emulating(wraps=False):
        model = load(store(name), expert_slots=4)
        assert not is_mapped(weights) and model._engine.held == model._engine.memory.total
        assert np.array_equal(evaluate(model.session(max_context=32)), in_place)


def test_weights_beside_experts_are_copied(store: Stores, tmp_path: Path) -> None:
    """A file that holds both is not mapped for the little that is wanted of it."""
    write_mlx_folder(store("rows"), tmp_path / "mlx")
    model = load(tmp_path / "mlx")
    assert not is_mapped(tmp_path / "mlx")
    assert np.array_equal(evaluate(model.session(max_context=32)), everything(store("rows")))


def test_weights_that_change_are_noticed(store: Stores, tmp_path: Path) -> None:
    shutil.copytree(store("rows"), tmp_path / "mine")
    session = load(tmp_path / "mine").session(max_context=32)
    session.prefill(FIRST)
    (tmp_path / "mine" / "model_weights.bin").touch()
    with pytest.raises(IoError, match=r"model_weights\.bin"):
        session.prefill(SECOND)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_with_every_expert_in_memory_is_one_submission(tmp_path: Path, name: str) -> None:
    """The GPU looks up itself what its router picked; the same bits as when the host does."""
    few = {"num_experts": 4, "num_groups": 2} if name == "latent" else {"num_experts": 3}
    synth(tmp_path / "few", changed(VARIANTS[name], **few))
    ids = tokens(60, vocab=VOCAB)  # every expert is picked for one of them
    streaming, resident = (load(tmp_path / "few", expert_slots=slots).session(max_context=64) for slots in (2, 0))
    streaming.prefill(ids)
    resident.prefill(ids)
    with gpu.emulating(delay=2000):
        for token in NEXT:
            assert np.array_equal(resident.step(token).numpy(), streaming.step(token).numpy())
            assert (resident.stats.submissions, resident.stats.waits) == (1, 1)
            assert resident.stats.expert_hits == streaming.stats.expert_hits + streaming.stats.expert_misses
            assert streaming.stats.submissions > 1
