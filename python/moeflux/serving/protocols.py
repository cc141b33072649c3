"""What this folder asks of a model, of its sessions and of what evaluates many of them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from moeflux import _core
from moeflux.runtime.look_ahead import LookAheadNotes
from moeflux.runtime.plan_table import Plan
from moeflux.text.protocols import TextModel, TextSession

__all__ = ["NO_LIMIT", "Decoder", "Event", "MakeDecoder", "ServedModel", "ServedSession"]

NO_LIMIT = (1 << 31) - 1
"""Tokens of an answer that may be as long as its context."""


class ServedSession(TextSession, Protocol):
    @property
    def _core(self) -> _core.Session: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def checkpoints(self) -> list[int]: ...
    @property
    def exact_from(self) -> int: ...
    def set_max_checkpoints(self, count: int) -> None: ...
    def fork(self, position: int | None = None) -> ServedSession: ...


class ServedModel(TextModel, Protocol):
    @property
    def _engine(self) -> _core.Engine: ...
    @property
    def _plan(self) -> Plan | None: ...
    @property
    def _notes(self) -> LookAheadNotes: ...
    @property
    def closed(self) -> bool: ...
    @property
    def arithmetic(self) -> str: ...
    @property
    def ready(self) -> bool: ...  # False: somebody who waits should wait on
    def make_decoder(self, rows: int = 0) -> Decoder: ...
    def session(self) -> ServedSession: ...


class Event(Protocol):
    """What a step did for one request: its next token, of several that it may have. There is one for each."""

    @property
    def id(self) -> int: ...
    @property
    def token(self) -> int | None: ...  # that was chosen
    @property
    def logprob(self) -> float | None: ...
    @property
    def top(self) -> Sequence[tuple[int, float]]: ...
    @property
    def finish(self) -> str: ...  # "end", "length", "context", "failed"; "": it goes on
    @property
    def error(self) -> str: ...  # "budget": there was no memory for its rows, and it is tried again
    @property
    def evaluated(self) -> int: ...  # tokens of its prompt
    @property
    def stats(self) -> _core.StepStats: ...  # of the engine's last call before the token was chosen


class Decoder(Protocol):
    """What is used of `_core.Decoder`, between whose steps requests are added and removed."""

    prompt_rows: int  # that prompts may take of one step, together

    @property
    def rows(self) -> int: ...  # of one step, at most
    def add(
        self,
        session: _core.Session,
        tokens: np.ndarray,
        sampler: _core.Sampler,
        stop_tokens: Sequence[int],
        max_tokens: int,
        logprobs: int | None = None,
        borders: Sequence[int] = (),
        masked: bool = False,
        stepwise: bool = False,
    ) -> int:
        """Returns its number, which is larger than those before. `borders` are positions where a checkpoint is made. A
        masked request waits for `set_mask` before each choice. A stepwise one has at most one token a step."""

    def set_mask(self, id: int, bits: np.ndarray | None) -> None: ...
    def remove(self, id: int) -> object: ...
    def step(self, cancel: _core.Cancel | None = None) -> Sequence[Event]:
        """Where steps are made ahead, what came of them since the last time."""

    def go_ahead(self) -> bool:
        """Makes further steps before they are asked for, as long as nothing but tokens comes of them. False, and there
        are none, where somebody has to do something between steps."""

    def end_ahead(self, at_once: bool = False) -> None:
        """Begins no further one; called from any thread."""

    @property
    def is_ahead(self) -> bool:
        """Whether there are such steps, or events of them that `step` has not given yet. Sessions of requests belong to
        the decoder then."""


class MakeDecoder(Protocol):
    def __call__(self, engine: _core.Engine, rows: int) -> Decoder: ...
