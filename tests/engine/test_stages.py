"""A model that is cut between its layers has the bits of a whole one, wherever it is cut. Every stage is an engine."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import moeflux
from golden.checkpoints import CHECKPOINTS
from moeflux import ArgumentError, Cancel, FormatError, StateError, _core
from moeflux.runtime.snapshot import Snapshot
from moeflux.runtime.state_file import load_state, save_state, state_file_bytes
from moeflux.stores.store import open_store
from support.engine import Folder, folders, load_faulty, tokens
from support.evaluated import plant_nan

STREAMS = [tokens(28), tokens(20, seed=5)]
CONTEXT = 40
DEVICES: dict[str, dict[str, Any]] = {
    "plain": {"verify_reads": True},
    "deferred": {"deferred": True, "look_ahead": "on"},
    "apart": {"apart": True},
}
FAMILIES = ("qwen3_5_moe", "deepseek_v3", "gpt_oss", "gemma4_other", "qwen4_exp")
"""With recurrent layers, latents and a layer without experts, windows, tied embeddings, several residual streams."""

Load = Callable[..., moeflux.Model]
Expect = Callable[[str], list[np.ndarray]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="module")
def expected(folder: Folder) -> Expect:
    """The logits of every token of each stream, of a whole model."""

    @functools.cache
    def of(name: str) -> list[np.ndarray]:
        model = load_faulty(folder(name), chunk=64)
        return [model.session(max_context=CONTEXT).prefill(ids, logits="all") for ids in STREAMS]

    return of


def cuts(layers: int) -> Iterator[tuple[int, ...]]:
    """Into two stages and into three, at all places: the borders of the stages."""
    for count in (1, 2):
        for places in itertools.combinations(range(1, layers), count):
            yield (0, *places, layers)


class Pipeline:
    """Stages, each with a session for every stream."""

    def __init__(self, stages: list[moeflux.Model], **options: Any) -> None:
        self.stages = stages
        self.sessions = [[stage.session(max_context=CONTEXT, **options) for stage in stages] for _ in STREAMS]

    def evaluate(self, work: dict[int, list[int]]) -> list[np.ndarray]:
        """The logits of all tokens of each stream."""
        rows: list[np.ndarray | None] = [None] * len(work)
        for place, stage in enumerate(self.stages):
            pieces = [(self.sessions[i][place], ids, row) for (i, ids), row in zip(work.items(), rows, strict=True)]
            if stage is self.stages[-1]:
                return stage.evaluate(pieces, logits="all")
            rows = list(stage.evaluate_hidden(pieces))
        raise AssertionError

    def go(self, counts: dict[int, int], expected: list[np.ndarray]) -> None:
        """So many tokens of each stream, from where it stands."""
        begins = {i: self.sessions[i][0].position for i in counts}
        found = self.evaluate({i: STREAMS[i][begin : begin + counts[i]] for i, begin in begins.items()})
        for rows, (i, begin) in zip(found, begins.items(), strict=True):
            assert np.array_equal(rows, expected[i][begin : begin + counts[i]])
            assert [session.position for session in self.sessions[i]] == [begin + counts[i]] * len(self.stages)


def loaded(folder: Folder, name: str, **options: Any) -> Callable[[int, int], moeflux.Model]:
    """The engines of each range of layers, opened once."""
    return functools.cache(lambda first, last: load_faulty(folder(name), layers=(first, last), **options))


def stages_of(load: Callable[[int, int], moeflux.Model], borders: tuple[int, ...]) -> list[moeflux.Model]:
    return [load(first, last) for first, last in itertools.pairwise(borders)]


# ---- The bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_cut(folder: Folder, expected: Expect, name: str) -> None:
    """Prompts in chunks, company, steps."""
    load, wanted = loaded(folder, name, chunk=7), expected(name)
    with open_store(folder(name)) as store:
        layers = store.variant.num_layers
    for borders in cuts(layers):
        pipeline = Pipeline(stages_of(load, borders))
        for counts in ({0: 17, 1: 2}, {0: 1, 1: 1}, {1: 8}, {0: 3}):
            pipeline.go(counts, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FAMILIES)
def test_going_back_and_on(folder: Folder, expected: Expect, name: str, device: str) -> None:
    """With the fewest slots: checkpoints, rewinds, forks and snapshots of all stages."""
    wanted = expected(name)
    with open_store(folder(name)) as store:
        variant = store.variant
    least = variant.experts.per_token
    load = loaded(folder, name, chunk=5, expert_slots=least, **DEVICES[device])
    for borders in (0, 1, variant.num_layers), (0, 2, 3, variant.num_layers):
        pipeline = Pipeline(stages_of(load, borders))
        pipeline.go({0: 11, 1: 3}, wanted)
        for session in pipeline.sessions[0]:
            session.checkpoint()
        pipeline.go({0: 6}, wanted)
        forks = [session.fork() for session in pipeline.sessions[0]]
        kept = [session.snapshot().to_bytes() for session in pipeline.sessions[0]]
        pipeline.go({0: 5, 1: 1}, wanted)
        for session in pipeline.sessions[0]:
            assert session.rewind(11) == 11
        pipeline.go({0: 1, 1: 4}, wanted)
        pipeline.sessions[0] = forks
        pipeline.go({0: 2}, wanted)
        for stage, session, data in zip(pipeline.stages, pipeline.sessions[0], kept, strict=True):
            session.clear()
            session.restore(Snapshot.from_bytes(data, stage.variant))
            assert session.tokens == STREAMS[0][:17]
        pipeline.go({0: 8, 1: 2}, wanted)


@pytest.mark.parametrize("kv_dtype", ["bf16", "q8"])
@pytest.mark.parametrize("name", FAMILIES[:3])
def test_other_rows(folder: Folder, name: str, kv_dtype: str) -> None:
    whole = load_faulty(folder(name)).session(max_context=CONTEXT, kv_dtype=kv_dtype)
    wanted = [whole.prefill(STREAMS[0], logits="all")]
    pipeline = Pipeline(stages_of(loaded(folder, name), (0, 1, 3, 4)), kv_dtype=kv_dtype)
    pipeline.go({0: 9}, wanted)
    pipeline.go({0: 1}, wanted)
    for stage, session in zip(pipeline.stages, pipeline.sessions[0], strict=True):
        session.restore(Snapshot.from_bytes(session.snapshot().to_bytes(), stage.variant))
    pipeline.go({0: 10}, wanted)


def test_the_last_stage_has_logits_as_ever(folder: Folder, expected: Expect) -> None:
    first, last = stages_of(loaded(folder, "qwen3_moe"), (0, 2, 4))
    ahead, behind = first.session(max_context=CONTEXT), last.session(max_context=CONTEXT)
    rows = first.evaluate_hidden([(ahead, STREAMS[0])])[0]
    assert rows.shape == (len(STREAMS[0]), first.width) and rows.dtype == np.float32
    rows.setflags(write=False)
    assert last.evaluate([(behind, STREAMS[0][:9], rows[:9])], logits="none") is None
    with pytest.raises(StateError, match="found none"):
        behind._logits().numpy()
    logits = last.evaluate([(behind, STREAMS[0][9:], rows[9:])])[0]
    wanted = expected("qwen3_moe")[0][-1]
    assert np.array_equal(logits.numpy(), wanted) and logits.argmax() == int(wanted.argmax())
    assert np.array_equal(behind.fork()._logits().numpy(), wanted)


def test_what_layers_are_called(folder: Folder) -> None:
    """Outside of an engine they have the model's numbers."""
    stage = load_faulty(folder("deepseek_v3"), layers=(1, 3))
    assert stage.layers == stage.session()._core.layers == (1, 3)
    assert "layers 1 to 2 of 4" in repr(stage)
    session = stage.session(max_context=CONTEXT)
    rows = np.ones((3, stage.width), np.float32)
    with stage.trace() as trace:
        stage.evaluate_hidden([(session, [1, 2, 3], rows)])
    assert trace.trace().layers == (1, 2) and trace.tokens == 3
    assert {layer for layer, _ in session.snapshot().tensors} == {1, 2}
    assert load_faulty(folder("deepseek_v3"), layers=(2, 0)).layers == (2, 4)
    assert load_faulty(folder("deepseek_v3"), layers=(0, 4), speculate="lookup").layers == (0, 4)


