"""Options of every test run, and what it says about itself."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import amx
from emulator import device
from moeflux.machine.machine import this_machine
from support.apart import apart
from support.children import search_path
from support.metal import needs_device

# No time decides a test, and a busy machine is slow to draw examples, too.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_report_header() -> str:
    machine = this_machine()
    return f"moeflux {machine.version}, numpy {machine.numpy}, {machine.cpus} x {machine.cpu}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-metal", action="store_true", help="what chooses a backend itself runs on the emulated GPU")
    parser.addoption(
        "--on-cuda",
        choices=("emulated", "real"),
        help="what chooses a backend itself runs on the emulated NVIDIA GPU, or on that of this machine",
    )
    parser.addoption("--every-architecture", action="store_true", help="test_cuda_compile.py compiles all for each")
    parser.addoption("--every-order", action="store_true", help="kernels run in every order, checked and not")
    parser.addoption(
        "--every-refusal",
        action="store_true",
        help="test_refusals.py refuses every call, and test_every_op fails more ops",
    )
    parser.addoption(
        "--apart", action="store_true", help="engines have a device with memory of its own, and that is late"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a GPU, tests that hold on every backend run once."""
    on_cuda = config.getoption("--on-cuda")
    wanted = {"cuda"} if on_cuda else {"metal"} if config.getoption("--on-metal") else {"cpu", "metal"}

    def is_wanted(item: pytest.Item) -> bool:
        call = getattr(item, "callspec", None)
        params = call.params if call is not None else {}
        if on_cuda == "real" and "metal" in (params.get("run"), params.get("gpu_name")):  # it would be emulated
            return False
        backend = params.get("backend") if "backend" in item.fixturenames else None
        return backend not in ("cpu", "metal", "cuda") or backend in wanted

    def is_on_metal(item: pytest.Item) -> bool:
        return "backend" in item.fixturenames and item.callspec.params.get("backend") == "metal"

    config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
    kept = [item for item in items if is_wanted(item)]
    # The emulated GPU stays until its module ends. "auto" would mean it in tests behind it that choose no backend.
    items[:] = [item for _, module in groupby(kept, lambda item: item.path) for item in sorted(module, key=is_on_metal)]


def pytest_configure(config: pytest.Config) -> None:
    """Tests ignore what doctor once found on this machine, its GPU, and its user's defaults. Nothing is compiled anew
    for the processes that they start."""
    os.environ["PYTHONPATH"] = search_path(*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    os.environ["MOEFLUX_CACHE"] = tempfile.mkdtemp(prefix="moeflux-tests-")
    os.environ["MOEFLUX_BACKEND"] = "cpu"
    os.environ["MOEFLUX_CONFIG"] = ""
    device.EVERY_ORDER = config.getoption("--every-order")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart() -> None:
    """Before tests are collected, many of which run with every instruction set."""
    amx.install()


def pytest_collection_finish() -> None:
    """What is there now stays. Those who look for what nobody holds any more need not go through it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def on_metal(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--on-metal"))


@pytest.fixture(scope="session", autouse=True)
def preferred_backend(on_metal: bool) -> None:
    if on_metal:
        from emulator import gpu

        gpu.install(preferred=True)


@pytest.fixture(scope="session")
def on_cuda(request: pytest.FixtureRequest) -> str | None:
    return request.config.getoption("--on-cuda")


@pytest.fixture(scope="session", autouse=True)
def preferred_cuda(on_cuda: str | None) -> None:
    if on_cuda == "real":
        os.environ["MOEFLUX_BACKEND"] = "cuda"
        from support.gpu_ops import REAL

        REAL.add("cuda")
    elif on_cuda:
        from emulator import cuda_gpu

        cuda_gpu.install(preferred=True)


@pytest.fixture(scope="session", autouse=True)
def own_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    with apart() if request.config.getoption("--apart") else contextlib.nullcontext():
        yield


@pytest.fixture
def by_the_block(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of an engine that takes memory by the block, and weights into memory of its own."""
    if request.config.getoption("--apart"):
        pytest.skip("it counts blocks, and here a few buffers have them all")
    return {"backend": "cpu"}


@pytest.fixture
def no_copies(request: pytest.FixtureRequest) -> None:
    """For tests that count ops and reads: a device with memory of its own copies besides, and fills its slots."""
    if request.config.getoption("--apart") or request.config.getoption("--on-cuda"):
        pytest.skip("it counts ops and reads, and here copies and fills come to them")


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("metal", marks=needs_device), pytest.param("cuda", marks=needs_device)]
)
def backend(request: pytest.FixtureRequest, on_metal: bool, on_cuda: str | None) -> Iterator[str]:
    """The backend that "auto" means in tests that hold on all; CUDA with --on-cuda alone. Afterwards nothing of an
    emulated GPU may be left."""
    if request.param != "metal":
        yield request.param
        if on_cuda == "emulated":
            from emulator import cuda_gpu

            assert cuda_gpu.live_objects() == 0
        return
    from emulator import gpu

    gpu.install(preferred=True)
    yield "metal"
    gpu.install(preferred=on_metal)
    gc.collect()
    assert gpu.live_objects() == 0


# A shell starts what runs in its background with Ctrl-C ignored, and every program started from there inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
