"""Compiles the kernels for an NVIDIA GPU before a model wants them. What comes of it is kept in the user's cache
folder, so this takes its time once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, as_completed

from moeflux import _core
from moeflux.log import LOG
from moeflux.progress import Progress, for_terminal

__all__ = ["make_kernels"]

THREADS = 8  # the largest files take longer than the others together


def make_kernels(backend: str, progress: Progress | None = None) -> None:
    """Nothing if `backend` means another device, or the kernels are there. DeviceError if the compiler refuses them."""
    asked = os.environ.get("MOEFLUX_BACKEND", "auto") if backend == "auto" else backend
    files = _core.cuda_files_to_compile() if asked in ("auto", "cuda") else []
    if not files:
        return
    LOG.info("compiling %d files of kernels for the GPU", len(files))
    with (
        (progress or for_terminal(passing=True)).task("kernels for the GPU", len(files), "files") as task,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        for done in as_completed([pool.submit(_core.cuda_compile_for_device, file) for file in files]):
            if error := done.exception():
                if asked == "cuda":
                    raise error
                return  # `device_failure` says it
            task.advance(1)
