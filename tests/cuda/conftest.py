"""The CUDA backend on an emulated GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulator import cuda_gpu


@pytest.fixture(scope="session")
def only_emulated(on_cuda: str | None) -> None:
    if on_cuda == "real":
        pytest.skip("it runs on the emulated GPU, whatever GPU there is")


@pytest.fixture
def emulated_gpu(only_emulated: None, on_cuda: str | None) -> Iterator[None]:
    """Everything of the driver's that a test made is gone when it ends."""
    cuda_gpu.install()
    yield
    assert cuda_gpu.live_objects() == 0
    cuda_gpu.remove(on_cuda)


@pytest.fixture
def any_gpu(on_cuda: str | None, request: pytest.FixtureRequest) -> None:
    """The emulated one, or with --on-cuda=real that of this machine."""
    if on_cuda != "real":
        request.getfixturevalue("emulated_gpu")


@pytest.fixture(scope="module", autouse=True)
def as_before(on_cuda: str | None) -> Iterator[None]:
    """For the tests of other folders, "auto" means afterwards what it meant before."""
    yield
    cuda_gpu.remove(on_cuda)
