"""What a stage asks of the engine of its layers, and what a cluster asks of whoever starts its processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from moeflux import _core

__all__ = ["Crew", "Hand", "StageEngine", "StageSession", "StageWork"]

StageWork = tuple[Any, np.ndarray, np.ndarray | None, np.ndarray | None]
"""A session, its tokens, room for what comes of each token, and the rows that the stage before gave for them."""


class StageSession(Protocol):
    """What is used of `_core.Session`."""

    @property
    def position(self) -> int: ...
    @property
    def exact_from(self) -> int: ...
    @property
    def checkpoints(self) -> list[int]: ...
    @property
    def last(self) -> Any: ...
    def logits(self, out: np.ndarray | None, vocab: int) -> np.ndarray: ...
    def clear(self) -> None: ...
    def fork(self, position: int | None = None) -> StageSession: ...
    def checkpoint(self) -> None: ...
    def set_max_checkpoints(self, count: int) -> None: ...
    def rewind(self, position: int, exact: bool = True) -> int: ...
    def make_room(self, tokens: int) -> None: ...
    def read_state(self) -> list[Any]: ...
    def restore(self, position: int, tokens: np.ndarray, tensors: Sequence[np.ndarray]) -> None: ...


class StageEngine(Protocol):
    """What is used of `_core.Engine`, for a range of layers."""

    @property
    def memory(self) -> Any: ...
    @property
    def held_by_device(self) -> int: ...
    @property
    def slots(self) -> list[tuple[str, int, int]]: ...
    def session(self, max_context: int = 0, kv_dtype: str = "f32", max_checkpoints: int = 4) -> StageSession: ...
    def evaluate(
        self, work: Sequence[StageWork], logits: bool, cancel: _core.Cancel | None = None
    ) -> list[tuple[int, str]]: ...


class Hand(Protocol):
    """A process on some machine that does what it is told: `Host` there has the methods."""

    @property
    def name(self) -> str: ...  # of the machine
    @property
    def alive(self) -> bool: ...
    def call(self, method: str, *values: Any, seconds: float) -> Any:
        """What the method returns, or raises. PeerError when the process is gone, or does not answer in that time."""

    def dismiss(self) -> None:
        """Ends the process. Nothing happens when it is gone."""


class Crew(Protocol):
    """Starts processes, one for each machine, and starts those again that are gone."""

    def hire(self, index: int) -> Hand:
        """PeerError when there is no such machine now."""

    def close(self) -> None: ...
