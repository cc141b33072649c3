"""What tests of the Metal kernels share."""

from __future__ import annotations

import platform
import sys

import pytest

needs_device = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the emulated device runs on Linux x86-64"
)
