"""A prefill reads the experts of the next layer while it computes the present one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeflux import _core, open_store
from moeflux.conversion.synth import synth
from moeflux.models.presets import preset
from support.engine import load_faulty, tokens
from support.flat import changed

LAYERS, EXPERTS = 4, 32
A3B = changed(preset("a3b").with_layers(LAYERS), vocab_size=512, num_experts=EXPERTS)
K = A3B.experts.per_token
PROMPT = tokens(16, vocab=512)  # one chunk, in which nearly every expert is picked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ahead") / "a3b"
    synth(path, A3B)
    return path


def prefill(folder: Path, **options: Any) -> tuple[_core.StepStats, int]:
    """The stats of a first prefill, and the bytes of an expert. It runs on the CPU, where slots come free at known
    times."""
    model = load_faulty(folder, backend="cpu", **options)
    session = model.session(max_context=64)
    session.prefill(PROMPT)
    with open_store(folder) as store:
        return session.stats, store.directory.experts.bytes


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("slots", [K, EXPERTS // 2, EXPERTS + K + 2, LAYERS * EXPERTS])
def test_each_expert_is_read_once(folder: Path, slots: int) -> None:
    off, size = prefill(folder, expert_slots=slots, look_ahead="off")
    on, _ = prefill(folder, expert_slots=slots, look_ahead="on")
    assert off.bytes_read == off.expert_misses * size and off.look_ahead_reads == 0
    assert on.expert_misses + on.look_ahead_used == off.expert_misses
    assert on.bytes_read == off.bytes_read + on.look_ahead_wasted_bytes


def test_most_of_what_many_tokens_need_is_foreseen(folder: Path) -> None:
    stats, _ = prefill(folder, expert_slots=LAYERS * EXPERTS, look_ahead="auto")
    assert stats.look_ahead_precision > 0.8
    assert stats.look_ahead_used > 0.8 * (LAYERS - 1) * EXPERTS


def test_it_goes_on_as_slots_come_free(folder: Path) -> None:
    """A layer needs nearly all slots, so that at first there is room for few guesses."""
    slots = EXPERTS + K + 2
    stats, _ = prefill(folder, expert_slots=slots, look_ahead="on")
    at_once = (LAYERS - 1) * (slots - EXPERTS)
    assert stats.look_ahead_reads > 1.5 * at_once


def test_a_layer_in_waves_looks_ahead_from_its_last(folder: Path) -> None:
    """With half the slots that a layer needs."""
    off, _ = prefill(folder, expert_slots=EXPERTS // 2, look_ahead="off")
    on, _ = prefill(folder, expert_slots=EXPERTS // 2, look_ahead="on")
    assert 0 < on.look_ahead_reads <= (LAYERS - 1) * EXPERTS // 2
    assert on.expert_misses < off.expert_misses
