"""Matrices whose codes are floats: NVFP4 and FP8 as they are published, and the modes of MLX folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from golden import checkpoints
from golden.checkpoint import safetensors_bytes
from golden.elements import to_bf16
from moeflux import ArgumentError, FormatError, QuantFormat, oracle
from moeflux._core import SafetensorsFile
from moeflux.conversion.convert import ConvertFormat, convert
from moeflux.conversion.float_codes import take_nvfp4
from moeflux.conversion.stored import Stored
from moeflux.models.quantised import Nvfp4
from moeflux.oracle.stored import E4M3, float_numbers, widen
from moeflux.stores.spans import SpanReader
from moeflux.stores.store import open_store
from support.checkpoint_folder import edit_config, rewrite
from support.engine_logits import LARGEST_INT16_ERROR, assert_meets
from support.float_folders import LAYOUTS, MODES, Tensors, fp8_checkpoint, mlx_folder, nvfp4_checkpoint
from support.mlx_folder import write_mlx_folder

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "compressed.npz")
IDS = [1, 100, 50, 10, 42, 3, 77, 9]


def bits_of(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def stored_in(folder: Path, tensors: Tensors) -> tuple[SpanReader, dict[str, Stored]]:
    path = folder / "model.safetensors"
    path.write_bytes(safetensors_bytes(tensors))
    entries = SafetensorsFile(str(path)).tensors
    return SpanReader([path]), {
        name: Stored(name, 0, entry.offset, entry.dtype, tuple(entry.shape)) for name, entry in entries.items()
    }


# ---- Numbers --------------------------------------------------------------------------------------------------------


def test_e4m3_is_that_of_torch() -> None:
    """All but the two codes that stand for no number."""
    known = np.isfinite(GOLDEN["e4m3"])
    assert known.sum() == 254
    assert np.array_equal(bits_of(E4M3)[known], bits_of(GOLDEN["e4m3"])[known])


def test_numbers_of_nvfp4_are_those_of_compressed_tensors(tmp_path: Path) -> None:
    """To the last bit of the bf16 that it rounds to, with every scale. In f32 they may differ in the last bit: it
    divides by the scale of the tensor, and engines multiply by its reciprocal."""
    golden = {part: GOLDEN[f"nvfp4/{part}"] for part in ("packed", "scale", "global_scale", "numbers")}
    types = {"packed": "U8", "scale": "F8_E4M3", "global_scale": "F32"}
    reader, stored = stored_in(tmp_path, {f"x.weight_{part}": (dtype, golden[part]) for part, dtype in types.items()})
    shape = golden["numbers"].shape
    with reader:
        matrix = take_nvfp4("x.weight", (shape[0], shape[1]), Nvfp4(divides=True), lambda name, *_: stored[name])
        found = matrix.numbers(reader, 0, shape[0])
        words, scales = matrix.parts(reader, 0, shape[0])
    assert np.array_equal(to_bf16(found), golden["numbers"])
    of_store = float_numbers(words.view("<u4"), scales, QuantFormat.floats("NVFP4"))
    assert np.array_equal(bits_of(of_store), bits_of(found))


# ---- NVFP4 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "name"), [("modelopt", "qwen3_moe"), ("compressed", "qwen3_next")])
def test_nvfp4_is_kept(tmp_path: Path, layout: str, name: str) -> None:
    """A store has its numbers, to the last bit, and the engine computes with them."""
    meant: Tensors = {}
    folder = nvfp4_checkpoint(tmp_path / "hf", layout, meant, name)
    plain = checkpoints.write(name, tmp_path / "plain")
    rewrite(plain, lambda tensors: tensors.update(meant))
    asked = ConvertFormat.asked(4, dense_bits="bf16")
    report = convert(folder, tmp_path / "packed", format=asked, check="full")
    assert any(sentence.startswith("scales of activations") for sentence in report.plan.dropped)
    assert "NVFP4" in report.plan.dense_formats and report.plan.expert_format == "NVFP4"
    convert(plain, tmp_path / "expected", format=ConvertFormat.asked("f32"))
    nvfp4 = QuantFormat.floats("NVFP4")
    with open_store(tmp_path / "packed") as found, open_store(tmp_path / "expected") as expected:
        kept = [base for base, format in found.directory.formats.items() if format == nvfp4]
        assert len(kept) >= 4 * 4
        for base in kept:
            assert np.array_equal(widen(found.tensor(base)), widen(expected.tensor(base))), base
        for layer in found.variant.moe_layers:
            for pair in zip(found.expert(layer, 3), expected.expert(layer, 3), strict=True):
                assert pair[0].format == nvfp4 and np.array_equal(*map(widen, pair))
        logits = oracle.Session(found.variant, found).prefill(IDS)
    with moeflux.load(tmp_path / "packed", backend="cpu", threads=2) as model:
        assert_meets(model.session().prefill(IDS, logits="all"), logits, LARGEST_INT16_ERROR)


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder = nvfp4_checkpoint(tmp_path / "hf", "modelopt")
    edit_config(folder, quantization_config=None)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    assert convert(folder, tmp_path / "packed", dry_run=True).plan.expert_format == "NVFP4"


def of_expert(ending: str) -> Any:
    return lambda tensors: next(name for name in sorted(tensors) if ".experts." in name and name.endswith(ending))


def without_a_number(tensors: Tensors) -> None:
    tensors[of_expert("weight_scale")(tensors)][1][0, 1] = 0xFF


def without_a_scale(tensors: Tensors) -> None:
    tensors[of_expert("weight_scale_2")(tensors)][1][...] = 0


def of_bf16(tensors: Tensors) -> None:
    name = of_expert("weight_scale")(tensors)
    tensors[name] = ("BF16", np.ones(tensors[name][1].shape, np.uint16))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_a_number, r'weight_scale": expected finite numbers, found NaN'),
        (without_a_scale, r'weight_scale_2": expected a scale above 0, found 0'),
        (of_bf16, r'weight_scale": expected F8_E4M3, found BF16'),
        (lambda t: t.pop(of_expert("weight_scale_2")(t)), r'weight_scale_2" \[1\]: expected, found nothing'),
    ],
)
def test_damaged_nvfp4_is_named(damage: Any, message: str, tmp_path: Path) -> None:
    folder = nvfp4_checkpoint(tmp_path / "hf", "modelopt")
    rewrite(folder, damage)
    with pytest.raises(FormatError, match=message):
        convert(folder, tmp_path / "packed")


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("modelopt", {"quant_algo": "FP8"}, "quant_algo: expected 'NVFP4', found 'FP8'"),
        ("modelopt", {"group_size": 32}, "group_size: expected 16, found 32"),
        (
            "compressed",
            {"format": "mxfp4-pack-quantized"},
            "format: expected 'pack-quantized' or 'nvfp4-pack-quantized'",
        ),
    ],
)
def test_other_float_codes_are_refused(layout: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = nvfp4_checkpoint(tmp_path / "hf", layout)
    edit_config(folder, quantization_config=LAYOUTS[layout] | changes)
    with pytest.raises(FormatError, match=message):
        convert(folder, tmp_path / "packed")


def test_nvfp4_is_not_made_of_others(tmp_path: Path) -> None:
    folder = nvfp4_checkpoint(tmp_path / "hf", "modelopt")
    for bits, message in (
        (3, "found experts in NVFP4, which are taken as they are"),
        ("mxfp4", "expected experts in MXFP4"),
    ):
        with pytest.raises(FormatError, match=message):
            convert(folder, tmp_path / "packed", format=ConvertFormat.asked(bits))


# ---- FP8 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("qwen3_moe", "F32"), ("qwen3_5_moe", "BF16")])
def test_fp8_is_kept(tmp_path: Path, name: str, dtype: str) -> None:
    """In experts of their own and in stacks. Widths that are no whole blocks are plain."""
    meant: dict[str, np.ndarray] = {}
    folder = fp8_checkpoint(tmp_path / "hf", dtype, meant, name)
    report = convert(folder, tmp_path / "packed", format=ConvertFormat.asked("fp8"), check="full")
    own = QuantFormat.floats("FP8" if dtype == "BF16" else "FP8_F32")
    assert report.plan.dense_formats[str(own)] > 3
    canonical = {key.replace("model.language_model.", "model.").removesuffix(".weight"): key for key in meant}
    with open_store(tmp_path / "packed") as store:
        kept = [base for base, format in store.directory.formats.items() if format == own]
        for base in set(kept) & set(canonical):
            assert np.array_equal(bits_of(widen(store.tensor(base))), bits_of(meant[canonical[base]])), base
        assert len(set(kept) & set(canonical)) > 3
        gate, up, _ = store.expert(1, 2)
        assert gate.format == up.format == own
        if name == "qwen3_moe":
            expected = meant["model.layers.1.mlp.experts.2.up_proj.weight"]
        else:
            expected = meant[canonical["model.layers.1.mlp.experts.gate_up_proj"]][2][64:]
        assert np.array_equal(bits_of(widen(up)), bits_of(expected))
        logits = oracle.Session(store.variant, store).prefill(IDS)
    with moeflux.load(tmp_path / "packed", backend="cpu", threads=2) as model:
        assert_meets(model.session().prefill(IDS, logits="all"), logits, LARGEST_INT16_ERROR)


# ---- MLX ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_mlx(tmp_path: Path, mode: str) -> None:
    """In place and repacked: the same logits, bit for bit, which are those of the oracle."""
    folder = mlx_folder(tmp_path, mode)
    format = QuantFormat.floats(MODES[mode][0])
    report = convert(folder, tmp_path / "packed", check="full")
    assert report.plan.expert_format == str(format) and report.plan.dense_formats[str(format)] > 10
    logits = []
    with open_store(folder) as one, open_store(tmp_path / "packed") as other:
        assert one.kind == "mlx" and one.directory.experts.formats.up == format
        assert one.directory.formats == other.directory.formats
        assert one.directory.formats["lm_head"] == format
        assert one.directory.formats["model.layers.0.mlp.gate"] == QuantFormat.affine(8, 64)
        expected = oracle.Session(one.variant, one).prefill(IDS)
    for path in (folder, tmp_path / "packed"):
        with moeflux.load(path, backend="cpu", threads=2) as model:
            logits.append(model.session().prefill(IDS, logits="all"))
    assert np.array_equal(*logits)
    assert_meets(logits[0], expected, LARGEST_INT16_ERROR)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "mxfp4"}, "expected the mode mxfp4 as declared in .*found MLX_NVFP4"),
        ({"group_size": 32}, "expected groups of 32 as declared in .*found MLX_NVFP4"),
        ({"bits": 8}, "expected 8 bits as declared in .*found MLX_NVFP4"),
    ],
)
def test_what_mlx_declares_must_be_there(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = mlx_folder(tmp_path, "nvfp4")
    said = json.loads((folder / "config.json").read_text())["quantization"] | changes
    edit_config(folder, quantization=said)
    with pytest.raises(FormatError, match=message):
        open_store(folder)


def test_a_folder_with_distilled_weights_is_an_affine_one(tmp_path: Path) -> None:
    """DWQ: scales and biases are learned, a few matrices may have more bits, and config.json says all of it twice."""
    checkpoints.write("qwen3_moe", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "packed", format=ConvertFormat.asked(4, dense_bits=6), check="none")
    folder = write_mlx_folder(tmp_path / "packed", tmp_path / "mlx")
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, quantization_config=config["quantization"])
    with open_store(folder) as found, open_store(tmp_path / "packed") as expected:
        assert found.kind == "mlx" and found.directory.formats == expected.directory.formats
        assert str(found.directory.experts.formats.down) == "4-bit g64"


# ---- Names -----------------------------------------------------------------------------------------------------------


def test_names_of_formats() -> None:
    names = QuantFormat.float_types()
    assert [str(QuantFormat.floats(name)) for name in names] == names
    with pytest.raises(ArgumentError, match=r'expected one of MXFP4, .*found "FP4"'):
        QuantFormat.floats("FP4")
    for name in names:
        format = QuantFormat.floats(name)
        assert format.has_float_codes and not format.is_affine and format.has_scales
        columns = 4 * format.whole_columns
        assert format.row_bytes(columns) == format.weight_row_bytes(columns) + format.scale_row_bytes(columns)
    assert (
        QuantFormat.floats("NVFP4").scale_row_bytes(64) == 8
        and QuantFormat.floats("MLX_NVFP4").scale_row_bytes(64) == 4
    )
