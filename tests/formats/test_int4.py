"""Checkpoints with experts in int4: they are taken as they are, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden import checkpoints
from golden.elements import from_bf16
from moeflux import FormatError
from moeflux.conversion.convert import ConvertFormat, convert
from support.checkpoint_folder import edit_config, rewrite


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.write("kimi_k25", tmp_path / "hf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "float-quantized"}, r"quantization_config\.format: expected 'pack-quantized', found 'float-quant"),
        ({"config_groups": {}}, "config_groups: expected one group"),
        ({"num_bits": 8}, "weights: num_bits: expected 4, found 8"),
        ({"symmetric": False}, "weights: symmetric: expected True, found False"),
        ({"actorder": "group"}, "weights: actorder: expected None, found 'group'"),
        ({"type": "float"}, "weights: type: expected 'int', found 'float'"),
        ({"strategy": "channel"}, "weights: strategy: expected 'group', found 'channel'"),
        ({"group_size": 48}, "weights: group_size: .*48"),
        ({"group_size": None}, "weights: group_size: "),
    ],
)
def test_int4_of_other_kinds_is_refused(changes: dict[str, Any], message: str, folder: Path) -> None:
    quantisation = json.loads((folder / "config.json").read_text())["quantization_config"]
    weights = quantisation["config_groups"]["group_0"]["weights"]
    for key, value in changes.items():
        (quantisation if key in quantisation else weights)[key] = value
    edit_config(folder, quantization_config=quantisation)
    with pytest.raises(FormatError, match=message):
        convert(folder, folder.parent / "packed")


def test_int4_is_not_requantised(folder: Path) -> None:
    with pytest.raises(FormatError, match=r"experts in 4-bit g32, which are taken as they are; .* found 3-bit g64"):
        convert(folder, folder.parent / "packed", format=ConvertFormat.asked(3))


def scale_of_int4_in_f16(tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if name.endswith("weight_scale"))
    tensors[name] = ("F16", from_bf16(tensors[name][1]).astype(np.float16))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (scale_of_int4_in_f16, r'weight_scale": expected (F16|BF16) as those before, found (F16|BF16)'),
        (lambda t: t.pop(next(name for name in t if name.endswith("_packed"))), r'weight_packed" \[.*found nothing'),
        (lambda t: t.pop(next(name for name in t if name.endswith("_shape"))), r'weight_shape" \[2\]: expected, found'),
        (
            lambda t: t.update(
                {name: ("I32", words[:-1]) for name, (_, words) in t.items() if name.endswith("_packed")}
            ),
            r'weight_packed": expected shape \[64, 16\], found \[63, 16\]',
        ),
    ],
)
def test_damaged_int4_is_named(damage: object, message: str, folder: Path) -> None:
    rewrite(folder, damage)
    with pytest.raises(FormatError, match=message):
        convert(folder, folder.parent / "packed")
