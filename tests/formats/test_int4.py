"""Checkpoints in int4, as compressed-tensors, AutoAWQ and GPTQ pack it: taken as they are, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden import checkpoints
from golden.elements import from_bf16, to_bf16
from moeflux import FormatError, QuantFormat, open_store
from moeflux._core import SafetensorsFile
from moeflux.conversion.coded import Coded, take_coded
from moeflux.conversion.convert import ConvertFormat, convert
from moeflux.conversion.stored import Stored
from moeflux.models.quantised import Awq, Int4
from moeflux.oracle.stored import dequantize, widen
from moeflux.stores.spans import SpanReader
from support.checkpoint_folder import edit_config, rewrite
from support.int4 import Tensors, in_codes, quantisation

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "compressed.npz")
ROWS, COLUMNS = 9, 128


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.write("kimi_k25", tmp_path / "hf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"format": "float-quantized"},
            r"quantization_config\.format: expected 'pack-quantized' or 'nvfp4-pack-quantized', found 'float-quant",
        ),
        ({"config_groups": {}}, "config_groups: expected one group"),
        ({"num_bits": 8}, "weights: num_bits: expected 4, found 8"),
        ({"symmetric": None}, "weights: symmetric: expected True, found None"),
        ({"symmetric": False}, r'weight_zero_point" \[8, 4\]: expected, found nothing'),
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
        (scale_of_int4_in_f16, r"expected 4-bit g32.* as experts before, found 4-bit g32"),
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


# ---- To the last bit ------------------------------------------------------------------------------------------------


def written(folder: Path, tensors: Tensors) -> tuple[SpanReader, dict[str, Stored]]:
    """A file of these tensors, as conversion sees it."""
    path = folder / "model.safetensors"
    path.write_bytes(checkpoints.safetensors_bytes(tensors))
    entries = SafetensorsFile(str(path)).tensors
    stored = {name: Stored(name, 0, entry.offset, entry.dtype, tuple(entry.shape)) for name, entry in entries.items()}
    return SpanReader([path]), stored


def dequantised(matrix: Coded, reader: SpanReader) -> np.ndarray:
    """What a store with these parts stands for."""
    words, scales, biases = matrix.parts(reader, 0, matrix.rows)
    kind = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}[matrix.format.scale_type]
    return dequantize(words.view("<u4"), scales.view(kind), biases.view(kind), matrix.format)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", ["symmetric", "zeros"])
def test_numbers_are_those_of_compressed_tensors(tmp_path: Path, kind: str, group: int, dtype: str) -> None:
    """To the last bit. compressed-tensors rounds a product to the type of its scale; a store keeps all of it."""
    golden = {part: GOLDEN[f"compressed/{kind}/{group}/{dtype}/{part}"] for part in ("packed", "scale", "numbers")}
    tensors: Tensors = {"x.weight_shape": ("I32", np.array([ROWS, COLUMNS], np.int32))}
    tensors |= {"x.weight_packed": ("I32", golden["packed"]), "x.weight_scale": (dtype, golden["scale"])}
    if kind == "zeros":
        tensors["x.weight_zero_point"] = ("I32", GOLDEN[f"compressed/zeros/{group}/{dtype}/zero_point"])
    reader, stored = written(tmp_path, tensors)
    with reader:
        own = Int4(group, kind == "symmetric")
        matrix = take_coded("x.weight", (ROWS, COLUMNS), own, lambda name, *_: stored[name])
        assert matrix.format == QuantFormat.affine(4, group, dtype if kind == "symmetric" else "F32")
        exact = dequantised(matrix, reader)
        found = matrix.read(reader, 0, ROWS, dtype)
    assert np.array_equal(found, golden["numbers"])
    if dtype != "F32":
        wide = from_bf16(golden["scale"]) if dtype == "BF16" else golden["scale"].astype(np.float32)
        products = exact.reshape(ROWS, -1, group) / np.where(wide, wide, 1)[..., None].astype(np.float64)
        assert np.array_equal(products, np.rint(products))  # code less zero point: nothing was rounded
    if kind == "zeros" and dtype == "F32":  # whose scale leaves no room for the digits of a zero point in f32
        sizes = 16 * np.abs(golden["scale"]).repeat(group, axis=1)
        assert (np.abs(exact - golden["numbers"]) <= sizes * 2.0**-24).all()
    else:
        rounded = exact.astype(np.float32)
        assert np.array_equal(rounded if dtype == "F32" else narrow(rounded, dtype), golden["numbers"])


def narrow(values: np.ndarray, dtype: str) -> np.ndarray:
    return values.astype(np.float16) if dtype == "F16" else to_bf16(values)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_numbers_are_those_of_autoawq(tmp_path: Path, group: int) -> None:
    """To the last bit of its f16, to which it rounds a product."""
    golden = {part: GOLDEN[f"awq/{group}/{part}"] for part in ("qweight", "qzeros", "scales", "numbers")}
    types = {"qweight": "I32", "qzeros": "I32", "scales": "F16"}
    reader, stored = written(tmp_path, {f"x.{part}": (dtype, golden[part]) for part, dtype in types.items()})
    with reader:
        matrix = take_coded("x.weight", (16, COLUMNS), Awq(group), lambda name, *_: stored[name])
        exact = dequantised(matrix, reader)
        assert np.array_equal(matrix.read(reader, 3, 8, "F16"), golden["numbers"].T[3:8])
    assert np.array_equal(exact.astype(np.float16), golden["numbers"].T)


STAY = (".gate.weight", "norm.weight", "layernorm.weight", "lm_head.weight", "conv1d.weight", "eh_proj.weight")


def coded_and_plain(tmp_path: Path, name: str, kind: str, group: int, dtype: str) -> tuple[Path, Path]:
    """A checkpoint of which most matrices are in codes, and one with the numbers that they stand for, in f32."""
    coded, plain = (checkpoints.write(name, tmp_path / each) for each in ("coded", "plain"))
    rng = np.random.default_rng(group)
    meant: Tensors = {}

    def encode(tensors: Tensors) -> None:
        for key in sorted(tensors):
            shape = tensors[key][1].shape
            if not key.endswith(".weight") or key.endswith(STAY) or len(shape) != 2 or ".layers." not in key:
                continue
            if shape[0] % 8:  # the gate of a shared expert has one row, which is in codes nowhere
                continue
            del tensors[key]
            parts, numbers = in_codes(rng, key, shape, kind, group, dtype)
            tensors.update(parts)
            meant[key] = ("F32", numbers.astype(np.float32))

    rewrite(coded, encode)
    rewrite(plain, lambda tensors: tensors.update(meant))
    assert len(meant) > 80
    edit_config(coded, quantization_config=quantisation(kind, group))
    return coded, plain


@pytest.mark.parametrize(
    ("name", "kind", "group", "dtype"),
    [
        ("qwen3_moe", "symmetric", 64, "BF16"),
        ("qwen3_moe", "zeros", 32, "BF16"),
        ("qwen3_moe", "zeros", 32, "F16"),
        *(("qwen3_moe", kind, 64, "F16") for kind in ("awq", "gptq", "gptq_zeros", "gptq_v2")),
        ("qwen3_next", "awq", 32, "F16"),  # whose inputs are fused
        ("qwen3_next", "zeros", 32, "F16"),
        ("deepseek_v3", "gptq", 32, "F16"),  # of which a matrix is cut, and a part of it transposed
        ("mixtral", "gptq_v2", 64, "BF16"),
    ],
)
def test_a_store_has_the_numbers_of_the_codes(tmp_path: Path, name: str, kind: str, group: int, dtype: str) -> None:
    """All of them, to the last bit, but where heads are cut from a matrix and transposed: those are rounded to bf16, as
    those of any checkpoint."""
    coded, plain = coded_and_plain(tmp_path, name, kind, group, dtype)
    convert(coded, tmp_path / "packed", format=ConvertFormat.asked(4, dense_bits="bf16"), check="full")
    convert(plain, tmp_path / "expected", format=ConvertFormat.asked("f32"))
    symmetric = kind in ("symmetric", "gptq")
    own = QuantFormat.affine(4, group, dtype if symmetric else "F32")
    with open_store(tmp_path / "packed") as found, open_store(tmp_path / "expected") as expected:
        formats = found.directory.formats
        for base, format in formats.items():
            if format == own:
                assert np.array_equal(widen(found.tensor(base)), widen(expected.tensor(base))), base
            else:
                assert base.endswith((".gate", "lm_head", "embed_tokens", "embed_q", "unembed_out", "_expert_gate"))
                assert format == QuantFormat.plain("BF16")
                rounded = to_bf16(widen(expected.tensor(base)))
                assert np.array_equal(found.tensor(base).weight, rounded), base
        assert sum(format == own for format in formats.values()) >= 12
        for layer in found.variant.moe_layers:
            for expert in (0, found.variant.experts.count - 1):
                pairs = zip(found.expert(layer, expert), expected.expert(layer, expert), strict=True)
                assert all(one.format == own and np.array_equal(widen(one), widen(other)) for one, other in pairs)


def test_rows_of_codes_are_read_one_by_one(tmp_path: Path) -> None:
    """Where zero points of eight rows are in one word."""
    rng = np.random.default_rng(1)
    tensors, numbers = in_codes(rng, "x.weight", (21, 64), "zeros", 32, "F32")
    reader, stored = written(tmp_path, tensors)
    with reader:
        matrix = take_coded("x.weight", (21, 64), Int4(32, False), lambda name, *_: stored[name])
        for start, stop in [(0, 21), (5, 6), (7, 17), (16, 21)]:
            assert np.array_equal(matrix.read(reader, start, stop, "F32"), numbers[start:stop].astype(np.float32))


# ---- Refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("awq", {"bits": 8}, "bits: expected 4, found 8"),
        ("awq", {"version": "gemv"}, "version: expected 'gemm', found 'gemv'"),
        ("awq", {"zero_point": False}, "zero_point: expected True, found False"),
        ("awq", {"group_size": -1}, "group_size: .*found 0|group_size: .*-1"),
        ("gptq", {"desc_act": True}, "desc_act: expected False, found True"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format: expected None, found 'marlin'"),
        ("gptq", {"bits": True}, "bits: expected 4, found True"),
        ("gptq", {"sym": 1}, "sym: expected True, found 1"),
        ("gptq", {"dynamic": {"+:.*down_proj": {"bits": 8}}}, "dynamic: expected rules for what is not quantised"),
    ],
)
def test_other_awq_and_gptq_are_refused(kind: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = checkpoints.write("qwen3_moe", tmp_path / "hf")
    edit_config(folder, quantization_config=quantisation(kind, 64) | changes)
    with pytest.raises(FormatError, match=f"quantization_config.*{message}"):
        convert(folder, tmp_path / "packed")


def of_kind(ending: str) -> Any:
    return lambda tensors: next(name for name in sorted(tensors) if ".experts." in name and name.endswith(ending))


def another_order(tensors: Tensors) -> None:
    tensors[of_kind("g_idx")(tensors)][1][5] ^= 1


def all_ones(tensors: Tensors) -> None:
    tensors[of_kind("qzeros")(tensors)][1][0, 0] = -1


def infinite_scale(tensors: Tensors) -> None:
    tensors[of_kind(".scales")(tensors)][1][0, 0] = np.inf


def large_scale(tensors: Tensors) -> None:
    tensors[of_kind(".scales")(tensors)][1][0, 0] = 60000


def without_codes(tensors: Tensors) -> None:
    base = of_kind("qweight")(tensors).removesuffix("qweight")
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        tensors.pop(f"{base}{part}")
    tensors[f"{base}weight"] = ("BF16", np.zeros((128, 64), np.uint16))


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("gptq", another_order, r'g_idx": expected columns in their own order, in groups of 64, found another'),
        ("gptq", all_ones, r'qzeros": expected zero points of 8, for quantization_config says sym, found others'),
        ("gptq_zeros", all_ones, r'qzeros": expected zero points up to 15, found 16, which is packed as 15'),
        ("awq", infinite_scale, r'scales": expected finite numbers'),
        ("gptq", large_scale, r'scales": expected scales with which numbers and biases fit F16, found'),
        ("gptq", without_codes, r"expected (no codes|4-bit g64.*) as experts before, found (no|4)"),
        ("awq", lambda t: t.pop(of_kind("qzeros")(t)), r'qzeros" \[\d, \d+\]: expected, found nothing'),
        ("gptq", lambda t: t.pop(of_kind("g_idx")(t)), r'g_idx" \[\d+\]: expected, found nothing'),
    ],
)
def test_damaged_awq_and_gptq_are_named(kind: str, damage: Any, message: str, tmp_path: Path) -> None:
    folder, _ = coded_and_plain(tmp_path, "qwen3_moe", kind, 64, "F16")
    rewrite(folder, damage)
    with pytest.raises(FormatError, match=message):
        convert(folder, tmp_path / "packed")


def test_biases_of_zeros_are_dropped(tmp_path: Path) -> None:
    """GPTQ's tools write them for matrices that have none."""
    folder, _ = coded_and_plain(tmp_path, "qwen3_moe", "gptq", 64, "F16")
    name = "model.layers.0.mlp.experts.0.down_proj.bias"
    rewrite(folder, lambda tensors: tensors.update({name: ("F16", np.zeros(128, np.float16))}))
    report = convert(folder, tmp_path / "packed")
    assert report.plan.dropped == ("biases that are zero: 1 tensors, 256 bytes",)
    rewrite(folder, lambda tensors: tensors.update({name: ("F16", np.ones(128, np.float16))}))
    with pytest.raises(FormatError, match=r"experts\.0\.down_proj\.bias"):
        convert(folder, tmp_path / "other")
