"""The slot cache against a plain model of it: whatever is asked in whatever order, both give the same answers.

The model keeps evictable experts in a sorted list and does everything by searching; the cache must agree on every slot,
every outcome and every count.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux import StateError
from moeflux._core import Lease, SlotCache

LAYERS, EXPERTS, SLOT_BYTES = 2, 5, 16
Key = tuple[int, int]
KEYS = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]


def content(key: Key) -> bytes:
    return bytes([1 + key[0], 1 + key[1]] * (SLOT_BYTES // 2))


# ---- The model ----------------------------------------------------------------------------------------------------


@dataclass
class Held:
    key: Key
    slot: int
    state: str
    leases: int
    guess: bool


class Model:
    def __init__(self, policy: str, slots: int, ageing_period: int) -> None:
        self.policy, self.ageing_period = policy, ageing_period
        self.free = list(reversed(range(slots)))
        self.held: list[Held] = []  # with leases
        self.evictable: list[tuple[int, Held]] = []  # (level, expert), in the order in which they joined
        self.counts = dict.fromkeys(KEYS, 0)
        self.uses = 0
        self.stats = dict.fromkeys(
            "hits joined misses evictions failures guesses guesses_used guesses_wasted".split(), 0
        )

    def find(self, key: Key) -> Held | None:
        present = [h for h in self.held if h.state != "empty"] + [h for _, h in self.evictable]
        found = [h for h in present if h.key == key]
        assert len(found) <= 1, "an expert in two slots"
        return found[0] if found else None

    def take_slot(self) -> int | None:
        if self.free:
            return self.free.pop()
        if not self.evictable:
            return None
        victim = min(self.evictable, key=lambda pair: pair[0])  # the first of the lowest level
        self.evictable.remove(victim)
        self.stats["evictions"] += 1
        self.stats["guesses_wasted"] += victim[1].guess
        return victim[1].slot

    def use(self, key: Key) -> None:
        self.counts[key] = min(63, self.counts[key] + 1)
        self.uses += 1
        if self.policy == "lfu" and self.uses == self.ageing_period:
            self.uses = 0
            self.counts = {k: n // 2 for k, n in self.counts.items()}
            by_level = sorted(self.evictable, key=lambda pair: pair[0])
            self.evictable = [(max(1, level // 2) if level else 0, h) for level, h in by_level]

    def hold(self, held: Held) -> None:
        self.evictable = [pair for pair in self.evictable if pair[1] is not held]
        if held not in self.held:
            self.held.append(held)
        held.leases += 1

    def acquire(self, key: Key) -> tuple[Held, str] | None:
        held = self.find(key)
        if held is None:
            slot = self.take_slot()
            if slot is None:
                return None
            self.use(key)
            self.stats["misses"] += 1
            held = Held(key, slot, "loading", 0, False)
            self.hold(held)
            return held, "missing"
        self.use(key)
        self.stats["guesses_used"] += held.guess
        held.guess = False
        self.stats["hits" if held.state == "ready" else "joined"] += 1
        self.hold(held)
        return held, held.state

    def guess(self, key: Key, keep: int) -> Held | None:
        if self.find(key) or len(self.free) + len(self.evictable) <= keep:
            return None
        slot = self.take_slot()
        assert slot is not None
        self.stats["guesses"] += 1
        held = Held(key, slot, "loading", 0, True)
        self.hold(held)
        return held

    def end_loading(self, held: Held, well: bool) -> None:
        held.state = "ready" if well else "empty"
        self.stats["failures"] += not well

    def release(self, held: Held) -> None:
        held.leases -= 1
        if held.leases:
            return
        self.held = [h for h in self.held if h is not held]
        if held.state == "loading":
            self.end_loading(held, False)
        if held.state == "ready" and self.policy != "none":
            level = 0 if held.guess else max(1, self.counts[held.key]) if self.policy == "lfu" else 1
            self.evictable.append((level, held))
        else:
            self.free.append(held.slot)

    def drop(self, key: Key) -> bool:
        found = [pair for pair in self.evictable if pair[1].key == key]
        for pair in found:
            self.evictable.remove(pair)
            self.free.append(pair[1].slot)
        return bool(found)

    def drop_all(self) -> None:
        for _, held in sorted(self.evictable, key=lambda pair: pair[0]):
            self.free.append(held.slot)
        self.evictable = []


# ---- The comparison -----------------------------------------------------------------------------------------------


class Pair:
    """A cache and its model, and the leases that both have out."""

    def __init__(self, policy: str, slots: int, ageing_period: int) -> None:
        self.cache = SlotCache(LAYERS, EXPERTS, slots, SLOT_BYTES, policy, ageing_period)
        self.model = Model(policy, slots, ageing_period)
        self.leases: list[tuple[Lease, Held]] = []

    def acquire(self, key: Key) -> None:
        expected = self.model.acquire(key)
        if expected is None:
            with pytest.raises(StateError, match=rf"layer {key[0]} expert {key[1]}, found all \d+ leased"):
                self.cache.acquire(*key)
            return
        lease, found = self.cache.acquire(*key)
        assert (lease.slot, found) == (expected[0].slot, expected[1])
        if found == "ready":
            assert lease.data == content(key)
        self.leases.append((lease, expected[0]))

    def guess(self, key: Key, keep: int) -> None:
        lease, expected = self.cache.guess(*key, keep), self.model.guess(key, keep)
        assert (lease is None) == (expected is None)
        if expected is not None:
            assert lease.slot == expected.slot
            self.leases.append((lease, expected))

    def end_loading(self, index: int, well: bool) -> None:
        loading = [(lease, held) for lease, held in self.leases if held.state == "loading"]
        if not loading:
            return
        lease, held = loading[index % len(loading)]
        lease.write(content(held.key) if well else b"half")
        (self.cache.loaded if well else self.cache.failed)(lease)
        self.model.end_loading(held, well)

    def release(self, index: int) -> None:
        if self.leases:
            lease, held = self.leases.pop(index % len(self.leases))
            lease.release()
            self.model.release(held)

    def share(self, index: int) -> None:
        if self.leases:
            lease, held = self.leases[index % len(self.leases)]
            self.leases.append((self.cache.share(lease), held))
            self.model.hold(held)

    def drop(self, key: Key) -> None:
        assert self.cache.drop(*key) == self.model.drop(key)

    def drop_all(self) -> None:
        self.cache.drop_all()
        self.model.drop_all()

    def check(self) -> None:
        model = self.model
        for key in KEYS:
            assert self.cache.contains(*key) == (model.find(key) is not None)
        assert self.cache.spare == len(model.free) + len(model.evictable)
        assert self.cache.leased == len(model.held)
        assert self.cache.stats == model.stats
        for lease, held in self.leases:
            assert (lease.slot, lease.layer, lease.expert, lease.state) == (held.slot, *held.key, held.state)
            if held.state == "ready":
                assert lease.data == content(held.key), "a leased slot was written over"


KEY = st.sampled_from(KEYS)
INDEX = st.integers(0, 11)
STEP = st.one_of(
    st.tuples(st.just("acquire"), KEY),
    st.tuples(st.just("acquire"), KEY),
    st.tuples(st.just("guess"), KEY, st.integers(0, 3)),
    st.tuples(st.just("end_loading"), INDEX, st.sampled_from([True, True, True, False])),
    st.tuples(st.just("end_loading"), INDEX, st.just(True)),
    st.tuples(st.just("release"), INDEX),
    st.tuples(st.just("release"), INDEX),
    st.tuples(st.just("share"), INDEX),
    st.tuples(st.just("drop"), KEY),
    st.tuples(st.just("drop_all")),
)


@settings(max_examples=300)
@given(
    policy=st.sampled_from(["lru", "lfu", "none"]),
    slots=st.integers(1, 7),
    ageing_period=st.integers(1, 12),
    steps=st.lists(STEP, max_size=60),
)
def test_the_cache_is_its_model(policy: str, slots: int, ageing_period: int, steps: list[tuple]) -> None:
    pair = Pair(policy, slots, ageing_period)
    for name, *arguments in steps:
        getattr(pair, name)(*arguments)
        pair.check()


# ---- By hand, where the model itself might be wrong -----------------------------------------------------------------


def touch(cache: SlotCache, *experts: int) -> None:
    for expert in experts:
        lease, found = cache.acquire(0, expert)
        if found == "missing":
            cache.loaded(lease)
        lease.release()


def kept(cache: SlotCache) -> set[int]:
    return {expert for expert in range(EXPERTS) if cache.contains(0, expert)}


def test_lru_gives_up_the_longest_unused() -> None:
    cache = SlotCache(1, EXPERTS, 3)
    touch(cache, 0, 1, 2, 0, 3)
    assert kept(cache) == {0, 2, 3}


def test_lfu_gives_up_the_least_used() -> None:
    cache = SlotCache(1, EXPERTS, 3, policy="lfu", ageing_period=1000)
    touch(cache, 0, 0, 0, 1, 1, 2, 3)
    assert kept(cache) == {0, 1, 3}


def test_lfu_forgets_old_fame() -> None:
    """Forty uses long ago count for less than seven since, once the counts are halved often enough."""
    for period, kept_one in ((10_000, 0), (8, 1)):
        cache = SlotCache(1, EXPERTS, 2, policy="lfu", ageing_period=period)
        touch(cache, *[0] * 40, *[1, 2] * 5, 1, 1, 3)
        assert kept_one in kept(cache), period


def test_none_keeps_nothing() -> None:
    cache = SlotCache(1, EXPERTS, 3, policy="none")
    touch(cache, 0, 0, 1)
    assert kept(cache) == set()
    assert cache.stats["misses"] == 3


def test_a_wrong_guess_goes_first() -> None:
    cache = SlotCache(1, EXPERTS, 3)
    touch(cache, 0, 1)
    guess = cache.guess(0, 2)
    cache.loaded(guess)
    guess.release()
    touch(cache, 3)
    assert kept(cache) == {0, 1, 3}
    assert cache.stats["guesses_wasted"] == 1


def test_an_abandoned_load_is_not_found() -> None:
    cache = SlotCache(1, EXPERTS, 1, SLOT_BYTES)
    lease, _ = cache.acquire(0, 0)
    lease.write(b"half")
    lease.release()
    assert cache.acquire(0, 0)[1] == "missing"


@pytest.mark.parametrize("key", [(-1, 0), (0, -1), (LAYERS, 0), (0, EXPERTS)])
def test_no_such_expert(key: Key) -> None:
    cache = SlotCache(LAYERS, EXPERTS, 1)
    with pytest.raises(IndexError, match=f"found layer {key[0]}, expert {key[1]}"):
        cache.acquire(*key)


@pytest.mark.parametrize("shape", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1 << 40, 1 << 40, 1)])
def test_no_such_cache(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected layers, experts and slots"):
        SlotCache(*shape)
