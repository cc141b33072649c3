"""Both GPUs, emulated."""

from __future__ import annotations

import pytest

from support.gpu_ops import EMULATORS, GpuOps


@pytest.fixture(params=EMULATORS)
def run(request: pytest.FixtureRequest) -> GpuOps:
    return GpuOps(request.param)
