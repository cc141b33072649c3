"""The errors that moeflux raises. Every message says where, what was expected and what was found."""

from __future__ import annotations

from moeflux._core import BudgetError, Cancelled, DeviceError, Error, FormatError, IoError, StateError

__all__ = ["BudgetError", "Cancelled", "DeviceError", "Error", "FormatError", "IoError", "StateError", "found"]


def found(value: object, most: int = 40) -> str:
    """A value as a message shows it: what Python writes for it, cut to `most` characters."""
    try:
        return repr(value)[:most]
    except ValueError:  # a number of thousands of digits
        return "a number too long to be written"
