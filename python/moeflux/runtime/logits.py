"""The logits that a session's last token gives for the next one."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from moeflux import _core
from moeflux.errors import StateError

__all__ = ["Logits"]


class Logits:
    """The logits of the last token evaluated, still where the engine left them: nothing is copied until asked for.

    They are valid until the session evaluates again or goes back. After that, using them is a StateError.
    """

    def __init__(self, core: _core.Session, vocab_size: int) -> None:
        self._session = core
        self._vocab_size = vocab_size
        self._serial = core.logits_serial

    def argmax(self) -> int:
        return self._core().argmax()

    def top_k(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids and values of the k best, best first; the lower id wins a tie."""
        return self._core().top_k(k)

    def choose(
        self, sampler: _core.Sampler, allowed: np.ndarray | None = None, logprobs: int | None = None
    ) -> tuple[int, float | None, list[tuple[int, float]]]:
        """What a sampler chooses: a token, its log probability and those of the likeliest, where they are asked for."""
        return sampler.choose_of(self._core(), allowed, logprobs)

    def numpy(self, out: np.ndarray | None = None) -> np.ndarray:
        """A copy, float32 [vocab]; in `out` when given."""
        return self._core().logits(out, len(self))

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
        return self._serial == self._session.logits_serial

    def _core(self) -> _core.Session:
        if not self.current:
            raise StateError("logits: expected to be used before the session evaluates again, found used after")
        return self._session
