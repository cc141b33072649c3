"""config.json of a model's folder: a variant that the C++ core reads as it is written, or a refusal."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from moeflux import _core
from moeflux.models.config import variant_from_config
from moeflux.models.presets import PRESETS
from moeflux.models.tensors import dense_shapes
from moeflux.models.write_config import config_of

FOLDER = Path(tempfile.mkdtemp(prefix="moeflux-fuzz-"))


def seeds() -> list[bytes]:
    # Six layers: the last of Gemma 4 must not see a window.
    configs = [config_of(preset.with_layers(6)) for preset in PRESETS.values()]
    configs += [{"model_type": "qwen3_5_moe", "text_config": config} for config in configs[:1]]
    return [json.dumps(config).encode() for config in configs]


def one(data: bytes) -> None:
    path = FOLDER / "config.json"
    path.write_bytes(data)
    variant = variant_from_config(path)
    assert _core.read_variant(variant.to_json()) == json.loads(variant.to_json())
    assert dense_shapes(variant)
