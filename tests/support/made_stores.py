"""Stores of `moeflux synth` by names, each of them made when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from moeflux import Variant
from moeflux.conversion.synth import synth

Stores = Callable[[str], Path]


def stores_in(root: Path, variants: Mapping[str, Variant]) -> Stores:
    def make(name: str) -> Path:
        if not (root / name).exists():
            synth(root / name, variants[name])
        return root / name

    return make
