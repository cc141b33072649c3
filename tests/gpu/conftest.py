"""Both GPUs, emulated; with --on-cuda=real, one is that of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulator import cuda_gpu
from support.gpu_ops import EMULATORS, REAL, GpuOps


@pytest.fixture(params=EMULATORS)
def gpu_name(request: pytest.FixtureRequest, on_cuda: str | None) -> Iterator[str]:
    """For `backend`, of models."""
    if request.param not in REAL:
        EMULATORS[request.param].install()
    yield request.param
    if request.param == "cuda":
        cuda_gpu.remove(on_cuda)


@pytest.fixture(scope="module", params=EMULATORS)
def run(request: pytest.FixtureRequest, on_cuda: str | None) -> Iterator[GpuOps]:
    """Afterwards "auto" means what it meant before."""
    yield GpuOps(request.param)
    if request.param == "cuda":
        cuda_gpu.remove(on_cuda)
