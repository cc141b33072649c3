"""Wire formats 1 and 2 of snapshots: bytes packed by hand with struct, and every way in which they can be wrong."""

from __future__ import annotations

import re
import struct

import pytest

from moeflux import _core
from moeflux.errors import FormatError
from moeflux.models.presets import PRESETS
from moeflux.models.variants import Variant
from support.flat import changed

MAGIC = 0x4D464C58
POSITIONS = 3
MAX_POSITIONS = 1 << 20

# Two linear and two full layers; the widths are chosen so that no two states have the same size.
HYBRID = changed(
    PRESETS["Qwen3.6-35B-A3B"].with_layers(4),
    layer_kinds=("linear", "full") * 2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    rotary_dim=2,
    linear_key_heads=1,
    linear_value_heads=2,
    linear_key_dim=3,
    linear_value_dim=5,
    conv_kernel=4,
)
HYBRID_WORDS = {
    "num_layers": 4,
    "full_attn_interval": 2,
    "num_kv_heads": 1,
    "head_dim": 6,
    "linear_conv_bytes": 3 * (2 * 3 + 2 * 5) * 4,
    "linear_ssm_bytes": 2 * 5 * 3 * 4,
}
LATENT = changed(
    PRESETS["Cogito-V2-671B"].with_layers(4), kv_lora_rank=5, qk_rope_dim=2, rotary_dim=2, qk_nope_dim=4, head_dim=6
)
LATENT_WORDS = {
    "num_layers": 4,
    "full_attn_interval": 1,
    "num_kv_heads": 128,
    "head_dim": 6,
    "linear_conv_bytes": 0,
    "linear_ssm_bytes": 0,
}


def header(words: dict[str, int], version: int, ranks: tuple[int, int] = (0, 0), magic: int = MAGIC) -> bytes:
    values = [magic, version, *words.values(), *(ranks if version == 2 else ())]
    return struct.pack(f"<{len(values)}I", *values)


def hybrid(version: int, positions: int = POSITIONS) -> bytes:
    """Every state holds another byte value, so that one taken for another would show."""
    out = header(HYBRID_WORDS, version)
    for layer in range(4):
        if layer % 2 == 0:
            out += bytes([16 * layer + 1]) * 192 + bytes([16 * layer + 2]) * 120
        else:
            out += struct.pack("<i", positions)
            out += bytes([16 * layer + 1]) * (positions * 24) + bytes([16 * layer + 2]) * (positions * 24)
    return out


def latent(positions: int = POSITIONS) -> bytes:
    out = header(LATENT_WORDS, 2, (5, 2))
    for layer in range(4):
        out += struct.pack("<i", positions) + bytes([16 * layer + 1]) * (positions * 20)
        out += bytes([16 * layer + 2]) * (positions * 8)
    return out


SNAPSHOTS = {
    "hybrid 1": (HYBRID, hybrid(1)),
    "hybrid 2": (HYBRID, hybrid(2)),
    "hybrid 1 empty": (HYBRID, hybrid(1, 0)),
    "latent": (LATENT, latent()),
    "latent empty": (LATENT, latent(0)),
}