# ---- Memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", [*FAMILIES, "qwen3_moe_tied"])
def test_memory_is_that_of_the_layers(folder: Folder, name: str, apart: bool, on_metal: bool) -> None:
    options = {"max_context": CONTEXT, "kv_dtype": "bf16"}
    said = functools.partial(_core.testing.footprint, _core.testing.Faults(apart=apart))
    with open_store(folder(name)) as store:
        whole = said(store.directory, chunk=16, readers=1, **options)
        layers, tied = store.variant.num_layers, store.variant.tied_embeddings
        table = [tensor for at, tensor in store.directory.tensors.items() if at.startswith("model.embed_tokens.")]
        plans = []
        for first, last in itertools.pairwise((0, 1, 3, layers)):
            plan = said(store.directory, chunk=16, readers=1, layers=(first, last), **options)
            stage = load_faulty(folder(name), layers=(first, last), apart=apart)
            session = stage._engine.session(**options)
            assert stage._engine.memory.rows == 0
            out = np.empty((16, 384 if last == layers else stage.width), np.float32)
            hidden = np.ones((16, stage.width), np.float32)
            for ids in (tokens(16), tokens(16, seed=3)):
                stage._engine.evaluate([(session, np.asarray(ids, np.int32), out, hidden if first else None)], False)
            held = stage._engine.memory
            for part in ("dense_weights", "expert_slots", "scratch", "tables", "ngram_rows", "rows", "recurrent"):
                assert getattr(held, part) == getattr(plan, part), part
            assert held.checkpoints == plan.checkpoints and held.tokens == plan.tokens
            assert stage._engine.held == held.total <= plan.total
            plans.append(plan)
    page = 4096
    twice = sum(span[2] for tensor in table for span in tensor.spans) if tied else 0
    for part, extra in {"dense_weights": twice, "expert_slots": 0, "rows": 0, "recurrent": 0, "ngram_rows": 0}.items():
        together = sum(getattr(plan, part) for plan in plans) - extra
        # Where files are mapped, up to a sixteenth of a map is between tensors: of the whole, and of parts another.
        unused = getattr(whole, part) // 16 if on_metal and part == "dense_weights" else 0
        assert abs(together - getattr(whole, part)) <= 3 * page + unused, part


