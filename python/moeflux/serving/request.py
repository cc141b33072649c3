"""What somebody wants of a scheduler, and what it knows of that while it is on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import cast

import numpy as np

from moeflux._core import StepStats
from moeflux.errors import ArgumentError, found
from moeflux.runtime.tokens import Tokens, token_array
from moeflux.serving.handle import Handle
from moeflux.serving.protocols import NO_LIMIT, Event, ServedModel, ServedSession
from moeflux.text.asked import Asked, ask
from moeflux.text.chat import Prompt
from moeflux.text.generate import Finish, Piece
from moeflux.text.sampling import Sampler, Sampling

__all__ = ["Job", "Mask", "Request"]

TRIES = 3
"""To get to its next token, of an answer whose session is lost again and again."""

Mask = Callable[[Sequence[int]], "np.ndarray | None"]
"""Is given the tokens of the answer so far, once before each choice. Returns the tokens that may follow, as bits in
uint32 [ceil(vocab / 32)] (bit i of word w is for token 32 * w + i), or None when all may."""


@dataclass(frozen=True)
class Request:
    """A prompt and how its answer is made. `Session.generate` says what the fields up to `continues` mean."""

    prompt: str | Tokens | Prompt
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_tokens: Collection[int] = ()
    ignore_end: bool = False
    sampling: Sampling | None = None
    logprobs: int | None = None
    continues: bool = True
    mask: Mask | None = None  # called in the thread that evaluates: while it runs, everybody waits
    tenant: str = ""  # all tenants get the same share of what is computed
    priority: int = 0  # a higher one is begun first, and puts lower ones aside
    deadline: float | None = None  # seconds from `submit`; then the answer ends where it is
    borders: Tokens = ()  # positions of the prompt where later prompts may leave it, besides those of a Prompt

    def asked(self, model: ServedModel) -> Asked:
        """The same, checked."""
        if not isinstance(self.tenant, str):
            raise ArgumentError(f"tenant: expected a name, found {found(self.tenant)}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise ArgumentError(f"priority: expected a whole number, found {found(self.priority)}")
        return ask(
            model,
            self.prompt,
            stop_tokens=self.stop_tokens,
            ignore_end=self.ignore_end,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            stop=self.stop,
            logprobs=self.logprobs,
            continues=self.continues,
            timeout=self.deadline,
        )


class Job:
    """A request that was accepted. But for `handle` and `cancelled`, it belongs to the thread that evaluates."""

    handle: Handle

    def __init__(self, request: Request, model: ServedModel, asked: Asked, now: float) -> None:
        self.asked = asked
        self.sampling = asked.sampling.resolved()
        self.mask = request.mask
        self.tenant, self.priority = request.tenant, request.priority
        self.order = 0  # of acceptance
        self.arrived = now
        self.deadline = None if asked.timeout is None else now + asked.timeout
        self.cancelled = False
        self.borders = sorted({*asked.borders, *token_array(request.borders).tolist()})
        self.ids = np.asarray(asked.tokens, np.int32)  # to be evaluated: the prompt, and the answer so far
        self.sampler: Sampler | None = None  # from the first time that it runs: it has megabytes
        self.session: ServedSession | None = None  # while it runs
        self.id = 0  # in the decoder, while it runs
        self.reads = False  # some of `ids` are not evaluated, and no token is chosen
        self.behind: tuple[Job, int] | None = None  # waits until that one has evaluated so many tokens
        self.fetched: Future[bool] | None = None  # waits until a state has come from the disk
        self.places: list[int] = []  # where its session makes checkpoints
        self.begun_at = 0.0  # when it last was
        self.totals: StepStats | None = None  # of its session, then
        self.last_token: float | None = None  # when it came
        self.failed_at: list[int] = []  # positions of its sessions that were lost since its last token
        self.short_since: int | None = None  # it was put aside for memory when so many jobs had ended
        self._text = asked.text_of(model)
        self._model = model
        self._stats: StepStats | None = None  # of the engine's last call before the last token

    @property
    def running(self) -> bool:
        return self.session is not None

    @property
    def position(self) -> int:
        """How much of `ids` is evaluated."""
        return 0 if self.session is None else min(self.session.position, len(self.ids))

    @property
    def unread(self) -> int:
        """How much of `ids` is not evaluated, up to where a checkpoint is made."""
        position = self.position
        return min((place for place in self.places if place > position), default=len(self.ids)) - position

    @property
    def tokens_left(self) -> int:
        """Of the answer, until it has `max_tokens`."""
        limit = self.asked.max_tokens
        return NO_LIMIT if limit is None else limit - len(self.handle.tokens)

    def core_sampler(self) -> Sampler:
        if self.sampler is None:
            self.sampler = Sampler(self.sampling, self._model.variant.vocab_size, self.asked.tokens)
        return self.sampler

    def go_on_later(self) -> None:
        """It runs no more for now: what it has said is to be evaluated too."""
        self.ids = np.asarray([*self.asked.tokens, *self.handle.tokens], np.int32)

    def may_try_again(self) -> bool:
        """Of one whose session was lost. With recurrent layers, a step that fails for one may take the sessions of all.
        Who fails twice at the same place, or again and again before its next token, is at fault itself."""
        assert self.session is not None
        again = self.session.position not in self.failed_at and len(self.failed_at) < TRIES - 1
        self.failed_at.append(self.session.position)
        return again

    def allowed(self) -> np.ndarray | None:
        """What may be chosen next."""
        assert self.mask is not None
        return self.mask(tuple(self.handle.tokens))

    # ---- What came of it ----------------------------------------------------------------------------------------

    def take(self, event: Event) -> Finish | None:
        """A token that was chosen. Returns why the answer ends with it, if it does."""
        assert event.token is not None and event.finish != "failed"
        finish = cast(Finish, event.finish) if event.finish else None
        text = "" if finish == "end" else self._text.add(event.token)
        if self._text.stop_string is None and finish is not None:
            text += self._text.finish()
        if self._text.stop_string is not None:
            finish = "stop"
        self._stats = event.stats
        self.failed_at.clear()
        self.handle.say(Piece(text, event.token, self._stats, event.logprob, tuple(event.top)), self._text)
        return finish

    def end(self, finish: Finish, error: BaseException | None = None) -> None:
        """Nothing follows. Text that was held back comes now, as when a generation is cancelled."""
        if finish in ("timeout", "cancelled"):
            rest = self._text.finish()
            if self._text.stop_string is not None:
                finish = "stop"
            if rest and self._stats is not None:
                self.handle.say(Piece(rest, None, self._stats), self._text)
        self.sampler = None
        self.handle.over(finish, error)
