"""Every dense tensor of every architecture, in every type in which a store may have it, meets the oracle."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import QuantFormat, Store, Variant, _core, oracle
from moeflux.conversion.convert import convert
from moeflux.models.write_config import config_of
from moeflux.stores.store import open_store
from support.engine_logits import LARGEST_ORACLE_ERROR, assert_meets
from support.numbered_tensors import FLOATS, matrix, tensors, vector
from support.tiny_stores import MlxFolder, Raw, fuse, gemma4, glm, gpt_oss, hybrid, latent, minimax, shapes

IDS = [1, 40, 17, 33, 8]
FORMATS = [*map(QuantFormat.plain, FLOATS), *(QuantFormat.affine(4, 32, scales) for scales in FLOATS)]

HYBRID: dict[str, Any] = {
    "layer_kinds": ("linear", "full"), "mlp_kinds": ("moe",) * 2, "linear_value_heads": 4, "head_dim": 32,
}  # fmt: skip
GROUPED: dict[str, Any] = {
    "attention_gate": False, "layer_kinds": ("full",) * 2, "mlp_kinds": ("moe", "dense"), "dense_intermediate": 96,
    "head_dim": 32, "rotary_dim": 32, "shared_expert": "none", "shared_intermediate": 0, "linear_key_heads": 0,
    "linear_value_heads": 0, "linear_key_dim": 0, "linear_value_dim": 0, "conv_kernel": 0,
}  # fmt: skip
LATENT: dict[str, Any] = {"layer_kinds": ("full",) * 2, "mlp_kinds": ("dense", "moe")}

# A variant, and whether its latent attention is stored as embed_q and unembed_out.
ARCHITECTURES: dict[str, tuple[Variant, bool]] = {
    "qwen3_5_moe": (hybrid("qwen3_5_moe", **HYBRID), False),
    "qwen3_next": (hybrid("qwen3_next", **HYBRID), False),
    "qwen3_moe": (hybrid("qwen3_moe", **GROUPED), False),
    "glm4_moe": (glm(), False),
    "minimax_m2": (minimax(), False),
    "gpt_oss": (gpt_oss(), False),
    "gemma4": (gemma4(), False),
    "deepseek_v3": (latent(**LATENT), False),
    "deepseek_v3-stacks": (latent(**LATENT), True),
    "deepseek_v3-plain_q": (latent(**LATENT, q_lora_rank=0), False),
}


# ---- Stores -----------------------------------------------------------------------------------------------------


def write(folder: Path, architecture: str, stored: dict[str, Raw]) -> Path:
    config = config_of(ARCHITECTURES[architecture][0]) | {"quantization": {"bits": 4, "group_size": 32}}
    return MlxFolder(stored, shards=1, config=config).write(folder)


# ---- Tests ------------------------------------------------------------------------------------------------------


def engine_logits(store: Store) -> np.ndarray:
    """Without a plan, which would take most of the time."""
    engine = _core.Engine(store.directory, threads=1, readers=1, chunk=16, precision="exact")
    return moeflux.Model(store, engine).session(max_context=16).prefill(IDS, logits="all")


def check(folder: Path) -> np.ndarray:
    with open_store(folder) as store:
        found = engine_logits(store)
        assert_meets(found, oracle.Session(store.variant, store).prefill(IDS), LARGEST_ORACLE_ERROR)
    return found


def one_a_kind(names: Iterable[str]) -> list[str]:
    """Of those that differ in nothing but their layer, the first."""
    return list({re.sub(r"layers\.\d+", "layers", name): name for name in reversed(list(names))}.values())


def cases() -> list[Any]:
    out = []
    for architecture, (variant, split_kv) in ARCHITECTURES.items():
        matrices, vectors = shapes(variant, split_kv)
        each = [(name, format) for name in one_a_kind(matrices) for format in FORMATS[1:]]
        each += [(name, QuantFormat.plain(element)) for name in one_a_kind(vectors) for element in FLOATS[1:]]
        out += [pytest.param(architecture, name, form, id=f"{architecture}-{name}-{form}") for name, form in each]
    return out


@pytest.mark.parametrize(("architecture", "name", "format"), cases())
def test_one_tensor(tmp_path: Path, architecture: str, name: str, format: QuantFormat) -> None:
    """One tensor in that type, all others in f32."""
    matrices, vectors = shapes(*ARCHITECTURES[architecture])
    stored = dict(tensors(*ARCHITECTURES[architecture]))
    if name in vectors:
        stored |= vector(name, vectors[name], format.element)
    else:
        del stored[f"{name}.weight"]
        stored |= matrix(name, matrices[name], format)
    check(write(tmp_path / "mlx", architecture, stored))


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_tensors(tmp_path: Path, architecture: str, format: QuantFormat) -> None:
    """All in that type, routed experts too. Packed, where a device may use them in place, they give the same bits."""
    variant, split_kv = ARCHITECTURES[architecture]
    stored = tensors(variant, split_kv, format)
    if variant.model_type == "qwen3_next":
        stored = fuse(variant, stored)
    folder = write(tmp_path / "mlx", architecture, stored)
    convert(folder, tmp_path / "packed", check="none")
    found = check(folder)
    with open_store(tmp_path / "packed") as packed:
        assert np.array_equal(engine_logits(packed), found)
