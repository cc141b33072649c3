"""The model that comes with the package: small, real, and there without a download."""

from __future__ import annotations

from pathlib import Path

__all__ = ["path"]


def path() -> Path:
    """The folder of its packed store; MODEL_CARD.md in it says what it is, what it can do and what it was made of."""
    # It lies beside this file on disk: a package with a compiled module is never imported from inside an archive.
    return Path(__file__).with_name("builtin_model")
