"""Models in GGUF files, used in place: the very bits of a conversion of the same checkpoint where the file has its
numbers, text as the checkpoint's own tokenizer makes it, and clear refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import moeflux
from golden import checkpoints
from moeflux import ArgumentError, FormatError, oracle
from moeflux.conversion.convert import ConvertFormat, convert
from moeflux.conversion.verify import verify
from moeflux.measure.info import describe
from moeflux.models.gguf import find_gguf
from moeflux.stores.planned import store_to_plan
from moeflux.stores.store import StoredTensor, open_store
from support import gguf_files

IDS = [1, 100, 50, 10, 42, 3, 77, 9]
FAMILIES = tuple(gguf_files.FAMILIES)
EXACT = {name for name in FAMILIES if name not in gguf_files.CHANGED}
"""Those of which no number is changed in a file."""


def published(name: str, folder: Path) -> Path:
    made = folder / f"{name}-packed"
    own = None if name == "gpt_oss" else ConvertFormat.asked("bf16")
    convert(checkpoints.write(name, folder / name), made, format=own, check="none")
    return made


def numbers(matrix: StoredTensor) -> np.ndarray:
    """f32, as the oracle reads them."""
    return np.asarray(oracle.widen(matrix), np.float32)


def logits_of(store_path: Path) -> np.ndarray:
    with open_store(store_path) as store:
        return oracle.Session(store.variant, store).prefill(IDS)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_logits_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """A file in the checkpoint's own type gives the oracle's bits of a conversion to that type. Where the converter
    changes numbers, they come back to the last digit but one."""
    file = gguf_files.write(name, tmp_path / "m.gguf")
    found, wanted = logits_of(file), logits_of(published(name, tmp_path))
    assert np.ptp(wanted) > 1
    if name in EXACT:
        assert np.array_equal(found, wanted)
    else:
        assert np.abs(found - wanted).max() < 1e-5 * np.ptp(wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine(name: str, tmp_path: Path) -> None:
    """With all experts in memory, with the fewest, and with direct reads; the oracle's logits."""
    file = gguf_files.write(name, tmp_path / "m.gguf")
    found = []
    options: list[dict[str, Any]] = [{}, {"expert_slots": 8}, {"expert_slots": 8, "reads": "direct"}]
    for each in options:
        with moeflux.load(file, threads=2, sessions=1, precision="exact", **each) as model:
            session = model.session()
            found.append(np.stack([np.array(session.prefill(IDS)), *(np.array(session.step(id)) for id in IDS)]))
    assert all(np.array_equal(found[0], other) for other in found[1:])
    wanted = logits_of(file)[-1]
    assert np.abs(found[0][0] - wanted).max() < 1e-4 * np.ptp(wanted)


@pytest.mark.parametrize("type", ["F32", "F16", "Q8_0", "Q4_0", "Q5_1"])
def test_types(type: str, tmp_path: Path) -> None:
    """The numbers of every matrix are those that the package gguf reads."""
    file = gguf_files.write("qwen3_moe", tmp_path / "m.gguf", type=type)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    with open_store(file) as store:
        made = {"model.embed_tokens": "token_embd.weight", "model.layers.1.self_attn.k_proj": "blk.1.attn_k.weight"}
        for own, stored in made.items():
            raw = reader[stored]
            wanted = gguf.quants.dequantize(raw.data, raw.tensor_type)
            assert np.array_equal(numbers(store.tensor(own)), wanted)
        for place, own in enumerate(("gate", "up", "down")):
            raw = reader[f"blk.2.ffn_{own}_exps.weight"]
            wanted = gguf.quants.dequantize(raw.data, raw.tensor_type)[7]
            assert np.array_equal(numbers(store.expert(2, 7)[place]), wanted)
    with moeflux.load(file, threads=2, sessions=1, precision="exact", expert_slots=8) as model:
        found = np.array(model.session().prefill(IDS))
    wanted = logits_of(file)[-1]
    assert np.abs(found - wanted).max() < 1e-4 * np.ptp(wanted)


MIXED = {"blk.1.ffn_down_exps.weight": "F16", "blk.2.ffn_gate_exps.weight": "F32", "blk.3.ffn_up_exps.weight": "Q4_0"}


