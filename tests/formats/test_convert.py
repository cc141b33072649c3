"""Conversion: the tensors are those of mlx_lm.convert, a repack changes no byte, a stopped run is continued."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden import checkpoints
from golden.elements import fp8_blocks, fp8_values, from_bf16, to_bf16
from moeflux import ArgumentError, FormatError, IoError, QuantFormat, StateError, files
from moeflux.conversion.convert import ConvertFormat, convert
from moeflux.stores.packed import read_description
from moeflux.stores.store import open_store
from support import reference_weights
from support.agreement import mlx_type
from support.checkpoint_folder import edit_config, rewrite
from support.mlx_folder import TOKENIZER_FILES, dense_tensors, write_mlx_folder

HERE = Path(__file__).resolve().parents[1]
GOLDEN = json.loads((HERE / "golden" / "tensors.json").read_text())
ONE_OF_EACH = ("qwen3_5_moe", "qwen3_next", "qwen3_moe", "deepseek_v3", "glm4_moe", "minimax_m2", "gpt_oss", "gemma4")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf/NAME: every tiny checkpoint as published; mlx/NAME: some of them as stock MLX folders."""
    root = tmp_path_factory.mktemp("sources")
    for name in checkpoints.CHECKPOINTS:
        checkpoints.write(name, root / "hf" / name)
    for name in ONE_OF_EACH:
        convert(root / "hf" / name, root / "packed" / name)
        write_mlx_folder(root / "packed" / name, root / "mlx" / name)
    return root


def test_what_gemma4_sees_with_is_dropped(tmp_path: Path) -> None:
    folder = checkpoints.write("gemma4", tmp_path / "hf")
    seen = ("vision_tower.encoder.layers.0.mlp.up_proj.linear.weight", "embed_vision.embedding_projection.weight")
    rewrite(folder, lambda stored: stored.update({f"model.{name}": ("BF16", np.zeros((2, 2), "<u2")) for name in seen}))
    assert "vision tower: 2 tensors" in str(convert(folder, tmp_path / "packed"))


def tensor_hashes(folder: Path) -> dict[str, str]:
    """As make_goldens.py hashes what mlx_lm.convert wrote."""
    hashes = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                label = f"{entry['dtype']} {'x'.join(map(str, entry['shape']))} ".encode()
                hashes[name] = hashlib.sha256(label + data[start + begin : start + end]).hexdigest()
    return hashes


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- The right numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", sorted(GOLDEN))
def test_equals_mlx_lm_convert(case: str, sources: Path, tmp_path: Path) -> None:
    """Every tensor has the very bits that mlx_lm.convert gave it, norms once they are rounded as it rounds them; so
    they are folded, fp8 is widened, heads are split, and codes, scales and biases are those of MLX."""
    name, bits, group = case.split("/")
    asked = mlx_type(name, int(bits), int(group))
    convert(sources / "hf" / name, tmp_path / "packed", format=asked, check="none")
    found = tensor_hashes(write_mlx_folder(tmp_path / "packed", tmp_path / "mlx", rounded=True))
    assert found == GOLDEN[case]["sha256"]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_repack_changes_no_byte(name: str, sources: Path, tmp_path: Path) -> None:
    """The conversion of an MLX folder holds what the direct one from the original holds, byte for byte."""
    report = convert(sources / "mlx" / name, tmp_path / "repacked", check="full")
    direct = read_description(sources / "packed" / name)
    assert report.fingerprint == direct.fingerprint
    theirs, ours = files_of(sources / "packed" / name), files_of(tmp_path / "repacked")
    weights = [path for path in theirs if path.endswith(".bin")]
    assert len(weights) == 1 + len(direct.variant.moe_layers)
    for path in weights:
        assert ours[path] == theirs[path], path
    for path in TOKENIZER_FILES:
        assert ours[path] == (sources / "hf" / name / path).read_bytes()


