"""A trace of a model at work: what `moeflux trace` writes."""

from __future__ import annotations

from collections.abc import Callable

from moeflux.model import Model
from moeflux.routing.trace import Trace

__all__ = ["record"]


def record(
    model: Model, prompt: list[int], decode: int = 0, on_token: Callable[[int, int], object] = lambda done, total: True
) -> Trace:
    """Evaluates the prompt, then `decode` tokens more, each the likeliest; `on_token(done, total)` now and then."""
    total = len(prompt) + decode
    session = model.session(max_context=total)
    with model.trace() as recording:
        logits = session.prefill(prompt, on_progress=lambda done, _: on_token(done, total))
        for done in range(len(prompt), total):
            logits = session.step(logits.argmax())
            on_token(done + 1, total)
    return recording.trace()
