"""A device with memory of its own, which the host has no address of: every family and every flow gives the bits of the
CPU there. What goes from one memory to the other is a copy, and one that is left out shows: `make apart-engine` has all
tests of the engine do so."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest

import moeflux
from moeflux import DeviceError, IoError, StateError, _core
from moeflux.runtime.snapshot import Snapshot
from moeflux.text.sampling import Sampler, Sampling
from support.apart import apart
from support.engine import Folder, folders, load_faulty, steps, tokens

NAMES = ("qwen3_5_moe", "qwen3_next", "qwen3_moe", "deepseek_v3", "deepseek_v32", "kimi")
FLOWS = {
    "resident": {"expert_slots": 0},
    "overlapped": {"expert_slots": 9, "look_ahead": "on", "cache": "lfu"},
    "streamed": {"expert_slots": 4, "reads": "direct", "ring_depth": 1, "readers": 3},
    "host slots": {"expert_slots": 9, "host_slots": 14, "look_ahead": "on"},
    "few host slots": {"expert_slots": 4, "host_slots": 3, "look_ahead": "on", "cache": "lfu", "readers": 3},
    "all in host slots": {"expert_slots": 9, "host_slots": 1 << 20, "cache": "none", "verify_reads": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    yield folders(tmp_path_factory.mktemp("apart"))


@pytest.fixture(scope="module")
def expected(folder: Folder) -> Callable[[str], list[np.ndarray]]:
    return cache(lambda name: use(load_faulty(folder(name))))


def use(model: moeflux.Model) -> list[np.ndarray]:
    """All that a session gives: logits of every row and of the last, choices, checkpoints, what it remembers. What was
    saved, gone back to, cleared and restored goes on as it did before."""
    session = model.session(max_context=64)
    first = session.prefill(tokens(20), logits="all")
    found = [first, *session._core.top_k(3)]
    session.checkpoint()
    behind = steps(session, tokens(6, seed=3))
    logits = session.prefill(tokens(5, seed=4))
    found += [logits.numpy(), *logits.top_k(7), np.asarray(logits.argmax())]
    snapshot = session.snapshot()
    found += [np.asarray(session.tokens), *snapshot.tensors.values()]
    last = steps(session, tokens(3, seed=6))
    session.rewind(20)
    assert np.array_equal(steps(session, tokens(6, seed=3)), behind)
    session.clear()
    assert np.array_equal(session.prefill(tokens(20), logits="all"), first)
    session.restore(snapshot)
    assert np.array_equal(steps(session, tokens(3, seed=6)), last)
    return [*found, behind, last]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", NAMES)
def test_every_family_in_every_flow(
    folder: Folder, expected: Callable[[str], list[np.ndarray]], name: str, flow: str
) -> None:
    model = load_faulty(folder(name), apart=True, **FLOWS[flow])
    assert "apart" in repr(model)
    for found, wanted in zip(use(model), expected(name), strict=True):
        assert np.array_equal(found, wanted)
    engine = model._engine
    assert engine.held == engine.memory.total


def test_the_likeliest_token_is_known_without_logits(folder: Folder) -> None:
    """And the logits come when they are asked for: by a reader, a fork, a sampler that wants more than that token."""
    expected, session = (load_faulty(folder("qwen3_moe"), apart=own).session(max_context=64) for own in (False, True))
    vocab = session.model.variant.vocab_size
    greedy = [Sampler(Sampling(temperature=0), vocab, []) for _ in range(2)]
    drawing = [Sampler(Sampling(temperature=0.9, seed=5), vocab, []) for _ in range(2)]
    for i, token in enumerate(tokens(16)):
        wanted, found = expected.step(token), session.step(token)
        if i % 4 == 1:
            assert np.array_equal(found.numpy(), wanted.numpy())
        if i % 4 == 2:
            assert drawing[0].choose(found) == drawing[1].choose(wanted)
        assert greedy[0].choose(found) == greedy[1].choose(wanted)
        assert found.argmax() == wanted.argmax() == int(wanted.numpy().argmax())
        if i % 4 == 3:
            other = session.fork()
            assert np.array_equal(other.prefill([]).numpy(), wanted.numpy())
            other.close()


def answer(model: moeflux.Model, asked: Sampling, size: int = 24) -> tuple[list[int], Sampler]:
    """Tokens of one answer. Greedy choices, a reader and a fork are between them, and what they leave behind."""
    session = model.session(max_context=64)
    sampler = Sampler(asked, model.variant.vocab_size, [])
    logits = session.prefill(tokens(9, seed=2))
    chosen: list[int] = []
    for place in range(size):
        if place == 8:
            logits.numpy()
        if place == 12:
            assert logits.argmax() == int(np.asarray(session.fork().prefill([])).argmax())
        chosen.append(sampler.choose(logits).token)
        logits = session.step(chosen[-1])
    return chosen, sampler


@pytest.mark.parametrize("speculate", ["off", "lookup"])
@pytest.mark.parametrize(
    ("asked", "is_listed"),
    [
        ({"temperature": 0.9}, True),
        ({"temperature": 0.5, "top_k": 4}, True),
        ({"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02}, True),
        ({"temperature": 1.0, "top_p": 0.8}, True),
        ({"temperature": 1.3, "min_p": 0.1}, True),
        ({"temperature": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2, "top_k": 9}, True),
        ({"temperature": 0.9, "presence_penalty": 0.5}, False),
        ({"temperature": 0.9, "logit_bias": {3: 1.0}}, False),
    ],
    ids=str,
)
def test_a_token_is_drawn_without_the_logits(
    folder: Folder, asked: dict[str, float], is_listed: bool, speculate: str, on_metal: bool
) -> None:
    """Metal makes no lists, because it shares the host's memory."""
    settings = Sampling(seed=11, **asked)
    answers = []
    for own_memory in (False, True):
        model = load_faulty(folder("qwen3_moe"), apart=own_memory, speculate=speculate)
        chosen, sampler = answer(model, settings)
        answers.append(chosen)
        lists = (own_memory or "cuda" in repr(model)) and not on_metal
        if is_listed and lists:  # all but the first, and those behind somebody else's choice
            assert sampler._core.chosen_from_shortlists >= len(chosen) - 5
        else:
            assert sampler._core.chosen_from_shortlists == 0
    assert answers[0] == answers[1]