def test_loading_a_part(folder: Folder, expected: Expect) -> None:
    """By a plan of its own, which it keeps; the experts of all parts are those of the whole."""
    path, experts = folder("deepseek_v3"), []
    rows: list[np.ndarray | None] = [None]
    for layers in (0, 1), (1, 3), (3, 0):
        options: dict[str, Any] = {"layers": layers, "memory": "2GB", "context": CONTEXT, "chunk": 16, "readers": 1}
        plan = moeflux.plan(path, **options)
        with moeflux.load(path, **options) as model:
            assert model.layers == (layers[0], layers[1] or 4)
            assert (
                model.plan.parts["dense weights"] == plan.parts["dense weights"] == model._engine.memory.dense_weights
            )
            assert model._engine.held <= sum(model.plan.parts.values())
            work = [(model.session(), STREAMS[0], rows[0])]
            rows = [*model.evaluate_hidden(work)] if layers[1] else [*model.evaluate(work, logits="all")]
        experts.append((plan.experts, plan.expert_bytes_per_token))
        assert str(plan.experts) in str(plan)
    assert rows[0] is not None and np.array_equal(rows[0], expected("deepseek_v3")[0])
    whole = moeflux.plan(path, memory="2GB", context=CONTEXT)
    assert tuple(map(sum, zip(*experts, strict=True))) == (whole.experts, whole.expert_bytes_per_token)
    touched = [moeflux.plan(path, layers=layers).bytes_touched_per_token for layers in ((0, 2), (2, 0), (0, 4))]
    assert touched[0] + touched[1] == touched[2] == whole.bytes_touched_per_token


