"""Makes the models that engines are compared on: python bench/peers/models.py NAME FOLDER

They have random weights and fewer layers than the known models whose shapes they have. Their speed is that of the real
shape; their text is noise. Routing spreads over all experts, which is the worst that can happen to a cache.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from moeflux import Variant, builtin, open_store
from moeflux.conversion.synth import synth
from moeflux.models.layers import RoutedExperts
from moeflux.models.presets import preset

COGITO = preset("cogito")
MODELS: dict[str, Variant] = {
    "a3b": dataclasses.replace(preset("a3b").with_layers(8), vocab_size=8192),
    # One dense layer and three with experts, each of full width; 32 experts instead of 256, to fit in memory.
    "deepseek": dataclasses.replace(COGITO, layers=(COGITO.layers[0], *COGITO.layers[3:6]), vocab_size=8192).with_parts(
        RoutedExperts, count=32
    ),
}

LONG = 1 << 15


def small() -> Variant:
    """The shape of the built-in model, which fits in a processor's cache, with a longer context."""
    with open_store(builtin.path()) as store:
        return dataclasses.replace(store.variant, max_context=LONG)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in MODELS:
        raise SystemExit(f"{__doc__}\nNAME is one of {', '.join(MODELS)}")
    synth(Path(sys.argv[2]), MODELS[sys.argv[1]], force=True)
