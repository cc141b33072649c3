"""The thread that evaluates: it takes requests in, lets them begin, goes on by one step for all, and tells what came.

Whatever it is told by other threads (a request, a cancellation, an end) it sees between two steps, and a step is one
chunk at most. While nothing comes but tokens, the decoder goes ahead: it makes the next steps while this thread tells
what came of the last one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Literal

from moeflux._core import Cancel
from moeflux.errors import Cancelled, Error, Refused
from moeflux.log import LOG
from moeflux.serving.admission import PATIENCE, Admission
from moeflux.serving.handle import Bell
from moeflux.serving.line import Line
from moeflux.serving.options import Options
from moeflux.serving.protocols import Decoder, Event, ServedModel
from moeflux.serving.request import Job
from moeflux.serving.share import PromptShare
from moeflux.serving.stats import Counts, SchedulerStats, Times
from moeflux.text.generate import Finish

__all__ = ["Loop"]


MOST_FAULTS = 16
"""Turns in a row that fail, until the scheduler ends."""


class Loop:
    def __init__(self, model: ServedModel, decoder: Decoder, options: Options) -> None:
        self._decoder = decoder
        self._options = options
        self._notes = model._notes
        self._share = PromptShare(decoder.rows) if options.prompt_rows is None else None
        self._line = Line(options.waiting)
        self._running: dict[int, Job] = {}
        self._counts = Counts()
        self._first_token, self._between_tokens, self._service = Times(), Times(), Times()
        self._step_cancel = Cancel()
        self.bell = Bell()  # of all handles
        self._next_tidy: float | None = None
        self._faults = 0  # turns in a row that failed
        self._tried = 0.0  # when those who wait were last asked
        self._stepped = 0.0  # when the last step was over
        self._ahead_until: float | None = None  # then the decoder is to rest, for somebody's time is over
        # Of all threads, under its lock.
        self._changed = threading.Condition()
        self._arrivals: list[Job] = []
        self._closing: Literal["", "drain", "now"] = ""
        self._woken = False
        self._admission = Admission(model, options, self.wake)
        self.max_context = self._admission.max_context

    # ---- Of all threads -----------------------------------------------------------------------------------------

    def accept(self, job: Job) -> None:
        """Refused when too many wait, or when nothing is accepted any more."""
        with self._changed:
            try:
                if self._closing:
                    raise Refused("submit: expected a scheduler that is open, found it closing or closed")
                self._line.check(len(self._arrivals), self._expected_wait)
            except Refused:
                self._counts.refused += 1
                raise
            self._counts.accepted += 1
            job.order = self._counts.accepted
            self._arrivals.append(job)
            self._woken = True
            self._decoder.end_ahead()
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        job.cancelled = True
        self.wake()

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._decoder.end_ahead()
            self._changed.notify()

    def close(self, drain: bool) -> None:
        """Nothing is accepted any more. What was accepted is finished first, or ends where it is."""
        with self._changed:
            if not drain:
                self._closing = "now"
                self._step_cancel.set()
            elif not self._closing:
                self._closing = "drain"
            self._decoder.end_ahead(at_once=not drain)
            self._changed.notify()

    def stats(self) -> SchedulerStats:
        disk = self._admission.disk
        return SchedulerStats(
            **asdict(self._counts),
            waiting=len(self._line) + len(self._arrivals),
            running=len(self._running),
            idle=len(self._admission.tree),
            saved=0 if disk is None else len(disk),
            saved_bytes=0 if disk is None else disk.bytes,
            first_token_p50=self._first_token.percentile(50),
            first_token_p99=self._first_token.percentile(99),
            between_tokens_p50=self._between_tokens.percentile(50),
            between_tokens_p99=self._between_tokens.percentile(99),
        )

    def _expected_wait(self) -> float | None:
        """Until one more request is begun, if all take as long as those before them."""
        each = self._service.mean()
        ahead = len(self._line) + len(self._arrivals)
        return None if each is None else each * (ahead + 1) / self._options.running

    # ---- The thread ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        error: BaseException | None = None
        try:
            while self._wait():
                try:
                    self._turn()
                    self._faults = 0
                except Error as found:
                    self._go_on(found)
        except BaseException as found:
            LOG.exception("the scheduler ends: %s", found)
            error = found
        self._end(error)

    def _turn(self) -> None:
        """While steps are made ahead, what came of them is told, and nothing else is done. Whoever is to do more has
        them end first."""
        if not self._running:
            self._settle()
        rests = not self._decoder.is_ahead
        now = time.monotonic()
        if rests:
            self._end_early(now)
            self._begin(now)
            self.bell.ring()  # a step may take long
        elif self._ahead_until is not None and now >= self._ahead_until:
            self._decoder.end_ahead()
        self._step(rests)
        self.bell.ring()
        if not self._decoder.is_ahead:
            self._next_tidy = self._admission.tidy(time.monotonic())

    def _go_on(self, error: Error) -> None:
        """Something failed of which it is not known whom it was for, as where memory is short: all who run fail."""
        self._faults += 1
        if self._faults > MOST_FAULTS:
            raise error
        LOG.warning("a turn failed, and the %d answers that were under way: %s", len(self._running), error)
        self._settle()
        for job in list(self._running.values()):
            self._stop(job)
            self._fail(job, error, time.monotonic())
        self._rest()

    def _settle(self) -> None:
        """No step is made ahead from now on. What came of those is not told any more."""
        self._decoder.end_ahead(at_once=True)
        while self._decoder.is_ahead:
            with suppress(Error):
                self._decoder.step()

    def _wait(self) -> bool:
        """Until there is something to do. Returns whether to go on."""
        with self._changed:
            while True:
                for job in self._arrivals:
                    self._line.add(job)
                self._arrivals.clear()
                if self._closing == "now" or (self._closing and not self._running and not len(self._line)):
                    return False
                if self._running or self._woken:
                    if self._woken:
                        self._decoder.end_ahead()
                    self._woken = False
                    return True
                seconds = self._seconds_to_sleep()
                if seconds is not None and seconds <= 0:
                    return True
                self._changed.wait(seconds)

    def _seconds_to_sleep(self) -> float | None:
        now = time.monotonic()
        times = [job.deadline for job in self._line if job.deadline is not None]
        times += [] if self._next_tidy is None else [self._next_tidy]
        times += [self._tried + PATIENCE] if len(self._line) else []
        return min(times) - now if times else None

    # ---- Beginning ----------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """Lets those begin whose turn it is, while there is room. Who finds no memory is not overtaken by others that
        could do with less: they would keep it from ever beginning."""
        self._tried = now
        for job in self._line.in_turn():
            if self._running and job.short_since == self._counts.ended:
                return  # it gave way to those who run, and would again
            full = len(self._running) >= self._options.running
            if full and self._less_entitled(job, fairly=True) is None:
                continue
            try:
                if not self._admission.is_ready(job, self._running.values()):
                    continue
                if full:
                    self._displace(job, now, fairly=True)
                while not self._admission.begin(job, self._running.values(), now):
                    if self._admission.is_freeing or not self._displace(job, now, fairly=False):
                        return
            except Error as error:
                self._line.take(job)
                self._fail(job, error, now)
                continue
            self._start(job, now)

    def _displace(self, job: Job, now: float, *, fairly: bool) -> bool:
        """Puts somebody aside for a job, if there is anybody who should give way."""
        victim = self._less_entitled(job, fairly=fairly)
        if victim is not None:
            self._put_aside(victim, now)
        return victim is not None

    def _less_entitled(self, job: Job, *, fairly: bool) -> Job | None:
        """Who gives way to a job: the youngest of a lower priority. Or, `fairly`, of the same priority, when its tenant
        runs two more than the job's own."""
        lower = [other for other in self._running.values() if other.priority < job.priority]
        if lower:
            return max(lower, key=_youth)
        count = {job.tenant: 0}
        for other in self._running.values():
            count[other.tenant] = count.get(other.tenant, 0) + 1
        over = [
            other
            for other in self._running.values()
            if other.priority == job.priority and count[other.tenant] >= count[job.tenant] + 2
        ]
        return max(over, key=lambda other: (count[other.tenant], other.order)) if fairly and over else None

    def _start(self, job: Job, now: float) -> None:
        assert job.session is not None
        self._line.take(job)
        reused, asked = job.position, job.asked
        try:
            job.totals = job.session.total_stats
            job.id = self._decoder.add(
                job.session._core,
                job.ids[reused:],
                job.core_sampler()._core,
                sorted(asked.end_tokens),
                job.tokens_left,
                logprobs=asked.logprobs,
                borders=job.places,
                masked=job.mask is not None,
                stepwise=bool(asked.stop),  # its session is to stand where the answer ends
            )
        except Error as error:
            self._fail(job, error, now)
            return
        self._running[job.id] = job
        job.reads = True
        job.begun_at = now
        self._counts.reused_tokens += reused
        job.handle.begun(reused, now - job.arrived)
        self._set_mask(job, now)

    def _set_mask(self, job: Job, now: float) -> None:
        """Before each choice. A mask is somebody else's program: whatever it raises ends that answer alone."""
        if job.mask is None:
            return
        try:
            self._decoder.set_mask(job.id, job.allowed())
        except Exception as error:
            self._stop(job)
            self._fail(job, error, now)

    # ---- A step -------------------------------------------------------------------------------------------------

    def _step(self, rests: bool) -> None:
        """`rests`: no steps are made ahead, but may be now."""
        if not self._running:
            return
        if self._share is not None and rests:
            self._decoder.prompt_rows = self._share.rows([job.unread for job in self._running.values() if job.reads])
        began = time.monotonic() if rests else self._stepped
        try:
            events = self._decoder.step(self._step_cancel)
            if rests:
                self._go_ahead(events)
        except Cancelled:
            return
        except Error as error:
            LOG.warning("a step failed, and the %d answers that it was for: %s", len(self._running), error)
            for job in list(self._running.values()):
                self._stop(job)
                self._fail(job, error, time.monotonic())
            return
        self._stepped = now = time.monotonic()
        answers = {event.id for event in events if event.token is not None and not event.evaluated}
        if self._share is not None and (rests or len(answers) == len(events)):  # those of one step
            self._share.note(now - began, len(answers), sum(event.evaluated for event in events))
        heard = [(self._running[event.id], event) for event in events if event.id in self._running]
        for _, event in heard[:1]:  # what a step has cost is known to each of its requests
            self._notes.note_stats(event.stats)
        for job, event in heard:
            if event.id in self._running:  # its answer goes on
                try:
                    self._hear(job, event, now)
                except Error as error:
                    if event.id in self._running:
                        self._stop(job)
                    if job.handle.finish is None:
                        self._fail(job, error, now)
        short = [event for _, event in heard if event.error == "budget"]
        if short:
            self._make_room(now)
        if heard and len(short) == len(heard) and self._admission.is_freeing:
            self._rest()

    def _hear(self, job: Job, event: Event, now: float) -> None:
        self._counts.evaluated_tokens += event.evaluated
        self._line.charge(job, event.evaluated + (event.token is not None))
        if event.finish == "failed":
            del self._running[job.id]
            # A token that was chosen in this step and not told is lost, and chance does not choose it again.
            if event.token is None and self._admission.is_lost(job) and job.may_try_again():
                LOG.warning("an answer is made again from where its state is kept: %s", event.error)
                self._try_again(job)
            else:
                self._fail(job, Error(event.error), now)
            return
        if event.evaluated:
            job.handle.read(job.position)
        if event.token is None:
            return
        job.reads = False
        self._counts.tokens += 1
        if job.last_token is None:
            self._first_token.add(now - job.arrived)
        else:
            self._between_tokens.add(now - job.last_token)
        job.last_token = now
        finish = job.take(event)
        if finish is None:
            self._set_mask(job, now)
            return
        if event.finish:
            del self._running[job.id]
        else:
            self._stop(job)
        self._keep(job, now)
        self._over(job, finish, now)

    def _go_ahead(self, events: Sequence[Event]) -> None:
        """If nothing but tokens has come. The GPU, or the cores, need not wait then until this thread has told of them.
        Whatever else this thread is to do wakes it, or has its time, and ends the steps ahead."""
        if self._woken or any(event.finish or event.error or event.evaluated for event in events):
            return
        times = [job.deadline for job in self._running.values() if job.deadline is not None]
        seconds = self._seconds_to_sleep()
        times += [] if seconds is None else [time.monotonic() + seconds]
        self._ahead_until = min(times, default=None)
        with suppress(Error):  # there is no thread or no memory for it, and each step is asked for
            self._decoder.go_ahead()

    def _make_room(self, now: float) -> None:
        """Somebody's next rows found no memory, and none is about to come back. Idle branches go first. Then the
        youngest of those with the lowest priority is put aside; its state goes to the disk, or is evaluated again."""
        if self._admission.is_freeing or self._admission.drop():
            return
        victim = max(self._running.values(), key=_youth)
        self._put_aside(victim, now)
        victim.short_since = self._counts.ended
        if self._running:
            self._admission.drop()

    def _rest(self) -> None:
        """Until something has changed: nobody can go on before the disk has given memory back. What has come by now is
        told first."""
        self.bell.ring()
        with self._changed:
            if not self._woken:
                self._changed.wait(PATIENCE)

    # ---- Ending -------------------------------------------------------------------------------------------------

    def _end_early(self, now: float) -> None:
        """Those who were cancelled, and those whose time is over."""
        for job in (*self._line, *self._running.values()):
            late = job.deadline is not None and job.deadline <= now
            if not (job.cancelled or late):
                continue
            if job.running:
                self._stop(job)
                self._keep(job, now)
            else:
                self._line.take(job)
            self._over(job, "cancelled" if job.cancelled else "timeout", now)

    def _stop(self, job: Job) -> None:
        """Takes a job out of the decoder. Its session stays as it is."""
        del self._running[job.id]
        self._decoder.remove(job.id)

    def _try_again(self, job: Job) -> None:
        """Its session was lost, in a step that may have failed for somebody else."""
        self._admission.discard(job)
        job.go_on_later()
        self._line.put_back(job)

    def _put_aside(self, job: Job, now: float) -> None:
        """The job goes on later, from where it is now."""
        self._stop(job)
        self._keep(job, now)
        job.go_on_later()
        job.handle.put_aside += 1
        self._counts.put_aside += 1
        self._line.put_back(job)

    def _keep(self, job: Job, now: float) -> None:
        assert job.session is not None and job.totals is not None
        try:
            totals = job.session.total_stats
            job.handle.cost(job.totals, totals)
            self._counts.drafted_tokens += totals.drafted - job.totals.drafted
            self._counts.drafts_accepted += totals.accepted - job.totals.accepted
            self._admission.keep(job, now)
        except Error as error:
            LOG.warning("the state of an answer is lost: %s", error)
            self._admission.discard(job)

    def _fail(self, job: Job, error: BaseException, now: float) -> None:
        if job.running:
            self._admission.discard(job)
        self._over(job, "failed", now, error)

    def _over(self, job: Job, finish: Finish, now: float, error: BaseException | None = None) -> None:
        self._line.leave(job)
        counts = self._counts
        counts.ended += 1
        counts.cancelled += finish == "cancelled"
        counts.timed_out += finish == "timeout"
        counts.failed += finish == "failed"
        if job.begun_at:
            self._service.add(now - job.begun_at)
        job.end(finish, error)
        LOG.debug("answer: %s: %s", finish, job.handle.stats)

    def _end(self, error: BaseException | None) -> None:
        """Nothing goes on: with an error, as an error of all. Whoever waits for an answer is told first."""
        with self._changed:
            self._closing = "now"
            left = [*self._line, *self._arrivals, *self._running.values()]
            self._arrivals.clear()
        self._line.clear()
        self._counts.ended += len(left)
        for job in left:
            job.end("cancelled" if error is None else "failed", error)
        self.bell.ring()
        self._settle()
        for job in list(self._running.values()):
            self._stop(job)
            if error is None:
                self._keep(job, time.monotonic())
            else:
                self._admission.discard(job)
        self._running.clear()
        self._admission.close()


def _youth(job: Job) -> tuple[int, int]:
    return -job.priority, job.order
