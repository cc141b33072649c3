"""Snapshots in memory: the bytes are those of the file, their number is known before, and what is wrong with them is an
error with a class and fields."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import ArgumentError, FormatError, errors
from moeflux.runtime.snapshot import Snapshot
from support.engine import folders, steps, tokens

NAMES = ("qwen3_5_moe", "qwen3_moe", "deepseek_v3")
FORMATS = [("moeflux", name) for name in NAMES]
FORMATS += [("wire-1", "qwen3_5_moe"), ("wire-2", "qwen3_5_moe"), ("wire-2", "deepseek_v3")]
PROMPT = tokens(9)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, moeflux.Model]:
    folder = folders(tmp_path_factory.mktemp("snapshot"))
    return {name: moeflux.load(folder(name), threads=1) for name in NAMES}


def session_of(model: moeflux.Model, **options: Any) -> moeflux.Session:
    session = model.session(max_context=64, **options)
    session.prefill(PROMPT)
    return session


@pytest.mark.parametrize("kv_dtype", ("f32", "bf16", "q8"))
@pytest.mark.parametrize(("format", "name"), FORMATS)
def test_the_bytes_are_those_of_the_file(
    models: dict[str, moeflux.Model], tmp_path: Path, format: str, name: str, kv_dtype: str
) -> None:
    session = session_of(models[name], kv_dtype=kv_dtype)
    snapshot = session.snapshot()
    snapshot.save(tmp_path / "saved", format=format)
    data = snapshot.to_bytes(format)
    assert data == (tmp_path / "saved").read_bytes()
    assert snapshot.size(format) == len(data)
    expected = steps(session, PROMPT[:3])
    for given in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
        other = models[name].session(max_context=64, kv_dtype=kv_dtype)
        other.restore(Snapshot.from_bytes(given, models[name].variant))
        assert other.position == len(PROMPT)
        assert np.array_equal(steps(other, PROMPT[:3]), expected)


@pytest.mark.parametrize("format", ["moeflux", "wire-1", "wire-2"])
def test_an_empty_session_has_its_bytes_too(models: dict[str, moeflux.Model], format: str) -> None:
    model = models["qwen3_5_moe"]
    data = model.session(max_context=8).snapshot().to_bytes(format)
    found = Snapshot.from_bytes(data, model.variant)
    assert found.position == 0 and found.to_bytes(format) == data


@pytest.mark.parametrize(("format", "name"), FORMATS)
def test_a_buffer_of_the_callers(models: dict[str, moeflux.Model], format: str, name: str) -> None:
    snapshot = session_of(models[name]).snapshot()
    size = snapshot.size(format)
    exact, roomy, short = bytearray(size), bytearray(b"\x55" * (size + 7)), bytearray(b"\x55" * (size - 1))
    assert bytes(snapshot.write_into(exact, format)) == snapshot.to_bytes(format) == bytes(exact)
    assert len(snapshot.write_into(roomy, format)) == size
    assert roomy == exact + b"\x55" * 7
    with pytest.raises(
        errors.BufferTooSmall, match=f"buffer: expected at least {size} bytes .* found {size - 1}"
    ) as error:
        snapshot.write_into(short, format)
    assert (error.value.needed, error.value.found) == (size, size - 1)
    assert isinstance(error.value, ArgumentError) and short == b"\x55" * (size - 1)
    array = np.zeros(size // 4 + 1, np.float32)
    assert snapshot.write_into(array, format).tobytes() == bytes(exact)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (b"\0" * (1 << 20), "expected memory that can be written"),
        (np.zeros((1 << 20, 2), np.uint8)[:, 0], "expected memory without gaps"),
        ("text", "expected memory without gaps"),
        (None, "expected memory without gaps"),
    ],
    ids=("read-only", "gaps", "text", "none"),  # some versions of pytest would write all bytes into the name
)
def test_memory_that_is_none(models: dict[str, moeflux.Model], buffer: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"buffer: {message}"):
        session_of(models["qwen3_moe"]).snapshot().write_into(buffer)


def test_other_words_and_other_bytes(models: dict[str, moeflux.Model]) -> None:
    model = models["qwen3_5_moe"]
    snapshot = session_of(model).snapshot()
    for call in (snapshot.size, snapshot.to_bytes):
        with pytest.raises(ArgumentError, match="format: expected moeflux, wire-1, wire-2, found 'wire-3'"):
            call("wire-3")
    with pytest.raises(ArgumentError, match="snapshot: expected bytes without gaps, found None"):
        Snapshot.from_bytes(None, model.variant)
    with pytest.raises(ArgumentError, match="restore: expected at most 8 tokens"):
        Snapshot.from_bytes(snapshot.to_bytes(), model.variant, max_tokens=8)
    with pytest.raises(ArgumentError, match="mine: expected at most 3 tokens"):
        Snapshot.from_bytes(snapshot.to_bytes("wire-2"), model.variant, max_tokens=3, where="mine")
    with pytest.raises(ArgumentError, match=r"restore: expected a snapshot of the model"):
        models["qwen3_moe"].session().restore(snapshot)


def test_every_byte_of_our_own_format_is_held_to_something(models: dict[str, moeflux.Model]) -> None:
    """Cut anywhere, and changed anywhere but in names for people: refused, and never another state."""
    model = models["qwen3_moe"]
    snapshot = session_of(model).snapshot()
    data = snapshot.to_bytes()
    for end in (0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1):
        with pytest.raises(FormatError, match=r"^mine: "):
            Snapshot.from_bytes(data[:end], model.variant, where="mine")
    for at in range(8, len(data), len(data) // 97):
        spoilt = bytearray(data)
        spoilt[at] ^= 4
        try:
            found = Snapshot.from_bytes(spoilt, model.variant)
        except FormatError:
            continue
        assert found.tokens == snapshot.tokens
        assert all(np.array_equal(found.tensors[key], array) for key, array in snapshot.tensors.items())


# ---- What is wrong with a wire format, in fields -----------------------------------------------------------------


def word(at: int, value: int) -> Any:
    return lambda data: data[: 4 * at] + struct.pack("<i", value) + data[4 * at + 4 :]


FAULTS: list[tuple[Any, type[errors.SnapshotError], tuple[str, int | None, int | None, int | None]]] = [
    (word(1, 7), errors.BadVersion, ("version", None, 2, 7)),
    (word(2, 5), errors.ShapeMismatch, ("num_layers", None, 4, 5)),
    (word(5, 32), errors.ShapeMismatch, ("head_dim", None, 64, 32)),
    (word(10, -2), errors.NegativeLen, ("length", 0, 0, -2)),
    (word(10, (1 << 20) + 1), errors.LenOverflow, ("length", 0, 1 << 20, (1 << 20) + 1)),
    (lambda data: data[:7], errors.Truncated, ("magic and version", None, 8, 7)),
    (lambda data: data[:20], errors.Truncated, ("header", None, 32, 12)),
    (lambda data: data[:42], errors.Truncated, ("length", 0, 4, 2)),
    (lambda data: data[:1000], errors.Truncated, ("k", 0, 4608, 956)),
    (lambda data: data[:-1], errors.Truncated, ("v", 3, 4608, 4607)),
    (lambda data: data + b"abc", errors.TrailingBytes, ("end", None, 36920, 36923)),
]


@pytest.mark.parametrize(("spoil", "kind", "fields"), FAULTS)
def test_faults_have_classes_and_fields(
    models: dict[str, moeflux.Model], spoil: Any, kind: type[errors.SnapshotError], fields: tuple[Any, ...]
) -> None:
    model = models["qwen3_moe"]
    data = session_of(model).snapshot().to_bytes("wire-2")
    with pytest.raises(FormatError, match=f"^mine: {kind.__name__}: .*expected ") as error:
        Snapshot.from_bytes(spoil(data), model.variant, where="mine")
    assert type(error.value) is kind
    assert (error.value.field, error.value.layer, error.value.expected, error.value.found) == fields


def test_faults_of_magic_version_pattern_and_length(models: dict[str, moeflux.Model]) -> None:
    variant = models["qwen3_moe"].variant.to_json()
    with pytest.raises(errors.BadMagic) as magic:
        moeflux._core.parse_snapshot_wire(b"XLFN" + bytes(36), variant)
    assert (magic.value.expected, magic.value.found) == (0x4D464C58, 0x4E464C58)
    with pytest.raises(errors.BadVersion) as version:
        session_of(models["deepseek_v3"]).snapshot().size("wire-1")
    assert (version.value.expected, version.value.found) == (2, 1)
    mixed = models["qwen3_5_moe"].variant
    backwards = moeflux.Variant(**{f: getattr(mixed, f) for f in mixed.__slots__} | {"layers": mixed.layers[::-1]})
    with pytest.raises(errors.NoInterval) as pattern:
        moeflux._core.snapshot_wire_layout(backwards.to_json(), 1, 3)
    assert pattern.value.field == "full_attn_interval"
    data = session_of(models["qwen3_moe"]).snapshot().to_bytes("wire-2")
    second = 40 + 4 + 2 * 4608
    with pytest.raises(errors.UnequalLen) as unequal:
        moeflux._core.parse_snapshot_wire(data[:second] + struct.pack("<i", 8) + data[second + 4 :], variant)
    assert (unequal.value.layer, unequal.value.expected, unequal.value.found) == (1, 9, 8)
    assert isinstance(unequal.value, errors.SnapshotError) and isinstance(unequal.value, FormatError)
