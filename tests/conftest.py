"""What every test run says about itself."""

from __future__ import annotations

import os
import signal
import tempfile

from moeflux.machine import this_machine


def pytest_report_header() -> str:
    machine = this_machine()
    return f"moeflux {machine.version}, numpy {machine.numpy}, {machine.cpus} x {machine.cpu}"


def pytest_configure() -> None:
    """What doctor once found on this machine changes no test."""
    os.environ["MOEFLUX_CACHE"] = tempfile.mkdtemp(prefix="moeflux-tests-")


# A shell starts what runs in its background with Ctrl-C ignored, and every program started from there inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
