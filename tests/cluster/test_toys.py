"""Sessions and decoders over several stages, with layers of NumPy: what is sent, in which order, and what fails."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import moeflux
from moeflux import Sampling, StateError
from moeflux.cluster.cluster import Patience
from moeflux.cluster.model import ClusterModel
from moeflux.errors import BudgetError, Error, PeerError
from moeflux.serving import Request, Scheduler
from support.engine import folders, tokens
from support.served import until
from support.stages import ToyHost, toys

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders(tmp_path_factory.mktemp("cluster"))("qwen3_moe")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Iterator[ClusterModel]:
    with toys(folder, 1) as model:
        yield model


@pytest.fixture(params=[False, True], ids=["sees all", "forgets"])
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[ClusterModel]:
    with toys(folder, 2, forgets=request.param) as model:
        yield model


def engines(model: ClusterModel) -> list:  # type: ignore[type-arg]
    return [hand.host.engine for hand in model._cluster.hands]  # type: ignore[attr-defined]


def test_the_cut_changes_no_bit(whole: ClusterModel, model: ClusterModel) -> None:
    ids = tokens(50)
    one, two = whole.session(), model.session()
    assert np.array_equal(one.prefill(ids[:40], logits="all"), two.prefill(ids[:40], logits="all"))
    for token in ids[40:]:
        assert np.array_equal(one.step(token).numpy(), two.step(token).numpy())
    assert two.position == 50 and two.tokens == ids
    assert two.stats.tokens == 1 and two.total_stats.tokens == 50


def test_sessions_evaluate_together(whole: ClusterModel, model: ClusterModel) -> None:
    work = [(tokens(count, seed), model.session()) for count, seed in ((1, 2), (40, 3), (7, 4))]
    found = model.evaluate([(session, ids) for ids, session in work])
    for (ids, _), logits in zip(work, found, strict=True):
        assert np.array_equal(whole.session().prefill(ids).numpy(), logits.numpy())
        assert logits.argmax() == int(logits.numpy().argmax())


def test_forks_and_rewinds(whole: ClusterModel, model: ClusterModel) -> None:
    ids = tokens(20)
    session = model.session()
    session.prefill(ids[:10])
    session.checkpoint()
    session.prefill(ids[10:])
    forked = session.fork(10)
    assert forked.position == 10 and forked.tokens == ids[:10]
    expected = whole.session().prefill(ids).numpy()
    assert np.array_equal(forked.prefill(ids[10:]).numpy(), expected)
    assert session.rewind(10) == 10
    assert np.array_equal(session.prefill(ids[10:]).numpy(), expected)
    if session.exact_from:
        assert session.checkpoints == [10]
        with pytest.raises(StateError, match="the last checkpoint before it is at 10"):
            session.rewind(15)
        assert session.rewind(15, exact=False) == 10
    session.clear()
    assert (session.position, session.tokens) == (0, [])
    assert np.array_equal(session.prefill(ids).numpy(), expected)


def test_a_stage_that_fails_takes_all_stages_back(model: ClusterModel) -> None:
    ids = tokens(30)
    session = model.session()
    before = session.prefill(ids[:8]).numpy()
    session.checkpoint()
    engines(model)[1].failures.append(moeflux.IoError("no disk"))
    with pytest.raises(moeflux.IoError, match="machine 2: no disk"):
        session.prefill(ids[8:])
    assert session.position == 8 and [each.sessions for each in engines(model)]
    logits = session.prefill(ids[8:])
    with model.session() as other:
        assert np.array_equal(other.prefill(ids).numpy(), logits.numpy())
        assert not np.array_equal(before, logits.numpy())


def test_what_cannot_go_back_is_lost_until_it_is_cleared(folder: Path) -> None:
    with toys(folder, 2, forgets=True) as model:
        session = model.session()
        session.prefill(tokens(8))
        engines(model)[1].failures.append(moeflux.IoError("no disk"))
        with pytest.raises(moeflux.IoError):
            session.step(1)
        with pytest.raises(StateError, match="clear it or restore"):
            session.step(1)
        session.clear()
        session.prefill(tokens(8))


def test_no_room_on_any_stage_is_found_before_a_token_is_evaluated(model: ClusterModel) -> None:
    session = model.session(max_context=32)
    session.prefill(tokens(10))
    with pytest.raises(BudgetError, match="no room for 30"):
        session.prefill(tokens(30))
    assert session.position == 10
    session.prefill(tokens(22))


def test_bad_calls(model: ClusterModel) -> None:
    session = model.session()
    with pytest.raises(moeflux.ArgumentError, match="once"):
        model.evaluate([(session, [1]), (session, [2])])
    with pytest.raises(StateError, match="one machine"):
        model.trace()
    with pytest.raises(StateError, match="logits"):
        session.prefill([]).argmax()
    cancel = moeflux.Cancel()
    cancel.set()
    with pytest.raises(moeflux.Cancelled):
        session.prefill([1, 2], cancel=cancel)
    assert session.prefill([3, 4], on_progress=lambda *_: False) is not None


# ---- Many -------------------------------------------------------------------------------------------------------


def asks(count: int) -> list[Request]:
    return [
        Request(tokens(5 + 7 * seed, seed + 1), max_tokens=6 + seed, sampling=Sampling(1.0, seed=seed))
        for seed in range(count)
    ]


def alone(model: ClusterModel, request: Request) -> list[int]:
    with model.session() as session:
        prompt = np.asarray(request.prompt).tolist()
        return list(session.complete(prompt, max_tokens=request.max_tokens, sampling=request.sampling).tokens)


def test_a_scheduler_answers_as_sessions_alone(whole: ClusterModel, model: ClusterModel) -> None:
    requests = asks(6)
    with Scheduler(model, running=4) as scheduler:
        handles = [scheduler.submit(request) for request in requests]
        found = [list(handle.completion().tokens) for handle in handles]
    assert found == [alone(whole, request) for request in requests]


def test_as_many_batches_are_on_their_way_as_there_are_stages(folder: Path) -> None:
    """While the second stage has one request, the first has the other, or has had it."""
    with toys(folder, 2) as model:
        first, second = engines(model)
        held = threading.Event()

        def hold() -> None:
            if not held.is_set():
                until(lambda: len(first.calls) - len(second.calls) >= 2)
                held.set()

        with Scheduler(model, running=2) as scheduler:
            handles = [scheduler.submit(Request(tokens(9, seed), max_tokens=50)) for seed in (1, 2)]
            until(lambda: all(handle.tokens for handle in handles))
            second.gate = hold
            assert all(handle.completion().finish == "length" for handle in handles)
        assert held.is_set()


# ---- A machine is lost ------------------------------------------------------------------------------------------


def test_a_lost_machine_is_started_again(folder: Path, whole: ClusterModel) -> None:
    with toys(folder, 2) as model:
        session = model.session()
        session.prefill(tokens(5))
        model._cluster.hands[1].kill()  # type: ignore[attr-defined]
        with pytest.raises(PeerError):
            for token in tokens(40):
                session.step(token)
        with pytest.raises(PeerError, match="lost"):
            session.step(1)
        session.clear()  # waits for the restart
        expected = whole.session().prefill(tokens(9)).numpy()
        assert np.array_equal(session.prefill(tokens(9)).numpy(), expected)
        assert np.array_equal(model.session().prefill(tokens(9)).numpy(), expected)


@pytest.mark.parametrize("on_loss", ["again", "fail"])
def test_answers_under_way_when_a_machine_is_lost(folder: Path, whole: ClusterModel, on_loss: str) -> None:
    requests = asks(5)
    expected = [alone(whole, request) for request in requests]
    with toys(folder, 2, on_loss=on_loss) as model, Scheduler(model, running=3) as scheduler:
        handles = [scheduler.submit(request) for request in requests]
        hand = model._cluster.hands[0]
        calls = 0

        def dies() -> None:
            nonlocal calls
            calls += 1
            if calls == 6:
                threading.Thread(target=hand.kill).start()  # type: ignore[attr-defined]

        hand.host.engine.gate = dies  # type: ignore[attr-defined]
        found = []
        for handle in handles:
            try:
                found.append(list(handle.completion().tokens))
            except Error as error:
                assert "machine 1" in str(error)
                found.append([])
        if on_loss == "again":
            assert found == expected
        else:
            assert [] in found and all(one in ([], other) for one, other in zip(found, expected, strict=True))
        late = scheduler.submit(requests[0])
        assert list(late.completion().tokens) == expected[0]


def test_a_machine_that_is_lost_is_named_whoever_tells_of_it(folder: Path) -> None:
    with toys(folder, 2) as model:
        why = model._cluster.chain()._why
        assert why(1, -1, "gone") == "machine 1: lost by machine 2: gone"
        assert why(0, 1, "gone") == "machine 2: lost by machine 1: gone"
        assert why(0, -1, "gone") == "machine 1: gone" and why(1, 1, "gone") == "machine 2: gone"
        assert why(1, 0, "gone") == "machine 2: gone"


# ---- Joining ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"version": "9.9"}, r"machine 2: version: expected .*, found 9\.9"),
        ({"fingerprint": "abc"}, r"machine 2: model: expected [0-9a-f]{64}, found abc"),
        ({"arithmetic": "cpu: other"}, r"machine 2: arithmetic: expected toy, found cpu: other; with isa="),
        ({"kv_dtype": "q8"}, r"machine 2: kv_dtype: expected f32, found q8"),
    ],
)
def test_a_machine_that_has_something_else_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: dict[str, str], message: str
) -> None:
    plain = ToyHost.open

    def open(self: ToyHost, *given: object) -> dict[str, object]:
        opened = plain(self, *given)  # type: ignore[arg-type]
        if self.name == "2":
            opened["joining"] = dataclasses.replace(opened["joining"], **what)  # type: ignore[type-var]
        return opened

    monkeypatch.setattr(ToyHost, "open", open)
    with pytest.raises(StateError, match=message):
        toys(folder, 2)


def test_a_machine_that_cannot_be_reached_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ToyHost.listen
    monkeypatch.setattr(Patience, "hello", 1.0)
    # The port of nobody.
    monkeypatch.setattr(
        ToyHost, "listen", lambda self, run: plain(self, run) and 1 if self.name == "2" else plain(self, run)
    )
    with pytest.raises(PeerError, match=r"machine 2: expected it to be reached at 127\.0\.0\.1 from machine 1, found"):
        toys(folder, 2)


def test_a_machine_that_gives_no_sign_of_life_is_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patience, "signs", 1.5)
    silent = threading.Event()
    with toys(folder, 2) as model:
        session = model.session()
        session.prefill(tokens(4))
        chain = model._cluster.chain()
        plain = chain._take
        # As if the network had gone: nothing of that machine comes any more.
        monkeypatch.setattr(
            chain, "_take", lambda frame: None if silent.is_set() and frame.body.get("beat") == 1 else plain(frame)
        )
        silent.set()
        until(lambda: chain.error is not None)
        assert "machine 2: expected a sign of life within 1.5 s" in str(chain.error)
        with pytest.raises(PeerError, match="machine 2"):
            session.step(1)
        assert np.isfinite(model.session().prefill(tokens(4)).numpy()).all()


def test_options_that_machines_cannot_have(folder: Path) -> None:
    with pytest.raises(
        moeflux.ArgumentError, match="speculate: expected \"off\" over several machines, found 'lookup'"
    ):
        toys(folder, 2, speculate="lookup")
    with pytest.raises(moeflux.ArgumentError, match='on_loss: expected "again" or "fail"'):
        toys(folder, 2, on_loss="hope")
    with pytest.raises(moeflux.ArgumentError, match="on_progress"):
        moeflux.load(folder, machines=2, on_progress=print)


def test_a_closed_model_has_ended_its_processes(folder: Path) -> None:
    model = toys(folder, 2)
    session = model.session()
    hands = model._cluster.hands
    model.close()
    assert model.closed and session.closed and not any(hand.alive for hand in hands)
    with pytest.raises(StateError, match="closed"):
        model.session()


def test_what_was_kept_of_a_lost_machine_is_not_gone_on_from(folder: Path, whole: ClusterModel) -> None:
    """An idle branch in memory, which another prompt begins with."""
    first, second = Request(tokens(12), max_tokens=4), Request([*tokens(12), 5, 6], max_tokens=4)
    with toys(folder, 2) as model, Scheduler(model) as scheduler:
        assert list(scheduler.submit(first).completion().tokens) == alone(whole, first)
        model._cluster.hands[1].kill()  # type: ignore[attr-defined]
        assert list(scheduler.submit(second).completion().tokens) == alone(whole, second)


def test_a_session_that_is_dropped_while_its_thread_sends(folder: Path) -> None:
    """Python collects what refers to itself at any moment: then, too."""
    with toys(folder, 2) as model:
        chain, dropped = model._cluster.chain(), threading.Event()
        session = [model.session()]

        def drop() -> None:
            with chain._lock:
                session.clear()
            dropped.set()

        threading.Thread(target=drop, daemon=True).start()
        assert dropped.wait(60)
        model.session().prefill(tokens(3))
        hosts = [hand.host for hand in model._cluster.hands]  # type: ignore[attr-defined]
        assert all(len(host._stage._sessions) == 1 for host in hosts)
