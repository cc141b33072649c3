"""The engine on the emulated NVIDIA GPU, through the product's own CUDA backend and a stand-in for the driver: memory
that the host cannot touch, streams that are late, calls that fail. Everything of the driver's is counted afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from emulator import cuda_gpu
from moeflux import BudgetError, DeviceError, _core
from moeflux.conversion.synth import synth
from moeflux.text.sampling import Sampler, Sampling
from support.engine import evaluate, load_faulty, steps, survive, tokens
from support.made_stores import Stores, stores_in
from support.metal import needs_device
from support.tiny_stores import hybrid, latent

pytestmark = [needs_device, pytest.mark.usefixtures("emulated_gpu")]

VOCAB = 384  # what `evaluate` takes its tokens from
VARIANTS = {
    "hybrid": hybrid(layer_kinds=("linear", "full"), mlp_kinds=("moe",) * 2, vocab_size=VOCAB, num_experts=6),
    "latent": latent(layer_kinds=("full",) * 2, mlp_kinds=("dense", "moe"), vocab_size=VOCAB, num_experts=8,
                     num_groups=4, groups_per_token=2),
    # Of whole parts of columns, so that tiles of one row's products lie in shared memory.
    "wide": hybrid(layer_kinds=("linear", "full"), mlp_kinds=("moe",) * 2, vocab_size=VOCAB, hidden_size=128,
                   head_dim=64, rotary_dim=32, linear_key_dim=32, linear_value_dim=128, linear_value_heads=4,
                   num_experts=6, moe_intermediate=128, shared_intermediate=128),
    # Of rows that are longer than the warps of a block have together.
    "long": latent(layer_kinds=("full",) * 2, mlp_kinds=("dense", "moe"), vocab_size=VOCAB, hidden_size=4608,
                   num_experts=4, moe_intermediate=128, shared_intermediate=128),
}  # fmt: skip
# As "wide", with so many experts that the router's rows are a tile, too, and heads as attention of one row copies, or
# these and keys of the delta-net that are as long as its values, so that a step of several sessions takes all of it
# together.
MANY_EXPERTS = {
    name: hybrid(layer_kinds=("linear", "full"), mlp_kinds=("moe",) * 2, vocab_size=VOCAB, hidden_size=128,
                 head_dim=head_dim, rotary_dim=32, linear_key_dim=key_dim, linear_value_dim=128, linear_value_heads=4,
                 num_experts=40, moe_intermediate=128, shared_intermediate=128)
    for name, head_dim, key_dim in (("many experts", 64, 32), ("long heads", 128, 32), ("long keys", 128, 128))
}  # fmt: skip
FLOWS: dict[str, dict[str, Any]] = {
    "resident": {"expert_slots": 0},
    "streamed": {"expert_slots": 4, "readers": 2},
    "ahead": {"expert_slots": 5, "look_ahead": "on"},
    "host slots": {"expert_slots": 4, "host_slots": 3, "look_ahead": "on", "readers": 2},
}

LISTED_VOCAB = 5000  # of several blocks of logits
LAUNCHES_OF_STEP = {"hybrid": 36, "wide": 32, "long": 46}  # of the first, whose experts are read
# Of the delta-net's layer, of attention's, before and behind, and of words that go from one memory to the other.
WORDS_AHEAD = 2  # for the step to come: its lists and its angles
MOST_LAUNCHES_OF_RESIDENT_STEP = 6 + 8 + 4 + 4 + WORDS_AHEAD
# Likewise in a step of several sessions: two batches, with their surveys.
MOST_LAUNCHES_OF_ROWS = {"many experts": 11 + 12 + 6 + 4 + WORDS_AHEAD, "long keys": 9 + 12 + 6 + 4 + WORDS_AHEAD}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    return stores_in(tmp_path_factory.mktemp("cuda"), VARIANTS | MANY_EXPERTS)


def load(folder: Path, **options: Any) -> moeflux.Model:
    return load_faulty(folder, **{"backend": "cuda", "look_ahead": "off"} | options)


def read_all(model: moeflux.Model) -> None:
    """Until every expert is in its slot: between calls those are read that nobody asked for."""
    with model.session(max_context=64) as session:
        while any(filled < count for _, count, filled in model._engine.slots):
            session.prefill(tokens(2, vocab=VOCAB))
            session.clear()


def everything(folder: Path, **options: Any) -> np.ndarray:
    return evaluate(load(folder, **options).session(max_context=32))


def test_the_engine_is_that_of_the_cpu_in_every_flow(store: Stores) -> None:
    """Close to the CPU's numbers, and the same bits in every flow, however late the device is. Those of other shapes
    of rows in the flows where experts come and go."""
    for name in VARIANTS:
        expected = evaluate(load(store(name), backend="cpu", precision="exact").session(max_context=32))
        first = everything(store(name))
        assert np.abs(first - expected).max() < 1e-4 * np.abs(expected).max()
        flows = ("streamed", "host slots") if name in ("wide", "long") else FLOWS
        for order, flow in enumerate(flows):
            with cuda_gpu.emulating(delay=500 * order, order=order):
                assert np.array_equal(everything(store(name), **FLOWS[flow]), first)


@pytest.mark.parametrize("name", LAUNCHES_OF_STEP)
def test_a_graph_gives_the_bits_of_single_launches(store: Stores, name: str) -> None:
    """The first step launches one by one; when its kernels come again, they are a graph, with other arguments. In
    steps, ops go together in a launch: with the residual, SwiGLU, a norm, a gate, the convolution, the heads that
    attention takes, the router's choice, the sum of the experts. In a prefill each has its own."""
    model = load(store(name))
    ids = tokens(9, vocab=VOCAB)
    with cuda_gpu.emulating():
        first = steps(model.session(max_context=32), ids[:1])
        assert (cuda_gpu.launches(), cuda_gpu.graph_launches()) == (LAUNCHES_OF_STEP[name], 0)
    with cuda_gpu.emulating(delay=300):
        again = steps(model.session(max_context=64), ids)
        assert cuda_gpu.graph_launches() > 0
    with cuda_gpu.emulating():
        expected = load(store(name), chunk=32).session(max_context=32).prefill(ids, logits="all")
        assert cuda_gpu.graph_launches() == 0
    assert np.array_equal(again[:1], first) and np.array_equal(again, expected)


