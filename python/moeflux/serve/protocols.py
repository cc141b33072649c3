"""What the server asks of a model and of what schedules its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from moeflux.runtime.recording import Counting
from moeflux.text.chat import Prompt
from moeflux.text.generate import Finish, GenerationStats, Piece
from moeflux.text.protocols import TextModel
from moeflux.text.sampling import Sampling

__all__ = ["Handle", "Mask", "Scheduler", "ServedModel"]

Mask = Callable[[Sequence[int]], "np.ndarray | None"]
"""Given the tokens of the answer so far, the bits of those that may follow."""


class Handle(Protocol):
    """An answer on its way. It is made whether or not somebody reads it."""

    @property
    def finish(self) -> Finish | None: ...  # None: it goes on
    @property
    def stop_string(self) -> str | None: ...
    @property
    def stats(self) -> GenerationStats: ...
    @property
    def prompt_read(self) -> int: ...  # tokens of the prompt that are evaluated, or were already
    def cancel(self) -> None: ...
    def follow(self, tell: Callable[[], object]) -> None:
        """Calls this in the event loop that runs now when `arrived` has something, and may wait with the next time
        until that was asked."""

    def arrived(self) -> list[Piece] | None:
        """The pieces that have come since the last time; None when no more will. Raises what ended the answer."""


class Scheduler(Protocol):
    def submit(
        self,
        *,
        prompt: Prompt | Sequence[int],
        max_tokens: int | None,
        stop: Sequence[str],
        ignore_end: bool,
        sampling: Sampling,
        logprobs: int | None,
        continues: bool,
        mask: Mask | None,
        tenant: str,
        deadline: float | None,
    ) -> Handle:
        """From any thread. Refused when too many wait."""

    @property
    def numbers(self) -> dict[str, Any]:
        """What it has done so far, and how quickly, for people and /metrics."""

    @property
    def closed(self) -> bool: ...  # from the moment on from which it takes nothing more
    def close(self, drain: bool = True) -> None: ...  # when nothing is left; from any thread


class ServedModel(TextModel, Protocol):
    @property
    def plan(self) -> Any: ...
    @property
    def memory(self) -> Any: ...
    def count_experts(self) -> Counting: ...
