"""The real engine over several stages: the bits are those of one machine, whatever the cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import moeflux
from moeflux import Sampling, builtin
from moeflux.cluster.machines import Machine, Machines
from moeflux.cluster.model import ClusterModel
from moeflux.serving import Request, Scheduler
from support.engine import Folder, folders, load_faulty, tokens
from support.stages import real

pytest.importorskip("cryptography")

FAMILIES = ("qwen3_5_moe", "deepseek_v3", "gpt_oss")
"""With recurrent layers, with latent attention and a dense layer, with windows."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, folder: Folder) -> Path:
    return folder(request.param)


@pytest.fixture(scope="module")
def one(family: Path) -> moeflux.Model:
    return load_faulty(family)


@pytest.fixture(scope="module")
def two(family: Path) -> Iterator[ClusterModel]:
    with real(family, 2) as model:
        yield model


def cuts(layers: int) -> list[list[tuple[int, int]]]:
    """Every cut in two, and that into single layers."""
    every = [[(0, at), (at, layers)] for at in range(1, layers)]
    return [*every, [(at, at + 1) for at in range(layers)]] if layers > 2 else every


def test_every_cut_has_the_bits_of_one_machine(family: Path, one: moeflux.Model) -> None:
    ids = tokens(40)
    session = one.session(max_context=64)
    expected = session.prefill(ids[:30], logits="all"), [session.step(token).numpy() for token in ids[30:]]
    for ranges in cuts(one.variant.num_layers):
        machines = Machines(tuple(Machine(f"m{at}", layers=each) for at, each in enumerate(ranges)))
        with real(family, machines) as model, model.session() as far:
            assert np.array_equal(far.prefill(ids[:30], logits="all"), expected[0])
            for token, logits in zip(ids[30:], expected[1], strict=True):
                assert np.array_equal(far.step(token).numpy(), logits)


def test_checkpoints_forks_and_states(one: moeflux.Model, two: ClusterModel, tmp_path: Path) -> None:
    ids = tokens(50)
    near, far = one.session(max_context=64), two.session()
    for session in (near, far):
        session.prefill(ids[:20])
        session.checkpoint()
        session.prefill(ids[20:40])
    assert far.checkpoints == near.checkpoints and far.exact_from == near.exact_from
    for position in (20, 40):
        expected = near.fork(position).prefill(ids[position:]).numpy()
        assert np.array_equal(far.fork(position).prefill(ids[position:]).numpy(), expected)
    taken, saved = near.snapshot(), tmp_path / "far.session"
    far.snapshot().save(saved)
    again = moeflux.Snapshot.load(saved, one.variant)
    assert again.position == 40 and again.tokens == taken.tokens and again.tensors.keys() == taken.tensors.keys()
    assert all(np.array_equal(again.tensors[key], taken.tensors[key]) for key in taken.tensors)
    back = one.session(max_context=64)
    back.restore(saved)
    fresh = two.session()
    fresh.restore(taken)
    expected = near.prefill(ids[40:]).numpy()
    assert np.array_equal(back.prefill(ids[40:]).numpy(), expected)
    assert np.array_equal(fresh.prefill(ids[40:]).numpy(), expected)
    assert far.rewind(20) == near.rewind(20) == 20
    assert np.array_equal(far.prefill(ids[20:]).numpy(), expected)


def test_many_answers_beside_each_other(one: moeflux.Model, family: Path, tmp_path: Path) -> None:
    """Through the scheduler, which forks, keeps states on the disk and finds them there again."""
    shared = tokens(150)
    requests = [
        Request([*shared[: 150 - seed], *tokens(6, seed + 2)], max_tokens=8, sampling=Sampling(1.0, seed=seed))
        for seed in range(5)
    ]
    expected = []
    for request in requests:
        with one.session(max_context=256) as session:
            prompt = np.asarray(request.prompt).tolist()
            expected.append(session.complete(prompt, max_tokens=8, sampling=request.sampling).tokens)
    with real(family, 2, context=256, sessions=4) as two:
        with Scheduler(two, running=3, disk=tmp_path / "states") as scheduler:
            handles = [scheduler.submit(request) for request in requests]
            assert [handle.completion().tokens for handle in handles] == expected
        with Scheduler(two, disk=tmp_path / "states") as scheduler:
            again = Request([*requests[0].prompt, *expected[0], 5], max_tokens=1)
            handle = scheduler.submit(again)
            handle.completion()
            assert handle.stats.reused_tokens >= 150


def test_text_comes_as_from_one_machine() -> None:
    question = "What is the capital of France?"
    with (
        real(builtin.path(), 2, context=256, chunk=None) as model,
        moeflux.load(memory=None, context=256, threads=1) as near,
        model.chat(system="Be kind.") as far_talk,
        near.chat(system="Be kind.") as near_talk,
    ):
        assert far_talk.ask(question, temperature=0).text == near_talk.ask(question, temperature=0).text
        answers = [
            each.session().complete("Once upon a time", max_tokens=12, temperature=0.8, seed=3)
            for each in (model, near)
        ]
        assert answers[0] == answers[1] and answers[0].tokens == answers[1].tokens
        assert sum(model.memory.held.values()) > 0 and "machine" in str(model.plan)
