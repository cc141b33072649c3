"""Recording what a router picks: what is in a trace, in its file, and what the engine itself counted."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import FormatError, IoError, StateError, _core
from moeflux.files import write_atomically
from moeflux.measure.record import record
from moeflux.routing.trace import Trace
from moeflux.runtime.tokens import random_prompt, read_prompt
from moeflux.stores.tensor_file import chunks_of
from support.engine import Folder, folders, load_faulty, steps, tokens

NAMES = ["qwen3_5_moe", "deepseek_v3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("stores"))


def recorded(model: moeflux.Model, run: Callable[[moeflux.Session], Any]) -> Trace:
    session = model.session(max_context=256)
    with model.trace() as trace:
        run(session)
    return trace.trace()


# ---- What is recorded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_prefill_picks_what_steps_pick(folder: Folder, name: str) -> None:
    """However the tokens are cut; the trace says how they were."""
    model = moeflux.load(folder(name), threads=1, chunk=8)
    ids = tokens(21)
    stepped = recorded(model, lambda session: steps(session, ids))
    at_once = recorded(model, lambda session: session.prefill(ids))
    assert stepped.experts.shape == (21, len(model.variant.moe_layers), model.variant.experts.per_token)
    assert (stepped.experts == at_once.experts).all()
    assert stepped.layers == tuple(model.variant.moe_layers)
    assert stepped.passes.tolist() == [1] * 21
    assert at_once.passes.tolist() == [8, 8, 5]
    assert (stepped.model, stepped.fingerprint) == (model.variant.name, model.fingerprint)


def test_what_is_counted_is_what_is_recorded(folder: Folder) -> None:
    """Over all sessions, and over several turns of counting."""
    model = moeflux.load(folder("deepseek_v3"), threads=1, chunk=8)
    counting = model.count_experts()
    ids = tokens(21)
    trace = recorded(model, lambda session: session.prefill(ids))
    for _ in range(2):
        session = model.session(max_context=256)
        with counting:
            session.prefill(ids)
        session.prefill(ids)
    assert counting.layers == list(trace.layers)
    layers = [np.bincount(layer.ravel(), minlength=trace.num_experts) for layer in trace.experts.swapaxes(0, 1)]
    assert (counting.counts() == 2 * np.array(layers)).all()


def test_one_recording_at_a_time_also_when_it_counts(folder: Folder) -> None:
    model = moeflux.load(folder("deepseek_v3"), threads=1)
    with model.trace(), pytest.raises(StateError, match="counting: expected a model that is not recorded yet"):
        model.count_experts().__enter__()
    with model.count_experts(), pytest.raises(StateError, match="trace: expected a model that is not recorded yet"):
        model.trace().__enter__()


def test_the_picks_are_the_oracles(folder: Folder) -> None:
    from moeflux import oracle
    from moeflux.oracle import model as oracle_model

    picked: list[np.ndarray] = []
    route = oracle_model.route_softmax

    def spy(*arguments: Any, **named: Any) -> Any:
        result = route(*arguments, **named)
        picked.append(np.asarray(result[0]))
        return result

    with moeflux.open_store(folder("qwen3_5_moe")) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle_model, "route_softmax", spy)
        session = oracle.Session(store.variant, store)
        session.prefill(tokens(9))
    model = moeflux.load(folder("qwen3_5_moe"), threads=1)
    trace = recorded(model, lambda session: session.prefill(tokens(9)))
    expected = np.stack([layer.reshape(9, -1) for layer in picked], axis=1)
    assert (trace.experts == expected).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("policy", ["lru", "lfu", "none"])
def test_replayed_hits_are_the_engines_own(folder: Folder, name: str, share: float, policy: str) -> None:
    with moeflux.open_store(folder(name)) as store:
        v = store.variant
    slots = max(v.experts.per_token, int(share * v.experts.count * len(v.moe_layers)))
    # One reader: with more, the order in which a layer's experts arrive, and so the order in which they go, is chance.
    model = moeflux.load(folder(name), threads=1, readers=1, expert_slots=slots, cache=policy, look_ahead="off")
    session = model.session(max_context=256)
    with model.trace() as recording:
        steps(session, tokens(60))
    trace, stats = recording.trace(), session.total_stats
    hits, misses = _core.replay(trace.experts, trace.num_experts, policy, slots)
    assert (hits, misses) == (stats.expert_hits, stats.expert_misses)
    assert misses * trace.expert_bytes == stats.bytes_read
    assert hits + misses == trace.experts.size


def test_only_what_is_inside_the_with_is_recorded(folder: Folder) -> None:
    model = moeflux.load(folder("qwen3_5_moe"), threads=1)
    session = model.session(max_context=64)
    session.prefill(tokens(3))
    with model.trace() as trace:
        assert trace.tokens == 0
        session.step(1)
        assert trace.tokens == 1
        session.step(2)
    session.step(3)
    assert trace.tokens == 2
    with trace:
        session.step(4)
    assert trace.trace().tokens == 1  # from the start again


def test_sessions_are_recorded_in_the_order_of_their_turns(folder: Folder) -> None:
    model = moeflux.load(folder("qwen3_5_moe"), threads=1)
    alone = [recorded(model, lambda session, start=start: session.prefill(tokens(4, start))) for start in (5, 9)]
    one, other = model.session(max_context=16), model.session(max_context=16)
    with model.trace() as trace:
        for first, second in zip(tokens(4, 5), tokens(4, 9), strict=True):
            one.step(first)
            other.step(second)
    both = trace.trace().experts
    assert (both[0::2] == alone[0].experts).all()
    assert (both[1::2] == alone[1].experts).all()


def test_a_chunk_that_fails_leaves_no_trace(folder: Folder) -> None:
    whole = recorded(moeflux.load(folder("qwen3_5_moe"), threads=1), lambda session: session.prefill(tokens(6)))
    failures = 0
    for at in range(1, 40, 5):
        # Of a guess that fails nobody need hear.
        model = load_faulty(folder("qwen3_5_moe"), fault=_core.FaultPlan("error", at), look_ahead="off")
        session = model.session(max_context=64)
        with model.trace() as trace:
            try:
                session.prefill(tokens(6))
            except IoError:
                failures += 1
                assert trace.tokens == 0
                session.clear()
                session.prefill(tokens(6))
        assert (trace.trace().experts == whole.experts).all()
    assert failures >= 4


def test_recording_changes_no_logits(folder: Folder) -> None:
    model = moeflux.load(folder("qwen3_5_moe"), threads=1)
    before = steps(model.session(max_context=64), tokens(8))
    with model.trace():
        during = steps(model.session(max_context=64), tokens(8))
    assert (before == during).all()


def test_one_recording_at_a_time(folder: Folder) -> None:
    model = moeflux.load(folder("qwen3_5_moe"), threads=1)
    with model.trace(), pytest.raises(StateError, match="another recording under way"), model.trace():
        pass
    with pytest.raises(RuntimeError, match="on purpose"), model.trace():
        raise RuntimeError("on purpose")
    with model.trace() as trace:
        model.session(max_context=4).step(1)
    assert trace.tokens == 1


def test_it_is_read_while_another_thread_evaluates(folder: Folder) -> None:
    model = moeflux.load(folder("qwen3_5_moe"), threads=1)
    session = model.session(max_context=256)
    seen = []
    with model.trace() as trace:
        thread = threading.Thread(target=steps, args=(session, tokens(100)))
        thread.start()
        while thread.is_alive():
            seen.append(trace.trace())
        thread.join()
    final = trace.trace()
    assert final.tokens == 100
    for part in seen:
        assert (part.experts == final.experts[: part.tokens]).all()


def test_long_traces_cross_blocks(folder: Folder) -> None:
    """A block holds 2 ** 19 ids; steps and chunks alike run over its border."""
    model = moeflux.load(folder("qwen3_5_moe"), threads=2, chunk=512)
    row = len(model.variant.moe_layers) * model.variant.experts.per_token
    chunks = (1 << 19) // (row * 512) + 2
    session = model.session(max_context=512)
    ids = tokens(512)
    with model.trace() as trace:
        for _ in range(chunks):
            session.clear()
            session.prefill(ids)
    result = trace.trace()
    assert result.experts.size > 1 << 19
    parts = result.experts.reshape(chunks, 512, *result.experts.shape[1:])
    assert (parts == parts[0]).all()
    assert result.passes.tolist() == [512] * chunks


# ---- Files ------------------------------------------------------------------------------------------------------


def made(num_experts: int = 40, **changes: Any) -> Trace:
    random = np.random.default_rng(7)
    experts = np.argsort(random.random((11, 3, num_experts)), axis=-1)[..., :5].astype(np.uint16)
    trace = Trace("a model", "f00d", num_experts, 1234, (1, 2, 5), experts, np.array([6, 1, 4], np.int32))
    return replace(trace, **changes)


def same(one: Trace, other: Trace) -> bool:
    plain = (one.model, one.fingerprint, one.num_experts, one.expert_bytes, one.layers)
    if plain != (other.model, other.fingerprint, other.num_experts, other.expert_bytes, other.layers):
        return False
    return np.array_equal(one.experts, other.experts) and np.array_equal(one.passes, other.passes)


@pytest.mark.parametrize("num_experts", [5, 40, 256, 257, 4096])
def test_a_file_comes_back(tmp_path: Path, num_experts: int) -> None:
    trace = made(num_experts)
    path = tmp_path / "run.trace"
    trace.save(path)
    back = Trace.load(path)
    assert same(back, trace)
    assert back.experts.dtype == np.uint16
    ids = trace.experts.size * (1 if num_experts <= 256 else 2)
    assert ids < path.stat().st_size < ids + 1024
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_trace_comes_back(tmp_path: Path) -> None:
    empty = made(experts=np.zeros((0, 3, 5), np.uint16), passes=np.zeros(0, np.int32))
    empty.save(tmp_path / "x")
    assert same(Trace.load(tmp_path / "x"), empty)


def with_id(value: int, token: int = 3) -> np.ndarray:
    experts = made().experts.copy()
    experts[token, 1, 2] = value
    return experts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": with_id(40)}, "experts: expected 0 to 39, found 40"),
        (
            {"experts": with_id(int(made().experts[3, 1, 0]))},
            "experts: token 3, layer 2: expected 5 experts, found one twice",
        ),
        ({"layers": (1, 2)}, "layers: expected 3, found 2"),
        ({"layers": (1, 5, 2)}, "layers: expected ascending"),
        ({"layers": (1, 1, 2)}, "layers: expected ascending"),
        ({"layers": (-1, 1, 2)}, "layers: expected ascending"),
        ({"passes": np.array([6, 1, 3], np.int32)}, "passes: expected positive numbers that add up to 11, found 10"),
        ({"passes": np.array([11, 0], np.int32)}, "passes: expected positive"),
        ({"passes": np.array([12, -1], np.int32)}, "passes: expected positive"),
        ({"num_experts": 4, "experts": made().experts % 4}, "experts: expected 1 to 4 of a token, found 5"),
        ({"num_experts": 0}, "num_experts: expected 1 to 4096, found '0'"),
        ({"num_experts": 5000}, "num_experts: expected 1 to 4096"),
        ({"expert_bytes": -1}, "expert_bytes: expected 1 to"),
    ],
)
def test_content_that_cannot_be_names_the_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "bad.trace"
    made(**changes).save(path)
    with pytest.raises(FormatError, match=re.escape(f"{path}: {message}")):
        Trace.load(path)


METADATA = {
    "format": "moeflux-trace",
    "version": "1",
    "model": "m",
    "fingerprint": "f",
    "num_experts": "40",
    "expert_bytes": "1",
}
ARRAYS = {
    "experts": np.zeros((1, 1, 1), np.uint8),
    "layers": np.zeros(1, np.int32),
    "passes": np.ones(1, np.int32),
}


@pytest.mark.parametrize(
    ("metadata", "arrays", "message"),
    [
        ({"format": "moeflux-session"}, {}, "format: expected 'moeflux-trace', found 'moeflux-session'"),
        ({"version": "3"}, {}, "version: expected '1' or '2', found '3'"),
        ({"num_experts": "many"}, {}, "num_experts: expected 1 to 4096, found 'many'"),
        ({"num_experts": "300"}, {}, 'tensor "experts": expected U8 in 4 dimensions, found U8 (1, 1, 1)'),
        ({}, {"experts": np.zeros((1, 1, 1, 2), np.uint8)}, 'tensor "experts": expected U8 in 3 dimensions'),
        (
            {"num_experts": "300"},
            {"experts": np.zeros((1, 1, 1, 3), np.uint8)},
            'tensor "experts": expected U8 in 4 dimensions',
        ),
        ({}, {"layers": np.zeros(1, np.float32)}, 'tensor "layers": expected I32 in 1 dimensions, found F32 (1,)'),
        ({}, {"passes": None}, 'tensor "passes": expected experts, layers, passes, found it missing'),
        ({}, {"extra": np.zeros(1, np.int32)}, 'tensor "extra": expected experts, layers, passes, found it besides'),
    ],
)
def test_a_file_of_another_kind_names_the_field(
    tmp_path: Path, metadata: dict[str, str], arrays: dict[str, Any], message: str
) -> None:
    path = tmp_path / "bad.trace"
    whole = {name: array for name, array in (ARRAYS | arrays).items() if array is not None}
    write_atomically(path, chunks_of(METADATA | metadata, whole))
    with pytest.raises(FormatError, match=re.escape(f"{path}: {message}")):
        Trace.load(path)


def test_damage_anywhere_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    trace = made()
    trace.save(path)
    content = path.read_bytes()
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            back = Trace.load(path)
        except FormatError as error:
            assert str(path) in str(error)
        else:  # names for people, and what stands in for white space
            assert np.array_equal(back.experts, trace.experts)
            assert back.layers == trace.layers
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(FormatError, match=re.escape(str(path))):
            Trace.load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(IoError, match="expected a trace, found nothing"):
        Trace.load(tmp_path / "none")
    with pytest.raises(FormatError, match="expected a regular file, found a directory"):
        Trace.load(tmp_path)
    with pytest.raises(IoError, match="No such file"):
        made().save(tmp_path / "none" / "run.trace")


# ---- A run of its own -------------------------------------------------------------------------------------------


def test_record_evaluates_prompt_and_answer(folder: Folder) -> None:
    model = moeflux.load(folder("qwen3_5_moe"), threads=1, chunk=8)
    told: list[tuple[int, int]] = []
    trace = record(model, tokens(11), decode=4, on_token=lambda done, total: told.append((done, total)))
    assert trace.passes.tolist() == [8, 3, 1, 1, 1, 1]
    assert told == [(8, 15), (11, 15), (12, 15), (13, 15), (14, 15), (15, 15)]


def test_prompts_from_files(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_text("[1, 2,3\n 40]\n")
    assert read_prompt(path, 41) == [1, 2, 3, 40]
    for text, message in [
        ("1 2 40", "token 2: expected 0 to 39, found '40'"),
        ("1 -2", "token 1: expected 0 to 39, found '-2'"),
        ("hello", "token 0: expected 0 to 39, found 'hello'"),
        (" \n", "expected token ids, found none"),
        ("1" * 5000, "token 0: expected"),
    ]:
        path.write_text(text)
        with pytest.raises(FormatError, match=re.escape(f"{path}: {message}")):
            read_prompt(path, 40)
    path.write_bytes(b"\xff\xfe1")
    with pytest.raises(FormatError, match="expected UTF-8, found byte 0 to be none"):
        read_prompt(path, 40)


def test_random_prompts_depend_on_the_seed_alone() -> None:
    prompt = random_prompt(50, 1000, seed=3)
    assert prompt == random_prompt(50, 1000, seed=3) != random_prompt(50, 1000, seed=4)
    assert all(0 <= token < 1000 for token in prompt)
