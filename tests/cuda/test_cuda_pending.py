"""Tokens that the state of a delta-net does not have yet, on the emulated NVIDIA GPU: whoever comes next finds the
state that a prompt of the same tokens leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import moeflux
from emulator import cuda_gpu
from moeflux.conversion.synth import synth
from support.engine import load_faulty, steps, tokens
from support.metal import needs_device
from support.tiny_stores import hybrid

pytestmark = [needs_device, pytest.mark.usefixtures("any_gpu")]

VOCAB = 384
CONTEXT = 96
BEGUN = (5, 7, 3)  # tokens of each session before they go side by side
PERIOD = 3  # steps of which one writes a state
# Two heads share a key, so that a step of several sessions takes the whole delta-net together.
SHAPE = hybrid(layer_kinds=("linear", "full", "linear"), mlp_kinds=("moe",) * 3, vocab_size=VOCAB, hidden_size=128,
               head_dim=64, rotary_dim=32, linear_key_dim=128, linear_value_dim=128, linear_value_heads=4,
               num_experts=6, moe_intermediate=128, shared_intermediate=128)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pending") / "store"
    synth(path, SHAPE)
    return path


def load(folder: Path, speculate: str = "off") -> moeflux.Model:
    return load_faulty(folder, backend="cuda", look_ahead="off", chunk=32, expert_slots=0, speculate=speculate)


def ids_of(place: int) -> list[int]:
    return tokens(CONTEXT, seed=20 + place, vocab=VOCAB)


@functools.cache  # it takes longer than what is held to it
def logits_of(folder: Path, place: int) -> np.ndarray:
    """What a prompt of these tokens gives."""
    with load(folder).session(max_context=CONTEXT) as session:
        return np.array(session.prefill(ids_of(place), logits="all"))


class Beside:
    """Sessions side by side, and what prompts of the same tokens give."""

    def __init__(self, folder: Path, speculate: str = "off") -> None:
        self.model = load(folder, speculate)
        self.ids = [ids_of(place) for place in range(len(BEGUN))]
        self.expected = [logits_of(folder, place) for place in range(len(BEGUN))]
        self.sessions: list[moeflux.Session] = []
        self.begin()

    def begin(self) -> None:
        for session in self.sessions:
            session.close()
        self.sessions = [self.model.session(max_context=CONTEXT) for _ in BEGUN]
        for session, ids, begun in zip(self.sessions, self.ids, BEGUN, strict=True):
            session.prefill(ids[:begun])

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            places = [session.position for session in self.sessions]
            work = [(own, ids[at : at + 1]) for own, ids, at in zip(self.sessions, self.ids, places, strict=True)]
            for row, expected, at in zip(self.model.evaluate(work), self.expected, places, strict=True):
                assert np.array_equal(np.asarray(row.numpy()).reshape(-1), expected[at])

    def check_alone(self, session: moeflux.Session, place: int, count: int) -> None:
        """It goes on as that session would, by one token at a time."""
        at = session.position
        found = steps(session, self.ids[place][at : at + count]).reshape(count, -1)
        assert np.array_equal(found, self.expected[place][at : at + count])

    def check_prompt(self, session: moeflux.Session, place: int, count: int) -> None:
        at = session.position
        found = session.prefill(self.ids[place][at : at + count], logits="all")
        assert np.array_equal(found, self.expected[place][at : at + count])


def go_on_alone(beside: Beside) -> None:
    beside.check_alone(beside.sessions[1], 1, 3)


def take_a_few(beside: Beside) -> None:
    beside.check_prompt(beside.sessions[1], 1, 5)


def take_many(beside: Beside) -> None:
    beside.check_prompt(beside.sessions[1], 1, 40)


def fork(beside: Beside) -> None:
    other = beside.sessions[1].fork()
    beside.check_alone(other, 1, 2)
    beside.sessions[1].close()
    beside.sessions[1] = other


def go_back(beside: Beside) -> None:
    session = beside.sessions[1]
    at = session.checkpoint()
    beside.step(3)
    session.rewind(at)
    beside.check_alone(session, 1, 1)
    beside.step(2)
    session.rewind(at)


def begin_again(beside: Beside) -> None:
    beside.sessions[1].clear()
    beside.check_prompt(beside.sessions[1], 1, 2)


def save_and_restore(beside: Beside) -> None:
    """What is saved is what a prompt leaves. It is restored where other tokens are pending."""
    saved = beside.sessions[1].snapshot()
    with beside.model.session(max_context=CONTEXT) as plain:
        plain.prefill(beside.ids[1][: saved.position])
        for key, array in plain.snapshot().tensors.items():
            assert np.array_equal(saved.tensors[key], array), key
    beside.step()
    beside.sessions[1].restore(saved)
    again = beside.sessions[1].snapshot()
    assert all(np.array_equal(again.tensors[key], array) for key, array in saved.tensors.items())


@pytest.mark.parametrize(
    "change", [go_on_alone, take_a_few, take_many, fork, go_back, begin_again, save_and_restore],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_whoever_comes_next_finds_the_state(folder: Path, change: Callable[[Beside], None]) -> None:
    """After each number of steps side by side, so that some heads have each number of tokens pending, and then these go
    on."""
    beside = Beside(folder)
    for before in range(1, PERIOD + 1):
        beside.begin()
        beside.step(before)
        change(beside)
        beside.step(PERIOD)


def test_a_draft_that_is_wrong_leaves_nothing_pending(folder: Path) -> None:
    """The states between drafts are copies of what there is, with what is pending."""
    beside = Beside(folder, speculate="lookup")
    for _ in range(2):
        beside.step(3)
        beside.check_alone(beside.sessions[1], 1, 4)


@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize("order", range(3))
def test_no_order_of_threads_changes_it(folder: Path, order: int) -> None:
    """The last order is under the checker for races, in the kernels of the delta-net."""
    with cuda_gpu.emulating(order=order, checked=order == 2, check_only=b"delta_"):
        beside = Beside(folder)
        beside.step(PERIOD + 1)
        beside.sessions[1].snapshot()
        beside.step(2)
        beside.check_prompt(beside.sessions[1], 1, 17)
        beside.step(2)
        beside.check_alone(beside.sessions[1], 1, 1)


def test_the_plan_has_room_for_what_is_pending(folder: Path) -> None:
    with moeflux.load(folder, backend="cuda", memory=None, context=CONTEXT, kv_dtype="f32") as model:
        engine = model._engine
        states = 2 * 4 * (4 * 128 * 128 + 3 * 1024)  # of two layers, and what their convolutions keep
        with model.session(max_context=CONTEXT) as session:
            session.step(1)
            assert engine.held == engine.memory.total
            assert engine.memory.recurrent > states
            assert model.plan.parts["recurrent state"] == engine.memory.recurrent
