"""Checkpoints as they are published, used in place: the very bits of a conversion to their own type, whatever the
memory and however their experts are laid out, and clear refusals where that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from golden import checkpoints
from moeflux import FormatError, IoError, oracle
from moeflux.conversion.convert import ConvertFormat, convert
from moeflux.measure.info import describe
from moeflux.stores.checkpoints import needs_converting
from moeflux.stores.floats import decode
from moeflux.stores.planned import store_to_plan
from moeflux.stores.store import StoredTensor, open_store
from support.checkpoint_folder import rewrite

IDS = [1, 100, 50, 10, 42, 3, 77, 9]
NAMES = (
    "qwen3_5_moe", "qwen3_next", "qwen3_moe", "qwen3_moe_tied", "mixtral", "minimax_m2", "glm4_moe", "gemma4",
    "gpt_oss",
)  # fmt: skip

FORMATS = {"qwen3_moe_tied": "F16", "gpt_oss": "MXFP4"}  # of experts; convert makes BF16 of F16


def pair(name: str, root: Path) -> tuple[Path, Path]:
    """As published, and converted to its own type."""
    published, made = root / f"{name}-hf", root / name
    checkpoints.write(name, published)
    convert(published, made, format=None if name == "gpt_oss" else ConvertFormat.asked("bf16"), check="none")
    return published, made


def numbers(matrix: StoredTensor) -> np.ndarray:
    if matrix.scales is not None:
        return np.concatenate([matrix.weight.reshape(-1).view(np.uint8), matrix.scales.reshape(-1)])
    return decode(matrix.weight.reshape(-1).view(np.uint8), str(matrix.format))


@pytest.mark.parametrize("name", NAMES)
def test_the_bits_of_a_conversion(name: str, tmp_path: Path) -> None:
    published, made = pair(name, tmp_path)
    logits = []
    with open_store(published) as one, open_store(made) as other:
        logits = [oracle.Session(store.variant, store).prefill(IDS) for store in (one, other)]
        layer = one.variant.moe_layers[-1]
        if name != "gpt_oss":  # has a span for each row that stands between two others
            assert len(one.directory.expert_spans(layer, one.variant.experts.count - 1)) == 3
        for first, second in zip(one.expert(layer, 3), other.expert(layer, 3), strict=True):
            assert str(first.format) == FORMATS.get(name, "BF16")
            assert np.array_equal(numbers(first), numbers(second))
        for tensor in one.directory.tensors:
            if one.directory.tensors[tensor].step > 1:
                assert np.array_equal(one.tensor(tensor).weight, other.tensor(tensor).weight)
    assert np.array_equal(*logits) and np.ptp(logits[0]) > 1
    assert not needs_converting(published)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_moe", "gemma4", "gpt_oss"])
def test_the_engine_streams_it(name: str, tmp_path: Path) -> None:
    """With all experts in memory, with the fewest, and with direct reads, which begin between blocks of the disk."""
    published, made = pair(name, tmp_path)
    found = []
    few = 8
    options: list[dict[str, Any]] = [{}, {"expert_slots": few}, {"expert_slots": few, "reads": "direct"}]
    for folder, each in [(made, options[0]), *((published, each) for each in options)]:
        with moeflux.load(folder, threads=2, sessions=1, **each) as model:
            session = model.session()
            found.append(np.stack([np.array(session.prefill(IDS)), *(np.array(session.step(id)) for id in IDS)]))
    assert all(np.array_equal(found[0], other) for other in found[1:]) and np.ptp(found[0]) > 1


def test_what_it_is_and_what_it_costs_is_told(tmp_path: Path) -> None:
    folder = checkpoints.write("mixtral", tmp_path / "hf")
    told = describe(folder)
    assert (told.kind, told.expert_format) == ("published", "BF16")
    with store_to_plan(folder) as planned:
        assert planned.kind == "published" and planned.directory.experts.bytes == told.expert_bytes


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("deepseek_v2", "kv_b_proj in two parts"),
        ("deepseek_v3_fp8", "is F8_E4M3"),
        ("gpt_oss_plain", "matrices are transposed, and rows of gate_proj and up_proj alternate"),
        ("qwen3_vl_moe", r"gate_up_proj\": expected \[8, 384, 128\], found \[8, 128, 384\]"),
        ("kimi_k25", "is I32"),
    ],
)
def test_others_need_converting(name: str, why: str, tmp_path: Path) -> None:
    folder = checkpoints.write(name, tmp_path / "hf")
    assert needs_converting(folder)
    with pytest.raises(FormatError, match=f"experts as Hugging Face lays them out, which need converting: .*{why}"):
        open_store(folder)


def test_quantised_checkpoints_need_converting(tmp_path: Path) -> None:
    """Also of families that run as they are."""
    folder = checkpoints.write("qwen3_moe", tmp_path / "hf", shards=1)
    config, whole = folder / "config.json", (folder / "config.json").read_text()
    config.write_text(json.dumps({**json.loads(whole), "quantization_config": {"quant_method": "fp8"}}))
    assert needs_converting(folder)
    config.write_text(whole)
    assert not needs_converting(folder)
    rewrite(folder, lambda tensors: tensors.update({EXPERT: ("F8_E4M3", tensors[EXPERT][1].view(np.uint8)[:, ::2])}))
    assert needs_converting(folder)
    with pytest.raises(FormatError, match=r"which need converting: .*is F8_E4M3"):
        open_store(folder)


EXPERT = "model.layers.0.mlp.experts.15.up_proj.weight"


def test_damage_is_named(tmp_path: Path) -> None:
    folder = checkpoints.write("qwen3_moe", tmp_path / "hf", shards=1)

    def of_another_type(tensors: dict[str, Any]) -> None:
        tensors[EXPERT] = ("F16", tensors[EXPERT][1])

    rewrite(folder, of_another_type)
    with pytest.raises(FormatError, match=r'experts.15.up_proj.weight": expected the type of those before, found F16'):
        open_store(folder)
    rewrite(folder, lambda tensors: tensors.update({EXPERT: ("BF16", np.zeros((2, 2), np.uint16))}))
    with pytest.raises(FormatError, match=r"experts.15.up_proj.weight.*found BF16 \[2, 2\]"):
        open_store(folder)


def test_a_file_that_shrinks_is_named(tmp_path: Path) -> None:
    folder = checkpoints.write("qwen3_moe", tmp_path / "hf", shards=1)
    with open_store(folder) as store:
        (file,) = store.expert_files
        Path(file).write_bytes(Path(file).read_bytes()[:-64])
    with pytest.raises((FormatError, IoError), match="model"):
        moeflux.load(folder, threads=1, sessions=1)
