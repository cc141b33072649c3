"""Bringing a session to a new text while evaluating only what it must.

What a session has evaluated stays valid as far as the new text begins with the same tokens. Attention that sees
everything can be cut short anywhere, but a recurrent layer only goes back to a checkpoint, and a window only a little
beyond what it sees. So checkpoints are made on the way, where later texts are likely to differ from this one. None of
this changes a result: a state depends on the tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from moeflux._core import Cancel
from moeflux.errors import ArgumentError, Cancelled
from moeflux.runtime.logits import Logits
from moeflux.text.protocols import TextSession
from moeflux.text.tokenizer import shared_length

__all__ = ["reach"]

NEAR = 16
"""A border this near behind a checkpoint gets none of its own: each cuts the prefill, and a cut costs reads."""


def reach(
    session: TextSession,
    tokens: Sequence[int],
    borders: Iterable[int] = (),
    on_progress: Callable[[int, int], object] | None = None,
    cancel: Cancel | None = None,
) -> tuple[Logits | None, int]:
    """Goes to the end of `tokens` and leaves checkpoints near `borders`. Returns the logits there, and how many tokens
    needed no evaluation.

    `on_progress(done, total)` counts the tokens that do. When it returns False, or `cancel` is set, the evaluation
    stops. Then the logits are None, and the session stays where it stopped.
    """
    if not tokens:
        raise ArgumentError("prompt: expected at least one token, found none")
    if len(tokens) > session.max_context:
        raise ArgumentError(f"prompt: expected at most {session.max_context} tokens (the context), found {len(tokens)}")
    # The last token is evaluated in any case, for its logits.
    reused = session.rewind(min(shared_length(session.tokens, tokens), len(tokens) - 1), exact=False)
    total = len(tokens) - reused
    places = checkpoint_places(borders, reused, len(tokens)) if session.model.variant.forgets else []
    if places:
        session.checkpoint()

    def tell(done: int, _: int) -> object:
        return on_progress(start - reused + done, total) if on_progress is not None else None

    logits, start = None, reused
    for end in (*places, len(tokens)):
        with suppress(Cancelled):
            logits = session.prefill(tokens[start:end], tell, cancel=cancel)
        if session.position < end:
            return None, reused
        if end < len(tokens):
            session.checkpoint()
        start = end
    return logits, reused


def checkpoint_places(borders: Iterable[int], start: int, end: int) -> list[int]:
    """The borders that are worth a checkpoint; there is one at `start` already."""
    places, last = [], start
    for border in sorted(borders):
        if last + NEAR <= border < end:
            places.append(border)
            last = border
    return places