# ---- Bad use ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(1,), [0, 1], (0, "a"), (True, 2), (0, 1 << 40), 3])
def test_layers_that_are_no_range(folder: Folder, layers: Any) -> None:
    for call in (moeflux.plan, moeflux.load):
        with pytest.raises(ArgumentError, match="layers: expected a first layer and one past the last, found"):
            call(folder("qwen3_moe"), layers=layers)


@pytest.mark.parametrize("layers", [(2, 2), (3, 1), (-1, 2), (0, 5), (4, 0), (0, -1)])
def test_ranges_that_cannot_be(folder: Folder, layers: tuple[int, int]) -> None:
    match = f"layers: expected a first layer and one past the last, of 4 in all, found {layers[0]} and {layers[1]}"
    with open_store(folder("qwen3_moe")) as store, pytest.raises(ArgumentError, match=match):
        _core.footprint(store.directory, layers=layers)
    with pytest.raises(ArgumentError, match=match):
        load_faulty(folder("qwen3_moe"), layers=layers)


@pytest.mark.parametrize("speculate", ["lookup", "auto", "mtp"])
def test_no_drafts_in_a_part(folder: Folder, speculate: str) -> None:
    with pytest.raises(ArgumentError, match=f"speculate: expected off with some of the layers, found {speculate}"):
        load_faulty(folder("qwen3_moe"), layers=(0, 2), speculate=speculate)
    with pytest.raises(ArgumentError, match="speculate: expected off with some of the layers"):
        moeflux.plan(folder("qwen3_moe"), layers=(0, 2), speculate=speculate)


def test_rows_that_do_not_fit(folder: Folder) -> None:
    """Nobody has moved, and everybody can go on."""
    first, middle, last = stages_of(loaded(folder, "qwen3_moe"), (0, 1, 2, 4))
    whole = load_faulty(folder("qwen3_moe"))
    width, vocab = whole.width, whole.variant.vocab_size
    rows, ids = np.ones((2, width), np.float32), np.asarray([1, 2], np.int32)
    room, logits = np.empty((2, width), np.float32), np.empty((2, vocab), np.float32)
    odd = rows.copy()
    odd[1, 3] = np.inf
    behind = np.frombuffer(bytes(1) + rows.tobytes(), np.uint8)[1:].view(np.float32).reshape(2, width)
    cases: list[tuple[moeflux.Model, Any, Any, str]] = [
        (whole, None, rows, rf"work\[0\]: hidden_in: expected none with layers 0 to 3 of 4, found {2 * width}"),
        (first, room, rows, rf"work\[0\]: hidden_in: expected none with layers 0 to 0 of 4, found {2 * width}"),
        (first, None, None, rf"hidden_out: expected 2 x {width} numbers with layers 0 to 0 of 4, found none"),
        (first, logits, None, rf"out: expected .* shape \(2, {width}\), found float32 of shape \(2, {vocab}\)"),
        (middle, room, None, rf"hidden_in: expected 2 x {width} numbers with layers 1 to 1 of 4, found none"),
        (middle, None, rows, "hidden_out: expected 2 x"),
        (last, room, rows, rf"out: expected .* shape \(2, {vocab}\)"),
        (last, None, None, "hidden_in: expected 2 x"),
        (last, None, rows[:1], rf"hidden: expected a contiguous float32 array of shape \(2, {width}\), found"),
        (last, None, np.ones((2, 2 * width), np.float32)[:, ::2], "hidden: expected a contiguous float32 array"),
        (last, None, rows.astype(np.float64), "hidden: expected a contiguous float32 array .* found float64"),
        (last, None, behind, "hidden: expected a contiguous float32 array"),
        (last, None, odd, r"work\[0\]: hidden_in: expected finite numbers, found inf in row 1"),
    ]
    for model, out, hidden, match in cases:
        session = model.session(max_context=CONTEXT)
        with pytest.raises(ArgumentError, match=match):
            model._engine.evaluate([(session._core, ids, out, hidden)], True)
        assert session.position == 0
        good_out = None if model.layers[1] == 4 else room
        model._engine.evaluate([(session._core, ids, good_out, rows if model.layers[0] else None)], True)
        assert session.position == 2
    with pytest.raises(ArgumentError, match=r"work\[0\]: expected a session and its tokens, and hidden rows in an arr"):
        last.evaluate([(last.session(), [1], [[1.0]])])  # type: ignore[list-item]
    with pytest.raises(StateError, match="evaluate_hidden: expected a model without the last layer"):
        last.evaluate_hidden([(last.session(), [1], rows[:1])])


