"""Drafts: tokens that are evaluated because they are likely to come next. Whether they come or not, and whatever else a
session does meanwhile, no bit of any result changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import Cancel, Cancelled, DeviceError
from moeflux._core import DraftGovernor
from support.engine import Folder, folders, load_faulty, steps, tokens

PROMPT = [*tokens(20), *tokens(6)]
"""It begins to say itself again."""
NAMES = ("qwen3_5_moe", "qwen3_next", "qwen3_moe", "deepseek_v3")
DEVICES: dict[str, dict[str, Any]] = {
    "resident": {"threads": 2, "chunk": 3},
    "streamed": {"expert_slots": 9, "readers": 2, "look_ahead": "on"},
    "apart": {"apart": True, "chunk": 9},
    "deferred": {"deferred": True, "expert_slots": 9},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("drafts"))


def drafting(folder: Folder, name: str, **options: Any) -> moeflux.Model:
    return load_faulty(folder(name), speculate="lookup", **options)


def ready(model: moeflux.Model) -> moeflux.Session:
    """A session that foresees the next four tokens of the walk."""
    session = model.session(max_context=64)
    session.prefill(PROMPT[:-1])
    session.step(PROMPT[-1])
    return session


# ---- The same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_no_bit(folder: Folder, name: str, device: str) -> None:
    walk = [*PROMPT, *tokens(14)[6:], *tokens(3, seed=9), *tokens(9)[2:], *tokens(2, seed=5)]
    expected = steps(load_faulty(folder(name)).session(max_context=64), walk)
    session = drafting(folder, name, **DEVICES[device]).session(max_context=64)
    assert np.array_equal(steps(session, walk), expected)
    total = session.total_stats
    assert 0 < total.accepted < total.drafted
    assert total.tokens == len(walk) and session.tokens == walk


@pytest.mark.parametrize("accepted", [0, 2, 4])
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_moe"])
def test_what_a_session_does_between_drafts(folder: Folder, name: str, accepted: int) -> None:
    """It stands where it would have stood without them, with none, some or all of them accepted."""
    model, plain = drafting(folder, name), load_faulty(folder(name))
    known = [*PROMPT, *tokens(20)[6 : 6 + accepted]]
    after = tokens(3, seed=9)
    expected = plain.session(max_context=64).prefill([*known, *after], logits="all")[-3:]

    def there() -> moeflux.Session:
        session = ready(model)
        assert session._core.foresees(tokens(20)[6])
        assert session.stats.drafted == 4
        before = session.total_stats.submissions
        for token in known[len(PROMPT) :]:
            session.step(token)
        assert session.total_stats.submissions == before, "what was foreseen takes no work"
        assert session.position == len(known) and session.tokens == known
        return session

    def forked(session: moeflux.Session) -> moeflux.Session:
        return session.fork()

    def restored(session: moeflux.Session) -> moeflux.Session:
        other = model.session(max_context=64)
        other.restore(session.snapshot())
        return other

    def rewound(session: moeflux.Session) -> moeflux.Session:
        session.checkpoint()
        session.step(tokens(20)[6 + accepted])
        session.rewind(len(known))
        return session

    def cleared(session: moeflux.Session) -> moeflux.Session:
        session.clear()
        session.prefill(known)
        return session

    def read(session: moeflux.Session) -> moeflux.Session:
        """Nothing but looks at it."""
        session._core.top_k(3)
        session._core.make_room(2)
        return session

    ways: list[Callable[[moeflux.Session], moeflux.Session]] = [forked, restored, rewound, cleared, read]
    for way in ways:
        assert np.array_equal(steps(way(there()), after), expected), way.__name__
    assert np.array_equal(there().prefill(after, logits="all"), expected)
    one, two = there(), there()
    found = model.evaluate([(one, after[:1]), (two, after)])
    assert np.array_equal(found[0].numpy(), expected[0]) and np.array_equal(found[1].numpy(), expected[2])
    kept = [there().snapshot(), plain.session(max_context=64)]
    assert isinstance(kept[1], moeflux.Session)
    kept[1].prefill(known)
    assert kept[0].tensors.keys() == (other := kept[1].snapshot()).tensors.keys()
    assert all(np.array_equal(kept[0].tensors[key], other.tensors[key]) for key in other.tensors)


def test_as_many_drafts_as_came_true_and_one_more(folder: Folder) -> None:
    """A drafter that knows the text, and is right seven times out of ten."""
    text = tokens(120)
    plain = load_faulty(folder("qwen3_5_moe")).session(max_context=128)
    session = load_faulty(folder("qwen3_5_moe"), text=text, right=0.7, speculate="lookup").session(max_context=128)
    longest, came = 4, 0
    for place, token in enumerate(text):
        before = session.total_stats.drafted
        assert np.array_equal(session.step(token).numpy(), plain.step(token).numpy())
        if now := session.total_stats.drafted - before:
            assert now == min(longest, 4, len(text) - place - 1)
            came = 0
        came += session.stats.accepted
        longest = came + 1
    total = session.total_stats
    assert 0.4 < total.accepted / total.drafted < 0.7, "those behind a wrong one never come"


def test_company(folder: Folder) -> None:
    """One session's drafts come true, another's do not, a third reads a prompt."""
    model, plain = drafting(folder, "qwen3_5_moe"), load_faulty(folder("qwen3_5_moe"))
    one, two, three = ready(model), ready(model), model.session(max_context=64)
    right, wrong = tokens(12)[6:], tokens(6, seed=9)
    alone = [steps(session, ids) for session, ids in ((ready(plain), right), (ready(plain), wrong))]
    prompt = plain.session(max_context=64).prefill(PROMPT, logits="all")
    for place in range(6):
        found = model.evaluate(
            [(one, [right[place]]), (two, [wrong[place]]), (three, PROMPT[2 * place : 2 * place + 2])]
        )
        assert np.array_equal(found[0].numpy(), alone[0][place])
        assert np.array_equal(found[1].numpy(), alone[1][place])
        assert np.array_equal(found[2].numpy(), prompt[2 * place + 1])
    assert one.total_stats.accepted >= 4 and two.total_stats.accepted == 0


def test_the_end_of_the_context(folder: Folder) -> None:
    session = drafting(folder, "qwen3_5_moe").session(max_context=28)
    session.prefill(PROMPT[:-1])
    session.step(PROMPT[-1])
    assert session.stats.drafted == 2, "the context has room for so many"
    for token in tokens(8)[6:]:
        session.step(token)
    assert session.position == 28 and session.total_stats.accepted == 2
    with pytest.raises(moeflux.StateError, match="expected at most 28 tokens"):
        session.step(1)


def test_no_memory_for_drafts(folder: Folder, by_the_block: dict[str, Any]) -> None:
    """The row of the token itself has room in a block that is there; those of its drafts would need another."""
    walk = [*tokens(20) * 12, *tokens(14)]

    def fill(model: moeflux.Model) -> list[moeflux.Session]:
        other, session = model.session(max_context=512), model.session(max_context=512)
        other.prefill(tokens(257))
        session.prefill(walk)
        return [session, other]

    free = drafting(folder, "qwen3_moe", **by_the_block)
    session, _other = fill(free)
    limit = free._engine.memory.sessions
    expected = [session.step(token).numpy() for token in tokens(20)[14:16]]
    assert session.stats.accepted == 1
    tight, _full = fill(drafting(folder, "qwen3_moe", session_bytes=limit, **by_the_block))
    assert np.array_equal([tight.step(token).numpy() for token in tokens(20)[14:16]], expected)
    assert tight.total_stats.drafted == 0


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_moe"])
def test_a_step_with_drafts_that_fails(folder: Folder, name: str) -> None:
    """One op in seven, each in a run of its own. The session is where it was and goes on, or it says that it cannot."""
    following = tokens(9)[6:]
    expected = steps(ready(load_faulty(folder(name))), following)
    failed = 0
    for op in itertools.count(0, 7):
        session = drafting(folder, name, fail_at_op=op).session(max_context=64)
        try:
            session.prefill(PROMPT[:-1])
        except DeviceError:
            continue
        try:
            session.step(PROMPT[-1])
            break  # all of its ops came before this one
        except DeviceError:
            failed += 1
        assert session.position == len(PROMPT) - 1
        if name == "qwen3_5_moe":
            with pytest.raises(moeflux.StateError, match="clear it or restore"):
                session.step(PROMPT[-1])
            session.clear()
            session.prefill(PROMPT[:-1])
        session.step(PROMPT[-1])
        assert np.array_equal(steps(session, following), expected)
        assert session.total_stats.accepted == len(following)
    assert failed > 5


def test_a_step_with_drafts_that_is_given_up(folder: Folder) -> None:
    session = ready(drafting(folder, "qwen3_5_moe"))
    cancel = Cancel()
    cancel.set()
    for token, there in ((tokens(7)[6], True), (1, False)):
        assert session._core.foresees(token) == there
        with pytest.raises(Cancelled):
            session.step(token, cancel=cancel)
        assert session.position == len(PROMPT) and session.tokens == PROMPT
    plain = ready(load_faulty(folder("qwen3_5_moe")))
    assert np.array_equal(steps(session, tokens(9)[6:]), steps(plain, tokens(9)[6:]))


def test_memory_is_as_planned(folder: Folder) -> None:
    with moeflux.load(folder("qwen3_5_moe"), context=64, speculate="lookup", memory=None) as model:
        session = model.session()
        session.prefill(PROMPT)
        held, planned = model.memory.held, model.plan.parts
        assert sum(held.values()) == model._engine.held
        assert all(held[name] == planned[name] for name in held if name != "loading")  # which is given back


# ---- Whether they pay ---------------------------------------------------------------------------------------------

WINDOW, KEPT, REST, LONGEST_REST = 16, 512, 64, 4096


def feed(
    governor: DraftGovernor, calls: int, plain: float = 1.0, with_drafts: float = 1.5, accepted: float = 2
) -> None:
    """Calls that take so long without drafts and with them. `accepted`: of four drafts."""
    for _ in range(calls):
        if governor.on:
            governor.add(with_drafts, 1, 4)
            governor.accept(int(accepted))
        else:
            governor.add(plain, 1, 0)


def calls_until(governor: DraftGovernor, on: bool, most: int, **costs: float) -> int:
    for call in range(most):
        if governor.on == on:
            return call
        feed(governor, 1, **costs)
    return most


def test_it_watches_before_it_tries() -> None:
    governor = DraftGovernor()
    assert calls_until(governor, True, 1000) == WINDOW + 1  # the first call after a change does not count
    assert governor.pays is None


def test_it_is_kept_while_it_pays_and_compared_again() -> None:
    governor = DraftGovernor()
    calls_until(governor, True, 1000)
    feed(governor, WINDOW + 2)
    assert governor.pays is True
    assert WINDOW + KEPT // 2 < calls_until(governor, False, 5000) + WINDOW + 2 < 2 * KEPT
    assert calls_until(governor, True, 1000) == WINDOW + 1


def test_it_rests_when_it_does_not_pay_and_longer_each_time() -> None:
    governor, rests = DraftGovernor(), []
    for _ in range(9):
        calls_until(governor, True, 10000, with_drafts=3.0)
        calls_until(governor, False, 100, with_drafts=3.0)
        assert governor.pays is False
        rests.append(calls_until(governor, True, 10000, with_drafts=3.0) - WINDOW - 1)
    assert rests[0] >= REST - 2 and rests[1] >= 2 * REST - 2 and max(rests) <= LONGEST_REST


def test_it_ends_when_the_text_no_longer_suggests_the_right_ones() -> None:
    governor = DraftGovernor()
    calls_until(governor, True, 1000)
    feed(governor, 3 * WINDOW)
    assert governor.on
    assert calls_until(governor, False, 1000, accepted=0) <= 2 * WINDOW + 2
    assert governor.pays is False


def test_calls_that_drafted_nothing_decide_nothing() -> None:
    governor = DraftGovernor()
    calls_until(governor, True, 1000)
    for _ in range(1000):
        governor.add(1.0, 1, 0)
    assert governor.on and governor.pays is None


def test_other_company_is_watched_anew() -> None:
    governor = DraftGovernor()
    calls_until(governor, True, 1000)
    governor.add(4.0, 8, 0)
    assert not governor.on, "what one session takes says nothing of eight"


def test_auto_watches_first(folder: Folder) -> None:
    assert ready(load_faulty(folder("qwen3_moe"), speculate="auto")).total_stats.drafted == 0
