"""A store as its users see it: the same model through every kind of folder, and clear refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden import checkpoints
from golden.checkpoint import safetensors_bytes
from moeflux import FormatError, NotFoundError, QuantFormat, oracle
from moeflux.conversion.convert import convert
from moeflux.stores.packed import format_from_json
from moeflux.stores.store import Store, open_store
from support.mlx_folder import write_mlx_folder

IDS = [1, 100, 50, 10, 42, 3, 77, 9]
NAMES = (
    "qwen3_5_moe", "qwen3_next", "qwen3_moe", "deepseek_v3", "glm4_moe", "minimax_m2", "gpt_oss", "gpt_oss_plain",
    "gemma4", "gemma4_other",
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each architecture: hf (bf16), direct (hf -> packed), mlx (stock layout), packed (mlx -> packed)."""
    root = tmp_path_factory.mktemp("stores")
    for name in NAMES:
        hf, direct, mlx, packed = (root / f"{kind}-{name}" for kind in ("hf", "direct", "mlx", "packed"))
        checkpoints.write(name, hf)
        convert(hf, direct)
        write_mlx_folder(direct, mlx)
        convert(mlx, packed)
    return root


def logits(folder: Path) -> np.ndarray:
    with open_store(folder) as store:
        return oracle.Session(store.variant, store).prefill(IDS)


@pytest.mark.parametrize("name", NAMES)
def test_one_model_three_ways(folders: Path, name: str) -> None:
    """A stock MLX folder, its repacked form, and a conversion straight from the bf16 original: not one bit between."""
    mlx, packed, direct = (logits(folders / f"{kind}-{name}") for kind in ("mlx", "packed", "direct"))
    assert np.isfinite(mlx).all() and np.ptp(mlx) > 1
    assert np.array_equal(mlx, packed)
    assert np.array_equal(mlx, direct)


@pytest.mark.parametrize("name", NAMES)
def test_fingerprints(folders: Path, name: str) -> None:
    """Equal weights, equal fingerprint, wherever they came from; an MLX folder has its own kind of fingerprint."""
    with open_store(folders / f"packed-{name}") as packed, open_store(folders / f"direct-{name}") as direct:
        assert packed.fingerprint == direct.fingerprint
    with open_store(folders / f"mlx-{name}") as first, open_store(folders / f"mlx-{name}") as second:
        assert first.fingerprint == second.fingerprint != packed.fingerprint


def test_mlx_fingerprint_sees_changed_weights(folders: Path, tmp_path: Path) -> None:
    copy = tmp_path / "mlx-qwen3_moe"
    shutil.copytree(folders / "mlx-qwen3_moe", copy)
    with open_store(copy) as store:
        before = store.fingerprint
        file, offset, _ = store.directory.tensors["model.norm.weight"].spans[0]
        path = Path(store.directory.files[file])
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    with open_store(copy) as store:
        assert store.fingerprint != before


