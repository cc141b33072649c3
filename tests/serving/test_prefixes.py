"""No prompt is read twice: what every request evaluates is counted, token by token."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moeflux
from moeflux import Sampling, builtin
from moeflux.serving import Handle, Request, Scheduler
from moeflux.serving.prefixes import Branch, PrefixTree, places_to_make, shared_prefix
from moeflux.serving.protocols import ServedSession
from support.engine import Folder, load_faulty
from support.served import Alone, Gate, text

NAMES = ("qwen3_5_moe", "qwen3_moe", "gpt_oss")


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, folder: Folder) -> moeflux.Model:
    """A hybrid one, one that sees everything, and one of whose layers every second has a window."""
    return load_faulty(folder(request.param))


# ---- An agent ---------------------------------------------------------------------------------------------------


class Agent:
    """A conversation of tokens: instructions, then turns of what a tool says and what the model answers."""

    def __init__(self, instructions: list[int], seed: int) -> None:
        self.said = list(instructions)
        self.borders = [len(instructions)]
        self.seed = seed
        self.turn = 0
        self.held = 0  # how much of it the engine has evaluated
        self.asked = 0  # tokens of all its prompts

    def request(self, **options: Any) -> Request:
        """The next turn."""
        self.turn += 1
        self.said += text(20, seed=100 * self.seed + self.turn)
        self.borders.append(len(self.said))
        self.asked += len(self.said)
        sampling = Sampling(1.0, seed=self.turn)
        return Request(list(self.said), max_tokens=6, sampling=sampling, borders=list(self.borders), **options)

    def hear(self, answer: Handle) -> None:
        self.said += answer.tokens
        self.held = len(self.said) - 1


def turn(scheduler: Scheduler, agent: Agent, alone: Alone) -> int:
    """Returns how many tokens of the prompt were evaluated."""
    request = agent.request()
    answer = scheduler.submit(request).wait()
    assert (answer.tokens, answer.finish) == alone(request)
    agent.hear(answer)
    return len(answer.prompt) - answer.stats.reused_tokens


INSTRUCTIONS = text(256, seed=5)


def test_an_agent_of_twenty_turns_evaluates_nothing_but_new_text(model: moeflux.Model, alone: Alone) -> None:
    with Scheduler(model, running=2, checkpoint_every=128) as scheduler:
        agent = Agent(INSTRUCTIONS, 1)
        assert turn(scheduler, agent, alone) == 256 + 20
        for _ in range(19):
            new = len(agent.said) + 20 - agent.held
            assert turn(scheduler, agent, alone) == new == 21
        other = Agent(INSTRUCTIONS, 2)
        assert turn(scheduler, other, alone) == 20, "the instructions are there"
        assert turn(scheduler, other, alone) == 21
        assert turn(scheduler, agent, alone) == 21
        stats = scheduler.stats
        assert stats.evaluated_tokens == 276 + 19 * 21 + 20 + 21 + 21
        assert stats.reused_tokens + stats.evaluated_tokens == agent.asked + other.asked


def test_an_edit_is_evaluated_from_its_border_on(model: moeflux.Model, alone: Alone) -> None:
    with Scheduler(model, running=2) as scheduler:
        agent = Agent(INSTRUCTIONS, 1)
        for _ in range(6):
            turn(scheduler, agent, alone)
        # The fourth thing that the tool said becomes another.
        border, end = agent.borders[4] - 20, agent.borders[4]
        edited = agent.said[:border] + text(20, seed=999) + agent.said[end:]
        request = Request(edited, max_tokens=6, sampling=Sampling(1.0, seed=1), borders=agent.borders)
        answer = scheduler.submit(request).wait()
        assert answer.tokens == alone(request)[0]
        evaluated = len(edited) - answer.stats.reused_tokens
        assert len(edited) - border <= evaluated <= len(edited) - border + 1
        assert turn(scheduler, agent, alone) == 21, "the unedited one is still there"


def test_two_that_come_together_read_what_they_share_once(model: moeflux.Model, alone: Alone) -> None:
    """The second waits for the first, but not for its answer."""
    gate = Gate()
    with Scheduler(model, decoder=gate, running=3, rows=64) as scheduler:
        agents = [Agent(INSTRUCTIONS, seed) for seed in (1, 2, 3)]
        requests = [agent.request() for agent in agents]
        answers = [scheduler.submit(request) for request in requests]
        gate.wait()
        gate.let(2)
        assert [answer.waited_seconds is None for answer in answers] == [False, True, True]
        gate.open()
        for request, answer in zip(requests, answers, strict=True):
            assert (answer.wait().tokens, answer.finish) == alone(request)
        evaluated = [len(answer.prompt) - answer.stats.reused_tokens for answer in answers]
        assert evaluated == [276, 20, 20]
        assert scheduler.stats.evaluated_tokens == 276 + 40


def test_who_waits_for_what_another_reads_does_not_wait_for_ever(model: moeflux.Model, alone: Alone) -> None:
    gate = Gate()
    with Scheduler(model, decoder=gate, running=2, rows=64) as scheduler:
        first, second = Agent(INSTRUCTIONS, 1).request(), Agent(INSTRUCTIONS, 2).request()
        given_up, answer = scheduler.submit(first), scheduler.submit(second)
        gate.wait()
        gate.let(1)
        given_up.cancel()
        gate.open()
        assert answer.wait().tokens == alone(second)[0]


def test_where_texts_part_becomes_a_place(model: moeflux.Model, alone: Alone) -> None:
    """Also when nobody says where messages end."""
    with Scheduler(model, running=1) as scheduler:
        found = []
        for seed in (1, 2, 3):
            request = Request(INSTRUCTIONS + text(30, seed), max_tokens=4, sampling=Sampling(seed=1))
            answer = scheduler.submit(request).wait()
            assert answer.tokens == alone(request)[0]
            found.append(len(answer.prompt) - answer.stats.reused_tokens)
        assert found[0] == 286 and found[2] == 30


def test_a_long_prompt_leaves_places_on_its_way(model: moeflux.Model, alone: Alone) -> None:
    with Scheduler(model, running=1, checkpoint_every=64) as scheduler:
        whole = text(400)
        scheduler.submit(Request(whole, max_tokens=1)).wait()
        for shared in (390, 300, 200, 100):
            request = Request(whole[:shared] + text(10, seed=9), max_tokens=4, sampling=Sampling(1.0, seed=1))
            answer = scheduler.submit(request).wait()
            assert answer.tokens == alone(request)[0]
            assert answer.stats.reused_tokens > shared - 64


def test_the_same_prompt_again(model: moeflux.Model, alone: Alone) -> None:
    request = Request(text(200), max_tokens=4, sampling=Sampling(1.0, seed=1), borders=[180, 199])
    with Scheduler(model, running=1) as scheduler:
        answers = [scheduler.submit(request).wait() for _ in range(3)]
        assert [answer.tokens for answer in answers] == [alone(request)[0]] * 3
        assert all(200 - answer.stats.reused_tokens <= 20 for answer in answers[1:])


def test_a_conversation_with_a_template() -> None:
    model = moeflux.load(builtin.path(), threads=2)
    with Scheduler(model) as scheduler:
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}]
        held = 0
        for question in ("What is 3 plus 4?", "And the capital of France?", "Name two colors.", "Thank you!"):
            messages.append({"role": "user", "content": question})
            assert model.chat_format is not None
            prompt = model.chat_format.encode(messages)
            answer = scheduler.submit(Request(prompt, continues=False, sampling=Sampling()))
            said = answer.completion()
            assert said == model.session().complete(prompt, continues=False, temperature=0)
            assert answer.stats.reused_tokens == held
            held = len(prompt.tokens) + len(said.tokens) - 1
            messages.append({"role": "assistant", "content": str(said)})


# ---- The tree by itself -----------------------------------------------------------------------------------------


class Stood:
    """In place of a session."""

    closed = False

    def close(self) -> None:
        self.closed = True


def branch(ids: list[int], places: list[int], exact_from: int | None = None) -> Branch:
    """From its end on, every position is a place, if nothing else is said."""
    start = len(ids) if exact_from is None else exact_from
    return Branch(cast(ServedSession, Stood()), np.asarray(ids, np.int32), places, start, len(ids))


short = st.lists(st.integers(0, 1), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("exact_from", "places", "left"), [(0, [1, 2], 1), (0, [1], 2), (1, [], 2), (2, [1, 2], 1), (3, [], 1)]
)
def test_a_branch_goes_where_another_has_all_of_its_places(exact_from: int, places: list[int], left: int) -> None:
    tree = PrefixTree(100)
    tree.add(branch([1, 1, 1], [], exact_from), 0.0)
    tree.add(branch([1, 1, 1], places, 3), 0.0)
    assert len(tree) == left
    assert tree.find(np.asarray([1, 1, 0], np.int32)).position == (2 if exact_from < 3 else 0)


@given(st.lists(short, max_size=6), short, st.sampled_from(("all", "last", "end")), st.randoms())
def test_the_deepest_place_is_found(texts: list[list[int]], wanted: list[int], exact: str, random: Any) -> None:
    """Where every position is a place, where the last ones are, as with windows, and where the end alone is."""
    tree = PrefixTree(100)
    kept = []
    for ids in texts:
        size = len(ids)
        start = {"all": 0, "last": random.randint(0, size), "end": size}[exact]
        places = sorted(random.sample(range(1, size + 1), random.randint(0, size))) if start else []
        kept.append((ids, sorted({*places, *range(max(start, 1), size + 1)})))
        tree.add(branch(ids, places, start), 0.0)
    found = tree.find(np.asarray(wanted, np.int32))
    reachable = [
        place for ids, places in kept for place in places if ids[:place] == wanted[:place] and place < len(wanted)
    ]
    assert found.position == max(reachable, default=0) and (found.branch is None) == (found.position == 0)
    if found.branch is not None:
        assert found.branch.ids[: found.position].tolist() == wanted[: found.position]
        assert found.branch.place_before(found.position) == found.position


def test_who_goes_first() -> None:
    tree = PrefixTree(100)
    root = branch([1, 2, 3, 4], [2, 4])
    inner = branch([1, 2, 3, 4, 5, 6], [4, 6])
    leaf = branch([1, 2, 3, 4, 5, 6, 7, 8], [6, 8])
    other = branch([9, 9, 9], [3])
    for each in (other, root, inner, leaf):
        tree.add(each, 0.0)
    assert tree.is_inner(inner) and not tree.is_inner(root) and not tree.is_inner(leaf)
    assert (tree.goes_on(root), tree.goes_on(leaf)) == (True, False)
    assert tree.is_root(root) and not tree.is_root(leaf)
    gone = []
    tree.was_used(np.asarray([1, 2, 7]), None, 1.0)  # of use: the root alone
    while len(tree):
        gone.append(tree.least())
        tree.remove(gone[-1])
    assert gone == [inner, other, leaf, root]
    with pytest.raises(LookupError):
        tree.least()


def test_there_are_no_more_than_may_be_and_none_twice() -> None:
    tree = PrefixTree(2)
    branches = [branch([seed], [1]) for seed in range(4)]
    for each in branches:
        tree.add(each, 0.0)
    assert tree.all() == branches[2:]
    assert [cast(Stood, each.session).closed for each in branches] == [True, True, False, False]
    again = branch([3], [1])
    tree.add(again, 0.0)
    assert tree.all() == [branches[2], again]
    attending = PrefixTree(10)
    part, whole = branch([1, 2], [], 0), branch([1, 2, 3], [], 0)
    attending.add(part, 0.0)
    attending.add(whole, 0.0)
    assert attending.all() == [whole]
    seeing = PrefixTree(10)
    part, other, whole = branch([1, 2, 3, 4], [2], 4), branch([1, 2, 3], [], 3), branch([1, 2, 3, 4, 5, 6], [2], 4)
    for each in (part, other, whole):
        seeing.add(each, 0.0)
    assert seeing.all() == [other, whole], "one has a place that the longest has not"


@given(short, short)
def test_what_texts_share(one: list[int], other: list[int]) -> None:
    shared = shared_prefix(np.asarray(one), np.asarray(other))
    assert one[:shared] == other[:shared]
    assert one[shared : shared + 1] != other[shared : shared + 1] or shared == min(len(one), len(other))


@given(
    st.lists(st.integers(0, 500), max_size=12),
    st.integers(0, 500),
    st.integers(1, 300),
    st.integers(1, 8),
    st.integers(0, 400),
    st.integers(1, 500),
)
def test_where_checkpoints_are_made(
    borders: list[int], shared: int, every: int, limit: int, start: int, length: int
) -> None:
    end = start + length
    places = places_to_make(borders, shared, every, limit, start, end)
    assert places == sorted(places) and len(places) <= limit
    assert all(start < place < end for place in places)
    assert all(later - earlier >= 16 for earlier, later in zip([start, *places], places, strict=False))
