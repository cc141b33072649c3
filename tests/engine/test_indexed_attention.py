"""Latent attention to the rows that an index selects: against the definition, and against itself in every way that must
change no bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import moeflux
from moeflux import FormatError, Variant, _core, oracle
from moeflux.models.layers import Index, LatentAttention
from moeflux.stores.spans import SpanReader
from moeflux.stores.store import Store
from support.engine import folders, load_faulty, steps, tokens
from support.engine_logits import LARGEST_ORACLE_ERROR, assert_meets
from support.metal import needs_device
from support.numbered_tensors import tensors
from support.tiny_stores import MlxFolder, deepseek_v32

ROWS = ("f32", "bf16", "q8")
LONG = 300
COUNTS = (1, 5, 40)


def store(folder: Path, variant: Variant) -> Store:
    """With 384 tokens, in one file."""
    MlxFolder(tensors(variant), shards=1).write(folder)
    directory = _core.open_mlx(folder, variant.to_json())
    return Store(folder, "mlx", variant, directory, None, SpanReader(directory.files))


def model(opened: Store, **options: object) -> moeflux.Model:
    engine = _core.Engine(opened.directory, **{"threads": 1, "precision": "exact"} | options)
    return moeflux.Model(opened, engine)


def session(opened: Store, kv_dtype: str = "f32", **options: object) -> moeflux.Session:
    return model(opened, **options).session(max_context=512, kv_dtype=kv_dtype)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Rows select 40 of those before them."""
    with store(tmp_path_factory.mktemp("indexed") / "mlx", deepseek_v32(40, vocab_size=384)) as opened:
        yield opened


@pytest.mark.parametrize("count", COUNTS)
def test_prefill_and_steps_meet_the_oracle(tmp_path: Path, count: int) -> None:
    ids = tokens(60)
    with store(tmp_path / "mlx", deepseek_v32(count, vocab_size=384)) as opened:
        expected = oracle.Session(opened.variant, opened).prefill(ids)
        one = session(opened, chunk=7)
        found = np.concatenate([one.prefill(ids[:50], logits="all"), steps(one, ids[50:])])
    assert_meets(found, expected, LARGEST_ORACLE_ERROR)


@pytest.mark.parametrize("rows", ROWS)
def test_no_bit_depends_on_how_it_was_computed(indexed: Store, rows: str) -> None:
    """Chunks, threads, steps, company, forks, snapshots, rewinding: on both sides of a border of blocks."""
    ids, others = tokens(LONG), tokens(90, seed=5)
    expected = session(indexed, rows).prefill(ids, logits="all")
    assert np.array_equal(session(indexed, rows, chunk=64, threads=2).prefill(ids, logits="all"), expected)
    loaded = model(indexed, chunk=48)
    one, other = (loaded.session(max_context=512, kv_dtype=rows) for _ in range(2))
    found = loaded.evaluate([(one, ids[:250]), (other, others)])
    assert np.array_equal(found[0].numpy(), expected[249])
    saved, fork = one.snapshot(), one.fork()
    for each in (one, fork):
        assert np.array_equal(steps(each, ids[250:262]), expected[250:262])
    one.rewind(200)
    assert np.array_equal(one.prefill(ids[200:], logits="all"), expected[200:])
    other.restore(saved)
    assert np.array_equal(other.prefill(ids[250:], logits="all"), expected[250:])


@pytest.mark.parametrize("rows", ROWS)
def test_a_short_context_has_the_bits_of_a_model_without_an_index(tmp_path: Path, rows: str) -> None:
    """Until a row sees more rows than it may select."""
    ids, variant = tokens(30), deepseek_v32(20, vocab_size=384)
    plain = variant.with_parts(LatentAttention, index=None)
    with store(tmp_path / "mlx", variant) as opened, store(tmp_path / "plain", plain) as without:
        found, all_seen = (session(each, rows).prefill(ids, logits="all") for each in (opened, without))
    assert np.array_equal(found[:20], all_seen[:20])
    assert (found[20:] != all_seen[20:]).any(axis=1).all()


def test_what_the_index_keeps_is_state(indexed: Store) -> None:
    """It is in the snapshot, and another key selects other rows."""
    one = session(indexed)
    ids = tokens(LONG)
    one.prefill(ids)
    state = one.snapshot().tensors
    keys = [key for key in state if key[1] == "index_k"]
    assert keys == [(layer, "index_k") for layer in range(indexed.variant.num_layers)]
    assert all(state[key].shape == (LONG, 24) for key in keys)
    assert indexed.variant.state_numbers() == (0, 3 * (64 + 16 + 24))
    with pytest.raises(FormatError, match="found one in tiny deepseek_v32, whose keys this format cannot say"):
        one.snapshot().size("wire-2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, r"index\.count: expected 1 to"),
        ({"dim": 8}, r"index\.dim: expected 16 to"),
        ({"unit": 4}, r"index\.unit: expected 1, found 4"),
        ({"unit": 3}, r"index\.unit: expected a divisor of 256, found 3"),
    ],
)
def test_what_an_index_may_be(changes: dict[str, int], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        deepseek_v32().with_parts(Index, **changes)


def test_an_index_needs_compressed_queries() -> None:
    with pytest.raises(FormatError, match="q_rank: expected above 0 with an index"):
        deepseek_v32().with_parts(LatentAttention, q_rank=0)


def test_a_variant_with_an_index_is_written_and_read() -> None:
    variant = deepseek_v32()
    assert Variant.from_dict(variant.to_dict()) == variant
    assert variant.to_dict()["mixers"][0]["index"] == {"heads": 4, "dim": 24, "count": 5}
    assert variant.identity() != variant.with_parts(LatentAttention, index=None).identity()


@pytest.mark.parametrize("backend", [pytest.param("metal", marks=needs_device)], indirect=True)
def test_gathered_rows_need_two_tables_at_once(tmp_path: Path, backend: str) -> None:
    """On Metal, of those that they come from and go to. There is room for two in all, and other ops take it, too."""
    path = folders(tmp_path)("deepseek_v32")
    plain, late = (load_faulty(path, backend=backend, deferred=deferred) for deferred in (False, True))
    expected = plain.session(max_context=64)
    expected.prefill(tokens(20))
    session = late.session(max_context=64)
    session.prefill(tokens(20))
    assert np.array_equal(steps(session, tokens(6)), steps(expected, tokens(6)))
    sessions = [plain.session(max_context=64) for _ in range(3)]
    for each in sessions:
        each.prefill(tokens(26))
    told = [logits.numpy() for logits in plain.evaluate([(each, tokens(4, seed=2)) for each in sessions])]
    assert all(np.array_equal(each, told[0]) for each in told)
    assert np.array_equal(told[0], steps(sessions[0].fork(26), tokens(4, seed=2))[-1])