def refused(data: bytes, variant: Variant, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        _core.parse_snapshot_wire(data, variant.to_json())


@pytest.mark.parametrize(
    ("variant", "data", "parts"),
    [
        (HYBRID, hybrid(1), {0: ("conv", "recurrent"), 1: ("k", "v"), 2: ("conv", "recurrent"), 3: ("k", "v")}),
        (HYBRID, hybrid(2), {0: ("conv", "recurrent"), 1: ("k", "v"), 2: ("conv", "recurrent"), 3: ("k", "v")}),
        (LATENT, latent(), dict.fromkeys(range(4), ("latent", "rope_k"))),
    ],
)
def test_every_state_is_found(variant: Variant, data: bytes, parts: dict[int, tuple[str, str]]) -> None:
    wire = _core.parse_snapshot_wire(data, variant.to_json())
    sizes = {"conv": 192, "recurrent": 120, "k": 72, "v": 72, "latent": 60, "rope_k": 24}
    assert wire.positions == POSITIONS
    assert wire.version == struct.unpack_from("<I", data, 4)[0]
    assert [(span.layer, span.part) for span in wire.spans] == [
        (layer, part) for layer in range(4) for part in parts[layer]
    ]
    for i, span in enumerate(wire.spans):
        content = bytes([16 * span.layer + 1 + i % 2]) * sizes[span.part]
        assert data[span.offset : span.offset + span.bytes] == content
    for offset in wire.length_offsets:
        assert struct.unpack_from("<i", data, offset) == (POSITIONS,)


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_what_would_be_written_is_what_was_read(name: str) -> None:
    variant, data = SNAPSHOTS[name]
    wire = _core.parse_snapshot_wire(data, variant.to_json())
    layout = _core.snapshot_wire_layout(variant.to_json(), wire.version, wire.positions)
    assert layout == wire
    assert layout.bytes == len(data)

    written = bytearray(layout.bytes)
    start = _core.snapshot_wire_header(variant.to_json(), wire.version)
    assert len(start) == layout.header_bytes
    written[: len(start)] = start
    for offset in layout.length_offsets:
        struct.pack_into("<i", written, offset, wire.positions)
    for span in layout.spans:
        written[span.offset : span.offset + span.bytes] = data[span.offset : span.offset + span.bytes]
    assert written == data


@pytest.mark.parametrize(("version", "bytes_"), [(1, 66_027_592), (2, 66_027_600)])
def test_sizes_of_the_older_engine(version: int, bytes_: int) -> None:
    """Qwen3.6-35B-A3B after 4 tokens, as the older engine's logs have it."""
    variant = PRESETS["Qwen3.6-35B-A3B"].to_json()
    layout = _core.snapshot_wire_layout(variant, version, 4)
    assert layout.bytes == bytes_
    assert _core.snapshot_wire_header(variant, version)[:4] == b"XLFM"


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_every_truncation_is_refused(name: str) -> None:
    variant, data = SNAPSHOTS[name]
    text = variant.to_json()
    for length in range(len(data)):
        with pytest.raises(FormatError, match=r"^snapshot: Truncated: .* expected .* found"):
            _core.parse_snapshot_wire(data[:length], text)


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_byte_too_many_is_refused(name: str) -> None:
    variant, data = SNAPSHOTS[name]
    refused(data + b"\0", variant, f"TrailingBytes: expected the end at byte {len(data)}, found 1 more bytes")


def test_truncation_names_layer_and_part() -> None:
    refused(hybrid(1)[:-1], HYBRID, "Truncated: layer 3, v: expected 72 bytes at byte 880, found 71")
    refused(hybrid(2)[: 40 + 100], HYBRID, "Truncated: layer 0, conv: expected 192 bytes at byte 40, found 100")
    refused(hybrid(2)[: 40 + 312 + 3], HYBRID, "Truncated: layer 1, length: expected 4 bytes at byte 352, found 3")
    refused(b"XLFM", HYBRID, "Truncated: magic and version: expected 8 bytes at byte 0, found 4")
    refused(hybrid(2)[:39], HYBRID, "Truncated: header: expected 32 bytes at byte 8, found 31")


def test_magic_and_version_are_checked_first() -> None:
    refused(b"MFLX" + hybrid(1)[4:], HYBRID, "BadMagic: expected 0x4d464c58, found 0x584c464d")
    refused(struct.pack("<II", 1, 99), HYBRID, "BadMagic: expected 0x4d464c58, found 0x1")
    for version in (0, 3, 0xFFFFFFFF):
        refused(struct.pack("<II", MAGIC, version), HYBRID, f"BadVersion: expected 1 or 2, found {version}")
    refused(header(LATENT_WORDS, 1) + latent()[40:], LATENT, "BadVersion: expected 2 for latent attention, found 1")


@pytest.mark.parametrize("field", [*HYBRID_WORDS, "kv_lora_rank", "qk_rope_head_dim"])
@pytest.mark.parametrize("found", [7, 0xFFFFFFFF])
def test_a_header_of_another_shape_names_the_field(field: str, found: int) -> None:
    expected = {**LATENT_WORDS, "kv_lora_rank": 5, "qk_rope_head_dim": 2}
    data = header({**expected, field: found}, 2, ()) + latent()[40:]
    refused(data, LATENT, f"ShapeMismatch: {field}: expected {expected[field]}, found {found}")
    if field in HYBRID_WORDS:
        data = header({**HYBRID_WORDS, field: found}, 1) + hybrid(1)[32:]
        refused(data, HYBRID, f"ShapeMismatch: {field}: expected {HYBRID_WORDS[field]}, found {found}")


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (-1, "NegativeLen: layer 3: expected 0 or more positions, found -1"),
        (-(2**31), "NegativeLen: layer 3: expected 0 or more positions, found -2147483648"),
        (MAX_POSITIONS + 1, "LenOverflow: layer 3: expected at most 1048576 positions, found 1048577"),
        (2**31 - 1, "LenOverflow: layer 3: expected at most 1048576 positions, found 2147483647"),
        (MAX_POSITIONS, "UnequalLen: layer 3: expected 3 positions as in the full layers before, found 1048576"),
        (0, "UnequalLen: layer 3: expected 3 positions as in the full layers before, found 0"),
    ],
)
@pytest.mark.parametrize(("variant", "data", "row_bytes"), [(HYBRID, hybrid(2), 48), (LATENT, latent(), 28)])
def test_lengths_are_checked(variant: Variant, data: bytes, row_bytes: int, positions: int, message: str) -> None:
    at = len(data) - POSITIONS * row_bytes - 4
    refused(data[:at] + struct.pack("<i", positions) + data[at + 4 :], variant, message)


