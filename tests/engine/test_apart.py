"""A device with memory of its own, which the host has no address of: every family and every flow gives the bits of the
CPU there. What goes from one memory to the other is a copy, and one that is left out shows: `make apart-engine` has all
tests of the engine do so."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import moeflux
from moeflux import IoError, _core
from support.apart import apart
from support.engine import Folder, folders, load_faulty, steps, tokens

NAMES = ("qwen3_5_moe", "qwen3_next", "qwen3_moe", "deepseek_v3", "kimi")
FLOWS = {
    "resident": {"expert_slots": 0},
    "overlapped": {"expert_slots": 9, "look_ahead": "on", "cache": "lfu"},
    "streamed": {"expert_slots": 4, "reads": "direct", "ring_depth": 1, "readers": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    yield folders(tmp_path_factory.mktemp("apart"))


def use(model: moeflux.Model) -> list[np.ndarray]:
    """All that a session gives: logits of every row and of the last, choices, checkpoints, what it remembers."""
    session = model.session(max_context=64)
    found = [session.prefill(tokens(20), logits="all"), *session._core.top_k(3)]
    session.checkpoint()
    found.append(steps(session, tokens(6, seed=3)))
    logits = session.prefill(tokens(5, seed=4))
    found += [logits.numpy(), *logits.top_k(7), np.asarray(logits.argmax())]
    snapshot = session.snapshot()
    found += [np.asarray(session.tokens), *snapshot.tensors.values()]
    session.rewind(20)
    found.append(steps(session, tokens(3, seed=5)))
    session.clear()
    found.append(session.prefill(tokens(20), logits="all"))
    session.restore(snapshot)
    found.append(steps(session, tokens(3, seed=6)))
    return found


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", NAMES)
def test_every_family_in_every_flow(folder: Folder, name: str, flow: str) -> None:
    expected = use(load_faulty(folder(name)))
    model = load_faulty(folder(name), apart=True, **FLOWS[flow])
    assert "apart" in repr(model)
    for found, wanted in zip(use(model), expected, strict=True):
        assert np.array_equal(found, wanted)
    engine = model._engine
    assert engine.held == engine.memory.total


def test_what_was_guessed_comes_to_the_host(folder: Folder) -> None:
    """No guess changes a bit, so it is seen in what was read."""
    foreseen = []
    for own_memory in (False, True):
        model = load_faulty(folder("qwen3_moe"), apart=own_memory, deferred=True, look_ahead="on", expert_slots=40)
        session = model.session(max_context=64)
        for part in (tokens(16), tokens(16, seed=5)):
            session.prefill(part)
        steps(session, tokens(12, seed=3))
        foreseen.append(session.total_stats.look_ahead_reads)
    assert foreseen[1] > foreseen[0] / 2


def test_reads_are_verified_where_they_have_arrived(folder: Folder) -> None:
    options = {"apart": True, "verify_reads": True, "expert_slots": 4}
    expected = use(load_faulty(folder("qwen3_moe")))
    for found, wanted in zip(use(load_faulty(folder("qwen3_moe"), **options)), expected, strict=True):
        assert np.array_equal(found, wanted)
    model = load_faulty(folder("qwen3_moe"), fault=_core.FaultPlan("wrong_bytes", 5), **options)
    with pytest.raises(IoError, match="expected the SHA-256"):
        model.session().prefill(tokens(20))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("host reads device", "expected memory that the host reaches"),
        ("op reads staging", "expected memory that ops reach"),
        ("op writes staging", "expected memory that ops reach"),
        ("copy too long", "expected 64 bytes at byte 4"),
        ("copy beside too long", "expected 64 bytes at byte 4"),
    ],
)
def test_a_copy_that_was_forgotten_shows(kind: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        _core.forget_a_copy(kind)


def test_the_plan_is_what_is_held(folder: Folder) -> None:
    """Two sides of what both know, rooms for reads, and nothing that is mapped."""
    with apart():
        model = moeflux.load(folder("qwen3_5_moe"), context=64, chunk=16, expert_slots=8, verify_reads=True)
        session = model.session(max_context=64)
    session.prefill(tokens(20))
    assert "apart" in repr(model)
    assert model._engine.held == model._engine.memory.total <= sum(model.plan.parts.values())
