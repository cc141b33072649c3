"""Policies played against a trace, compared with plain models of them, and the optimum with every way there is."""

from __future__ import annotations

import json
import re
import time
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux import ArgumentError, _core
from moeflux.measure.text_plot import text_plot
from moeflux.routing.replay import OPTIMUM, POLICIES, Replay, replay, slot_counts
from moeflux.routing.trace import Trace


def trace_of(ids: np.ndarray, experts: int) -> Trace:
    passes = np.ones(len(ids), np.int32)
    return Trace("a model", "f00d", experts, 1_000_000, tuple(range(ids.shape[1])), ids.astype(np.uint16), passes)


def random_ids(seed: int, tokens: int, layers: int, experts: int, k: int) -> np.ndarray:
    """Some experts are popular."""
    random = np.random.default_rng(seed)
    score = random.gumbel(size=(tokens, layers, experts)) + np.linspace(0, 3, experts)
    return np.argsort(-score, axis=-1)[..., :k].astype(np.uint16)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """ids, experts of a layer, slots"""
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(2, 6))
    k = draw(st.integers(1, min(3, experts)))
    tokens = draw(st.integers(1, 40))
    slots = draw(st.integers(k, layers * experts))
    return random_ids(draw(st.integers(0, 1 << 30)), tokens, layers, experts, k), experts, slots


# ---- Plain models -----------------------------------------------------------------------------------------------