def test_log_probabilities_and_masks_have_all_logits(folder: Folder) -> None:
    found = []
    for own_memory in (False, True):
        session = load_faulty(folder("qwen3_moe"), apart=own_memory).session(max_context=64)
        vocab = session.model.variant.vocab_size
        sampler = Sampler(Sampling(temperature=0.8, seed=2), vocab, [])
        mask = np.zeros((vocab + 31) // 32, np.uint32)
        mask[1] = 0xFFFF
        logits = session.prefill(tokens(5))
        for place in range(9):
            extra: dict[str, object] = [{}, {"logprobs": 3}, {"allowed": mask}][place % 3]
            found.append(sampler.choose(logits, **extra))
            logits = session.step(found[-1].token)
    assert found[:9] == found[9:]


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


def test_reads_are_verified_where_they_have_arrived(
    folder: Folder, expected: Callable[[str], list[np.ndarray]]
) -> None:
    options = {"apart": True, "verify_reads": True, "expert_slots": 4}
    for found, wanted in zip(use(load_faulty(folder("qwen3_moe"), **options)), expected("qwen3_moe"), strict=True):
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


Calls = list[tuple[str, Callable[[], object]]]


def life(session: moeflux.Session) -> Calls:
    """Calls that each copy beside the batches: experts that arrive, and all that a session does with its state."""
    saved: list[Snapshot] = []
    return [
        ("prefill", lambda: session.prefill(tokens(16), logits="all")),
        ("checkpoint", session.checkpoint),
        ("step", lambda: steps(session, [5])),
        ("prefill", lambda: session.prefill(tokens(5, seed=4), logits="all")),
        ("save", lambda: saved.append(session.snapshot())),
        ("rewind", lambda: session.rewind(16)),
        ("step", lambda: steps(session, tokens(3, seed=5))),
        ("clear", session.clear),
        ("prefill", lambda: session.prefill(tokens(6, seed=2), logits="all")),
        ("restore", lambda: session.restore(saved[-1])),
        ("step", lambda: steps(session, tokens(2, seed=6))),
    ]


def live(session: moeflux.Session) -> tuple[list[np.ndarray], str | None]:
    """What a life yields that goes on where a copy failed, and the call in which it did. There the session is as it
    was, or says that it is not until it is cleared."""
    found: list[np.ndarray] = []
    failed, calls, at = None, life(session), 0
    while at < len(calls):
        name, call = calls[at]
        before = session.position
        try:
            result = call()
        except DeviceError as error:
            assert "was told to fail" in str(error) and failed is None
            failed = name
            try:
                session.snapshot()
            except StateError as unusable:
                assert "clear it or restore" in str(unusable)
                session.clear()
                found, at = [], 0
            else:
                assert name not in ("rewind", "clear", "restore")  # which leave pieces
                assert session.position == before
            continue
        if isinstance(result, np.ndarray):
            found.append(result)
        at += 1
    return found, failed


@pytest.mark.parametrize(
    ("slots", "stride", "calls"),
    [(63, 2, {"prefill", "checkpoint", "save", "rewind", "clear", "restore"}), (9, 11, {"prefill", "step"})],
)
def test_a_copy_that_fails(folder: Folder, slots: int, stride: int, calls: set[str]) -> None:
    """Every other one where most are of state, some where most are of experts. One slot is missing, or the engine would
    fill those that nobody waits for, at times of its own."""
    options = {"apart": True, "expert_slots": slots, "look_ahead": "off"}
    expected, _ = live(load_faulty(folder("qwen3_5_moe")).session(max_context=64))

    def loaded(number: int) -> moeflux.Model | None:
        try:
            return load_faulty(folder("qwen3_5_moe"), fail_at_copy=number, **options)
        except DeviceError as error:
            assert f"copy {number} was told to fail" in str(error)
            return None

    first = bisect.bisect_left(range(1 << 12), True, key=lambda number: loaded(number) is not None)
    assert first > 50  # of the weights
    seen: set[str] = set()
    for number in itertools.count(first, stride):
        model = loaded(number)
        assert model is not None
        found, failed = live(model.session(max_context=64))
        assert len(found) == len(expected) and all(map(np.array_equal, found, expected))
        if failed is None:
            break
        seen.add(failed)
    assert calls <= seen


def test_the_plan_is_what_is_held(folder: Folder) -> None:
    """Two sides of what both know, rooms for reads, and nothing that is mapped."""
    with apart():
        model = moeflux.load(folder("qwen3_5_moe"), context=64, chunk=16, expert_slots=8, verify_reads=True)
        session = model.session(max_context=64)
    session.prefill(tokens(20))
    assert "apart" in repr(model)
    assert model._engine.held == model._engine.memory.total <= sum(model.plan.parts.values())
