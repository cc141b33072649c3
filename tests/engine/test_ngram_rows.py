"""Rows of n-gram tables: read once, ahead of a prompt, and through the same faults as experts."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import moeflux
from golden import checkpoints
from moeflux import FormatError, IoError, StateError, _core
from moeflux.conversion.convert import convert
from moeflux.models.ngrams import ngram_rows, table_rows
from moeflux.stores.store import open_store
from support.engine import Folder, folders, load_faulty, tokens

NAME = "qwen4_exp_linear"
LAYER = 1
PROMPT = tokens(50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("ngram-rows"))


def rows_of(variant: moeflux.Variant, ids: list[int]) -> np.ndarray:
    shape = variant.layers[LAYER].ngram
    assert shape is not None
    return ngram_rows(shape, variant.vocab_size, ids, 0)


def test_each_row_is_read_once(folder: Folder) -> None:
    """All that the first chunk needs; what later chunks need is on its way before they begin."""
    model = load_faulty(folder(NAME), chunk=16)
    rows = rows_of(model.variant, PROMPT)
    session = model.session(max_context=64)
    session.prefill(PROMPT)
    assert session.stats.ngram_misses == len(np.unique(rows[:16]))
    assert session.stats.ngram_hits == rows.size - session.stats.ngram_misses
    session.clear()
    session.prefill(PROMPT[:16])
    assert (session.stats.ngram_misses, session.stats.ngram_hits) == (0, rows[:16].size)


@pytest.mark.usefixtures("no_copies")
def test_bytes_are_counted(folder: Folder) -> None:
    # With a slot for each expert, a GPU would fill those that are free, too.
    model = load_faulty(folder(NAME), chunk=16, look_ahead="off", expert_slots=12)
    shape = model.variant.layers[LAYER].ngram
    assert shape is not None
    other = tokens(16, seed=5)
    session = model.session(max_context=64)
    session.prefill(other)
    stats = session.stats
    with open_store(folder(NAME)) as store:
        experts = stats.expert_misses * store.directory.experts.bytes
    assert stats.bytes_read == experts + stats.ngram_misses * shape.row_width * 2  # bf16


def test_rows_make_way_for_others(folder: Folder) -> None:
    """Far more rows than there is room for, and the same bits as with room for all."""
    ids = tokens(300, vocab=383)
    small, large = load_faulty(folder(NAME), chunk=2), load_faulty(folder(NAME), chunk=256)
    expected = large.session(max_context=400).prefill(ids, logits="all")
    session = small.session(max_context=400)
    assert np.array_equal(session.prefill(ids, logits="all"), expected)
    assert session.stats.ngram_misses + session.stats.ngram_hits == rows_of(small.variant, ids).size


def test_the_end_of_a_text_is_the_end_of_its_ngrams() -> None:
    variant = moeflux.models.config.variant_from_config(checkpoints.CHECKPOINTS[NAME]().config)
    shape = variant.layers[LAYER].ngram
    assert shape is not None
    end, heads = shape.end_id, shape.heads
    after_end, first = rows_of(variant, [7, 8, end, 9]), rows_of(variant, [9])
    assert np.array_equal(after_end[3], first[0])
    one, two = rows_of(variant, [5, 8, 9])[2], rows_of(variant, [6, 8, 9])[2]
    assert np.array_equal(one[:heads], two[:heads]) and not np.array_equal(one[heads:], two[heads:])
    assert one.max() < table_rows(shape)


def test_a_table_that_changes_is_an_error(folder: Folder, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(folder(NAME), store)
    model = load_faulty(store)
    session = model.session(max_context=64)
    session.prefill(PROMPT[:8])
    os.utime(store / "model_weights.bin", (1, 1))
    with pytest.raises(IoError, match=r"model_weights\.bin"):
        session.prefill(tokens(8, seed=77))


def test_a_state_without_its_tokens_is_refused(folder: Folder) -> None:
    """Nobody knows which rows the next token chooses."""
    model = load_faulty(folder(NAME))
    session = model.session(max_context=64)
    session.prefill(PROMPT[:8])
    saved = session.snapshot()
    session.restore(saved)
    expected = session.step(3).numpy()
    session.restore(dataclasses.replace(saved, tokens=()))
    with pytest.raises(StateError, match="the tokens before these, which choose rows of n-gram tables"):
        session.step(3)
    session.restore(saved)
    assert np.array_equal(session.step(3).numpy(), expected)


def test_wrong_hashes_are_refused(tmp_path: Path) -> None:
    hf = checkpoints.write(NAME, tmp_path / "hf")
    config = (hf / "config.json").read_text()
    (hf / "config.json").write_text(config.replace('"model_type"', '"seed": 5, "model_type"'))
    with pytest.raises(FormatError, match=r"layer_multipliers.*: expected \[.* from config.json, found"):
        convert(hf, tmp_path / "packed", check="none")


def test_tables_lie_behind_what_is_in_memory(folder: Folder) -> None:
    with open_store(folder(NAME)) as store:
        tables = {name for name, tensor in store.directory.tensors.items() if tensor.is_table}
        ends = [s[1] + s[2] for n, t in store.directory.tensors.items() if n not in tables for s in t.spans]
        assert len(tables) == 4
        assert min(store.directory.tensors[name].spans[0][1] for name in tables) >= max(ends)
        sizes = _core.footprint(store.directory, max_context=64)
    assert sizes.ngram_rows > 0
