"""Text from a model, token by token.

for piece in session.generate("Once upon a time", temperature=0.7, seed=1):
    print(piece.text, end="", flush=True)
print(session.complete("Once upon a time", max_tokens=40))
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from moeflux._core import Cancel, StepStats
from moeflux.errors import Cancelled, StateError
from moeflux.log import LOG
from moeflux.progress import time_text
from moeflux.runtime.logits import Logits
from moeflux.runtime.tokens import Tokens
from moeflux.sizes import size_text
from moeflux.text.asked import Asked, ask
from moeflux.text.awaiting import Answer
from moeflux.text.chat import Prompt
from moeflux.text.protocols import TextSession
from moeflux.text.reuse import reach
from moeflux.text.sampling import Sampler

__all__ = ["Completion", "Finish", "Generation", "GenerationStats", "Piece", "TokenAnswer", "begin"]

Finish = Literal["end", "stop", "length", "context", "timeout", "cancelled", "failed"]
"""Why an answer ended: a token of the model's or of `stop_tokens`, a string of `stop`, `max_tokens`, a full context,
the `timeout`, `cancel` or an `on_progress` that said so, an error."""


def begin(
    session: TextSession,
    prompt: str | Tokens | Prompt,
    *,
    on_progress: Callable[[int, int], object] | None = None,
    **options: Any,
) -> Generation:
    """Does what `Session.generate` says."""
    return Generation(session, ask(session.model, prompt, **options), on_progress)


@dataclass(frozen=True)
class Piece:
    """One token of an answer, and the text that became certain with it."""

    text: str  # empty while a character is unfinished, or while it may become a stop string
    token: int | None  # None: only text that had been held back, when an answer is cancelled
    stats: StepStats  # of the engine's last call before the token was chosen
    logprob: float | None = None  # of the token, by the model alone; only when asked for
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their logprobs, best first


@dataclass(frozen=True)
class GenerationStats:
    """What an answer cost. Speed counts its tokens from the second on: the first comes with the prompt."""

    prompt_tokens: int
    reused_tokens: int  # of the prompt, that were evaluated already
    prompt_seconds: float  # to the first token
    tokens: int  # of the answer
    seconds: float  # of the answer after its first token, without the caller's own time
    bytes_read: int  # of experts, prompt and answer together
    read_wait_seconds: float
    expert_hits: int
    expert_misses: int
    drafted: int = 0  # tokens that speculation evaluated because they were likely to come next
    accepted: int = 0  # of these, that came
    host_hits: int = 0  # of the misses on a device with memory of its own, those that were in the host's
    bytes_copied: int = 0  # to that device, prompt and answer together

    @property
    def tokens_per_second(self) -> float:
        return (self.tokens - 1) / self.seconds if self.seconds > 0 and self.tokens > 1 else 0.0

    @property
    def hit_rate(self) -> float:
        """The share of the needed experts that was in memory, or on its way there: in that of the device, if it has its
        own."""
        return self.expert_hits / max(self.expert_hits + self.expert_misses, 1)

    @property
    def acceptance(self) -> float:
        """The share of the drafted tokens that came."""
        return self.accepted / max(self.drafted, 1)

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "tokens_per_second": self.tokens_per_second,
            "hit_rate": self.hit_rate,
            "acceptance": self.acceptance,
        }

    def __str__(self) -> str:
        new = self.prompt_tokens - self.reused_tokens
        rate = f", {new / self.prompt_seconds:.1f} tokens/s" if self.prompt_seconds > 0 else ""
        copied = f"{size_text(self.bytes_copied)} copied to the device, " if self.bytes_copied else ""
        drafts = f"; {self.accepted} of {self.drafted} drafted tokens came" if self.drafted else ""
        reused = f" ({self.reused_tokens} were there already)" if self.reused_tokens else ""
        return (
            f"prompt {self.prompt_tokens} tokens{reused} in {_seconds(self.prompt_seconds)}{rate}; "
            f"answer {self.tokens} tokens in {_seconds(self.seconds)}, {self.tokens_per_second:.1f} tokens/s; "
            f"experts: {size_text(self.bytes_read)} read, {copied}{self.hit_rate:.1%} found in memory, "
            f"{_seconds(self.read_wait_seconds)} waited for reads{drafts}"
        )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else time_text(seconds)


class TokenAnswer(Answer[Piece]):
    """An answer in pieces, which knows what it has said so far."""

    text: str
    tokens: list[int]
    finish: Finish | None

    @property
    @abstractmethod
    def stop_string(self) -> str | None: ...

    @property
    @abstractmethod
    def stats(self) -> GenerationStats: ...


class Completion(str):
    """A whole answer: its text, which also knows how it came about. Made by `Session.complete`."""

    finish: Finish
    stop_string: str | None  # that was found
    tokens: tuple[int, ...]  # one that ended it is the last
    pieces: tuple[Piece, ...]  # with their logprobs, where those were asked for
    stats: GenerationStats

    @classmethod
    def of(cls, answer: TokenAnswer) -> Completion:
        """Waits for the end of an answer and gives all of it."""
        pieces = tuple(answer)
        made = cls(answer.text)
        assert answer.finish is not None
        made.finish, made.stop_string, made.stats = answer.finish, answer.stop_string, answer.stats
        made.tokens, made.pieces = tuple(answer.tokens), pieces
        return made

    @property
    def text(self) -> str:
        """The same text as a plain string."""
        return str(self)

    def __repr__(self) -> str:
        return f"Completion({super().__repr__()}, finish={self.finish!r}, tokens={len(self.tokens)})"


class Generation(TokenAnswer):
    """An answer as it comes: an iterator of pieces, once through. Made by `Session.generate`.

    The session works whenever a piece is asked for, and rests in between. When the answer is over, or left unfinished,
    the session holds the prompt and the answer without its last token. Once the session has been used for something
    else, an unfinished generation cannot go on: StateError.

    With `async for`, each piece is made in a thread of the event loop's pool. When the task that awaits a piece is
    cancelled, so is the generation, and the session rests before the task goes on.
    """

    def __init__(
        self, session: TextSession, asked: Asked, on_progress: Callable[[int, int], object] | None = None
    ) -> None:
        self.session = session
        self.prompt = asked.tokens
        self.tokens: list[int] = []  # of the answer, including a token that ended it
        self.text = ""
        self.finish: Finish | None = None  # None: it goes on
        self._asked = asked
        self._text = asked.text_of(session.model)
        sampler = Sampler(asked.sampling, session.model.variant.vocab_size, self.prompt)
        self.sampling = sampler.sampling  # with the seed that is used
        self._on_progress = on_progress
        self._cancel = Cancel()
        self._asked_to_end = False
        self._told = False
        self._reused = 0
        self._prompt_seconds = self._seconds = 0.0
        self._before = session.total_stats
        self._after = self._before
        self._pieces = self._run(sampler)  # which goes with the last piece: it has megabytes

    @property
    def stop_string(self) -> str | None:
        """The string of `stop` that was found."""
        return self._text.stop_string

    def cancel(self) -> None:
        """Ends the answer within the time of a layer, as `Session.prefill` and `step` are cancelled. May be called from
        another thread, or from a signal handler."""
        self._asked_to_end = True
        self._cancel.set()

    def __next__(self) -> Piece:
        try:
            return next(self._pieces)
        except StopIteration:
            if not self._told:
                self._told = True
                LOG.debug("answer: %s: %s", self.finish, self.stats)
            raise
        except BaseException as error:
            # Ctrl-C and the like are nobody's fault.
            self.finish = "failed" if isinstance(error, Exception) else "cancelled"
            LOG.warning("answer: %s after %d tokens: %s", self.finish, len(self.tokens), error)
            raise

    def __repr__(self) -> str:
        finish = "" if self.finish is None else f", finish={self.finish!r}"
        return f"Generation({len(self.prompt)} + {len(self.tokens)} tokens{finish}, text={self.text[-60:]!r})"

    def close(self) -> None:
        """Ends the answer here, as `cancel` does. Text that was held back becomes the rest of `text`."""
        self.cancel()
        for _ in self:
            pass

    @property
    def stats(self) -> GenerationStats:
        """What the answer has cost so far."""
        before, after = self._before, self._after
        return GenerationStats(
            len(self.prompt),
            self._reused,
            self._prompt_seconds,
            len(self.tokens),
            self._seconds,
            after.bytes_read - before.bytes_read,
            after.read_wait_seconds - before.read_wait_seconds,
            after.expert_hits - before.expert_hits,
            after.expert_misses - before.expert_misses,
            after.drafted - before.drafted,
            after.accepted - before.accepted,
            after.host_hits - before.host_hits,
            after.bytes_copied - before.bytes_copied,
        )

    # ---- One token after the other ------------------------------------------------------------------------------

    def _run(self, sampler: Sampler) -> Iterator[Piece]:
        asked = self._asked
        if asked.timeout is not None:
            self._cancel.set_after(asked.timeout)
        logits = None if self._cancel.is_set() else self._prefill()
        count = self.session.max_context - len(self.prompt) + 1  # the last token needs no place in the context
        limit: Finish = "context"
        if asked.max_tokens is not None and asked.max_tokens <= count:
            count, limit = asked.max_tokens, "length"
        while logits is not None and not self._cancel.is_set():
            started = time.perf_counter()
            token, logprob, top = sampler.choose(logits, logprobs=asked.logprobs)
            self.tokens.append(token)
            ends = token in asked.end_tokens
            text = "" if ends else self._text.add(token)
            if self.stop_string is not None:
                self.finish = "stop"
            elif ends:
                self.finish = "end"
            elif len(self.tokens) == count:
                self.finish = limit
            if self.finish in ("end", limit):
                text += self._rest()
            self.text += text
            piece = Piece(text, token, self.session.stats, logprob, tuple(top))
            self._seconds += time.perf_counter() - started
            yield piece
            if self.finish is not None:
                return
            if not self._cancel.is_set():
                logits = self._step(token, logits)
        late = asked.timeout is not None and not self._asked_to_end and self._cancel.is_set()
        self.finish = "timeout" if late else "cancelled"
        rest = self._rest()
        if rest:
            self.text += rest
            yield Piece(rest, None, self.session.stats)

    def _prefill(self) -> Logits | None:
        started = time.perf_counter()
        self._before = self._after = self.session.total_stats
        try:
            logits, self._reused = reach(
                self.session, self.prompt, self._asked.borders, self._on_progress, self._cancel
            )
        finally:
            self._after = self.session.total_stats
            self._prompt_seconds = time.perf_counter() - started
        return logits

    def _step(self, token: int, before: Logits) -> Logits | None:
        if not before.current:  # the token continues what the session held then, and nothing else
            raise StateError("generation: expected the session as its last piece left it, found it used otherwise")
        started = time.perf_counter()
        try:
            return self.session.step(token, cancel=self._cancel, after=before)  # a thread may have come in between
        except Cancelled:
            return None
        finally:
            self._after = self.session.total_stats
            self._seconds += time.perf_counter() - started

    def _rest(self) -> str:
        """Text that was held back, now that nothing follows."""
        text = self._text.finish()
        if self.stop_string is not None:
            self.finish = "stop"
        return text
