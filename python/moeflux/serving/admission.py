"""Which session a job runs in, where memory for it comes from, and what becomes of its state when it stops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from moeflux.errors import BudgetError, PeerError, StateError
from moeflux.log import LOG
from moeflux.serving.disk import DiskTier
from moeflux.serving.options import Options
from moeflux.serving.prefixes import Branch, Found, PrefixTree, places_to_make, shared_prefix
from moeflux.serving.protocols import ServedModel, ServedSession
from moeflux.serving.request import Job
from moeflux.sizes import parse_size

__all__ = ["PATIENCE", "Admission"]

PATIENCE = 0.05
"""Seconds until somebody who found no memory, or no time of the disk, asks again, when no event would tell."""
WORTH_WAITING = 64
"""Tokens. For fewer, nobody waits for a file, or for somebody else to evaluate them."""

Made = TypeVar("Made")


@dataclass
class Coming:
    """A session that the disk brings to the state behind these tokens."""

    session: ServedSession
    ids: np.ndarray
    first: int
    done: Future[bool]


class Admission:
    """Belongs to the thread that evaluates. A job that begins goes on from the deepest place that is exact: of a branch
    in memory, of one on disk, or of one that another job is just about to reach."""

    def __init__(self, model: ServedModel, options: Options, wake: Callable[[], None]) -> None:
        """`wake` is called, in any thread, when who waits for the disk need not wait any more."""
        self._model = model
        self._options = options
        self._forgets = model.variant.forgets
        self.tree = PrefixTree(options.idle)
        self._coming: list[Coming] = []
        self.disk: DiskTier | None = None
        session = model.session()
        self.max_context, lossy = session.max_context, session.lossy
        session.close()
        if options.disk is not None:
            identity = f"{model.fingerprint}, {model.arithmetic}, {lossy}"
            quota = parse_size("disk_quota", options.disk_quota)
            self.disk = DiskTier(options.disk, model, identity, quota, options.disk_seconds, wake)

    # ---- Beginning ----------------------------------------------------------------------------------------------

    def is_ready(self, job: Job, running: Iterable[Job]) -> bool:
        """Whether the job should begin now. Where it is worth it, it waits until its state is read, or until a job
        that runs has evaluated what both have in common."""
        self._arrive()
        if not self._model.ready or self._waits(job):
            return False
        running = list(running)
        found = self._find(job, running)
        return not self._fetch(job, found) and not self._follow(job, found, running)

    def begin(self, job: Job, running: Iterable[Job], now: float) -> bool:
        """Gives the job a session that holds what can be reused. False when there is no memory for one now."""
        found = self._find(job, running)
        try:
            session = self._session_at(found)
            places = self._places(job, session, found)
        except BudgetError:
            return False
        except PeerError:  # the session was lost with a machine, or is not to be had now
            if found.branch is None and self._model.ready:
                raise
            if found.branch is not None and found.branch in self.tree:
                self.tree.remove(found.branch).close()
            return False
        job.session, job.places = session, places
        self.tree.was_used(job.ids, found.branch, now)
        return True

    def _find(self, job: Job, running: Iterable[Job]) -> Found:
        return self.tree.find(job.ids, (self._branch_of(other) for other in running))

    def _waits(self, job: Job) -> bool:
        if job.fetched is not None and not job.fetched.done():
            return True
        if job.behind is None:
            return False
        other, position = job.behind
        if other.running and other.position < position:
            return True
        job.behind = None
        return False

    def _fetch(self, job: Job, found: Found) -> bool:
        """Has a state read that is deeper than what there is in memory, if there is memory for it."""
        position = 0 if self.disk is None else self.disk.find(job.ids)
        if self.disk is None or position < found.position + WORTH_WAITING:
            return False
        ids = job.ids[:position]
        for other in self._coming:
            if np.array_equal(other.ids, ids):
                job.fetched = other.done
                return True
        try:
            session = self._with_room(partial(self._session_of, position))
        except BudgetError:
            return self.is_freeing
        first = min([*job.borders[:1], position])
        job.fetched = self.disk.fetch(session, ids)
        self._coming.append(Coming(session, ids, first, job.fetched))
        return True

    def _session_of(self, positions: int) -> ServedSession:
        """With memory for the rows of so many."""
        session = self._model.session()
        try:
            session._core.make_room(positions)
        except BudgetError:
            session.close()
            raise
        return session

    def _arrive(self) -> None:
        """What has come from the disk becomes a branch."""
        over = [each for each in self._coming if each.done.done()]
        self._coming = [each for each in self._coming if each not in over]
        for each in over:
            if each.done.result():
                branch = Branch(each.session, each.ids, (), each.session.exact_from, each.first)
                self.tree.add(branch, time.monotonic())
                continue
            each.session.close()
            assert self.disk is not None
            self.disk.forget(each.ids)

    def _follow(self, job: Job, found: Found, running: list[Job]) -> bool:
        """Waits for a job that evaluates the same tokens now: until it has left a place there."""
        best = found.position + WORTH_WAITING
        for other in running:
            shared = min(shared_prefix(other.ids, job.ids), len(job.ids) - 1)
            ahead = [place for place in other.places if other.position < place <= shared]
            place = max(ahead, default=0) if self._forgets else shared
            if place > max(best, other.position):
                best, job.behind = place, (other, place)
        return job.behind is not None

    def _branch_of(self, job: Job) -> Branch:
        """What a running job has evaluated, for others to go on from."""
        assert job.session is not None
        ids = job.ids[: job.position]
        return Branch(job.session, ids, job.session.checkpoints, job.session.exact_from, len(ids))

    # ---- Sessions -----------------------------------------------------------------------------------------------

    def _session_at(self, found: Found) -> ServedSession:
        """A fork of the branch. Where there is no memory for it, the branch itself, if nobody is running in it."""
        branch, position = found.branch, found.position
        if branch is None:
            return self._with_room(self._model.session)

        def fork() -> ServedSession:
            return branch.session.fork(position)

        if branch not in self.tree:
            return self._with_room(fork)
        at_its_end = position == len(branch.ids)  # nothing is lost when the branch itself goes on
        try:
            return self._with_room(fork, inner=at_its_end, but=branch)
        except BudgetError:
            if self.is_freeing:
                raise
            session = self.tree.remove(branch)
        if at_its_end and self._forgets:
            session.checkpoint()
        session.rewind(position)
        return session

    def _with_room(self, make: Callable[[], Made], *, inner: bool = False, but: Branch | None = None) -> Made:
        """What `make` gives. While there is no memory for it, idle branches go, one of them to the disk: BudgetError
        until that has given its memory back."""
        while True:
            try:
                return make()
            except BudgetError:
                if (self.is_freeing and not inner) or not self.drop(inner=inner, but=but):
                    raise

    def _places(self, job: Job, session: ServedSession, found: Found) -> list[int]:
        """Where the job's session makes checkpoints on its way, as many as there is memory for."""
        if not self._forgets:
            return []
        options, start = self._options, session.position
        places = places_to_make(
            job.borders, found.shared, options.checkpoint_every, options.checkpoints, start, len(job.ids)
        )
        while True:
            try:
                rooms = min(len(places) + len(session.checkpoints) + 1, 2 * options.checkpoints + 1)
                self._with_room(partial(session.set_max_checkpoints, rooms), inner=True)
                break
            except BudgetError:
                if not places:
                    break
                places.pop(len(places) // 2)
        if start:
            session.checkpoint()
        return places

    # ---- Ending -------------------------------------------------------------------------------------------------

    def keep(self, job: Job, now: float) -> None:
        """The job runs no more. What its session has evaluated becomes a branch."""
        assert job.session is not None
        session = job.session
        ids = np.asarray(session.tokens, np.int32)
        if not len(ids):
            self.discard(job)
            return
        if self._forgets:
            session.set_max_checkpoints(max(len(session.checkpoints), 1))
        first = job.borders[0] if job.borders else len(ids)
        job.session = None
        self.tree.add(Branch(session, ids, session.checkpoints, session.exact_from, first), now)

    def is_lost(self, job: Job) -> bool:
        """Whether a failure has left the job's session unusable."""
        assert job.session is not None
        try:
            job.session._core.make_room(0)
        except (PeerError, StateError):
            return True
        return False

    def discard(self, job: Job) -> None:
        """The job runs no more, and its session is of no use to others."""
        assert job.session is not None
        job.session.close()
        job.session = None

    def drop(self, *, inner: bool = False, but: Branch | None = None) -> bool:
        """Gives back the memory of the branch that is missed least, once it is on the disk. Returns whether there was
        one."""
        try:
            branch = self.tree.least(inner=inner, but=but)
        except LookupError:
            return False
        self._move(branch)
        return True

    # ---- The disk -----------------------------------------------------------------------------------------------

    def tidy(self, now: float) -> float | None:
        """Moves a branch to the disk that was idle for long. Returns when the next one will have been."""
        if self.disk is None:
            return None
        branch = self.tree.unused_since(now - self._options.idle_seconds)
        if branch is not None and self.disk.busy:
            return now + PATIENCE
        if branch is not None:
            self._move(branch)
        oldest = next(iter(self.tree.all()), None)
        return None if oldest is None else oldest.since + self._options.idle_seconds

    @property
    def is_freeing(self) -> bool:
        """Whether a state is on its way to the disk, whose memory comes back then."""
        return self.disk is not None and self.disk.busy

    def _move(self, branch: Branch) -> None:
        """To the disk, if that has time now. Else its memory comes back at once."""
        self._give_up(branch, [] if self.is_freeing else self._worth_saving(branch))

    def _worth_saving(self, branch: Branch) -> list[int]:
        """The end of a branch unless another one goes on from there, and its first place if no other branch has one as
        early: the rest is evaluated again if somebody asks for it."""
        disk, first, end = self.disk, branch.first, len(branch.ids)
        if disk is None:
            return []
        saves_end = not self.tree.goes_on(branch) and not disk.has(branch.ids)
        saves_first = first < end and self.tree.is_root(branch) and not disk.has(branch.ids[:first])
        return [end] * saves_end + [first] * saves_first

    def _give_up(self, branch: Branch, positions: list[int]) -> None:
        """Has the disk keep what it was at these positions."""
        session = self.tree.remove(branch)
        try:
            if self.disk is not None and positions:
                self.disk.save(session, positions)
                return
        except RuntimeError as error:  # ours, or no thread any more because the interpreter ends
            LOG.warning("a state is not saved: %s", error)
        session.close()

    def close(self) -> None:
        """Everything idle goes to the disk, or is given back."""
        for branch in self.tree.all():
            self._give_up(branch, self._worth_saving(branch))
        if self.disk is not None:
            self.disk.close()
        for each in self._coming:
            each.session.close()
