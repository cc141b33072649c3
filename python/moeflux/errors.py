"""The errors that moeflux raises. Every message says where, what was expected and what was found."""

from __future__ import annotations

from moeflux._core import BudgetError, DeviceError, Error, FormatError, IoError, StateError

__all__ = ["BudgetError", "DeviceError", "Error", "FormatError", "IoError", "StateError"]
