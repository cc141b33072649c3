"""Failures under the engine: every op, a store that changes, weights that are not numbers; and the ring of batches in
flight. Each is reported as an error, the session is where it was or says that it is not, and nothing wrong stays."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import moeflux
from moeflux import ArgumentError, DeviceError, IoError, StateError, _core
from support.engine import FIRST, NEXT, SECOND, Folder, evaluate, folders, load_faulty, steps, survive, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("faults"))


# ---- Every op ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ring_depth", "device"), [(1, "prompt"), (2, "prompt"), (2, "deferred"), (2, "apart")])
@pytest.mark.parametrize("name", ("qwen3_5_moe", "qwen3_moe", "deepseek_v3"))
def test_every_op(folder: Folder, name: str, ring_depth: int, device: str, request: pytest.FixtureRequest) -> None:
    """At one depth or the other, on a device that works late, and on one that has memory of its own too. Some of the
    ops fail in turn, others at each depth and on each device; with --every-refusal, more of them."""
    expected = evaluate(load_faulty(folder(name), expert_slots=6).session())
    stride = 11 if device == "prompt" else 29
    if request.config.getoption("--every-refusal"):
        stride = 2 if device == "prompt" else 7
    for number in itertools.count((ring_depth - 1) * (stride // 2), stride):
        options = {"ring_depth": ring_depth, "fail_at_op": number}
        if device != "prompt":
            options[device] = True
        model = load_faulty(folder(name), expert_slots=6, **options)
        if not survive(model, DeviceError, expected):
            assert number > 100
            break


@pytest.mark.usefixtures("backend")
def test_a_restore_heals(folder: Folder) -> None:
    model = load_faulty(folder("qwen3_5_moe"))
    healthy = model.session()
    healthy.prefill(FIRST)
    snapshot = healthy.snapshot()
    expected = steps(healthy, NEXT)
    faulty = load_faulty(folder("qwen3_5_moe"), expert_slots=6, fail_at_op=150)  # no step is recorded ahead
    session = faulty.session()
    with pytest.raises(DeviceError):
        for token in tokens(20):
            session.step(token)
    with pytest.raises(StateError, match="clear it or restore"):
        session.step(1)
    session.restore(snapshot)
    assert np.array_equal(steps(session, NEXT), expected)


def test_a_failed_step_goes_back_to_a_checkpoint_here_and_to_no_other(folder: Folder, backend: str) -> None:
    """Not all experts have slots: then no GPU records a step ahead, which nobody would miss if an op of it failed."""
    expected = steps(load_faulty(folder("qwen3_5_moe")).session(), tokens(12))
    healed = set()
    for number in range(80, 500, 105 if backend == "metal" else 35):
        model = load_faulty(folder("qwen3_5_moe"), expert_slots=6, fail_at_op=number)
        session, found = model.session(), []
        with pytest.raises(DeviceError):
            for i, token in enumerate(tokens(12)):
                if i % 2:
                    session.checkpoint()
                found.append(session.step(token).numpy())
        at = session.position
        assert at == len(found)
        healed.add(at in session.checkpoints)
        if at in session.checkpoints:
            found += list(steps(session, tokens(12)[at:]))
            assert np.array_equal(found, expected)
        elif at:
            with pytest.raises(StateError, match="clear it or restore"):
                session.rewind(at - 1)
            with pytest.raises(StateError, match="clear it or restore"):
                session.checkpoint()
            with pytest.raises(StateError, match="clear it or restore"):
                session.snapshot()
    assert healed == {True, False}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("room", (True, False))
def test_a_failed_prefill_goes_back_where_there_is_room_for_a_copy(folder: Folder, room: bool) -> None:
    """A copy of the state takes the room of a checkpoint that is not made yet."""
    whole = load_faulty(folder("qwen3_5_moe")).session()
    expected = [whole.prefill(prompt, logits="all") for prompt in (FIRST, SECOND)][1]
    failed = 0
    for number in range(0, 400, 30):
        session = load_faulty(folder("qwen3_5_moe"), fail_at_op=number).session()
        session.set_max_checkpoints(2 if room else 1)
        with pytest.raises(DeviceError):  # wherever it is
            session.prefill(FIRST[:2])
            session.checkpoint()
            session.prefill(FIRST[2:])
            session.prefill(SECOND)
            session.prefill(tokens(100))
        if session.position < len(FIRST):
            continue
        if session.position > len(FIRST):
            break
        failed += 1
        if room:
            assert np.array_equal(session.prefill(SECOND, logits="all"), expected)
            continue
        with pytest.raises(StateError, match="evaluation failed half-way"):
            session.step(1)
    assert failed


# ---- A store that changes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy(folder: Folder, backend: str) -> Callable[[str], np.ndarray]:
    """What a store that nobody touches yields."""
    return cache(lambda name: evaluate(moeflux.load(folder(name), threads=2).session()))


@pytest.fixture
def mine(folder: Folder, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(folder(name), tmp_path / name))


def layer_file(store: Path, layer: int) -> Path:
    return store / "packed_experts" / f"layer_{layer:02d}.bin"


def other_bytes(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def other_file(path: Path) -> None:
    shutil.copy(path, path.with_name("new"))
    os.replace(path.with_name("new"), path)


CHANGES = {
    # A read comes to the end of the file, or the file is looked at after a guess that nobody needed.
    "truncated": (lambda path: os.truncate(path, 100), "(changed while in use: )?expected .* bytes"),
    "grown": (lambda path: os.truncate(path, path.stat().st_size + 4096), "changed while in use: expected .* bytes"),
    "rewritten": (other_bytes, "changed while in use: expected no write"),
    "replaced": (other_file, "changed while in use: .* found another of the same name"),
    "removed": (Path.unlink, "expected the file that was opened, found none"),
}


@pytest.mark.parametrize(("name", "slots"), [("qwen3_moe", 5), ("qwen3_5_moe", None)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_store_that_changes(
    mine: Callable[[str], Path], healthy: Callable[[str], np.ndarray], name: str, change: str, slots: int | None
) -> None:
    """The call that read from it fails, naming the file; what it brought is forgotten. Put back, all is well."""
    store = mine(name)
    path = layer_file(store, 2)
    model = moeflux.load(store, threads=2, expert_slots=slots)
    good, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    session = model.session()
    session.prefill(FIRST)
    alter, message = CHANGES[change]
    kept = path.with_name("kept")
    os.link(path, kept)
    alter(path)
    for _ in range(2):
        with pytest.raises(IoError, match=f"layer_02.bin: {message}"):
            session.prefill(SECOND)
        assert session.position == len(FIRST)
    os.replace(kept, path)
    if path.read_bytes() != good:
        path.write_bytes(good)
    os.utime(path, ns=times)
    session.clear()
    assert np.array_equal(evaluate(session), healthy(name))


def test_what_was_read_before_a_change_serves_on(mine: Callable[[str], Path]) -> None:
    store = mine("qwen3_moe")
    model = moeflux.load(store, threads=2, look_ahead="off")  # a wrong guess may be dropped now and read then
    expected = evaluate(model.session())
    for layer in range(4):
        other_bytes(layer_file(store, layer))
    assert np.array_equal(evaluate(model.session()), expected)


# ---- Weights that are not numbers -------------------------------------------------------------------------------


def plant_nan(store: Path, tensor: str, element: int) -> None:
    entry = json.loads((store / "model_weights.json").read_text())["tensors"][tensor]
    width, nan = (4, b"\x00\x00\xc0\x7f") if entry["dtype"] == "F32" else (2, b"\xc0\x7f")
    with (store / "model_weights.bin").open("r+b") as file:
        file.seek(entry["offset"] + width * element)
        file.write(nan)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3_moe", "model.norm.weight"),
        ("qwen3_5_moe", "model.layers.0.input_layernorm.weight"),
        ("qwen3_5_moe", "model.layers.1.linear_attn.dt_bias"),
        ("qwen3_moe", "model.layers.1.mlp.gate.scales"),
        ("qwen3_moe", "model.layers.1.self_attn.k_norm.weight"),
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("deepseek_v3", "model.layers.0.mlp.down_proj.scales"),
        ("deepseek_v3", "model.layers.3.self_attn.kv_a_layernorm.weight"),
    ],
)
def test_nan_weights(mine: Callable[[str], Path], name: str, tensor: str) -> None:
    store = mine(name)
    plant_nan(store, tensor, 3)
    session = moeflux.load(store, threads=2).session()
    if tensor.endswith("e_score_correction_bias"):  # the expert it speaks for is never chosen: a NaN is worse than all
        assert np.isfinite(session.prefill(FIRST, logits="all")).all()
        return
    with pytest.raises(moeflux.Error, match=r"expected a finite number, found -?nan: the weights are damaged"):
        session.prefill(FIRST)
    with pytest.raises(StateError, match="its logits were not finite; clear it"):
        session.step(1)
    session.clear()
    assert session.position == 0


def test_nan_harms_one_session(mine: Callable[[str], Path], healthy: Callable[[str], np.ndarray]) -> None:
    """The damage is in the embedding of one token. A session that never uses it never notices."""
    expected = healthy("qwen3_5_moe")
    store, bad = mine("qwen3_5_moe"), 200
    assert bad not in FIRST + SECOND + NEXT
    plant_nan(store, "model.embed_tokens.scales", bad * 2)
    model = moeflux.load(store, threads=2, expert_slots=5)
    harmed, other = model.session(), model.session()
    found = [other.prefill(FIRST, logits="all")]
    with pytest.raises(moeflux.Error, match="expected a finite number"):
        harmed.prefill([1, bad, 2])
    found += [other.prefill(SECOND, logits="all"), steps(other, NEXT)]
    assert np.array_equal(np.concatenate(found), expected)
    harmed.clear()
    assert np.array_equal(evaluate(harmed), expected)


def test_nan_in_a_middle_row_is_told_when_it_is_asked_for(mine: Callable[[str], Path]) -> None:
    """A row that nothing after it looks at: the last layer's expert. Its logits are nan, those of the last row not."""
    store = mine("qwen3_moe")
    path, session = layer_file(store, 3), moeflux.load(store, threads=1, readers=1).session()
    expected = session.prefill(FIRST, logits="all")
    size = path.stat().st_size // 16
    layout = json.loads((store / "packed_experts" / "layout.json").read_text())
    scales = next(piece for piece in layout["components"] if piece["name"] == "down_proj.scales")
    seen = False
    for expert in range(16):
        good = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(expert * size + scales["offset"])
            file.write(b"\xc0\x7f")
        session = moeflux.load(store, threads=1, readers=1).session()
        try:
            last = session.prefill(FIRST).numpy()
        except moeflux.Error:
            path.write_bytes(good)
            continue
        assert np.allclose(last, expected[-1], atol=1e-4)
        session.clear()
        try:
            every = session.prefill(FIRST, logits="all")
            assert np.isfinite(every).all()
        except moeflux.Error as error:
            assert "expected a finite number" in str(error)
            seen = True
        path.write_bytes(good)
    assert seen


