"""What every test run says about itself."""

from __future__ import annotations

from moeflux.machine import this_machine


def pytest_report_header() -> str:
    machine = this_machine()
    return f"moeflux {machine.version}, numpy {machine.numpy}, {machine.cpus} x {machine.cpu}"
