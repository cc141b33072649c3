"""Compiles the kernels that a model wants of an NVIDIA GPU before it runs there. What comes of it is kept in the user's
cache folder, so this takes its time once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed

from moeflux import _core
from moeflux.log import LOG
from moeflux.progress import Progress, for_terminal

__all__ = ["make_kernels"]


def make_kernels(units: list[str], threads: int, progress: Progress | None = None) -> None:
    """`units`: what `_core.kernels_to_compile` named. DeviceError if the compiler refuses one."""
    if not units:
        return
    LOG.info("compiling %d kernels for the GPU", len(units))
    with (
        (progress or for_terminal(passing=True)).task("kernels for the GPU", len(units), "kernels") as task,
        ThreadPoolExecutor(threads) as pool,
    ):
        for done in as_completed([pool.submit(_core.cuda_make, unit) for unit in units]):
            done.result()
            task.advance(1)
