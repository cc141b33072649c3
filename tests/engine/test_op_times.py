"""The clock around every op changes no bit, and the bytes and products that it counts are those of the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import moeflux
from golden import checkpoints
from moeflux import _core
from moeflux.models.layers import GroupedAttention, LatentAttention
from moeflux.ops import Ops
from moeflux.stores.store import Store, open_store
from support.engine import engine_with, evaluate, folders

NAMES = list(checkpoints.CHECKPOINTS)


@pytest.fixture(scope="module", params=NAMES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    with open_store(folders(tmp_path_factory.mktemp("op_times"))(request.param)) as opened:
        yield opened


def engine_of(store: Store, deferred: bool = False, **options: object) -> _core.Engine:
    faults = {"deferred": True} if deferred else {}
    return engine_with(faults, store, threads=1, readers=1, chunk=16, **options)


def test_no_bit_changes(store: Store) -> None:
    logits = [
        evaluate(moeflux.Model(store, engine_of(store, time_ops=timed, deferred=deferred)).session(max_context=32))
        for timed, deferred in ((False, False), (True, False), (True, True))
    ]
    assert np.array_equal(logits[0], logits[1]) and np.array_equal(logits[0], logits[2])


def test_a_step_multiplies_every_matrix_once(store: Store) -> None:
    """Every dense matrix but the embedding, the chosen experts, and nothing else that has weights."""
    engine = engine_of(store, time_ops=True)
    session = moeflux.Model(store, engine).session(max_context=32)
    session.prefill(list(range(20)))  # more rows than an index selects
    assert engine.take_op_times()
    session.step(4)
    times = engine.take_op_times()
    assert engine.take_op_times() == []
    v = store.variant
    experts = len(v.moe_layers) * v.experts.per_token * 3 * v.hidden_size * v.experts.intermediate
    ffn = [time for time in times if time.op == "expert_ffn"]
    assert sum(time.products for time in ffn) == experts
    assert sum(time.rows for time in ffn) == len(v.moe_layers) * v.experts.per_token
    matmuls = [time for time in times if time.op == "matmul"]
    matrices = {name: format for name, format in store.directory.formats.items() if name != "model.embed_tokens"}
    assert sum(time.products for time in matmuls) == sum(elements(store, name) for name in matrices) + (
        v.vocab_size * v.hidden_size if v.tied_embeddings else 0
    )
    assert all(time.shape and time.bytes > 0 and time.seconds > 0 and time.rows == time.calls for time in matmuls)
    assert sum(time.bytes for time in ffn) > len(v.moe_layers) * v.experts.per_token * store.directory.experts.bytes
    full, latent = v.layers_with(GroupedAttention), v.layers_with(LatentAttention)
    attending = "mla_attention" if latent else "attention"
    assert sum(time.calls for time in times if time.op == attending) == len(full + latent)


def elements(store: Store, name: str) -> int:
    stored = store.tensor(name)
    rows, *rest = stored.weight.shape[:-1], stored.weight.shape[-1]
    columns = stored.scales.shape[-1] * stored.format.group_size if stored.format.is_affine else rest[0]
    return int(np.prod(rows)) * columns


def test_ops_that_run_later_are_timed_one_by_one(store: Store) -> None:
    """And counted as on the CPU, but for copies: to a device with memory of its own, tables go of layers whose experts
    have not all been read yet, and how many these are depends on how far reads are. Experts may come in fewer calls."""
    counts = []
    for deferred in (False, True):
        engine = engine_of(store, deferred=deferred, time_ops=True)
        session = moeflux.Model(store, engine).session(max_context=32)
        for _ in range(2):  # what waits for a read is not timed, so the first reads what the second takes
            session.clear()
            session.prefill(list(range(20)))
            engine.take_op_times()
            session.step(4)
        times = engine.take_op_times()
        assert all(time.seconds > 0 for time in times)
        counts.append(
            {(time.op, time.shape): (time.rows, time.bytes, time.products) for time in times if time.op != "copy"}
        )
    assert counts[0] == counts[1]


def test_nothing_where_nobody_asked(store: Store) -> None:
    engine = engine_of(store)
    moeflux.Model(store, engine).session(max_context=8).step(1)
    assert engine.take_op_times() == []


@pytest.mark.usefixtures("no_copies")
def test_single_ops(tmp_path: Path) -> None:
    timed = Ops(threads=1, timed=True)
    x = np.ones((3, 64), np.float32)
    for _ in range(2):
        timed.residual_add(x, x)
    [time] = timed.take_times()
    assert (time.op, time.shape, time.calls, time.bytes) == ("residual_add", "", 2, 2 * 3 * x.nbytes)
    assert timed.take_times() == []