class Naive:
    """A cache that finds everything by searching. The experts of a layer are held until `ring` further ones are in."""

    def __init__(self, policy: str, slots: int, ring: int) -> None:
        self.policy, self.slots, self.ring = policy, slots, ring
        self.evictable: list[tuple[int, int]] = []  # in the order in which they were let go
        self.level: dict[tuple[int, int], int] = {}
        self.batches: list[list[tuple[int, int]]] = []  # held, oldest first
        self.uses: dict[tuple[int, int], int] = {}
        self.until_halving = 10 * slots
        self.hits = self.misses = 0

    def holds(self, key: tuple[int, int]) -> bool:
        return key in self.evictable or any(key in batch for batch in self.batches)

    def use(self, key: tuple[int, int]) -> None:
        self.uses[key] = min(63, self.uses.get(key, 0) + 1)
        self.until_halving -= 1
        if self.policy == "lfu" and self.until_halving == 0:
            self.until_halving = 10 * self.slots
            self.uses = {k: n // 2 for k, n in self.uses.items()}
            self.evictable.sort(key=lambda k: self.level[k])
            self.level = {k: max(1, n // 2) for k, n in self.level.items()}

    def let_go(self, batch: list[tuple[int, int]]) -> None:
        for key in batch:
            if any(key in other for other in self.batches) or self.policy == "none":
                continue
            self.evictable.append(key)
            self.level[key] = max(1, self.uses[key])

    def let_all_go(self) -> None:
        while self.batches:
            self.let_go(self.batches.pop(0))

    def play(self, layer: int, experts: list[int]) -> None:
        keys = [(layer, expert) for expert in sorted(experts)]
        there = [key for key in keys if self.holds(key)]
        missing = [key for key in keys if not self.holds(key)]
        self.hits += len(there)
        self.misses += len(missing)
        for key in there:
            self.use(key)
            if key in self.evictable:
                self.evictable.remove(key)
        held = {key for batch in self.batches for key in batch} | set(there)
        if self.slots - len(held) < len(missing):
            mine, self.batches = there, [*self.batches, there]
            older, self.batches = self.batches[:-1], [mine]
            for batch in older:
                self.let_go(batch)
            self.batches = []
        for key in missing:
            occupied = len(self.evictable) + len({k for batch in self.batches for k in batch} | set(there))
            occupied += missing.index(key)
            if occupied == self.slots:
                self.evictable.remove(self.victim())
            self.use(key)
        self.batches.append(there + missing)
        if len(self.batches) > self.ring:
            self.let_go(self.batches.pop(0))

    def victim(self) -> tuple[int, int]:
        if self.policy == "lru":
            return self.evictable[0]
        return min(self.evictable, key=lambda key: self.level[key])  # the first of the lowest


def naive(policy: str, ids: np.ndarray, slots: int, ring: int) -> tuple[int, int]:
    model = Naive(policy, slots, ring)
    for token in ids.tolist():
        for layer, experts in enumerate(token):
            model.play(layer, experts)
        model.let_all_go()
    return model.hits, model.misses


@settings(max_examples=300)
@given(cases(), st.sampled_from(POLICIES), st.integers(1, 3))
def test_a_policy_does_what_it_says(case: tuple[np.ndarray, int, int], policy: str, ring: int) -> None:
    ids, experts, slots = case
    assert _core.replay(ids, experts, policy, slots, ring) == naive(policy, ids, slots, ring)


def belady(ids: np.ndarray, slots: int) -> int:
    """Hits if the expert whose next use is furthest away is given up; it searches the future again each time."""
    groups = [[(layer, e) for e in experts] for token in ids.tolist() for layer, experts in enumerate(token)]
    held: set[tuple[int, int]] = set()
    hits = 0
    for now, group in enumerate(groups):
        hits += sum(key in held for key in group)
        held |= set(group)

        def next_use(key: tuple[int, int], now: int = now) -> int:
            return next((i for i in range(now + 1, len(groups)) if key in groups[i]), len(groups))

        for key in sorted(held - set(group), key=next_use, reverse=True)[: max(0, len(held) - slots)]:
            held.remove(key)
    return hits


@settings(max_examples=200)
@given(cases())
def test_the_optimum_gives_up_what_is_wanted_last(case: tuple[np.ndarray, int, int]) -> None:
    ids, experts, slots = case
    assert _core.replay(ids, experts, OPTIMUM, slots)[0] == belady(ids, slots)


@settings(max_examples=40)
@given(st.integers(0, 1 << 30), st.integers(2, 4))
def test_no_choice_of_victims_beats_the_optimum(seed: int, slots: int) -> None:
    """Every choice is tried, on a case small enough for it."""
    ids = random_ids(seed, tokens=9, layers=1, experts=5, k=2)
    groups = [frozenset(token[0]) for token in ids.tolist()]

    @cache
    def fewest(now: int, held: frozenset[int]) -> int:
        if now == len(groups):
            return 0
        everything = held | groups[now]
        surplus = max(0, len(everything) - slots)
        choices = combinations(everything - groups[now], surplus)
        return len(groups[now] - held) + min(fewest(now + 1, everything - set(gone)) for gone in choices)

    assert _core.replay(ids, 5, OPTIMUM, slots)[1] == fewest(0, frozenset())


@pytest.mark.parametrize("policy", [*POLICIES, OPTIMUM])
def test_with_room_for_all_only_the_first_time_is_a_miss(policy: str) -> None:
    ids = random_ids(3, tokens=200, layers=2, experts=16, k=4)
    trace = trace_of(ids, 16)
    hits, misses = _core.replay(ids, 16, policy, 32)
    assert hits + misses == ids.size
    if policy == "none":
        assert hits == 0  # a layer's experts are let go before it comes again
    else:
        assert misses == trace.experts_used


def test_a_million_accesses_are_seconds_at_most() -> None:
    """No figure is asserted: it ends. (A search of the future for each miss would take hours.)"""
    ids = random_ids(4, tokens=400, layers=10, experts=64, k=8)
    ids = np.tile(ids, (32, 1, 1))
    started = time.monotonic()
    counts = {policy: _core.replay(ids, 64, policy, 200) for policy in (*POLICIES, OPTIMUM)}
    print(f"{4 * ids.size} accesses in {time.monotonic() - started:.2f} s")
    assert ids.size > 1_000_000
    assert counts[OPTIMUM][0] > max(counts[policy][0] for policy in POLICIES)


# ---- The command's content --------------------------------------------------------------------------------------

TRACE = trace_of(random_ids(1, tokens=300, layers=3, experts=32, k=4), 32)


def test_curves_are_ordered() -> None:
    result = replay(TRACE)
    assert list(result.curves) == ["lru", "lfu", "none", OPTIMUM]
    for curve in result.curves.values():
        assert [point.slots for point in curve] == list(result.slots)
        assert all(point.hits + point.misses == TRACE.experts.size for point in curve)
    for policy in ("lru", OPTIMUM):  # both keep with more slots what they keep with fewer
        rates = [point.hit_rate for point in result.curves[policy]]
        assert rates == sorted(rates)
    for policy in POLICIES:
        pairs = zip(result.curves[policy], result.curves[OPTIMUM], strict=True)
        assert all(point.hits <= best.hits for point, best in pairs)


def test_asked_sizes_and_policies() -> None:
    result = replay(TRACE, ["50%", 12, "96", "50%"], ["lfu", "lfu"])
    assert result.slots == (12, 48, 96)
    assert list(result.curves) == ["lfu", OPTIMUM]


@pytest.mark.parametrize("asked", ["3", "97", "0%", "101%", "%", "-5", "many", "", "1e3", "5.5", "nan%"])
def test_a_size_that_cannot_be_names_what_can(asked: str) -> None:
    with pytest.raises(ArgumentError, match=r"slots: expected 4 to 96, or a share of 96 as in 25%, found"):
        slot_counts(TRACE, [asked])


def test_a_small_share_is_raised_to_one_token() -> None:
    assert slot_counts(TRACE, ["1%", "0.1%", "12.5%"]) == (4, 12)
    with pytest.raises(ArgumentError, match="at least one"):
        slot_counts(TRACE, [])


def test_odd_calls() -> None:
    with pytest.raises(ArgumentError, match="policy: expected lru, lfu, none or all, found 'fifo'"):
        replay(TRACE, policies=["fifo"])
    with pytest.raises(ArgumentError, match="empty"):
        replay(trace_of(np.zeros((0, 3, 4), np.uint16), 32))
    ids = TRACE.experts
    for arguments in ((ids, 8, "lru", 12), (ids, 32, "lru", 3), (ids, 32, "lru", 97), (ids, 32, "lru", 12, 0)):
        with pytest.raises(ValueError, match="expected"):
            _core.replay(*arguments)


def test_the_table_says_what_was_counted() -> None:
    result = replay(TRACE, ["25%", "100%"])
    text = str(result)
    assert "3600 requests" in text
    assert "decoded one after another" in text
    (row,) = (line for line in text.splitlines() if re.match(r"\s+24 ", line))
    point = result.curves["lru"][0]
    assert f"{point.hit_rate:.1%}" in row
    assert f"{point.misses / 300:.2f} MB" in row
    assert "25.0%" in row
    assert "24.00 MB" in row


def test_json_has_every_point() -> None:
    result = replay(TRACE, [12, 48])
    values = json.loads(json.dumps(result.to_dict()))
    assert len(values["points"]) == 8
    for point in values["points"]:
        assert point["hits"] + point["misses"] == TRACE.experts.size
        assert point["bytes_per_token"] == point["misses"] * 1_000_000 / 300


@pytest.mark.parametrize("slots", [("10%", "50%", "100%"), ("50%",), (4,)])
def test_plots(slots: tuple[int | str, ...]) -> None:
    result = replay(TRACE, slots)
    drawn = text_plot(result)
    marks = {"lru": "r", "lfu": "f", "none": "n", OPTIMUM: "*"}
    body = "\n".join(line.partition("|")[2] for line in drawn.splitlines())
    assert "r" in body
    assert len(slots) == 1 or ("n" in body and "*" in body)
    assert all(f"{mark} {name}" in drawn for name, mark in marks.items())


def test_points_are_told_as_they_come() -> None:
    seen: list[str] = []
    result: Replay = replay(TRACE, [8, 16], ["lru"], on_point=lambda point: seen.append(point.policy))
    assert seen == ["lru", "lru", OPTIMUM, OPTIMUM]
    assert len(result.curves) == 2
