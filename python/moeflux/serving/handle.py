"""An answer on its way from a scheduler, for whoever asked for it: in any thread, or in any event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from moeflux._core import StepStats
from moeflux.text.answer_text import AnswerText
from moeflux.text.generate import Completion, Finish, GenerationStats, Piece, TokenAnswer
from moeflux.text.sampling import Sampling

__all__ = ["Bell", "Handle"]

Tell = Callable[[], object]


class Bell:
    """Tells those who wait for pieces in event loops: after a step for all of its handles, each loop once, which takes
    a system call. Belongs to the thread that evaluates."""

    def __init__(self) -> None:
        self._told: dict[asyncio.AbstractEventLoop, list[Tell]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, tell: Tell) -> None:
        self._told.setdefault(loop, []).append(tell)

    def ring(self) -> None:
        told, self._told = self._told, {}
        for loop, all_of_it in told.items():
            with suppress(RuntimeError):  # the loop has ended, and nobody waits any more
                loop.call_soon_threadsafe(_tell, all_of_it)


class Handle(TokenAnswer):
    """An iterator of pieces, once through, which waits for each. `async for` waits without a thread.

    The answer is made whether or not somebody reads it. When the task that awaits a piece is cancelled, or a Ctrl-C
    comes while one is waited for, so is the answer.
    """

    def __init__(self, prompt: list[int], sampling: Sampling, cancel: Callable[[], object], bell: Bell) -> None:
        self.prompt = prompt
        self.prompt_read = 0  # tokens of it that are evaluated so far, or needed no evaluation
        self.sampling = sampling  # with the seed that is used
        self.tokens: list[int] = []  # of the answer, including a token that ended it
        self.text = ""
        self.finish: Finish | None = None  # None: it goes on
        self.put_aside = 0  # how many times it gave way to others
        self.waited_seconds: float | None = None  # from `submit` until it was begun; None: it waits still
        self._cancel: Callable[[], object] | None = cancel  # None: it has ended
        self._bell = bell
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # to enter it costs more than the lock alone
        self._pieces: deque[Piece] = deque()
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, Tell]] = []
        self._follower: tuple[asyncio.AbstractEventLoop, Tell] | None = None
        self._told = False  # the follower was, and has not looked since
        self._error: BaseException | None = None
        self._stop_string: str | None = None
        self._reused = 0
        self._submitted = self._first = self._last = time.perf_counter()  # when the first and the last token came
        self._runs: list[tuple[StepStats, StepStats]] = []  # the totals of its session when it began, and when it ended

    @property
    def stop_string(self) -> str | None:
        """The string of `stop` that was found."""
        return self._stop_string

    @property
    def stats(self) -> GenerationStats:
        """What the answer has cost so far. Its prompt's seconds begin with `submit`. What was read for it is known at
        its end, and what was read for several at once counts for each of them."""
        runs = self._runs
        return GenerationStats(
            len(self.prompt),
            self._reused,
            self._first - self._submitted,
            len(self.tokens),
            self._last - self._first,
            sum(after.bytes_read - before.bytes_read for before, after in runs),
            sum(after.read_wait_seconds - before.read_wait_seconds for before, after in runs),
            sum(after.expert_hits - before.expert_hits for before, after in runs),
            sum(after.expert_misses - before.expert_misses for before, after in runs),
            sum(after.drafted - before.drafted for before, after in runs),
            sum(after.accepted - before.accepted for before, after in runs),
            sum(after.host_hits - before.host_hits for before, after in runs),
            sum(after.bytes_copied - before.bytes_copied for before, after in runs),
        )

    def cancel(self) -> None:
        """Ends the answer within one chunk, also in the midst of its prompt. May be called from any thread."""
        cancel = self._cancel
        if cancel is not None:
            cancel()

    def close(self) -> None:
        """Ends the answer here, as `cancel` does, and waits for that."""
        self.cancel()
        self.wait()

    def completion(self) -> Completion:
        """Waits for the whole answer: a string, with `finish`, `stats` and `tokens`."""
        return Completion.of(self)

    # ---- Reading ------------------------------------------------------------------------------------------------

    def __next__(self) -> Piece:
        with self._changed:
            try:
                while not self._pieces and self.finish is None:
                    self._changed.wait()
            except BaseException:  # Ctrl-C
                self.cancel()
                raise
            piece = self._taken()
        if piece is None:
            raise StopIteration
        return piece

    async def __anext__(self) -> Piece:
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if self._pieces or self.finish is not None:
                    piece = self._taken()
                    break
                woken: asyncio.Future[None] = loop.create_future()
                self._sleepers.append((loop, partial(_wake, woken)))
            try:
                await woken
            except asyncio.CancelledError:
                self.cancel()
                raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def follow(self, tell: Tell) -> None:
        """Calls this in the event loop that runs now when something has come, which `arrived` has then; and again when
        more has come after that was asked, and at the end. One follower takes what several answers have."""
        with self._changed:
            self._follower = asyncio.get_running_loop(), tell
            here = bool(self._pieces) or self.finish is not None
        if here:
            tell()

    def arrived(self) -> list[Piece] | None:
        """The pieces that have come since the last time; None when no more will. The error that ended the answer,
        once."""
        with self._lock:
            self._told = False
            pieces = list(self._pieces)
            self._pieces.clear()
            if pieces or self.finish is None:
                return pieces
            self._taken()
            return None

    def _taken(self) -> Piece | None:
        """The next piece; None at the end. The error that ended the answer, once."""
        if self._pieces:
            return self._pieces.popleft()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return None

    def __repr__(self) -> str:
        finish = "" if self.finish is None else f", finish={self.finish!r}"
        return f"Handle({len(self.prompt)} + {len(self.tokens)} tokens{finish}, text={self.text[-60:]!r})"

    # ---- Writing: by the thread that evaluates ------------------------------------------------------------------

    def begun(self, reused: int, waited: float) -> None:
        """The first time that it runs."""
        if self.waited_seconds is None:
            self.waited_seconds, self._reused = waited, reused
        self.read(reused)

    def read(self, position: int) -> None:
        """So many tokens are evaluated. After it was put aside, it may be fewer than before."""
        self.prompt_read = max(self.prompt_read, min(position, len(self.prompt)))

    def say(self, piece: Piece, text: AnswerText) -> None:
        now = time.perf_counter()
        with self._lock:
            if piece.token is not None:
                self._first, self._last = self._first if self.tokens else now, now
                self.tokens.append(piece.token)
            self.text += piece.text
            self._stop_string = text.stop_string
            self._pieces.append(piece)
            self._wake()

    def cost(self, before: StepStats, after: StepStats) -> None:
        """What its session had read before and after one of its runs."""
        self._runs.append((before, after))

    def over(self, finish: Finish, error: BaseException | None) -> None:
        with self._lock:
            self.finish, self._error = finish, error
            # It holds the request, which holds this: nothing of either would be free before the collector comes.
            self._cancel = None
            self._told = False  # of the end it is told even so
            self._wake()

    def _wake(self) -> None:
        """Who waits in a thread comes now, and who does in an event loop when the bell rings."""
        self._changed.notify_all()
        for loop, tell in self._sleepers:
            self._bell.add(loop, tell)
        self._sleepers.clear()
        if self._follower is not None and not self._told:
            self._told = True
            self._bell.add(*self._follower)


def _tell(all_of_it: list[Tell]) -> None:
    for tell in all_of_it:
        tell()


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