def test_layers_with_experts_of_their_own_types(tmp_path: Path) -> None:
    """As quantisers leave them, that give some layers more bits than others."""
    file = gguf_files.write("qwen3_moe", tmp_path / "m.gguf", type="Q8_0", others=MIXED)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    with open_store(file) as store:
        assert store.directory.layers_differ
        for layer in range(4):
            for own, found in zip(("gate", "up", "down"), store.expert(layer, 5), strict=True):
                raw = reader[f"blk.{layer}.ffn_{own}_exps.weight"]
                wanted = gguf.quants.dequantize(raw.data, raw.tensor_type)[5]
                assert np.array_equal(numbers(found), wanted)
    found = []
    for slots in (None, 8):
        with moeflux.load(file, threads=2, sessions=1, precision="exact", expert_slots=slots) as model:
            session = model.session()
            found.append(np.stack([np.array(session.prefill(IDS)), *(np.array(session.step(id)) for id in IDS)]))
    assert np.array_equal(*found)
    wanted = logits_of(file)[-1]
    assert np.abs(found[0][0] - wanted).max() < 1e-4 * np.ptp(wanted)
    assert describe(file).expert_format == "Q8_0 / F16 / F32 / Q4_0"
    with pytest.raises(FormatError, match=r"m.gguf: expected experts of the same types in all layers, .*runs as it is"):
        convert(file, tmp_path / "packed")


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "mixtral", "gpt_oss"])
def test_a_conversion_has_the_same_bits(name: str, tmp_path: Path) -> None:
    """And the same text beside the weights."""
    file, made = gguf_files.write(name, tmp_path / "m.gguf", type="Q8_0"), tmp_path / "packed"
    report = convert(file, made, check="full")
    assert report.plan.kind == "gguf" and report.checked_experts > 0
    assert np.array_equal(logits_of(made), logits_of(file))
    assert verify(made).ok and verify(file).ok
    one, other = (moeflux.load(path, threads=1, sessions=1) for path in (file, made))
    with one, other:
        assert one.end_tokens == other.end_tokens and one.default_sampling == other.default_sampling
        assert one.chat_format is not None and other.chat_format is not None
        assert one.chat_format.text == other.chat_format.text
        assert one.tokenizer.encode("Hi, you!") == other.tokenizer.encode("Hi, you!")


def test_a_conversion_keeps_what_it_is(tmp_path: Path) -> None:
    file = gguf_files.write("qwen3_moe", tmp_path / "m.gguf")
    with pytest.raises(ArgumentError, match="found a GGUF file, which is repacked as it is; expected no format"):
        convert(file, tmp_path / "packed", format=ConvertFormat.asked(4))


def test_a_model_in_parts(tmp_path: Path) -> None:
    whole = gguf_files.write("qwen3_moe", tmp_path / "m.gguf")
    gguf_files.write("qwen3_moe", tmp_path / "parts" / "m.gguf", parts=9)
    with open_store(tmp_path / "parts") as store:
        assert len(store.directory.files) > 3 and len(store.expert_files) > 1
    assert np.array_equal(logits_of(tmp_path / "parts"), logits_of(whole))


def test_what_it_is_is_told(tmp_path: Path) -> None:
    file = gguf_files.write("qwen3_moe", tmp_path / "m.gguf", type="Q8_0")
    told = describe(file)
    assert (told.kind, told.expert_format, told.variant.name) == ("gguf", "Q8_0", "tiny qwen3_moe")
    assert told.missing == []
    with store_to_plan(file) as planned:
        assert planned.kind == "gguf" and planned.fingerprint == told.fingerprint
    with store_to_plan(tmp_path) as planned:  # the folder that has one model
        assert planned.fingerprint == told.fingerprint


def test_fingerprints_differ_where_weights_do(tmp_path: Path) -> None:
    def louder(_: gguf.GGUFWriter, tensors: gguf_files.Tensors) -> None:
        tensors["blk.1.attn_norm.weight"][3] += 1

    one, other = tmp_path / "one", tmp_path / "other"
    gguf_files.write("qwen3_moe", one / "m.gguf")
    gguf_files.write("qwen3_moe", other / "m.gguf", change=louder)
    shutil.copytree(one, tmp_path / "copy")
    prints = []
    for folder in (one, other, tmp_path / "copy"):
        with open_store(folder) as store:
            prints.append(store.fingerprint)
    assert prints[0] == prints[2] != prints[1]


