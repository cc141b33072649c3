"""Many requests, one model: see docs/serving.md."""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path

from moeflux.errors import ArgumentError, StateError, refusals
from moeflux.runtime.plan_table import Plan
from moeflux.serving.handle import Handle
from moeflux.serving.loop import Loop
from moeflux.serving.options import DAY, Options
from moeflux.serving.protocols import MakeDecoder, ServedModel
from moeflux.serving.request import Job, Request
from moeflux.serving.stats import SchedulerStats

__all__ = ["Scheduler"]


class Scheduler:
    """Answers many requests at once, in a thread of its own. No answer depends on what else is asked for, on the order,
    or on who was put aside for whom.

    A conversation goes on where its last answer ended, and what prompts have in common is evaluated once, as long as
    there is memory to keep it; with `disk`, also after that and after a restart.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        decoder: MakeDecoder | None = None,
        running: int | None = None,
        waiting: int = 64,
        rows: int = 0,
        prompt_rows: int | None = None,
        checkpoints: int = 8,
        checkpoint_every: int = 2048,
        idle: int = 64,
        idle_seconds: float = 300.0,
        disk: str | Path | None = None,
        disk_quota: int | str = "20GB",
        disk_seconds: float = 30 * DAY,
    ) -> None:
        """
        running           answers that are made at the same time, at most; by default the sessions that the model was
                          loaded for
        waiting           requests that wait, at most: Refused for one more
        rows              tokens that one step evaluates, at most; 0: those of a chunk
        prompt_rows       how many of them may be of prompts while answers are under way: fewer let those come sooner.
                          By default as many as make a step take not quite twice as long, which is measured
        checkpoints       places that a prompt leaves for others to go on from, at most, in models with recurrent layers
                          or windows
        checkpoint_every  tokens after which a long prompt leaves one, besides the ends of its messages
        idle              branches that are kept in memory, at most; they go earlier when there is no memory for others
        idle_seconds      with `disk`: those that nobody used for so long move there
        disk              a folder for them, for this alone; made if there is none
        disk_quota        bytes that it may have, as 20_000_000_000 or "20GB"
        disk_seconds      files unused for so long are removed
        decoder           makes what evaluates, in place of the model's own; for tests
        """
        options = Options(
            running=default_running(model) if running is None else running,
            waiting=waiting,
            rows=rows,
            prompt_rows=prompt_rows,
            checkpoints=checkpoints,
            checkpoint_every=checkpoint_every,
            idle=idle,
            idle_seconds=idle_seconds,
            disk=disk,
            disk_quota=disk_quota,
            disk_seconds=disk_seconds,
        )
        made = model.make_decoder(rows) if decoder is None else decoder(model._engine, rows)
        if prompt_rows is not None:
            made.prompt_rows = prompt_rows
        self._model = model
        self._loop = Loop(model, made, options)
        self._max_context = self._loop.max_context
        self._thread = threading.Thread(target=self._loop.run, name="moeflux-scheduler", daemon=True)
        with refusals("a scheduler"):
            self._thread.start()
        # When nobody has the scheduler any more, and when the interpreter ends.
        self._finalizer = weakref.finalize(self, _end, self._loop, self._thread)

    def submit(self, request: Request) -> Handle:
        """Takes a request, from any thread. The answer comes through the handle.

        ArgumentError for a request that is wrong. Refused when as many wait as may wait; it says how many, and how long
        it may take.
        """
        if not isinstance(request, Request):
            raise ArgumentError(f"submit: expected a Request, found {type(request).__name__}")
        if self._model.closed:
            raise StateError("submit: expected a model that is open, found it closed")
        asked = request.asked(self._model)
        if not asked.tokens:
            raise ArgumentError("prompt: expected at least one token, found none")
        if len(asked.tokens) > self._max_context:
            raise ArgumentError(
                f"prompt: expected at most {self._max_context} tokens (the context), found {len(asked.tokens)}"
            )
        job = Job(request, self._model, asked, time.monotonic())
        job.handle = Handle(asked.tokens, job.sampling, lambda: self._loop.cancel(job), self._loop.bell)
        self._loop.accept(job)
        return job.handle

    @property
    def stats(self) -> SchedulerStats:
        """What it has done so far, and how quickly."""
        return self._loop.stats()

    # ---- Ending -------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return not self._thread.is_alive()

    def close(self, drain: bool = True) -> None:
        """Takes no more requests, and waits for the end of those that it has. Without `drain`, they end where they are.
        Then states go to the disk, if there is one, and their memory is given back."""
        try:
            self._loop.close(drain)
            self._thread.join()
        except BaseException:  # Ctrl-C while it drains
            _end(self._loop, self._thread)
            raise
        self._finalizer.detach()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Drains, unless an exception ends the `with`."""
        self.close(drain=kind is None)

    def __repr__(self) -> str:
        return f"Scheduler({self._model!r}, {'closed' if self.closed else self.stats})"


def default_running(model: ServedModel) -> int:
    plan: Plan | None = model._plan
    return plan.sessions if plan is not None else 1


def _end(loop: Loop, thread: threading.Thread) -> None:
    loop.close(drain=False)
    thread.join()
