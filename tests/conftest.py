"""Options of every test run, and what it says about itself."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

import amx
from moeflux.machine.machine import this_machine
from support.apart import apart
from support.metal import needs_device

# No time decides a test, and a busy machine is slow to draw examples, too.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_report_header() -> str:
    machine = this_machine()
    return f"moeflux {machine.version}, numpy {machine.numpy}, {machine.cpus} x {machine.cpu}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-metal", action="store_true", help="what chooses a backend itself runs on the emulated GPU")
    parser.addoption("--every-refusal", action="store_true", help="test_refusals.py refuses every call")
    parser.addoption(
        "--apart", action="store_true", help="engines have a device with memory of its own, and that is late"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On Metal, tests that hold on both run once."""

    def is_of_the_cpu(item: pytest.Item) -> bool:
        call = getattr(item, "callspec", None)
        return call is not None and call.params.get("backend") == "cpu"

    if config.getoption("--on-metal"):
        config.hook.pytest_deselected(items=[item for item in items if is_of_the_cpu(item)])
        items[:] = [item for item in items if not is_of_the_cpu(item)]


def pytest_configure() -> None:
    """Tests ignore what doctor once found on this machine, and its GPU."""
    os.environ["MOEFLUX_CACHE"] = tempfile.mkdtemp(prefix="moeflux-tests-")
    os.environ["MOEFLUX_BACKEND"] = "cpu"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart() -> None:
    """Before tests are collected, many of which run with every instruction set."""
    amx.install()


@pytest.fixture(scope="session")
def on_metal(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--on-metal"))


@pytest.fixture(scope="session", autouse=True)
def preferred_backend(on_metal: bool) -> None:
    if on_metal:
        from emulator import gpu

        gpu.install(preferred=True)


@pytest.fixture(scope="session", autouse=True)
def own_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    with apart() if request.config.getoption("--apart") else contextlib.nullcontext():
        yield


@pytest.fixture
def no_copies(request: pytest.FixtureRequest) -> None:
    """For tests that count ops and reads: a device with memory of its own copies besides, and fills its slots."""
    if request.config.getoption("--apart"):
        pytest.skip("it counts ops and reads, and here copies and fills come to them")


@pytest.fixture(scope="module", params=["cpu", pytest.param("metal", marks=needs_device)])
def backend(request: pytest.FixtureRequest, on_metal: bool) -> Iterator[str]:
    """The backend that "auto" means in tests that hold on both. Afterwards no Metal object may be left."""
    if request.param == "cpu":
        yield "cpu"
        return
    from emulator import gpu

    gpu.install(preferred=True)
    yield "metal"
    gpu.install(preferred=on_metal)
    gc.collect()
    assert gpu.live_objects() == 0


# A shell starts what runs in its background with Ctrl-C ignored, and every program started from there inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