def test_steps_that_read_give_the_bits_of_a_prefill(store: Stores) -> None:
    """As graphs, too. No batch holds for a read here, so what says where experts lie comes with the launches that look
    there."""
    ids = tokens(9, vocab=VOCAB)
    with cuda_gpu.emulating():
        found = steps(load(store("wide"), deferred=True, expert_slots=4).session(max_context=32), ids)
        assert cuda_gpu.graph_launches() > 0
    expected = load(store("wide"), chunk=32).session(max_context=32).prefill(ids, logits="all")
    assert np.array_equal(found, expected)


def test_a_step_of_a_resident_model_gives_the_bits_of_a_prefill(store: Stores) -> None:
    """Where all experts are in slots, the choice goes with their gate and up, and their down with the sum."""
    model = load(store("long heads"))
    session = model.session(max_context=64)
    for seed in range(1, 5):  # so that every expert is read, and the device knows where it is
        session.prefill(tokens(60, seed=seed, vocab=VOCAB))
        session.clear()
    ids = tokens(9, vocab=VOCAB)
    with cuda_gpu.emulating():
        first = steps(session, ids[:1])
        assert cuda_gpu.launches() <= MOST_LAUNCHES_OF_RESIDENT_STEP and cuda_gpu.graph_launches() == 0
    found = np.concatenate([first, steps(session, ids[1:])])
    expected = load(store("long heads"), chunk=32).session(max_context=32).prefill(ids, logits="all")
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "lengths", "multiprocessors", "checked"),
    [
        ("many experts", [260, 300], 4, False),
        ("many experts", list(range(5, 13)), 4, True),
        ("many experts", list(range(5, 14)), 4, False),
        ("many experts", [3] * 17, 8, False),
        ("long keys", [70, 100, 7], 4, True),
        ("long keys", list(range(5, 14)), 8, False),
    ],
)
def test_sessions_side_by_side_have_the_bits_of_each_alone(
    store: Stores, name: str, lengths: list[int], multiprocessors: int, checked: bool
) -> None:
    """Of two to eight rows ops go together in other launches than of one, and of nine in some; on a larger GPU of more
    rows, too. Tests of single ops do not run these launches, so one step of each kind of model is checked."""
    with cuda_gpu.emulating(multiprocessors=multiprocessors, checked=checked):
        model = load(store(name), chunk=32)
    read_all(model)
    sessions = [model.session(max_context=320) for _ in lengths]
    ids = [tokens(4, seed=50 + place, vocab=VOCAB) for place in range(len(lengths))]
    expected = []
    for place, (own, length) in enumerate(zip(sessions, lengths, strict=True)):
        own.prefill(tokens(length, seed=20 + place, vocab=VOCAB))
        fork = own.fork()
        expected.append(steps(fork, ids[place]))
        fork.close()
    found = []
    for turn in range(4):  # the last asks for the best tokens alone
        with cuda_gpu.emulating(order=turn, checked=checked and turn == 1):
            rows = model.evaluate([(own, own_ids[turn : turn + 1]) for own, own_ids in zip(sessions, ids, strict=True)])
            assert turn > 0 or cuda_gpu.launches() <= MOST_LAUNCHES_OF_ROWS[name] + (8 if len(lengths) > 8 else 0)
            assert turn < 3 or (cuda_gpu.launches(), cuda_gpu.graph_launches()) == (0, 1)  # recorded ahead
            best = [row.argmax() for row in rows]
        if turn < 3:
            found.append([np.array(row.numpy()).reshape(-1) for row in rows])
    assert np.array_equal(np.array(found).swapaxes(0, 1), np.array(expected)[:, :3].reshape(len(lengths), 3, -1))
    assert best == [int(last.argmax()) for last in np.array(expected)[:, 3].reshape(len(lengths), -1)]