def test_which_file_of_a_folder(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None and find_gguf(tmp_path / "m.gguf") is None
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf", "README.md"):
        (tmp_path / name).touch()
    assert find_gguf(tmp_path) == tmp_path / "m-00001-of-00002.gguf"
    (tmp_path / "other.gguf").touch()
    with pytest.raises(FormatError, match=r"expected one model in GGUF, found 2: m-00001.*, other.gguf. Name the file"):
        find_gguf(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(tmp_path) is None


# ---- Refusals ---------------------------------------------------------------------------------------------------

Change = Callable[[gguf.GGUFWriter, gguf_files.Tensors], object]
K, ROUTER = "blk.0.attn_k.weight", "blk.0.ffn_gate_inp.weight"

BAD: list[tuple[str, Change, str]] = [
    ("an unknown value", lambda w, t: w.add_uint32("qwen3moe.rope.new", 1), r'"rope.new" is not one that moeflux know'),
    ("a value of another model", lambda w, t: w.add_uint32("llama.block_count", 1), r"llama.block_count: expected val"),
    ("another kind of file", lambda w, t: set_value(w, "general.type", "adapter"), r"general.type: .*found 'adapter'"),
    ("another architecture", lambda w, t: set_value(w, "general.architecture", "bert"), r"architecture: expected one "),
    ("a sigmoid router", lambda w, t: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID), r"gating_func: .*1"),
    ("a rope of its own", lambda w, t: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), r"scaling.type: .*yarn"),
    ("a missing value", lambda w, t: del_value(w, "qwen3moe.expert_used_count"), r"expert_used_count: expected a whol"),
    ("a value of another kind", lambda w, t: set_value(w, "qwen3moe.block_count", "4"), r"block_count: expected a who"),
    ("a missing tensor", lambda w, t: t.pop(K), r'expected a tensor "model.layers.0.self_attn.k_proj.weight"'),
    ("missing experts", lambda w, t: t.pop("blk.3.ffn_up_exps.weight"), r'"model.layers.3.mlp.switch_mlp.up_proj.weig'),
    ("an unknown tensor", lambda w, t: t.update({"blk.0.new.weight": t[K]}), r'"blk.0.new.weight": expected only tens'),
    ("a tensor outside", lambda w, t: t.update({"rope_freqs.weight": t[K][0]}), r'"rope_freqs.weight": expected only'),
    ("another shape", lambda w, t: t.update({K: t[K][:-1]}), r'self_attn.k_proj.weight": .*\[128, 128\], found .*\[12'),
    ("a tensor too many", lambda w, t: t.update({"blk.0.attn_k.bias": t[K][0]}), r'self_attn.k_proj.bias": expected o'),
    ("no embedding", lambda w, t: t.pop("token_embd.weight"), r"token_embd.weight: expected a matrix, found none"),
]  # fmt: skip


def set_value(writer: gguf.GGUFWriter, key: str, text: str) -> None:
    writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(text, gguf.GGUFValueType.STRING)


def set_list(writer: gguf.GGUFWriter, key: str, values: list[int]) -> None:
    writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(values, gguf.GGUFValueType.ARRAY)


def del_value(writer: gguf.GGUFWriter, key: str) -> None:
    del writer.kv_data[0][key]


@pytest.mark.parametrize(("change", "message"), [each[1:] for each in BAD], ids=[each[0] for each in BAD])
def test_what_does_not_fit_is_named(change: Change, message: str, tmp_path: Path) -> None:
    file = gguf_files.write("qwen3_moe", tmp_path / "m.gguf", change=change)
    with pytest.raises(FormatError, match=f"^{tmp_path}/m.gguf: .*{message}"):
        open_store(file)


FREQS = "rope_freqs.weight"
BAD_GEMMA4: list[tuple[str, Change, str]] = [
    ("other divisors", lambda w, t: t[FREQS].__setitem__(1, 8.0), r"tensor rope_freqs.weight: expected ones and then"),
    ("a turn behind others", lambda w, t: t[FREQS].__setitem__(-1, 1.0), r"rope_freqs.weight: expected ones and then"),
    ("no divisors", lambda w, t: t.pop(FREQS), r"rope_freqs.weight: expected F32 \[32\], found none"),
    ("too few divisors", lambda w, t: t.update({FREQS: t[FREQS][1:]}), r"expected F32 \[32\], found F32 \[31\]"),
    ("layers of a kind that differ", lambda w, t: set_list(w, KV, [4, 2, 4, 2]), r"head_count_kv: expected one number"),
    ("too few layers", lambda w, t: set_list(w, KV, [4, 4, 2]), r"head_count_kv: expected a number for each of 4"),
    ("a layer too many", lambda w, t: w.add_uint32("gemma4.nextn_predict_layers", 1), r"window_pattern: expected true"),
    ("no scale of a layer", lambda w, t: t.pop("blk.0.layer_output_scale.weight"), r'"model.layers.0.layer_scalar"'),
]  # fmt: skip
KV = "gemma4.attention.head_count_kv"


@pytest.mark.parametrize(("change", "message"), [each[1:] for each in BAD_GEMMA4], ids=[each[0] for each in BAD_GEMMA4])
def test_what_does_not_fit_gemma4_is_named(change: Change, message: str, tmp_path: Path) -> None:
    file = gguf_files.write("gemma4", tmp_path / "m.gguf", change=change)
    with pytest.raises(FormatError, match=f"^{tmp_path}/m.gguf: .*{message}"):
        open_store(file)


def test_a_type_that_no_kernel_reads(tmp_path: Path) -> None:
    def whole(writer: gguf.GGUFWriter, tensors: gguf_files.Tensors) -> None:
        writer.add_tensor("blk.0.attn_k.weight", tensors.pop(K).astype(np.float64))

    file = gguf_files.write("qwen3_moe", tmp_path / "m.gguf", change=whole)
    with pytest.raises(FormatError, match=r'"blk.0.attn_k.weight": type: expected F32, F16, BF16, .*Q4_K.*, found F64'):
        open_store(file)
