"""A loaded model: `load` opens a store and brings its dense weights into memory; `Model` makes sessions."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from moeflux import _core
from moeflux.session import Session
from moeflux.store import Store, open_store
from moeflux.variants import Variant

__all__ = ["Model", "load"]


class Model:
    """Immutable and shared: any number of sessions, in any threads, may use one model; their calls take turns."""

    def __init__(self, store: Store, engine: _core.Engine) -> None:
        self.variant: Variant = store.variant
        self.path: Path = store.path
        self.fingerprint: str = store.fingerprint
        self._engine = engine

    def session(self, max_context: int | None = None, kv_dtype: str = "f32") -> Session:
        """A new timeline. Keys and values of up to `max_context` tokens are kept, as "f32" or "bf16".

        Without `max_context`: the model's own limit, at most 32768. Memory is taken as positions are used.
        """
        return Session(self, self._engine.session(max_context or 0, kv_dtype), kv_dtype)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes held for the model, by what they are for. Sessions come on top."""
        return self._engine.memory()

    def __repr__(self) -> str:
        lossy = "".join(f", LOSSY: {sentence}" for sentence in self.variant.lossy)
        return f"Model({self.variant.name}, {self._engine.describe()}{lossy})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Model cannot be pickled: open the store in the other process with moeflux.load")


def load(
    path: str | Path,
    *,
    backend: str = "auto",
    threads: int | None = None,
    isa: str | None = None,
    readers: int | None = None,
    expert_slots: int | None = None,
    ring_depth: int = 2,
    chunk: int | None = None,
    experts_per_token: int | None = None,
) -> Model:
    """Opens the store at `path` (packed, or a stock MLX folder) for evaluation.

    threads       that compute; all cores by default
    isa           CPU kernels: "portable", "avx2", "avx512" or "neon"; the best one by default (or MOEFLUX_ISA)
    readers       threads that read experts from disk
    expert_slots  experts held in memory; all of them by default. Fewer changes the speed and not one bit of the result
    ring_depth    expert batches in flight
    chunk         most tokens of a prefill step; 512 by default
    experts_per_token   LOSSY: another number of experts than the model's own
    """
    with open_store(path, experts_per_token=experts_per_token) as store:
        engine = _core.Engine(
            store.directory,
            backend=backend,
            isa=isa or "",
            threads=threads or 0,
            readers=readers or 0,
            expert_slots=expert_slots or 0,
            ring_depth=ring_depth,
            chunk=chunk or 0,
        )
        return Model(store, engine)
