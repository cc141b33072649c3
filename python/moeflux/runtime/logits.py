"""The logits that a session's last token gives for the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np

from moeflux import _core
from moeflux.errors import StateError, refusals

__all__ = ["Logits"]

Read = TypeVar("Read")


class Evaluated(Protocol):
    """A session, which may be closed: then there is no core."""

    @property
    def closed(self) -> bool: ...
    @property
    def _core(self) -> _core.Session: ...


class Logits:
    """The logits of the last token evaluated, still where the engine left them: nothing is copied until asked for.

    They are valid until the session evaluates again, goes back or is closed. After that, using them is a StateError.
    """

    def __init__(self, session: Evaluated, vocab_size: int, serial: int | None = None) -> None:
        """Those of this serial, or those that the session has now."""
        self._session = session
        self._vocab_size = vocab_size
        self.serial = session._core.logits_serial if serial is None else serial

    def argmax(self) -> int:
        core = self._session._core
        if isinstance(core, _core.Session):  # it looks at the serial itself, which takes less time
            return core.argmax(self.serial)
        return self._read(lambda core: core.argmax())

    def top_k(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids and values of the k best, best first; the lower id wins a tie."""
        with refusals(f"logits: the {k} best"):
            return self._read(lambda core: core.top_k(k))

    def choose(
        self, sampler: _core.Sampler, allowed: np.ndarray | None = None, logprobs: int | None = None
    ) -> tuple[int, float | None, list[tuple[int, float]]]:
        """What a sampler chooses: a token, its log probability and those of the likeliest, where they are asked for."""
        if isinstance(self._session._core, _core.Session):
            return self._read(lambda core: sampler.choose_of(core, allowed, logprobs))
        return self._read(lambda core: sampler.choose(core.logits(None, len(self)), allowed, logprobs))

    def numpy(self, out: np.ndarray | None = None) -> np.ndarray:
        """A copy, float32 [vocab]; in `out` when given."""
        with refusals(f"logits: a copy of {len(self)}"):
            return self._read(lambda core: core.logits(out, len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("logits are the engine's memory: an array of them is always a copy")
        return self.numpy().astype(dtype or np.float32, copy=False)

    def __len__(self) -> int:
        return self._vocab_size

    def __reduce__(self) -> NoReturn:
        raise TypeError("Logits cannot be pickled: they are the engine's memory; send numpy() of them")

    @property
    def current(self) -> bool:
        """Does the session still stand where these were computed?"""
        return not self._session.closed and self.serial == self._session._core.logits_serial

    def _read(self, read: Callable[[_core.Session], Read]) -> Read:
        """What is read is these logits if they are there before and after. Another thread may come in between."""
        core = self._session._core
        self._check(core)
        found = read(core)
        self._check(core)
        return found

    def _check(self, core: _core.Session) -> None:
        if self.serial != core.logits_serial:
            raise StateError("logits: expected to be used before the session evaluates again, found used after")

    def __repr__(self) -> str:
        return f"Logits({len(self)} of {self._session!r}{'' if self.current else ', which has gone on'})"