@pytest.mark.parametrize("name", NAMES)
def test_mlx_fingerprint_covers_every_vector(
    folders: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeflux.stores.store.SAMPLES", 1)
    monkeypatch.setattr("moeflux.stores.store.SAMPLE_BYTES", 1)
    copy = tmp_path / "mlx"
    shutil.copytree(folders / f"mlx-{name}", copy)
    with open_store(copy) as store:
        files, seen = store.directory.files, {store.fingerprint}
        vectors = [t.spans[0] for name, t in store.directory.tensors.items() if name not in parts_of_matrices(store)]
    assert len(vectors) > 10
    for file, offset, _ in vectors:
        with Path(files[file]).open("r+b") as data:
            data.seek(offset)
            byte = data.read(1)[0]
            data.seek(offset)
            data.write(bytes([byte ^ 1]))
        with open_store(copy) as store:
            assert store.fingerprint not in seen
            seen.add(store.fingerprint)


def parts_of_matrices(store: Store) -> set[str]:
    return {f"{base}.{part}" for base in store.directory.formats for part in ("weight", "scales", "biases")}


def test_tensors_and_experts(folders: Path) -> None:
    with open_store(folders / "packed-qwen3_5_moe") as store:
        variant = store.variant
        norm = store.tensor("model.norm.weight")
        assert norm.format == QuantFormat.plain("F32") and norm.weight.shape == (variant.hidden_size,)
        head = store.tensor("lm_head")
        assert head.format == QuantFormat.affine(4, 64)
        assert head.weight.shape == (variant.vocab_size, variant.hidden_size // 8)
        gate, up, down = store.expert(1, 3)
        assert gate.weight.shape == up.weight.shape == (variant.experts.intermediate, variant.hidden_size // 8)
        assert down.scales is not None and down.scales.shape == (
            variant.hidden_size,
            variant.experts.intermediate // 64,
        )
        with pytest.raises(FormatError, match="found expert 99 of layer 1"):
            store.expert(1, 99)
        with pytest.raises(FormatError, match='tensor "nothing": expected to be in the store'):
            store.tensor("nothing")


def test_a_folder_of_the_older_tools(folders: Path, tmp_path: Path) -> None:
    """Without moeflux.json, with the model's shape from config.json or from the manifest's own block."""
    for name in ("qwen3_5_moe", "deepseek_v3"):
        expected = logits(folders / f"packed-{name}")
        older = tmp_path / name
        shutil.copytree(folders / f"packed-{name}", older)
        (older / "moeflux.json").unlink()
        assert np.array_equal(logits(older), expected)
        (older / "config.json").unlink()
        assert np.array_equal(logits(older), expected)
        apart = tmp_path / f"experts-{name}"
        (older / "packed_experts").rename(apart)
        with pytest.raises(FormatError, match="expected a folder packed_experts or packed_experts_2bit, found neither"):
            open_store(older)
        with open_store(older, experts=apart) as store:
            assert store.kind == "packed"


def test_a_store_whose_conversion_has_not_ended_is_refused(folders: Path, tmp_path: Path) -> None:
    """It may have all that a store of the older tools has. A whole one whose journal is still there is a store."""
    unfinished = tmp_path / "packed.partial"
    shutil.copytree(folders / "packed-qwen3_5_moe", unfinished)
    (unfinished / "journal.jsonl").write_text("")
    open_store(unfinished).close()
    (unfinished / "moeflux.json").unlink()
    with pytest.raises(FormatError, match=r"moeflux.json: expected .* of a conversion that has not ended"):
        open_store(unfinished)


def test_the_artifacts_and_root_layout(folders: Path, tmp_path: Path) -> None:
    source = folders / "packed-deepseek_v3"
    for part in ("artifacts", "root", "mlx"):
        (tmp_path / part).mkdir()
    for name in ("model_weights.bin", "model_weights.json"):
        shutil.copy(source / name, tmp_path / "artifacts" / name)
    shutil.copy(source / "config.json", tmp_path / "mlx" / "config.json")
    shutil.copytree(source / "packed_experts", tmp_path / "root" / "packed_experts")
    assert np.array_equal(logits(tmp_path), logits(source))


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_fp8"])
def test_a_checkpoint_needs_converting(tmp_path: Path, name: str) -> None:
    folder = checkpoints.write(name, tmp_path / "hf")
    with pytest.raises(FormatError, match="experts as Hugging Face lays them out, which need converting"):
        open_store(folder)


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "kimi_k25", "glm4_moe_lite"])
def test_a_model_that_sees_three_ways(tmp_path: Path, name: str) -> None:
    """As published, in MLX's layout and repacked from there: the same bits. What sees is passed over everywhere."""
    hf, direct, mlx, packed = (tmp_path / kind for kind in ("hf", "direct", "mlx", "packed"))
    convert(checkpoints.write(name, hf), direct)
    write_mlx_folder(direct, mlx)
    add_what_sees(mlx)
    convert(mlx, packed)
    expected = logits(direct)
    assert np.ptp(expected) > 1
    assert np.array_equal(logits(mlx), expected) and np.array_equal(logits(packed), expected)


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v2_lite"])
def test_parts_that_others_have_too_three_ways(tmp_path: Path, name: str) -> None:
    hf, direct, mlx, packed = (tmp_path / kind for kind in ("hf", "direct", "mlx", "packed"))
    convert(checkpoints.write(name, hf), direct)
    convert(write_mlx_folder(direct, mlx), packed)
    expected = logits(direct)
    assert np.ptp(expected) > 1
    assert np.array_equal(logits(mlx), expected) and np.array_equal(logits(packed), expected)


def add_what_sees(mlx: Path) -> None:
    """A shard of tensors under the names that MLX folders of such models have beside the language model's."""
    names = ("vision_tower.blocks.0.norm1.weight", "mm_projector.pre_norm.weight", "model.visual.merger.norm.weight")
    names += ("multi_modal_projector.linear_1.weight", "language_model.vision_tower.patch_embed.proj.bias")
    names += ("embed_vision.embedding_projection.weight",)
    shard = safetensors_bytes({name: ("BF16", np.ones(4, np.uint16)) for name in names})
    (mlx / "model-vision.safetensors").write_bytes(shard)
    index = mlx / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= dict.fromkeys(names, "model-vision.safetensors")
    index.write_text(json.dumps(content))


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"nowhere: expected a folder, found nothing"):
        open_store(tmp_path / "nowhere")
    with pytest.raises(FormatError, match=r"expected a packed store .* or a GGUF file, found none of them"):
        open_store(tmp_path)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_store_of_version_1_is_the_same_model(folders: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(folders / f"packed-{name}", tmp_path / "store")
    path = tmp_path / "store" / "moeflux.json"
    content = json.loads(path.read_text())
    assert content["version"] == 2
    with open_store(tmp_path / "store") as store:
        variant, fingerprint = store.variant, store.fingerprint
    path.write_text(json.dumps({**content, "version": 1, "variant": variant.identity()}))
    with open_store(tmp_path / "store") as store:
        assert (store.variant, store.fingerprint) == (variant, fingerprint)
    path.write_text(json.dumps({**content, "version": 1}))
    with pytest.raises(FormatError, match='variant: field "attention" is missing'):
        open_store(tmp_path / "store")


def test_a_tampered_description_is_refused(folders: Path, tmp_path: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(folders / "packed-qwen3_moe", copy)
    path = copy / "moeflux.json"
    content = json.loads(path.read_text())
    variant = content["variant"]
    fewer = [{**part, "count": 4} if "count" in part else part for part in variant["feed_forwards"]]
    for change, message in [
        ({"version": 3}, "version: expected 1 to 2, found 3"),
        ({"format": "other"}, 'format: expected "moeflux-packed"'),
        ({"variant": {**variant, "feed_forwards": fewer}}, "moeflux.json"),
        ({"experts": {**content["experts"], "directory": "../elsewhere"}}, "experts.directory: expected the name"),
        ({"fingerprint": "0" * 64}, "fingerprint: expected"),
    ]:
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(FormatError, match=message):
            open_store(copy)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"bits": 7, "group_size": 64, "scale_type": "BF16"}, "bits: expected 2, 3, 4, 5, 6 or 8, found 7"),
        ({"bits": 4, "group_size": 48, "scale_type": "BF16"}, "group_size: expected 32, 64 or 128, found 48"),
        ({"element": "F8"}, "element: expected BF16, F16 or F32, found F8"),
    ],
)
def test_a_format_that_there_is_not_is_the_fault_of_its_file(value: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError, match=f"^moeflux.json: experts.gate: {words}"):
        format_from_json(value, "moeflux.json: experts.gate")
