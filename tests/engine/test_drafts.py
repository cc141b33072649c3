"""Drafts: tokens that are evaluated because they are likely to come next. Whether they come or not, and whatever else a
session does meanwhile, no bit of any result changes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import ArgumentError, Cancel, Cancelled, DeviceError
from moeflux._core import DraftGovernor, best_drafts
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


# ---- How many pay ---------------------------------------------------------------------------------------------------

WINDOW, KEPT, REST, LONGEST_REST, MOST = 16, 512, 64, 4096, 4
COSTS: dict[str, list[float]] = {
    "as one row": [1, 1.03, 1.06, 1.09, 1.12],
    "built-in": [1, 1.19, 1.33, 1.48, 1.67],
    "a second row is dear": [1, 1.55, 2.2, 2.75, 3.2],
    "as before": [1, 1.86, 2.30, 2.78, 3.01],
    "streamed": [1, 1.9, 2.8, 3.7, 4.6],
    "layer": [1, 1.75, 2.6, 3.35, 4],
}
"""What a call takes with 0 to 4 drafts: machines that are functions."""


def tokens_a_second(costs: list[float], right: float, drafts: int) -> float:
    return sum(right**i for i in range(drafts + 1)) / costs[drafts]


class Text:
    """What a session says on such a machine. A draft is right with the probability that `right` has for its token."""

    def __init__(self, governor: DraftGovernor, costs: list[float], right: Callable[[int], float], seed: int = 7):
        self.governor, self.costs, self.right, self.drawn = governor, costs, right, random.Random(seed)
        self.said, self.seconds, self.longest, self.asked = 0, 0.0, MOST, list[int]()
        self.noise: Callable[[random.Random], float] = lambda drawn: 1.0

    def call(self) -> int:
        """Returns how many were drafted."""
        drafts = self.governor.drafts(self.longest)
        came = 0
        while came < drafts and self.drawn.random() < self.right(self.said + came):
            came += 1
        self.seconds += self.costs[drafts]
        self.governor.add(self.costs[drafts] * self.noise(self.drawn), 1, drafts)
        if drafts:
            self.governor.add_outcome(self.longest, drafts, came)
            self.longest = came + 1
        self.said += 1 + came
        self.asked.append(drafts)
        return drafts

    def calls(self, count: int) -> float:
        """Tokens a second of so many calls."""
        said, seconds = self.said, self.seconds
        for _ in range(count):
            self.call()
        return (self.said - said) / (self.seconds - seconds)

    def until(self, on: bool, most: int = 100_000) -> int:
        for call in range(most):
            if (self.governor.drafts(self.longest) > 0) == on:
                return call
            self.call()
        return most


def text(costs: str, right: float, seed: int = 7) -> Text:
    return Text(DraftGovernor(), COSTS[costs], lambda place: right, seed)


@pytest.mark.parametrize("right", [0.0, 0.3, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("costs", COSTS)
def test_as_many_as_bring_most_tokens_a_second(costs: str, right: float) -> None:
    rates = [tokens_a_second(COSTS[costs], right, drafts) for drafts in range(MOST + 1)]
    assert best_drafts(COSTS[costs], [right] * MOST) == rates.index(max(rates))
    assert best_drafts(COSTS[costs], [right] * MOST, 1) == rates.index(max(rates[1:]), 1)


def test_what_is_not_known_lies_on_a_line() -> None:
    assert best_drafts([1, None, None, None, 3], [0.7] * MOST) == 1, "1.7 tokens in 1.5, 2.19 in 2"
    assert best_drafts([1, 1.8, None, None, 3], [0.7] * MOST) == 0, "2.19 in 2.2"
    assert best_drafts([1, 1.1, None, None, None], [0.9] * MOST) == 4, "the line goes on"
    assert best_drafts([1, 0.9, None, None, None], [0.5] * MOST) == 4, "but never down: 1.94 in 1"
    assert best_drafts([1, None, None, None, None], [0.0] * MOST) == 0, "the fewer of equal ones"
    assert best_drafts([1, 1, 1, 5, 5], [1, 0.1, 1, 1]) == 2, "1 + 1 + 0.1 tokens"
    with pytest.raises(ArgumentError, match="expected those of a call without drafts"):
        best_drafts([None, 1, 1, 1, 1], [0.5] * MOST)
    with pytest.raises(ArgumentError, match="least: expected 0 to 4, found 5"):
        best_drafts([1, 1, 1, 1, 1], [0.5] * MOST, 5)


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("right", [0.0, 0.3, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("costs", COSTS)
def test_it_comes_near_the_best_number(costs: str, right: float, others: bool) -> None:
    """In 4000 calls, with all that it tries. Calls vary by a tenth, and now and then another program takes the
    processor. What counts is how long they would have taken without that."""
    found = text(costs, right)
    found.noise = lambda drawn: (
        drawn.lognormvariate(0, 0.1) + (3 * drawn.random() if others and drawn.random() < 0.05 else 0)
    )
    best = max(tokens_a_second(COSTS[costs], right, drafts) for drafts in range(MOST + 1))
    assert found.calls(4000) > 0.93 * best


@pytest.mark.parametrize("costs", COSTS)
def test_text_that_repeats_itself_now_and_then(costs: str) -> None:
    """Sixty tokens stood there before, of sixty few did. It is at least nearly as good as no drafts."""
    found = Text(DraftGovernor(), COSTS[costs], lambda place: 0.97 if place // 60 % 2 else 0.1)
    rate = found.calls(6000)
    assert rate > 0.93
    if costs in ("as one row", "built-in", "a second row is dear"):
        numbers = [tokens_a_second(COSTS[costs], 0.97, MOST), 1.1 / COSTS[costs][1]]
        assert rate > 0.8 * 2 / sum(1 / number for number in numbers), "with many here and one there"


def test_a_second_row_that_is_dear() -> None:
    """One draft pays where four lose."""
    assert (
        tokens_a_second(COSTS["a second row is dear"], 0.7, 4)
        < 1
        < tokens_a_second(COSTS["a second row is dear"], 0.7, 1)
    )
    found = text("a second row is dear", 0.7)
    found.calls(1500)
    assert found.governor.pays is True
    assert found.asked.count(1) > 0.7 * len(found.asked)


def test_it_watches_before_it_tries() -> None:
    found = text("built-in", 0.7)
    assert found.until(True) == WINDOW + 1  # the first call after a change does not count
    assert found.governor.drafts() == MOST and found.governor.pays is None


def test_it_is_kept_while_it_pays_and_compared_again() -> None:
    found = text("built-in", 0.9)
    found.until(True)
    found.calls(WINDOW + 2)
    assert found.governor.pays is True
    assert KEPT - 2 < found.until(False) < KEPT + 2
    assert found.until(True) == WINDOW + 1


def test_it_rests_when_it_does_not_pay_and_longer_each_time() -> None:
    found, rests = text("streamed", 0.3), list[int]()
    for _ in range(9):
        found.until(True)
        assert found.until(False) == WINDOW + 2
        assert found.governor.pays is False
        rests.append(found.until(True) - WINDOW - 1)
    assert rests[0] >= REST - 2 and rests[1] >= 2 * REST - 2 and max(rests) <= LONGEST_REST


def test_it_ends_when_the_text_no_longer_suggests_the_right_ones() -> None:
    right = [1.0]
    found = Text(DraftGovernor(), COSTS["a second row is dear"], lambda place: right[0])
    found.until(True)
    found.calls(3 * WINDOW)
    assert found.governor.pays is True
    right[0] = 0.0
    assert found.until(False) <= 3 * WINDOW
    assert found.governor.pays is False


def test_it_tries_again_when_the_machine_has_changed() -> None:
    """Rows become dear, and cheap again."""
    found = text("built-in", 0.9)
    found.calls(400)
    assert found.governor.pays is True
    found.costs = [1, 2, 3, 4, 5]
    assert found.until(False) <= KEPT
    found.costs = COSTS["built-in"]
    found.calls(4 * REST)
    assert found.governor.pays is True and found.governor.drafts() == MOST


def test_experts_that_were_read_from_a_disk_at_first() -> None:
    """Everything took five times as long, and drafts little more than no drafts. Then they are in memory, where drafts
    lose."""
    found = text("as before", 0.7)
    found.costs = [5 * each for each in COSTS["built-in"]]
    found.until(True)
    found.calls(2 * WINDOW)
    assert found.governor.pays is True
    found.costs = COSTS["as before"]
    assert found.until(False) <= 2 * WINDOW
    found.calls(3 * WINDOW)
    assert found.governor.pays is False


@pytest.mark.parametrize("costs", ["as before", "streamed", "layer"])
@pytest.mark.parametrize("right", [0.0, 0.3, 0.7])
def test_what_it_tries_costs_little(costs: str, right: float) -> None:
    """Drafts lose or hardly win there. A thousand calls lose four in a hundred at most, the first thousand six."""
    found = text(costs, right)
    assert found.calls(1000) > 0.94
    for _ in range(4):
        assert found.calls(1000) > 0.96


def test_calls_that_drafted_nothing_decide_nothing() -> None:
    found = text("built-in", 0.7)
    found.until(True)
    for _ in range(1000):
        found.governor.add(1.0, 1, 0)
    assert found.governor.drafts() == MOST and found.governor.pays is None


def test_other_company_is_watched_anew() -> None:
    found = text("built-in", 0.7)
    found.until(True)
    found.governor.add(4.0, 8, 0)
    assert found.governor.drafts() == 0, "what one session takes says nothing of eight"


@pytest.mark.parametrize("company", [1, 8])
def test_several_sessions_share_what_is_known(company: int) -> None:
    """Of eight, some drafts came true and others did not. The number is that of what a row of all of them takes."""
    governor, drawn, longest = DraftGovernor(), random.Random(3), [MOST] * company
    asked = []
    for _ in range(600):
        drafts = [governor.drafts(each) for each in longest]
        rows = 1 + sum(drafts) / company
        governor.add(company * (1 + 0.55 * (rows - 1)), company, sum(drafts))
        for i, number in enumerate(drafts):
            if number == 0:
                continue
            came = next((place for place in range(number) if drawn.random() > 0.7), number)
            governor.add_outcome(longest[i], number, came)
            longest[i] = came + 1
        asked.append(sum(drafts) / company)
    assert governor.pays is True and 0.9 < np.mean(asked[100:]) < 1.4


def test_auto_watches_first(folder: Folder) -> None:
    assert ready(load_faulty(folder("qwen3_moe"), speculate="auto")).total_stats.drafted == 0
