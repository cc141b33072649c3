"""The CUDA backend on an emulated GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulator import cuda_gpu


@pytest.fixture(scope="module", autouse=True)
def as_before(on_cuda: str | None) -> Iterator[None]:
    """For the tests of other folders, "auto" means afterwards what it meant before."""
    yield
    cuda_gpu.remove(on_cuda)