def test_calls_of_a_whole_model_alone(folder: Folder) -> None:
    first, last = stages_of(loaded(folder, "qwen3_moe"), (0, 2, 4))
    for stage, part in ((first, "layers 0 to 1 of 4"), (last, "layers 2 to 3 of 4")):
        session = stage.session(max_context=CONTEXT)
        for name, call in {"prefill": lambda s: s.prefill([1, 2]), "step": lambda s: s.step(1)}.items():
            with pytest.raises(StateError, match=f"{name}: expected an engine with all layers, found one with {part}"):
                call(session)
        with pytest.raises(StateError, match=f"Decoder: expected an engine with all layers, found one with {part}"):
            _core.Decoder(stage._engine)
    session = first.session(max_context=CONTEXT)
    first.evaluate_hidden([(session, [1, 2])])
    for logits in (lambda: session._logits().numpy(), lambda: session._logits().argmax()):
        with pytest.raises(StateError, match="expected an engine with the last layer, which has the logits, found one"):
            logits()


def test_rows_that_are_not_finite(folder: Folder, tmp_path: Any) -> None:
    """They break their session, in the stage that has the damage. The others go on."""
    damaged = folders(tmp_path)
    plant_nan(damaged("qwen3_moe"), 5)
    stage = load_faulty(damaged("qwen3_moe"), layers=(0, 1))
    good, bad = stage.session(max_context=CONTEXT), stage.session(max_context=CONTEXT)
    message = r"work\[1\]: hidden rows\[\d+\]: expected a finite number, found nan: the weights are damaged"
    with pytest.raises(moeflux.Error, match=message):
        stage.evaluate_hidden([(good, [1, 2]), (bad, [1, 5])])
    assert good.position == 2
    with pytest.raises(StateError, match="session: its hidden rows were not finite; clear it or restore a state"):
        stage.evaluate_hidden([(bad, [1])])
    bad.clear()
    stage.evaluate_hidden([(good, [3]), (bad, [1])])


def test_a_call_that_is_given_up(folder: Folder, expected: Expect) -> None:
    pipeline = Pipeline(stages_of(loaded(folder, "qwen3_5_moe"), (0, 2, 4)))
    wanted = expected("qwen3_5_moe")
    pipeline.go({0: 6}, wanted)
    cancel = Cancel()
    cancel.set()
    first = pipeline.stages[0]
    with pytest.raises(moeflux.Cancelled):
        first.evaluate_hidden([(pipeline.sessions[0][0], STREAMS[0][6:9])], cancel=cancel)
    pipeline.go({0: 3}, wanted)


def test_snapshots_of_other_layers(folder: Folder, tmp_path: Any) -> None:
    first, last = stages_of(loaded(folder, "qwen3_5_moe"), (0, 2, 4))
    whole = load_faulty(folder("qwen3_5_moe"))
    session, of_last, of_whole = (model.session(max_context=CONTEXT) for model in (first, last, whole))
    first.evaluate_hidden([(session, [1, 2, 3])])
    of_whole.prefill([1, 2, 3])
    snapshot = session.snapshot()
    assert snapshot.layers == (0, 2) and of_whole.snapshot().layers is None
    for target, taken, match in (
        (of_last, snapshot, "expected a snapshot of layers 2 to 3, found one of layers 0 to 1"),
        (of_whole, snapshot, "expected a snapshot of all layers, found one of layers 0 to 1"),
        (session, of_whole.snapshot(), "expected a snapshot of layers 0 to 1, found one of all layers"),
    ):
        with pytest.raises(ArgumentError, match=f"restore: {match}"):
            target.restore(Snapshot.from_bytes(taken.to_bytes(), whole.variant))
    assert of_whole.position == 3 and of_last.position == 0
    for format in ("wire-1", "wire-2"):
        with pytest.raises(
            ArgumentError, match=f"format: expected moeflux for a snapshot of layers 0 to 1, found {format}"
        ):
            snapshot.to_bytes(format)
    data = snapshot.to_bytes()
    assert data.count(b'"layers":"0:2"') == 1
    for odd in (b"2:0", b"0:5", b"0,2", b"x:2", b"-:2"):
        with pytest.raises(FormatError, match="layers: expected two of 0:4, found"):
            Snapshot.from_bytes(data.replace(b'"layers":"0:2"', b'"layers":"%s"' % odd), whole.variant)
    with pytest.raises(FormatError, match=r'tensor "layers\.0\.conv": expected a piece of this model'):
        Snapshot.from_bytes(data.replace(b'"layers":"0:2"', b'"layers":"1:2"'), whole.variant)