# ---- Batches in flight ------------------------------------------------------------------------------------------


def in_background(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except moeflux.Error as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, errors


@pytest.fixture(params=(1, 2))
def full(request: pytest.FixtureRequest) -> Iterator[tuple[_core.DeferredRing, list[_core.Batch]]]:
    """A ring of depth 1 or 2 with as many batches, batch i leasing expert i."""
    ring, batches = _core.DeferredRing(request.param), [_core.Batch() for _ in range(request.param)]
    for i, batch in enumerate(batches):
        ring.push(batch, [i])
    yield ring, batches
    for batch in batches:
        batch.finish()


Full = tuple[_core.DeferredRing, list[_core.Batch]]


def test_push_waits_for_the_oldest_when_full(full: Full) -> None:
    ring, batches = full
    assert (ring.leased, ring.waits) == (len(batches), 0)
    last = _core.Batch()
    thread, errors = in_background(lambda: ring.push(last, [7]))
    thread.join(0.05)
    assert thread.is_alive()
    batches[0].finish()
    thread.join(20)
    assert not thread.is_alive() and not errors
    assert (ring.leased, ring.waits) == (len(batches), 1)
    last.finish()
    for batch in batches:
        batch.finish()
    ring.drain()
    assert ring.empty and ring.leased == 0


def test_a_failed_batch_throws_where_it_is_waited_for(full: Full) -> None:
    ring, batches = full
    batches[0].finish("broken")
    last = _core.Batch()
    last.finish()  # a batch that is not taken is waited for, like any that is dropped
    with pytest.raises(DeviceError, match="broken"):
        ring.push(last, [7])
    assert ring.leased == len(batches) - 1  # neither the failed one's nor that of the batch that was not taken
    for batch in batches:
        batch.finish()
    ring.drain()
    assert ring.leased == 0


def test_drain_ends_all_and_throws_the_first(full: Full) -> None:
    ring, batches = full
    for i, batch in enumerate(batches):
        batch.finish(f"broken {i}")
    with pytest.raises(DeviceError, match="broken 0"):
        ring.drain()
    assert ring.empty and ring.leased == 0
    ring.drain()


def test_the_destructor_drains(full: Full) -> None:
    ring, batches = full
    thread, errors = in_background(ring.destroy)
    thread.join(0.05)
    assert thread.is_alive() and ring.leased > 0
    for batch in batches:
        batch.finish("nobody cares")
    thread.join(20)
    assert not thread.is_alive() and not errors and ring.leased == 0


@pytest.mark.parametrize(
    ("arguments", "named"), [((0,), "depth"), ((-1,), "depth"), ((2, 0), "slots"), ((2, -3), "slots")]
)
def test_a_ring_of_nothing_is_refused(arguments: tuple[int, ...], named: str) -> None:
    with pytest.raises(ArgumentError, match=rf"\[DeferredRing\] {named}: expected at least 1, found {arguments[-1]}"):
        _core.DeferredRing(*arguments)


def test_who_drops_a_ring_does_not_wait() -> None:
    """Whose batches nobody will end, with their own names gone too or not: in a process that has a time to end in."""
    program = """
import gc
from moeflux import _core
for kept in (True, False):
    ring, batch = _core.DeferredRing(2), _core.Batch()
    ring.push(batch, [0])
    ring.push(_core.Batch(), [1])
    circle = [ring]
    circle.append(circle)
    if not kept:
        del batch
    del ring, circle
    gc.collect()
print("gone")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "gone\n"), done.stderr


def test_collect_does_not_wait(full: Full) -> None:
    ring, batches = full
    ring.collect()
    assert ring.leased == len(batches)
    batches[-1].finish()
    ring.collect()
    assert ring.leased == (0 if len(batches) == 1 else 2)
    batches[0].finish()
    ring.collect()
    assert ring.empty and ring.leased == 0 and ring.waits == 0
