"""Mixture-of-Experts language models far larger than memory."""

from __future__ import annotations

from moeflux._core import QuantFormat, __version__
from moeflux.errors import BudgetError, DeviceError, Error, FormatError, IoError, StateError
from moeflux.variants import PRESETS, Variant

__all__ = [
    "PRESETS",
    "BudgetError",
    "DeviceError",
    "Error",
    "FormatError",
    "IoError",
    "QuantFormat",
    "StateError",
    "Variant",
    "__version__",
]
