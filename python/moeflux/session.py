"""A session: one timeline of tokens on a model, with its checkpoints and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import numpy as np

from moeflux import _core
from moeflux._core import Cancel, StepStats
from moeflux.errors import ArgumentError, BudgetError, StateError, found, refusals
from moeflux.living import Living
from moeflux.runtime.logits import Logits
from moeflux.runtime.look_ahead import LookAheadNotes
from moeflux.runtime.plan import price, pricing
from moeflux.runtime.plan_table import Plan
from moeflux.runtime.snapshot import Snapshot, part_of
from moeflux.runtime.tokens import Tokens, is_token, token_array

if TYPE_CHECKING:
    from moeflux.text.chat import Prompt
    from moeflux.text.generate import Completion, Generation
    from moeflux.text.protocols import TextModel
    from moeflux.text.sampling import Sampling

__all__ = ["Session"]

OnProgress = Callable[[int, int], object]

LOSSY_ROWS = {
    "bf16": "keeps keys and values in bf16, not f32",
    "q8": "keeps keys and values in codes of 8 bits, not f32",
}


class Session:
    """One timeline. It takes one caller at a time: a second thread gets StateError, and the first one goes on."""

    def __init__(
        self,
        model: TextModel,
        core: _core.Session,
        kv_dtype: str,
        plan: Plan | None = None,
        notes: LookAheadNotes | None = None,
        siblings: Living[Session, None] | None = None,
    ) -> None:
        self.model = model
        self.kv_dtype = kv_dtype
        self._open: _core.Session | None = core  # None: closed
        self._plan = plan
        self._notes = notes or LookAheadNotes(model.variant.name)
        self._siblings: Living[Session, None] = (
            Living() if siblings is None else siblings
        )  # those that the model closes
        self._siblings.add(self, None)

    # ---- Being open ---------------------------------------------------------------------------------------------

    @property
    def _core(self) -> _core.Session:
        core = self._open  # another thread may close it now
        if core is None:
            raise StateError("session: expected one that is open, found it closed")
        return core

    @property
    def closed(self) -> bool:
        return self._open is None

    def close(self) -> None:
        """Gives the session's memory back, as the end of its `with` does. A call under way in another thread is
        finished first. Every use of the session afterwards is a StateError."""
        self._open = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def lossy(self) -> tuple[str, ...]:
        """One sentence for each departure from the model as published; usually none."""
        rounded = LOSSY_ROWS.get(self.kv_dtype)
        return (*self.model.variant.lossy, rounded) if rounded else self.model.variant.lossy

    # ---- Evaluating ---------------------------------------------------------------------------------------------

    @overload
    def prefill(
        self,
        tokens: Tokens,
        on_progress: OnProgress | None = None,
        *,
        logits: Literal["last"] = "last",
        cancel: Cancel | None = None,
    ) -> Logits: ...
    @overload
    def prefill(
        self,
        tokens: Tokens,
        on_progress: OnProgress | None = None,
        *,
        logits: Literal["all"],
        out: np.ndarray | None = None,
        cancel: Cancel | None = None,
    ) -> np.ndarray: ...
    def prefill(
        self,
        tokens: Tokens,
        on_progress: OnProgress | None = None,
        *,
        logits: str = "last",
        out: np.ndarray | None = None,
        cancel: Cancel | None = None,
    ) -> Logits | np.ndarray:
        """Evaluates tokens after those that the session holds, in chunks.

        `on_progress(done, total)` is called after each chunk. When it returns False, the prefill stops there, cleanly,
        and `position` says how far it came. The result is the logits of the last token evaluated; without any token,
        those that there were. With logits="all" it is those of every token evaluated, float32 [tokens, vocab], in `out`
        if given.

        Setting `cancel`, or Ctrl-C, cancels the call within the time of a layer. The session is then back where the
        chunk began. With recurrent layers, going back takes a checkpoint there, or room for one more within
        `set_max_checkpoints`. Otherwise the chunk is finished first.

        BudgetError when the sessions' memory has no room for the keys and values of all these tokens. Then nothing is
        evaluated, and the session is as it was.
        """
        vocab, every = self.model.variant.vocab_size, None
        with refusals("prefill"):
            ids = token_array(tokens)
        if logits == "all":
            with refusals(f"prefill: logits of {len(ids)} tokens x {vocab}"):
                every = out if out is not None else np.empty((len(ids), vocab), np.float32)
        elif logits != "last" or out is not None:
            raise ArgumentError(f'logits: expected "last", or "all" with or without out, found {logits!r:.40}')
        core = self._core
        with pricing(self._plan):
            done, serial = core.prefill(ids, on_progress, every, vocab, cancel)
        self._notes.note(core)
        return self._logits(serial) if every is None else every[:done]

    def step(self, token: int, *, cancel: Cancel | None = None, after: Logits | None = None) -> Logits:
        """Evaluates one token after those that the session holds. With `after`, the logits that the token was chosen
        from, it is evaluated only if they are still the session's, whatever other threads do.

        Setting `cancel`, or Ctrl-C, cancels the call within the time of a layer, and nothing has changed. With
        recurrent layers and no checkpoint here, a step that has begun is finished first.
        """
        if not is_token(token):
            with refusals("step"):
                token = int(token_array([token])[0])
        core = self._core
        try:  # no `with`: it would take microseconds
            serial = core.step(token, cancel, None if after is None else after.serial)
        except BudgetError as error:
            price(error, self._plan)
            raise
        self._notes.note(core)
        return self._logits(serial)

    def _logits(self, serial: int | None = None) -> Logits:
        return Logits(self, self.model.variant.vocab_size, serial)

    # ---- Text ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Tokens | Prompt,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        ignore_end: bool = False,
        logprobs: int | None = None,
        continues: bool = True,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
        sampling: Sampling | None = None,
        **changes: Any,
    ) -> Generation:
        """What the model writes after a prompt, as an iterator of pieces. Nothing is evaluated before the first.

        The session's own tokens are used: only the part of the prompt that it does not hold is evaluated. The result is
        the same as from a new session.

        prompt       text, which is only text; tokens; or what `model.chat_format.encode` makes of a conversation. A
                     model without a tokenizer takes tokens and gives tokens, whose pieces have no text
        max_tokens   how many tokens at most; without it, the model ends the answer, or the full context does
        stop         strings that end the answer and are not part of it
        stop_tokens  tokens that end the answer besides the model's own
        ignore_end   the model's own end tokens do not end the answer
        logprobs     give the logprob of every token, and of so many alternatives
        continues    False: the answer is a text of its own, and loses a leading space that the tokenizer puts there
        timeout      seconds from when the first piece is asked for; then the answer ends where it is
        on_progress  called with (done, total) of the prompt; when it returns False the generation ends
        sampling     replaces `model.default_sampling`; `changes` are fields of it: temperature=0.7, seed=1
        """
        from moeflux.text.generate import begin

        return begin(
            self,
            prompt,
            stop_tokens=stop_tokens,
            ignore_end=ignore_end,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=stop,
            logprobs=logprobs,
            continues=continues,
            timeout=timeout,
            on_progress=on_progress,
            **changes,
        )

    def complete(self, prompt: str | Tokens | Prompt, **options: Any) -> Completion:
        """All that the model writes after a prompt: a string, with `finish`, `stats` and `tokens`. `options` are those
        of `generate`."""
        from moeflux.text.generate import Completion

        return Completion.of(self.generate(prompt, **options))

    # ---- Where it stands ----------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """How many tokens have been evaluated."""
        return self._core.position

    @property
    def max_context(self) -> int:
        return self._core.max_context

    @property
    def tokens(self) -> list[int]:
        """The tokens that have been evaluated; empty after a restore from a file that does not have them."""
        return self._core.tokens

    @property
    def stats(self) -> StepStats:
        """Of the last `prefill`, `step` or `model.evaluate`; of the latter for all sessions, except for `tokens`."""
        return self._core.last

    @property
    def total_stats(self) -> StepStats:
        """Of all of them since the session was made."""
        return self._core.total

    # ---- Going back ---------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Goes back to position 0, without checkpoints. This also heals a session that a failure left unusable."""
        self._core.clear()

    def fork(self, position: int | None = None) -> Session:
        """Another session that stands where this one does, or where it stood at `position`, and goes on by itself.

        It may begin wherever `rewind` is exact: at 0, at a checkpoint, and from `exact_from` on. Elsewhere it is a
        StateError that names the last checkpoint before `position`. The fork has the tokens up to there, and the logits
        if this session stands there, but no checkpoints.

        Both share the keys and values that they have in common, whatever either does. A fork costs a copy of the
        recurrent state and of at most 256 positions. BudgetError as for a session that is made.
        """
        where = None if position is None else _count("position", position)
        with refusals(f"fork at position {self.position if where is None else where}"), pricing(self._plan):
            core = self._core.fork(where)
            forked = Session(self.model, core, self.kv_dtype, self._plan, self._notes, self._siblings)
        if self.closed:  # meanwhile, by another thread
            forked.close()
        return forked

    def checkpoint(self) -> int:
        """Remembers the present position, so that `rewind` can come back to it exactly. Returns the position.

        A checkpoint costs a copy of the recurrent state, and keeps the keys and values that layers with a window see
        from there. Beyond `set_max_checkpoints` (4), the least recently used one is dropped, but never that of
        position 0.
        """
        self._core.checkpoint()
        return self._core.position

    @property
    def checkpoints(self) -> list[int]:
        """Their positions, ascending: `rewind` reaches them exactly."""
        return self._core.checkpoints

    @property
    def exact_from(self) -> int:
        """Every position from this one on can be reached exactly by `rewind`: 0 if all layers see everything. Layers
        with a window keep a few keys and values more than they see, and recurrent layers know the present alone."""
        return self._core.exact_from

    def set_max_checkpoints(self, count: int) -> None:
        with pricing(self._plan):
            self._core.set_max_checkpoints(_count("count", count))

    def rewind(self, position: int, exact: bool = True) -> int:
        """Forgets everything from `position` on; returns the position reached.

        Rewinding is exact from `exact_from` on, at 0, and at a checkpoint. Elsewhere it is a StateError that names the
        last checkpoint before `position`. With exact=False it goes there instead.
        """
        return self._core.rewind(_count("position", position), exact)

    # ---- Saving -------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """A copy of the session's state. It can be saved, and restored here or in another process."""
        with refusals(f"snapshot at position {self.position}"):
            return Snapshot.of(self._core, self.model.variant, self.model.fingerprint)

    def restore(self, snapshot: Snapshot | str | Path) -> None:
        """Replaces the session's state by that of a snapshot, or of a file of one. It must be of the same model.

        A snapshot that does not fit is refused before anything changes.
        """
        variant = self.model.variant
        with refusals("restore"):
            taken = snapshot if isinstance(snapshot, Snapshot) else Snapshot.load(snapshot, variant, self.max_context)
            layers = part_of(self._core, variant)
            tensors = taken.tensors_for(variant, self.model.fingerprint, self.max_context, self.kv_dtype, layers)
            tokens = np.asarray(taken.tokens, np.int32)
        with pricing(self._plan):
            self._core.restore(taken.position, tokens, tensors)

    def __repr__(self) -> str:
        where = "closed" if self.closed else f"position {self.position} of {self.max_context}"
        return f"Session({self.model.variant.name}, {where})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Session cannot be pickled: save its snapshot() and restore that in the other process")


def _count(name: str, value: int) -> int:
    """Checks that a number fits into 64 bits, as the engine takes it."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ArgumentError(f"{name}: expected a whole number of 64 bits, found {found(value)}")
    return value
