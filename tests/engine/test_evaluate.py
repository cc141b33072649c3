"""Several sessions evaluate in one call. Each gets the bits that it would have got alone, whatever its company, and
however the work is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moeflux
from moeflux import ArgumentError, BudgetError, StateError, _core
from moeflux.ops import isas
from moeflux.stores.store import open_store
from support.engine import Folder, folders, load_faulty, tokens
from support.evaluated import Expect, logits_alone

NAMES = ("qwen3_5_moe", "qwen3_moe", "deepseek_v3")
STREAMS = [tokens(72, seed) for seed in (1, 5, 9, 14, 23)]
DEVICES = {
    "resident": {"threads": 2},
    "streamed": {"expert_slots": 5, "chunk": 5},
    "deferred": {"deferred": True, "expert_slots": 9, "look_ahead": "on"},
    "deferred, resident": {"deferred": True},
    "apart": {"apart": True, "expert_slots": 6, "cache": "none", "chunk": 9},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("evaluate"))


@pytest.fixture(scope="module")
def alone(folder: Folder) -> Expect:
    return logits_alone(folder, STREAMS)


class Company:
    """Sessions of one model, each somewhere in its stream."""

    def __init__(self, model: moeflux.Model, expected: list[np.ndarray], **options: Any) -> None:
        self.model, self.expected = model, expected
        self.sessions = [model.session(**{"max_context": 80, **options}) for _ in STREAMS]

    def work(self, cut: dict[int, int]) -> list[tuple[moeflux.Session, list[int]]]:
        """The next tokens of some sessions."""
        return [(s, STREAMS[i][s.position : s.position + n]) for i, n in cut.items() for s in [self.sessions[i]]]

    def go(self, cut: dict[int, int], logits: str) -> None:
        """Evaluates so many tokens of each session together."""
        work = self.work(cut)
        begun = [session.position for session, _ in work]
        found = self.model.evaluate(work, logits)  # type: ignore[call-overload]
        for place, (i, start) in enumerate(zip(cut, begun, strict=True)):
            session, end = self.sessions[i], start + cut[i]
            assert (session.position, session.tokens) == (end, STREAMS[i][:end])
            if logits == "all":
                assert np.array_equal(found[place], self.expected[i][start:end])
            elif logits == "last":
                assert found[place].current
                assert np.array_equal(found[place].numpy(), self.expected[i][end - 1])
                assert found[place].argmax() == int(self.expected[i][end - 1].argmax())
        assert (found is None) == (logits == "none")

    def stands(self, i: int) -> None:
        """The session has what it should have: it goes on alone."""
        session = self.sessions[i]
        start = session.position
        rows = session.prefill(STREAMS[i][start : start + 3], logits="all")
        assert np.array_equal(rows, self.expected[i][start : start + 3])


CUTS = st.dictionaries(st.integers(0, len(STREAMS) - 1), st.sampled_from((1, 1, 1, 2, 7, 13)), min_size=1)
SCHEDULES = st.lists(st.tuples(CUTS, st.sampled_from(("last", "all", "none"))), min_size=1, max_size=5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_company_changes_no_bit(folder: Folder, alone: Expect, on_metal: bool, name: str, device: str) -> None:
    model, expected = load_faulty(folder(name), **DEVICES[device]), alone(name)

    @settings(max_examples=2 if on_metal else 10, database=None)
    @given(SCHEDULES)
    def holds(schedule: list[tuple[dict[int, int], str]]) -> None:
        company = Company(model, expected)
        for cut, logits in schedule:
            company.go(cut, logits)
        for i in range(len(STREAMS)):
            company.stands(i)

    holds()


@pytest.mark.parametrize("kv_dtype", ["bf16", "q8"])
@pytest.mark.parametrize("isa", isas())
def test_with_every_instruction_set(folder: Folder, isa: str, kv_dtype: str) -> None:
    for precision in ("auto", "exact"):
        model = moeflux.load(folder("qwen3_5_moe"), isa=isa, precision=precision, threads=2)
        expected = [model.session(kv_dtype=kv_dtype).prefill(ids[:40], logits="all") for ids in STREAMS]
        company = Company(model, expected, kv_dtype=kv_dtype)
        company.go({0: 30, 3: 1, 4: 2}, "last")
        for _ in range(3):
            company.go({4: 1, 3: 1, 2: 1, 1: 1, 0: 1}, "last")


@pytest.mark.parametrize("name", NAMES)
def test_at_borders_of_blocks_and_in_forks(folder: Folder, name: str) -> None:
    model = load_faulty(folder(name), chunk=64)
    text, tails = tokens(254), [tokens(6, seed) for seed in (3, 4, 8)]
    root = model.session(max_context=600)
    root.prefill(text)
    expected = [root.fork().prefill(tail, logits="all") for tail in tails]
    forks = [root.fork() for _ in tails]
    for begin, end in ((0, 1), (1, 4), (4, 5), (5, 6)):
        found = model.evaluate([(f, tail[begin:end]) for f, tail in zip(forks, tails, strict=True)], logits="all")
        for rows, wanted in zip(found, expected, strict=True):
            assert np.array_equal(rows, wanted[begin:end])
    assert [fork.tokens for fork in forks] == [text + tail for tail in tails]


def test_more_sessions_than_rows_of_a_chunk(folder: Folder, alone: Expect) -> None:
    """And more of them than logits are computed at a time, some beside longer pieces."""
    expected = alone("qwen3_5_moe")
    model = load_faulty(folder("qwen3_5_moe"), chunk=24)
    companies = [Company(model, expected, max_context=1024) for _ in range(6)]
    sessions = [(company.sessions[i], i) for company in companies for i in range(len(STREAMS))]
    for n in (1, 1, 2):
        long = [j % 17 == 5 for j in range(len(sessions))]
        work = [
            (s, STREAMS[i][s.position : s.position + (9 if is_long else n)])
            for (s, i), is_long in zip(sessions, long, strict=True)
        ]
        for found, (s, i) in zip(model.evaluate(work), sessions, strict=True):
            assert np.array_equal(found.numpy(), expected[i][s.position - 1])


def test_an_expert_is_read_once_for_all(folder: Folder) -> None:
    model = load_faulty(folder("qwen3_moe"), expert_slots=8, cache="none", look_ahead="off")
    one, *others = [model.session(max_context=64) for _ in range(9)]
    one.prefill(tokens(6))
    model.evaluate([(session, tokens(6)) for session in others[:2]])
    assert others[0].stats.bytes_read == one.stats.bytes_read > 0
    for session in others[2:]:
        session.prefill(tokens(6))
    one.step(7)
    model.evaluate([(session, [7]) for session in others])
    assert others[-1].stats.bytes_read == one.stats.bytes_read > 0


def test_stats_are_of_the_call(folder: Folder) -> None:
    model = load_faulty(folder("qwen3_moe"), expert_slots=5, chunk=8)
    first, second = model.session(), model.session()
    first.prefill(STREAMS[0][:4])
    before = first.total_stats
    model.evaluate([(first, STREAMS[0][4:5]), (second, STREAMS[1][:10])])
    assert (first.stats.tokens, second.stats.tokens) == (1, 10)
    for name in ("seconds", "bytes_read", "expert_misses", "submissions", "waits"):
        assert getattr(first.stats, name) == getattr(second.stats, name) > 0
    assert second.total_stats.bytes_read == second.stats.bytes_read
    assert first.total_stats.tokens == 5
    assert first.total_stats.bytes_read == before.bytes_read + first.stats.bytes_read


def test_logits_that_nobody_wants(folder: Folder, alone: Expect) -> None:
    company = Company(load_faulty(folder("qwen3_moe")), alone("qwen3_moe"))
    company.go({0: 3, 1: 2}, "last")
    before = company.sessions[0]._logits()
    company.go({0: 1, 1: 1}, "none")
    assert not before.current
    for use in (before.numpy, company.sessions[0]._logits().argmax):
        with pytest.raises(StateError):
            use()
    company.go({0: 1, 1: 1}, "last")


# ---- Bad use ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_evaluated(folder: Folder) -> None:
    """Nobody has moved, and everybody can go on."""
    model, other = load_faulty(folder("qwen3_moe")), load_faulty(folder("qwen3_moe"))
    good, bad, full = (model.session(max_context=8) for _ in range(3))
    logits = [good.prefill([1, 2]), full.prefill([1] * 8)]
    closed, foreign = model.session(max_context=8), other.session(max_context=8)
    closed.close()
    cases: list[tuple[Any, type[moeflux.Error], str]] = [
        ([], ArgumentError, "evaluate: expected work for one session or more, found none"),
        ([(bad, [])], ArgumentError, r"work\[1\]: tokens: expected one or more, found none"),
        ([(bad, [1]), (good, [2])], ArgumentError, r"work\[2\]: expected each session once, found that of work\[0\]"),
        ([(foreign, [1])], ArgumentError, r"work\[1\]: expected a session of this model, found one of another"),
        ([(closed, [1])], StateError, r"work\[1\]: session: expected one that is open, found it closed"),
        ([(bad, [1] * 9)], StateError, r"work\[1\]: session: expected at most 8 tokens \(max_context\), found 9"),
        ([(full, [1])], StateError, r"work\[1\]: session: expected at most 8 tokens \(max_context\), found 9"),
        ([(bad, [384])], ArgumentError, r"work\[1\]: tokens\[0\]: expected 0 to 383, found 384"),
        ([(bad, [1.5])], ArgumentError, r"work\[1\]: tokens: expected whole numbers"),
        ([(bad, 3)], ArgumentError, r"work\[1\]: tokens: expected whole numbers"),
        ([bad], ArgumentError, r"work\[1\]: expected a session and its tokens, found Session"),
        ([(None, [1])], ArgumentError, r"work\[1\]: expected a session and its tokens, found \(None"),
        ([(bad, [1], 2)], ArgumentError, r"work\[1\]: expected a session and its tokens"),
    ]
    for work, error, message in cases:
        for kind in ("last", "all", "none"):
            with pytest.raises(error, match=message):
                model.evaluate([(good, [3]), *work] if work else [], kind)
        assert (good.position, bad.position, full.position, foreign.position) == (2, 0, 8, 0)
    with pytest.raises(ArgumentError, match='logits: expected "last", "all" or "none", found \'first\''):
        model.evaluate([(good, [3])], "first")  # type: ignore[call-overload]
    assert all(each.current for each in logits)
    alone = other.session(max_context=8)
    alone.prefill([1, 2])
    assert np.array_equal(model.evaluate([(good, [3]), (bad, [4])])[0].numpy(), alone.step(3).numpy())
    model.close()
    with pytest.raises(StateError, match=r"work\[0\]: session: expected one that is open"):
        model.evaluate([(good, [3])])


def test_a_plain_step_has_a_short_way(folder: Folder) -> None:
    """It gives what the long way gives, and takes nothing else."""
    model = load_faulty(folder("qwen3_moe"))
    one, two = model.session(max_context=8), model.session(max_context=8)

    class Other(moeflux.Session):
        pass

    def way(work: object) -> list[int] | None:
        serials: list[int] | None = model._engine.evaluate_step(work, moeflux.Session, None)
        return serials

    others: list[object] = [
        [],
        ((one, [1]),),
        [(one, (1,))],
        [(one, [1, 2])],
        [(one, [True])],
        [(one, [1.0])],
        [(one, [-1])],
    ]
    others += [[(one, [1 << 31])], [[one, [1]]], [(one, [1], None)], [(one, 1)], [(None, [1])], [(one._core, [1])]]
    closed = model.session(max_context=8)
    closed.close()
    other = model.session(max_context=8)
    other.__class__ = Other
    for work in [*others, [(one, [1]), (closed, [1])], [(one, [1]), (other, [1])]]:
        assert way(work) is None
    assert (one.position, two.position) == (0, 0)
    assert way([(one, [1]), (two, [2])]) == [one._core.logits_serial, two._core.logits_serial]
    short = model.evaluate([(one, [3]), (two, [4])])
    found = [(row.argmax(), row.numpy()) for row in short]
    for session, tokens_ in ((one, [1, 3]), (two, [2, 4])):
        session.clear()
        session.prefill(tokens_[:1])
    for (best, row), again in zip(found, model.evaluate([(one, (3,)), (two, (4,))]), strict=True):
        assert np.array_equal(row, again.numpy()) and best == again.argmax()
    with pytest.raises(StateError, match="used before the session evaluates again, found used after"):
        short[0].argmax()


@pytest.mark.parametrize("apart", (False, True))
@pytest.mark.parametrize("name", NAMES)
def test_an_empty_pool(folder: Folder, alone: Expect, name: str, apart: bool) -> None:
    """Room for the rows of two: nobody has lost anything, whoever it was that found none."""
    with open_store(folder(name)) as store:
        parts = _core.testing.footprint(_core.testing.Faults(apart=apart), store.directory, max_context=80)
    limit = len(STREAMS) * (parts.sessions - parts.rows) + 2 * parts.rows
    model = load_faulty(folder(name), session_bytes=limit, apart=apart)
    company = Company(model, alone(name))
    company.go({0: 20}, "last")
    kept = company.sessions[0]._logits()
    held = model._engine.held
    for cut in ({0: 5, 1: 1, 2: 9}, {1: 4, 2: 1, 0: 1}, {3: 1, 1: 1}):
        with pytest.raises(BudgetError, match=r"work\[\d\]: rows of a session: expected at most .* close a session"):
            company.go(cut, "last")
        assert [session.position for session in company.sessions] == [20, 0, 0, 0, 0]
        assert kept.current and model._engine.held == held
    company.go({0: 5, 1: 1}, "all")
    company.stands(0)


@pytest.mark.parametrize(
    ("name", "slots"), [("qwen3_5_moe", None), ("qwen3_5_moe", 5), ("qwen3_moe", 5), ("deepseek_v3", None)]
)
def test_on_any_device(folder: Folder, backend: str, name: str, slots: int | None) -> None:
    model = moeflux.load(folder(name), threads=2, expert_slots=slots, chunk=8)
    reached = (8, 15, 6)
    expected = [model.session().prefill(STREAMS[i][:end], logits="all") for i, end in enumerate(reached)]
    company = Company(model, [*expected, *expected])
    company.go({0: 3, 2: 1}, "last")
    company.go({0: 1, 1: 11, 2: 1}, "all")
    company.go({2: 1, 1: 1, 0: 1}, "last")
    for i, end in enumerate(reached):
        company.stands(i)
        assert company.sessions[i].position == end


def test_more_sessions_than_a_device_has_tables_for(folder: Folder, backend: str) -> None:
    """A device that takes tables of blocks has room for one session of a whole context, twice."""
    model = moeflux.load(folder("qwen3_moe"), threads=2)
    root = model.session()
    root.prefill(tokens(10))
    expected = [root.fork().step(token).numpy() for token in (1, 2, 3)]
    forks = [root.fork() for _ in range(12)]
    found = model.evaluate([(fork, [1 + place % 3]) for place, fork in enumerate(forks)])
    for place, logits in enumerate(found):
        assert np.array_equal(logits.numpy(), expected[place % 3])