def answers(model: moeflux.Model, every: list[Sampling]) -> tuple[list[list[int]], int]:
    """Of sessions that are evaluated together, each with its own settings; and how many tokens came from lists."""
    sessions = [model.session(max_context=32) for _ in every]
    samplers = [Sampler(asked, LISTED_VOCAB, []) for asked in every]
    rows = [session.prefill([5 + place, 7]) for place, session in enumerate(sessions)]
    chosen: list[list[int]] = [[] for _ in every]
    for _ in range(6):
        for own, sampler, row in zip(chosen, samplers, rows, strict=True):
            own.append(sampler.choose(row).token)
        rows = model.evaluate([(session, own[-1:]) for session, own in zip(sessions, chosen, strict=True)])
    return chosen, sum(sampler._core.chosen_from_shortlists for sampler in samplers)


def test_tokens_are_drawn_on_the_device(tmp_path: Path) -> None:
    """From lists, in a step of several sessions, those that all logits give: a sampler that keeps log probabilities has
    these."""
    shape = hybrid(layer_kinds=("linear", "full"), mlp_kinds=("moe",) * 2, vocab_size=LISTED_VOCAB, num_experts=6)
    synth(tmp_path / "store", shape)
    every = [Sampling(temperature=0.7, top_k=20, seed=1), Sampling(temperature=1.0, seed=2), Sampling()]
    every += [Sampling(temperature=0.3, top_p=0.3, seed=3), Sampling(temperature=0.4, min_p=0.4, seed=4)]
    chosen, listed = answers(load(tmp_path / "store"), every)
    assert listed >= 15
    with pytest.MonkeyPatch.context() as patch:
        choose = Sampler.choose
        patch.setattr(Sampler, "choose", lambda self, row: choose(self, row, logprobs=0))
        expected, none = answers(load(tmp_path / "store"), every)
    assert chosen == expected and none == 0


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [*((name, kv_dtype) for name in ("hybrid", "latent", "many experts") for kv_dtype in ("f32", "bf16", "q8")),
     ("long", "f32")],  # its attention is that of "latent"
)  # fmt: skip
def test_loading_makes_every_kernel_that_a_model_wants(
    store: Stores, name: str, kv_dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no text waits for the compiler. What is made is in the cache."""
    monkeypatch.setenv("MOEFLUX_CACHE", str(tmp_path))
    model = moeflux.load(store(name), backend="cuda", memory=None, kv_dtype=kv_dtype)
    made = sorted(file.name for file in (tmp_path / "cuda").iterdir())
    session = model.session()
    session.prefill(tokens(70 if name == "long" else 300, vocab=VOCAB))  # attention in parts, many rows
    sessions = [session, session.fork(), session.fork()]
    for session in sessions:
        session.prefill(tokens(5, vocab=VOCAB), logits="all")
    for _ in range(3):
        sessions[0].step(1)
        model.evaluate([(session, [2]) for session in sessions])
    assert sorted(file.name for file in (tmp_path / "cuda").iterdir()) == made
    assert 10 < len(made) < 60


@pytest.mark.parametrize("flow", ["resident", "ahead"])
@pytest.mark.parametrize(
    "call",
    ["cuMemcpyAsync", "cuLaunchKernel", "cuGraphLaunch", "cuGraphAddKernelNode", "cuGraphAddDependencies_v2",
     "cuGraphInstantiateWithFlags", "cuEventRecord", "cuEventCreate", "cuEventSynchronize", "cuMemAlloc_v2",
     "cuCtxPushCurrent_v2"],
)  # fmt: skip
def test_a_call_that_fails_leaves_nothing_wrong(store: Stores, call: str, flow: str) -> None:
    """Calls of the driver fail in turn, the first ones and some of the many that follow."""
    expected = everything(store("hybrid"))
    model = load(store("hybrid"), **FLOWS[flow])
    failed = False
    for number in (0, 1, 2, 7, 40):
        with cuda_gpu.emulating(fail_at=number, fail_in=call.encode(), delay=100):
            try:
                failed |= survive(model, DeviceError, expected)
            except DeviceError as error:  # of what a session takes
                failed = True
                assert "out of memory (CUDA_ERROR_OUT_OF_MEMORY)" in str(error)
    # A graph that cannot be made is done without.
    without = (
        "cuGraphAddKernelNode", "cuGraphAddDependencies_v2", "cuGraphInstantiateWithFlags", "cuCtxPushCurrent_v2",
    )  # fmt: skip
    assert failed == (call not in without)
    assert np.array_equal(evaluate(model.session(max_context=32)), expected)


def loading_fails(folder: Path, expected: np.ndarray, number: int) -> bool:
    """Whether it says that this call failed. Otherwise it did without."""
    failed = False
    with cuda_gpu.emulating(fail_at=number):
        try:
            assert np.array_equal(everything(folder), expected), number
        except (DeviceError, BudgetError):
            failed = True
    assert cuda_gpu.live_objects() == 0, number
    return failed


def test_loading_survives_every_call_that_fails(store: Stores) -> None:
    """Whichever call fails, loading either says so or does without, and leaves nothing behind."""
    with cuda_gpu.emulating():
        expected = everything(store("latent"))
        count = cuda_gpu.calls()
    failures = [loading_fails(store("latent"), expected, number) for number in range(0, count, max(1, count // 40))]
    assert sum(failures) > 13


def test_a_wait_that_fails_is_told_to_everyone_who_waits(tmp_path: Path) -> None:
    """For the copy of an expert's bytes wait the thread that reads, whose room they leave, and the load of the expert.
    When the first is told of a failure, the second is, too, although the driver answers each only once."""
    synth(tmp_path / "store", latent(layer_kinds=("full",), mlp_kinds=("moe",), vocab_size=64, num_experts=8))
    ids = tokens(9, vocab=64)

    def prefill(number: int) -> tuple[np.ndarray, int]:
        session = load(tmp_path / "store").session(max_context=32)
        with cuda_gpu.emulating(fail_at=number, fail_in=b"cuEventSynchronize"):
            return np.array(session.prefill(ids, logits="all")), cuda_gpu.calls()

    expected, count = prefill(-1)
    failures = 0
    for number in range(count):
        try:
            assert np.array_equal(prefill(number)[0], expected), number
        except DeviceError:
            failures += 1
    assert failures > 5


def test_loading_opens_the_gpu_once(store: Stores) -> None:
    """A context takes a tenth of a second, and the plan, the compiler and the engine all ask the GPU something."""
    with cuda_gpu.emulating(fail_in=b"cuDevicePrimaryCtxRetain"):
        model = moeflux.load(store("hybrid"), backend="cuda", memory=None)
        assert cuda_gpu.calls() == 1
        model.close()
    assert cuda_gpu.live_objects() == 0


def test_a_kernel_that_breaks_off_loses_the_device(store: Stores) -> None:
    """All that is under way fails, and what comes later says that only a new process will do."""
    model = load(store("hybrid"))
    session = model.session(max_context=32)
    session.prefill(tokens(3))
    with cuda_gpu.emulating(fault_at=20, delay=200):
        with pytest.raises(DeviceError, match="cuda: the GPU failed: unspecified launch failure"):
            session.prefill(tokens(3))
        for _ in range(2):
            with pytest.raises(DeviceError, match=r"the GPU is lost to this process.*start the program again"):
                model.session(max_context=32).prefill(tokens(3))
        del session, model


def test_an_op_that_fails_and_an_engine_beside_it(store: Stores) -> None:
    expected = everything(store("hybrid"))
    other = load(store("latent")).session(max_context=32)
    model = load(store("hybrid"), fail_at_op=30)
    assert survive(model, DeviceError, expected)
    assert np.array_equal(evaluate(other), everything(store("latent")))


def test_the_plan_is_what_is_held(store: Stores) -> None:
    for flow in FLOWS.values():
        engine = load(store("hybrid"), **flow)._engine
        assert engine.held == engine.memory.total


def test_too_little_memory_of_the_device(store: Stores) -> None:
    """A margin of 256 MiB stays free."""
    with (
        cuda_gpu.emulating(memory=(256 << 20) + 4096),
        pytest.raises(BudgetError, match=r"expected at most 4096 bytes .* were free on an emulated NVIDIA GPU"),
    ):
        load(store("hybrid"))


def test_device_memory_is_what_is_free() -> None:
    with cuda_gpu.emulating(memory=16 << 30):
        assert _core.device_memory("cuda") == (16 << 30) - (512 << 20)


def test_the_late_test_device_leaves_memory_to_the_backend(store: Stores) -> None:
    assert np.array_equal(everything(store("hybrid"), deferred=True), everything(store("hybrid")))


def test_ops_are_timed_one_by_one(store: Stores) -> None:
    """No bit changes, and each kind of op that the CPU counts is there, with as much work."""
    counts = []
    for backend in ("cpu", "cuda"):
        model = load(store("hybrid"), backend=backend, time_ops=True, expert_slots=0)
        session = model.session(max_context=32)
        session.prefill(tokens(5))
        model._engine.take_op_times()
        session.step(3)
        times = model._engine.take_op_times()
        assert all(time.seconds > 0 for time in times)
        counts.append({(time.op, time.shape): (time.rows, time.products) for time in times if time.products})
    assert counts[0] == counts[1]
    assert np.array_equal(everything(store("hybrid"), time_ops=True), everything(store("hybrid")))