def test_snapshots_of_parts_and_of_all(folder: Folder, expected: Expect) -> None:
    """Stages go on where a whole model stood, and the other way round, whatever the cut."""
    wanted, load = expected("qwen3_5_moe"), loaded(folder, "qwen3_5_moe")
    whole = load_faulty(folder("qwen3_5_moe")).session(max_context=CONTEXT)
    whole.prefill(STREAMS[0][:9])
    taken = whole.snapshot()
    pipeline = Pipeline(stages_of(load, (0, 1, 3, 4)))
    for session in pipeline.sessions[0]:
        session.restore(taken.part(*session._core.layers))
    pipeline.go({0: 8}, wanted)
    parts = [session.snapshot() for session in pipeline.sessions[0]]
    together = Snapshot.joined(parts)
    whole.restore(together)
    assert np.array_equal(whole.prefill(STREAMS[0][17:20], logits="all"), wanted[0][17:20])
    again = Pipeline(stages_of(load, (0, 2, 4)))
    for session in again.sessions[0]:
        session.restore(together.part(*session._core.layers))
    again.go({0: 4}, wanted)
    assert together.part(0, 4).to_bytes() == together.to_bytes() == Snapshot.joined([together]).to_bytes()
    assert parts[1].part(2, 3).layers == (2, 3)
    for odd, match in (
        ([], "parts: expected all layers, found those up to 0"),
        (parts[:2], "parts: expected all layers, found those up to 3"),
        (
            [parts[0], parts[2]],
            r"parts\[1\]: expected layers from 1 on, of .* and its 17 tokens, found layers 3 to 3 of",
        ),
        (
            [parts[0], taken.part(1, 4)],
            r"parts\[1\]: expected layers from 1 on, of .* 17 tokens, found .* and 9 tokens",
        ),
    ):
        with pytest.raises(ArgumentError, match=match):
            Snapshot.joined(odd)
    for first, last in ((0, 1), (1, 4), (2, 2)):
        with pytest.raises(ArgumentError, match=f"layers: expected some of layers 1 to 2, found {first} and {last}"):
            parts[1].part(first, last)


def test_state_files_of_a_part(folder: Folder, tmp_path: Any) -> None:
    first, last = stages_of(loaded(folder, "qwen3_5_moe"), (0, 2, 4))
    session, path = first.session(max_context=CONTEXT), tmp_path / "state"
    first.evaluate_hidden([(session, [1, 2, 3])])
    ids = np.asarray([1, 2, 3], np.int32)
    save_state(session._core, first.variant, first.fingerprint, path)
    assert path.stat().st_size == state_file_bytes(first.variant, first.fingerprint, "f32", 3, (0, 2))
    assert path.read_bytes() == session.snapshot().to_bytes()
    again = first.session(max_context=CONTEXT)
    load_state(again._core, first.variant, first.fingerprint, path, ids)
    rows = [first.evaluate_hidden([(each, [4])])[0] for each in (session, again)]
    assert np.array_equal(*rows)
    with pytest.raises(FormatError, match="found another state"):
        load_state(last.session(max_context=CONTEXT)._core, last.variant, last.fingerprint, path, ids)
