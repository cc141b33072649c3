"""The ops of moeflux.ops on an emulated GPU, by the engine's own backend.

Everything is done in several orders of threads, without the checker and under it (emulator/device.py says which); all
must leave the same bits. With --on-cuda=real, "cuda" is the GPU of this machine, and does everything twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from emulator import cuda_gpu, gpu
from emulator.device import ORDERS, runs
from moeflux.ops import Ops

EMULATORS = {"metal": gpu, "cuda": cuda_gpu}
REAL: set[str] = set()  # backends that are GPUs of this machine; conftest.py knows


class GpuOps:
    """As moeflux.ops.Ops, every op several times."""

    isa = ""

    def __init__(self, backend: str, is_once: bool = False) -> None:
        self.backend, self.is_once = backend, is_once

    @property
    def once(self) -> GpuOps:
        """Every op one time: for a result that only another is compared with, by a kernel that some test checks."""
        return GpuOps(self.backend, True)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._in_every_order, name)

    def _in_every_order(self, name: str, *arguments: Any, **settings: Any) -> Any:
        results = list(self._results(lambda: getattr(Ops(self.backend), name)(*arguments, **settings)))
        for other in results[1:]:
            assert _bits(other) == _bits(results[0]), f"{name}: the order of threads changes the result"
        return results[0]

    def _results(self, run: Callable[[], Any]) -> Iterator[Any]:
        if self.backend in REAL:
            yield from (run() for _ in range(1 if self.is_once else 2))
            return
        emulator = EMULATORS[self.backend]
        for checked, order in [(False, ORDERS[0])] if self.is_once else runs():
            with emulator.emulating(order=order, checked=checked):
                emulator.install()  # anew, because kernels that are checked are other kernels
                yield run()


def _bits(result: Any) -> list[bytes]:
    """Of a NaN only that it is one: which of several becomes the result, the CPU beneath decides."""
    if isinstance(result, (tuple, list)):
        return [bits for each in result for bits in _bits(each)]
    a = np.asarray(result)
    return [(np.where(np.isnan(a), np.nan, a).astype(a.dtype) if a.dtype.kind == "f" else a).tobytes()]