def test_alignment_order_and_padding(sources: Path) -> None:
    folder = sources / "packed" / "qwen3_5_moe"
    manifest = json.loads((folder / "model_weights.json").read_text())
    data = (folder / "model_weights.bin").read_bytes()
    end, previous = 0, ""
    for name, entry in manifest["tensors"].items():
        assert entry["offset"] % 64 == 0 and previous < name
        assert data[end : entry["offset"]] == bytes(entry["offset"] - end) and entry["offset"] - end < 64
        end, previous = entry["offset"] + entry["size"], name
    assert len(data) == end
    assert manifest["num_tensors"] == len(manifest["tensors"])
    assert manifest["config"]["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]


def test_plain_formats_keep_every_number(sources: Path, tmp_path: Path) -> None:
    """bf16 in, bf16 out: no matrix is touched."""
    name = "qwen3_moe"
    convert(sources / "hf" / name, tmp_path / "packed", format=ConvertFormat.asked("bf16"))
    description = read_description(tmp_path / "packed")
    assert description.experts.gate == QuantFormat.plain("BF16")
    for tensor, (_, values) in checkpoints.CHECKPOINTS[name]().tensors.items():
        if ".mlp.experts." not in tensor:
            assert description.tensor_sha256[tensor] == hashlib.sha256(values.tobytes()).hexdigest(), tensor


@pytest.mark.parametrize("name", checkpoints.CHECKPOINTS)
def test_vectors_keep_every_bit(name: str, sources: Path, tmp_path: Path) -> None:
    """Whatever the bits, each is as it was published, or f32 that says exactly that, or exactly one more."""
    convert(sources / "hf" / name, tmp_path / "packed", format=ConvertFormat.asked(4, 64, element="F16"), check="none")
    stored = dense_tensors(tmp_path / "packed")
    whole = reference_weights.load(name)[1].tensors
    vectors = [tensor for tensor in stored if tensor in whole and whole[tensor].ndim != 2]
    assert len(vectors) > 6  # two norms in each of three layers, and the last one, where a model has nothing else
    for tensor in vectors:
        dtype, values = stored[tensor]
        found = from_bf16(values) if dtype == "BF16" else values.astype(np.float32)
        assert np.array_equal(found.reshape(-1), whole[tensor].reshape(-1)), tensor


def test_large_matrices_go_through_in_blocks(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows give the bytes that one block gives, also where heads are gathered and fp8 has scales."""
    monkeypatch.setattr("moeflux.conversion.made_of.BLOCK_ELEMENTS", 2000)
    monkeypatch.setattr("moeflux.conversion.from_mlx.PART_BYTES", 300)
    monkeypatch.setattr("moeflux.conversion.packer.GROUP_BYTES", 60_000)
    for name in (*ONE_OF_EACH, "deepseek_v3_fp8"):
        if name in ONE_OF_EACH:
            expected = read_description(sources / "packed" / name).fingerprint
            if name in ("qwen3_5_moe", "deepseek_v3", "gpt_oss"):  # a repack has no other ways
                assert convert(sources / "mlx" / name, tmp_path / f"{name}-mlx", check="full").fingerprint == expected
        else:
            with monkeypatch.context() as patched:
                patched.setattr("moeflux.conversion.made_of.BLOCK_ELEMENTS", 1 << 20)
                expected = convert(sources / "hf" / name, tmp_path / f"{name}-whole").fingerprint
        assert convert(sources / "hf" / name, tmp_path / f"{name}-hf").fingerprint == expected


def test_report_says_what_is_dropped(sources: Path, tmp_path: Path) -> None:
    report = convert(sources / "hf" / "qwen3_5_moe", tmp_path / "packed", dry_run=True)
    text = str(report)
    assert "vision tower: 1 tensors" in text and "multi-token prediction: 2 tensors" in text
    text = str(convert(sources / "hf" / "deepseek_v3", tmp_path / "packed", dry_run=True))
    assert "multi-token prediction: 1 tensors" in text and "rotary" in text


# ---- Refusals ---------------------------------------------------------------------------------------------------


def test_unknown_tensor_is_named(sources: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sources / "hf" / "qwen3_moe", tmp_path / "hf"))
    rewrite(folder, lambda t: t.update({"model.layers.1.mlp.surprise": ("BF16", np.zeros(2, "<u2"))}))
    with pytest.raises(FormatError, match=r'tensor "model\.layers\.1\.mlp\.surprise" BF16 \[2\]'):
        convert(folder, tmp_path / "packed")


@pytest.mark.parametrize("gone", ["model.norm.weight", "model.layers.2.mlp.experts.3.up_proj.weight"])
def test_missing_tensor_is_named(gone: str, sources: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sources / "hf" / "qwen3_moe", tmp_path / "hf"))
    rewrite(folder, lambda t: t.pop(gone))
    with pytest.raises(FormatError, match=gone.replace(".", r"\.")):
        convert(folder, tmp_path / "packed")


def test_wrong_shape_is_named(sources: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sources / "hf" / "qwen3_moe", tmp_path / "hf"))
    rewrite(folder, lambda t: t.update({"model.norm.weight": ("BF16", np.zeros(127, "<u2"))}))
    with pytest.raises(FormatError, match=r'"model\.norm\.weight": expected shape \[128\], found \[127\]'):
        convert(folder, tmp_path / "packed")


def test_not_a_number_is_named(sources: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sources / "hf" / "qwen3_moe", tmp_path / "hf"))
    name = "model.layers.0.self_attn.k_proj.weight"

    def spoil(tensors: dict) -> None:
        tensors[name][1][7, 5] = 0x7FC0

    rewrite(folder, spoil)
    with pytest.raises(FormatError, match=r"k_proj\.weight.*finite"):
        convert(folder, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_fp8_without_scales(sources: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sources / "hf" / "deepseek_v3_fp8", tmp_path / "hf"))
    gone = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    rewrite(folder, lambda t: t.pop(gone))
    with pytest.raises(FormatError, match=r"o_proj\.weight_scale_inv"):
        convert(folder, tmp_path / "packed")


@pytest.mark.parametrize("method", ["bitsandbytes", "aqlm"])
def test_other_quantisations_are_refused(method: str, sources: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sources / "hf" / "qwen3_moe", tmp_path / "hf"))
    edit_config(folder, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(FormatError, match=rf"quant_method.*found '{method}'.*Supported"):
        convert(folder, tmp_path / "packed")


def test_mlx_is_not_requantised(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="repacked as it is"):
        convert(sources / "mlx" / "qwen3_moe", tmp_path / "packed", format=ConvertFormat.asked(8))


def test_missing_shard_is_named(sources: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sources / "hf" / "qwen3_moe", tmp_path / "hf"))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match=r"model-00002-of-00002\.safetensors"):
        convert(folder, tmp_path / "packed")


# ---- Writing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hf", "mlx"])
def test_dry_run_touches_nothing(kind: str, sources: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sources.rglob("*")}
    report = convert(sources / kind / "qwen3_5_moe", tmp_path / "packed", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in sources.rglob("*")} == before
    packed = sources / "packed" / "qwen3_5_moe"
    layers = list((packed / "packed_experts").glob("layer_*.bin"))
    assert report.plan.total == sum(path.stat().st_size for path in [packed / "model_weights.bin", *layers])
    assert "nothing was written" in str(report)


def test_refuses_to_overwrite(sources: Path, tmp_path: Path) -> None:
    dest = tmp_path / "packed"
    convert(sources / "hf" / "qwen3_moe", dest)
    before = files_of(dest)
    with pytest.raises(StateError, match="force"):
        convert(sources / "hf" / "qwen3_next", dest)
    assert files_of(dest) == before
    convert(sources / "hf" / "qwen3_next", dest, force=True)
    assert read_description(dest).variant.model_type == "qwen3_next"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed"]


def test_force_spares_what_is_no_store(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mother.txt").write_text("dear")
    with pytest.raises(StateError, match="left alone"):
        convert(sources / "hf" / "qwen3_moe", tmp_path / "letters", force=True)
    assert files_of(tmp_path / "letters") == {"mother.txt": b"dear"}


def test_destination_must_be_apart(sources: Path) -> None:
    source = sources / "hf" / "qwen3_moe"
    for dest in (source, source / "packed", source.parent):
        with pytest.raises(ArgumentError, match="apart"):
            convert(source, dest, force=True)


def test_full_disk_is_refused_first(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeflux.files.free_bytes", lambda path: 1000)
    with pytest.raises(IoError, match=r"packed: expected \d+ bytes free.*found 1000 "):
        convert(sources / "hf" / "qwen3_moe", tmp_path / "packed")
    assert list(tmp_path.iterdir()) == []


# ---- Stopped and continued --------------------------------------------------------------------------------------

KILLED_AFTER = """
import os, signal, sys
from pathlib import Path
from moeflux.conversion import journal, packer
from moeflux.conversion.convert import convert
packer.GROUP_BYTES, packer.SYNC_BYTES = 30_000, 1
pieces, append = int(sys.argv[3]), journal.Journal.append
def append_then_die(self, entries):
    append(self, entries)
    global pieces
    pieces -= len(entries)
    if pieces <= 0:
        with open(self.path, "a") as file:
            file.write('{"layer":0,"fir')  # the line that a kill cuts off
        os.kill(os.getpid(), signal.SIGKILL)
journal.Journal.append = append_then_die
convert(sys.argv[1], sys.argv[2])
"""


def killed(source: Path, dest: Path, pieces: int) -> None:
    """A conversion in a process of its own that is killed after about that many pieces."""
    run = subprocess.run([sys.executable, "-c", KILLED_AFTER, str(source), str(dest), str(pieces)], check=False)
    assert run.returncode == -signal.SIGKILL
    assert not dest.exists() and dest.with_name(f"{dest.name}.partial").is_dir()


@pytest.mark.parametrize(("kind", "name"), [("hf", "deepseek_v3"), ("mlx", "qwen3_5_moe")])
def test_resumes_after_a_kill(kind: str, name: str, sources: Path, tmp_path: Path) -> None:
    """Killed twice, in the dense tensors and in the experts: the third run ends with what one run would have written,
    and writes only what was missing."""
    source, dest = sources / kind / name, tmp_path / "packed"
    killed(source, dest, 20)
    killed(source, dest, 60)
    report = convert(source, dest)
    assert 0 < report.written < report.plan.total
    assert report.plan.resumed == report.plan.total - report.written
    convert(source, tmp_path / "at-once")
    assert files_of(dest) == files_of(tmp_path / "at-once")


def test_resumes_only_what_it_began(sources: Path, tmp_path: Path) -> None:
    source, dest = Path(shutil.copytree(sources / "hf" / "qwen3_moe", tmp_path / "hf")), tmp_path / "packed"
    killed(source, dest, 30)
    partial = files_of(tmp_path / "packed.partial")
    with pytest.raises(StateError, match=r"with format .*4-bit g64.*now .*8-bit g64"):
        convert(source, dest, format=ConvertFormat.asked(8))
    shard = source / "model-00001-of-00002.safetensors"
    os.utime(shard, ns=(1, shard.stat().st_mtime_ns + 1))
    with pytest.raises(StateError, match="whose files were others"):
        convert(source, dest)
    assert files_of(tmp_path / "packed.partial") == partial
    convert(source, dest, format=ConvertFormat.asked(8), force=True)
    assert read_description(dest).experts.down == QuantFormat.affine(8, 64)
    assert not (tmp_path / "packed.partial").exists()


def test_a_failing_disk_leaves_a_resumable_partial(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC in the middle is an IoError naming the file; what was finished is kept."""
    source, dest, write = sources / "hf" / "qwen3_moe", tmp_path / "packed", os.pwrite
    calls = 0

    def full(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls > 60:
            raise OSError(28, "No space left on device")
        return write(descriptor, data, offset)

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", full)
        with pytest.raises(IoError, match=r"packed\.partial/.*No space left.*packed\.partial keeps what is done"):
            convert(source, dest)
    assert not dest.exists()
    report = convert(source, dest)
    assert report.plan.resumed > 0
    assert report.fingerprint == read_description(sources / "packed" / "qwen3_moe").fingerprint


def test_ctrl_c_says_how_to_go_on(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    calls = 0

    class Interrupting:
        def __enter__(self) -> Interrupting:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def task(self, label: str, total: int) -> Interrupting:
            return self

        def note(self, sentence: str) -> None:
            notes.append(sentence)

        def advance(self, bytes_done: int) -> None:
            nonlocal calls
            calls += 1
            if calls == 20:
                raise KeyboardInterrupt

    source, dest = sources / "hf" / "qwen3_moe", tmp_path / "packed"
    with pytest.raises(KeyboardInterrupt):
        convert(source, dest, progress=Interrupting())
    assert "packed.partial" in notes[0] and "goes on" in notes[0]
    assert convert(source, dest).plan.resumed > 0


def test_writes_by_others_are_noticed(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches the disk is compared with the source."""
    write = os.pwrite

    def flips_a_bit(descriptor: int, data: memoryview, offset: int) -> int:
        if len(data) > 200_000:
            changed = bytearray(data)
            changed[-1] ^= 1
            data = memoryview(changed)
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", flips_a_bit)
    with pytest.raises(IoError, match=r"layer_00\.bin: expert 15: expected the source's bytes"):
        convert(sources / "hf" / "qwen3_moe", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_a_piece_is_on_disk_before_it_is_journalled(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure could leave a journal that speaks of bytes that never arrived."""
    from moeflux.conversion import packer
    from moeflux.conversion.journal import Journal

    synced: set[str] = set()
    sync, append = files.sync, Journal.append

    def remembering_sync(path: Path) -> None:
        synced.add(path.name)
        sync(path)

    def checking_append(self: Journal, entries: list[dict]) -> None:
        for entry in entries:
            if "layer" in entry:
                assert f"layer_{entry['layer']:02d}.bin" in synced
            elif "tensors" in entry:
                assert "model_weights.bin" in synced
        synced.clear()
        append(self, entries)

    monkeypatch.setattr(packer, "SYNC_BYTES", 1)
    monkeypatch.setattr(files, "sync", remembering_sync)
    monkeypatch.setattr(Journal, "append", checking_append)
    convert(sources / "hf" / "qwen3_moe", tmp_path / "packed")


def test_fp8_is_rounded_to_bf16_first(sources: Path, tmp_path: Path) -> None:
    """Whatever is asked for: the products of codes and scales are numbers of bf16, as mlx-lm has them."""
    for kind in ("bf16", "f32"):
        convert(sources / "hf" / "deepseek_v3_fp8", tmp_path / kind, format=ConvertFormat.asked(kind))
    name = "model.layers.1.self_attn.o_proj.weight"
    narrow, wide = (dense_tensors(tmp_path / kind)[name][1] for kind in ("bf16", "f32"))
    assert np.array_equal(narrow.astype("<u4") << 16, wide.view("<u4"))


def test_fp8_experts_that_are_stacked_the_other_way_round(sources: Path, tmp_path: Path) -> None:
    """A scale is of the rows and columns that lie there, not of those that are asked for."""
    folder = Path(shutil.copytree(sources / "hf" / "qwen3_vl_moe", tmp_path / "hf"))
    meant: dict[str, np.ndarray] = {}

    def narrow(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".mlp.experts." in name]:
            each = [fp8_blocks(from_bf16(values).astype(np.float64)) for values in tensors[name][1]]
            codes, scales = (np.stack(parts) for parts in zip(*each, strict=True))
            tensors[name], tensors[f"{name}_scale_inv"] = ("F8_E4M3", codes), ("F32", scales)
            size = fp8_values()[codes & 127] * np.where(codes & 128, -1, 1)
            spread = scales.repeat(128, axis=1).repeat(128, axis=2)[:, : codes.shape[1], : codes.shape[2]]
            meant[name.rpartition("layers.")[2]] = to_bf16(size.astype(np.float32) * spread)

    rewrite(folder, narrow)
    edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    convert(folder, tmp_path / "packed", format=ConvertFormat.asked("bf16"), check="none")
    with open_store(tmp_path / "packed") as store:
        for layer, expert in ((0, 0), (3, 7)):
            both, down = (meant[f"{layer}.mlp.experts.{name}"][expert].T for name in ("gate_up_proj", "down_proj"))
            expected = (*np.split(both, 2), down)
            for found, wanted in zip(store.expert(layer, expert), expected, strict=True):
                assert np.array_equal(found.weight, wanted)
