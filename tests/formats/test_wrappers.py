"""Models that see: names alone tell their text part from the model that it is. Conversion gives the same bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden import checkpoints
from moeflux.conversion.convert import convert
from moeflux.stores.checkpoints import needs_converting
from moeflux.stores.store import open_store
from support.checkpoint_folder import rewrite


def in_glm(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


def in_kimi(name: str) -> str:
    return f"language_model.{name}"


# Of each, by its model_type: the tiny checkpoint that is its text part, that part's own model_type, how its tensors are
# called, and tensors beside them.
WRAPPERS: dict[str, tuple[str, str, Callable[[str], str], tuple[str, ...]]] = {
    "glm4v_moe": ("glm4_moe_air", "glm4v_moe_text", in_glm, ("model.visual.blocks.0.norm1.weight",)),
    "kimi_vl": (
        "kimi_plain_q",
        "deepseek_v3",
        in_kimi,
        ("vision_tower.patch_embed.proj.bias", "multi_modal_projector.linear_1.weight"),
    ),
}


def wrapped(folder: Path, declared: str) -> Path:
    _, inner, called, others = WRAPPERS[declared]

    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[called(name)] = tensors.pop(name)
        tensors |= {name: ("BF16", np.zeros(64, np.uint16)) for name in others}

    rewrite(folder, rename)
    text = json.loads((folder / "config.json").read_text())
    config = {"model_type": declared, "text_config": {**text, "model_type": inner}, "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("declared", WRAPPERS)
def test_a_text_part_is_the_model_that_it_is(declared: str, tmp_path: Path) -> None:
    plain = checkpoints.write(WRAPPERS[declared][0], tmp_path / "plain")
    folder = wrapped(Path(shutil.copytree(plain, tmp_path / "wrapped")), declared)
    contents = []
    for source in (plain, folder):
        out = tmp_path / f"{source.name}-packed"
        convert(source, out)
        contents.append({path.relative_to(out): path.read_bytes() for path in out.rglob("*.bin")})
    assert contents[0] == contents[1] and len(contents[0]) > 1
    assert needs_converting(plain) == needs_converting(folder) == (declared == "kimi_vl")
    if declared == "glm4v_moe":
        with open_store(plain) as one, open_store(folder) as other:
            assert one.directory.tensors.keys() == other.directory.tensors.keys()
            layer = one.variant.moe_layers[0]
            for first, second in zip(one.expert(layer, 1), other.expert(layer, 1), strict=True):
                assert np.array_equal(first.weight, second.weight)
