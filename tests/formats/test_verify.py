"""`verify` finds every kind of damage and names the part that has it."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from golden import checkpoints
from moeflux import NotFoundError
from moeflux.conversion.convert import convert
from moeflux.conversion.verify import Problem, VerifyReport, verify
from support.mlx_folder import write_mlx_folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verify")
    checkpoints.write("qwen3_5_moe", root / "hf")
    convert(root / "hf", root / "packed")
    return root / "packed"


@pytest.fixture
def store(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "packed"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def only(report: VerifyReport) -> Problem:
    assert not report.ok and len(report.problems) == 1, str(report)
    return report.problems[0]


def test_good_store(good: Path) -> None:
    report = verify(good)
    assert report.ok and report.has_checksums and report.notes == ()
    assert (report.tensors, report.experts) == (146, 4 * 16)
    # Everything but moeflux.json itself, and the trailing gap that is not there.
    assert report.bytes == sum(path.stat().st_size for path in good.rglob("*.*") if path.name != "moeflux.json")
    assert "every checksum agrees" in str(report)


@pytest.mark.parametrize(("layer", "expert"), [(0, 0), (2, 7), (3, 15)])
def test_one_bit_in_an_expert(layer: int, expert: int, store: Path) -> None:
    path = store / "packed_experts" / f"layer_{layer:02d}.bin"
    size = path.stat().st_size // 16
    flip(path, expert * size + (size - 1 if expert else 0))
    problem = only(verify(store))
    assert (problem.layer, problem.expert) == (layer, expert)
    assert f"packed_experts/layer_{layer:02d}.bin: layer {layer} expert {expert}: expected sha256 " in str(problem)


def test_two_bad_experts_are_two_problems(store: Path) -> None:
    path = store / "packed_experts" / "layer_01.bin"
    size = path.stat().st_size // 16
    flip(path, 3 * size)
    flip(path, 9 * size)
    assert [(p.layer, p.expert) for p in verify(store).problems] == [(1, 3), (1, 9)]


def test_one_bit_in_a_dense_tensor(store: Path) -> None:
    name = "model.layers.3.self_attn.q_norm.weight"
    entry = json.loads((store / "model_weights.json").read_text())["tensors"][name]
    flip(store / "model_weights.bin", entry["offset"] + entry["size"] - 1)
    assert f'model_weights.bin: tensor "{name}": expected sha256' in str(only(verify(store)))


def test_one_bit_between_dense_tensors(store: Path) -> None:
    entries = json.loads((store / "model_weights.json").read_text())["tensors"]
    places = sorted((entry["offset"], entry["size"], name) for name, entry in entries.items())
    start = next(o + s for (o, s, _), (after, _, _) in pairwise(places) if o + s < after)
    flip(store / "model_weights.bin", start)
    assert "expected zeros" in str(only(verify(store)))


@pytest.mark.parametrize("name", ["model_weights.bin", "packed_experts/layer_02.bin", "tokenizer.json"])
def test_missing_file(name: str, store: Path) -> None:
    (store / name).unlink()
    assert str(only(verify(store))) == f"{name}: expected a file, found nothing"


def test_truncated_layer_names_its_lost_experts(store: Path) -> None:
    path = store / "packed_experts" / "layer_01.bin"
    size = path.stat().st_size // 16
    path.write_bytes(path.read_bytes()[: 14 * size + 5])
    problems = verify(store).problems
    assert "truncated" in str(problems[0])
    assert [(p.layer, p.expert) for p in problems[1:]] == [(1, 14), (1, 15)]


def test_truncated_dense_file_names_its_lost_tensors(store: Path) -> None:
    path = store / "model_weights.bin"
    path.write_bytes(path.read_bytes()[:-1])
    problems = verify(store).problems
    assert "truncated" in str(problems[0])
    assert 'tensor "model.norm.weight"' in str(problems[1]) and len(problems) == 2


def test_too_long_file(store: Path) -> None:
    with open(store / "packed_experts" / "layer_00.bin", "ab") as file:
        file.write(b"more")
    assert "too long" in str(only(verify(store)))


def test_changed_small_file(store: Path) -> None:
    (store / "config.json").write_text((store / "config.json").read_text().replace("128", "129", 1))
    assert str(only(verify(store))).startswith("config.json: expected sha256")


def test_changed_manifest(store: Path) -> None:
    """Two tensors of one size that trade places are noticed though every byte of the weights is in order."""
    path = store / "model_weights.json"
    manifest = json.loads(path.read_text())
    first, second = (f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1))
    tensors = manifest["tensors"]
    tensors[first], tensors[second] = tensors[second], tensors[first]
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    problems = verify(store).problems
    assert [p.file for p in problems] == ["model_weights.json", "model_weights.bin", "model_weights.bin"]


def test_changed_checksum_in_the_description(store: Path) -> None:
    """moeflux.json cannot be adjusted to bad weights without its fingerprint telling."""
    path = store / "moeflux.json"
    description = json.loads(path.read_text())
    description["expert_sha256"]["0"][3] = "0" * 64
    path.write_text(json.dumps(description))
    assert "fingerprint: expected" in str(only(verify(store)))


def test_strangers_are_noted(store: Path) -> None:
    (store / "notes.txt").write_text("mine")
    report = verify(store)
    assert report.ok and report.notes == ("notes.txt: no part of the store",)


def test_an_extra_layer_is_a_problem(store: Path) -> None:
    (store / "packed_experts" / "layer_04.bin").write_bytes(b"x")
    assert "layer_04.bin" in str(only(verify(store)))


def test_stores_without_checksums(good: Path, store: Path, tmp_path: Path) -> None:
    """Older folders and MLX folders: the structure is checked, and the report says that contents were not."""
    (store / "moeflux.json").unlink()
    mlx = write_mlx_folder(good, tmp_path / "mlx")
    for folder, file in ((store, "packed_experts/layer_00.bin"), (mlx, "model-00001-of-00002.safetensors")):
        report = verify(folder)
        assert report.ok and not report.has_checksums
        assert "no checksums" in str(report) and "every checksum agrees" not in str(report)
        with open(folder / file, "r+b") as damaged:
            damaged.truncate((folder / file).stat().st_size - 1)
        assert file.rpartition("/")[2] in str(only(verify(folder)))


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="found nothing"):
        verify(tmp_path / "nowhere")
