"""What tests of the Metal kernels share."""

from __future__ import annotations

import os
import platform
import sys

import pytest

needs_device = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or "libtsan.so" in os.environ.get("LD_PRELOAD", ""),
    reason="the emulated device runs on Linux x86-64, and ThreadSanitizer does not follow its fibers",
)
