"""What is evaluated already: the sessions of answers that have ended, as branches of a tree of tokens.

Branches that begin with the same tokens share the blocks of their keys and values. A recurrent layer can only go on
from where its state was kept, and a window from where its rows are, so a branch has places: its checkpoints, and every
position from some one on to its end. If all layers see everything, every position is a place. A state depends on the
tokens before it alone, so going on from a place changes no bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moeflux.serving.protocols import ServedSession
from moeflux.text.reuse import checkpoint_places

__all__ = ["Branch", "Found", "PrefixTree", "places_to_make", "shared_prefix"]


def shared_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two texts have in common from the beginning."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count


def begins_with(ids: np.ndarray, beginning: np.ndarray) -> bool:
    """Most texts that differ do so in the last token, too, so that is looked at first."""
    size = len(beginning)
    return len(ids) >= size and (not size or (ids[size - 1] == beginning[-1] and np.array_equal(ids[:size], beginning)))


class Branch:
    """A session, and what it has evaluated."""

    def __init__(
        self, session: ServedSession, ids: np.ndarray, checkpoints: Sequence[int], exact_from: int, first: int
    ) -> None:
        """Every position from `exact_from` on is a place. `first`: where its instructions end, if that is known."""
        self.session = session
        self.ids = ids
        self.exact_from = exact_from
        self.places = sorted({*checkpoints, exact_from} - {0})  # the first ones
        # The one that others may share.
        self.first = self.places[0] if exact_from else first
        self.used = 0  # the tree's clock when it was last of use
        self.since = 0.0  # when that was

    def place_before(self, position: int) -> int:
        """The last place that is not behind a position; 0 when there is none."""
        if position >= self.exact_from:
            return position
        return max((place for place in self.places if place <= position), default=0)

    def covers(self, other: Branch) -> bool:
        """Whether it has the tokens of the other one, and a place wherever that has one."""
        if not all(self.place_before(place) == place for place in other.places):
            return False
        # From `exact_from` on, each position is one; nearly always the first says already that it is none of ours.
        behind = range(max(other.exact_from, 1), min(self.exact_from, len(other.ids) + 1))
        return all(self.place_before(place) == place for place in behind) and begins_with(self.ids, other.ids)


@dataclass(frozen=True)
class Found:
    """Where a text can go on: the deepest place, whose it is, and how far any branch has the same tokens."""

    branch: Branch | None
    position: int
    shared: int


class PrefixTree:
    """Branches come and go in one thread. `limit` is how many there may be."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._branches: list[Branch] = []
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        return len(self._branches)

    def __contains__(self, branch: Branch) -> bool:
        return branch in self._branches

    def find(self, ids: np.ndarray, running: Iterable[Branch] = ()) -> Found:
        """For a text whose last token is to be evaluated in any case, for its logits. `running` have branches of
        their own, which stay where they are."""
        found = Found(None, 0, 0)
        for branch in (*self._branches, *running):
            shared = min(shared_prefix(branch.ids, ids), len(ids) - 1)
            place = branch.place_before(shared)
            deeper = place > found.position
            found = Found(branch if deeper else found.branch, max(place, found.position), max(shared, found.shared))
        return found

    def was_used(self, ids: np.ndarray, source: Branch | None, now: float) -> None:
        """A text was begun, from this branch: whatever lies on its way was of use."""
        for branch in self._branches:
            if branch is source or branch.first <= shared_prefix(branch.ids, ids):
                self._use(branch, now)

    def add(self, branch: Branch, now: float) -> None:
        """Those that it makes superfluous go: the same text again, and, if every position is a place, any part of
        it."""
        self._use(branch, now)
        for other in list(self._branches):
            if branch.covers(other):
                self.remove(other).close()
        self._branches.append(branch)
        while len(self._branches) > self._limit:
            self.remove(self.least()).close()

    def remove(self, branch: Branch) -> ServedSession:
        """Its session is the caller's from now on."""
        self._branches.remove(branch)
        return branch.session

    def least(self, *, inner: bool = False, but: Branch | None = None) -> Branch:
        """The branch that is missed least; with `inner`, only of those that others make up for. LookupError when there
        is none. Branches in the midst of others go first: what they hold is needed again only where somebody changes
        what was said before. Then those go that were not used for longest."""
        others = [branch for branch in self._branches if branch is not but]
        midst = [branch for branch in others if self.is_inner(branch)]
        chosen = midst if midst or inner else others
        if not chosen:
            raise LookupError("prefixes: expected a branch that may go, found none")
        return min(chosen, key=lambda branch: branch.used)

    def unused_since(self, time: float) -> Branch | None:
        """The one unused for longest, if it was not used after `time`."""
        oldest = min(self._branches, key=lambda branch: branch.used, default=None)
        return oldest if oldest is not None and oldest.since <= time else None

    def is_inner(self, branch: Branch) -> bool:
        """Whether a branch goes on from its end, and another one has a place as early as its first."""
        return self.goes_on(branch) and any(
            other is not branch and other.first <= branch.first and begins_with(branch.ids, other.ids[: other.first])
            for other in self._branches
        )

    def goes_on(self, branch: Branch) -> bool:
        """Whether another branch goes on from its end."""
        size = len(branch.ids)
        return any(len(other.ids) > size and begins_with(other.ids, branch.ids) for other in self._branches)

    def is_root(self, branch: Branch) -> bool:
        """Whether no other branch has a place before its first."""
        return not any(
            other.first < branch.first and begins_with(branch.ids, other.ids[: other.first]) for other in self._branches
        )

    def all(self) -> list[Branch]:
        """Those unused for longest first."""
        return sorted(self._branches, key=lambda branch: branch.used)

    def _use(self, branch: Branch, now: float) -> None:
        branch.used, branch.since = next(self._clock), now


def places_to_make(borders: Iterable[int], shared: int, every: int, limit: int, start: int, end: int) -> list[int]:
    """Where to make checkpoints between `start` and `end`, `limit` at most: at the borders, where the text leaves what
    others have said (`shared`), and every so many tokens. Where there are too many, the first place stays, for it is
    what others may share, and so do the last ones."""
    stride = max(every, -(-(end - start) // limit))
    places = checkpoint_places({*borders, shared, *range(start + stride, end, stride)}, start, end)
    return places if len(places) <= limit else places[:1] + places[len(places) - limit + 1 :]