def test_the_longest_snapshot_is_laid_out() -> None:
    layout = _core.snapshot_wire_layout(PRESETS["Cogito-V2-671B"].to_json(), 2, MAX_POSITIONS)
    assert layout.bytes == 40 + 61 * (4 + MAX_POSITIONS * 2304)
    for positions in (-1, MAX_POSITIONS + 1):
        with pytest.raises(FormatError, match=f"positions: expected 0 to 1048576, found {positions}"):
            _core.snapshot_wire_layout(HYBRID.to_json(), 2, positions)


@pytest.mark.parametrize(
    "kinds",
    [
        ("full", "linear", "linear", "full"),
        ("linear", "linear", "linear", "linear"),
        ("full", "linear", "full", "linear"),
    ],
)
def test_a_pattern_without_interval_has_no_snapshot(kinds: tuple[str, ...]) -> None:
    variant = changed(HYBRID, layer_kinds=kinds)
    refused(hybrid(2), variant, "NoInterval: expected full attention in every n-th layer")
    for write in (
        lambda text: _core.snapshot_wire_header(text, 2),
        lambda text: _core.snapshot_wire_layout(text, 2, POSITIONS),
    ):
        with pytest.raises(FormatError, match="NoInterval"):
            write(variant.to_json())


@pytest.mark.parametrize(("variant", "version"), [(LATENT, 1), (HYBRID, 0), (HYBRID, 3)])
def test_versions_that_cannot_be_written(variant: Variant, version: int) -> None:
    with pytest.raises(FormatError, match="BadVersion"):
        _core.snapshot_wire_header(variant.to_json(), version)
    with pytest.raises(FormatError, match="BadVersion"):
        _core.snapshot_wire_layout(variant.to_json(), version, POSITIONS)


def test_a_state_beyond_the_header_word_is_refused() -> None:
    wide = changed(HYBRID, linear_key_heads=512, linear_value_heads=512, linear_key_dim=2048, linear_value_dim=2048)
    with pytest.raises(
        FormatError, match="ShapeMismatch: linear_ssm_bytes: expected a number of 32 bits, found 8589934592"
    ):
        _core.snapshot_wire_header(wide.to_json(), 2)


def test_any_buffer_of_bytes_is_read_and_messages_name_the_place() -> None:
    data, text = hybrid(2), HYBRID.to_json()
    expected = _core.parse_snapshot_wire(data, text)
    for buffer in (bytearray(data), memoryview(data)):
        assert _core.parse_snapshot_wire(buffer, text) == expected
    with pytest.raises(FormatError, match=r"^session\.bin: BadMagic"):
        _core.parse_snapshot_wire(b"\0" * 8, text, where="session.bin")
    with pytest.raises(TypeError, match="bytes-like"):
        _core.parse_snapshot_wire("text", text)
    with pytest.raises(BufferError):
        _core.parse_snapshot_wire(memoryview(data)[::2], text)
    with pytest.raises(FormatError, match="variant"):
        _core.parse_snapshot_wire(data, "{}")
