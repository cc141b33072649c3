"""Makes the seeds of the fuzz targets: small whole files of every kind. PYTHON tests/fuzz/make_seeds.py"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

from moeflux.models.presets import PRESETS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support import gguf_bytes

CORPUS = Path(__file__).resolve().parent / "corpus"


def save(target: str, name: str, content: bytes | str) -> None:
    path = CORPUS / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def json_seeds() -> None:
    save("json", "empty_object", "{}")
    save("json", "kinds", '{"a": [null, true, false, 0, -1, 1.5e-3, "x"], "b": {"c": {}}, "": []}')
    save("json", "numbers", "[9223372036854775807, -9223372036854775808, 9223372036854775808, 1e308, 5e-324, -0.0]")
    save("json", "strings", r'["\"\\\/\b\f\n\r\t", "\u00e9\ud83d\ude00", "é😀", "\u0000"]')
    save("json", "deep", "[" * 63 + "]" * 63)
    save("json", "too_deep", "[" * 65 + "]" * 65)
    save("json", "duplicate_key", '{"a": 1, "b": 2, "a": 3}')
    save("json", "bad_utf8", b'["\xc3\x28", "\xed\xa0\x80"]')
    save("json", "lone_surrogate", r'["\ud83d"]')


def manifest_seeds() -> None:
    tensors = {
        "model.norm.weight": {"offset": 0, "size": 64, "shape": [32], "dtype": "BF16"},
        "lm_head.weight": {"offset": 64, "size": 128, "shape": [8, 4], "dtype": "U32", "bits": 4},
        "lm_head.scales": {"offset": 192, "size": 16, "shape": [8, 1], "dtype": "BF16"},
        "model.layers.0.linear_attn.A_log": {"offset": 256, "size": 16, "shape": [4], "dtype": "F32"},
        "empty": {"offset": 320, "size": 0, "shape": [0, 7], "dtype": "F16"},
    }
    whole = {"model": "x", "num_tensors": len(tensors), "tensors": tensors, "config": {"hidden_size": 32}}
    save("manifest", "whole", json.dumps(whole))
    save("manifest", "no_tensors", '{"tensors": {}}')
    overlap = {"tensors": dict.fromkeys("ab", tensors["model.norm.weight"])}
    save("manifest", "overlap", json.dumps(overlap))
    past_the_end = {"offset": 9223372036854775744, "size": 128, "shape": [2, 32], "dtype": "BF16"}
    save("manifest", "past_the_end", json.dumps({"tensors": {"a": past_the_end}}))


def safetensors_file(header: dict[str, object], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def safetensors_seeds() -> None:
    header = {
        "__metadata__": {"format": "mlx"},
        "a.weight": {"dtype": "U32", "shape": [2, 4], "data_offsets": [0, 32]},
        "a.scales": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [32, 36]},
        "e": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [36, 40]},
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [40, 44]},
        "none": {"dtype": "I64", "shape": [0], "data_offsets": [44, 44]},
    }
    save("safetensors", "whole", safetensors_file(header, bytes(44)))
    save("safetensors", "short", safetensors_file(header, bytes(43)))
    save("safetensors", "empty", safetensors_file({}, b""))
    overlap = {name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for name in "ab"}
    save("safetensors", "overlap", safetensors_file(overlap, bytes(4)))
    save("safetensors", "long_header", struct.pack("<Q", 2**63) + b"{}")


def gguf_seeds() -> None:
    one, of = gguf_bytes, gguf_bytes.value
    numbers = [of(letter, one.scalar(letter, 1)) for letter in one.KINDS]
    strings = of("tokens", one.array(one.STRING, one.string("a") + one.string("ö"), 2))
    inner = struct.pack("<IQ", 0, 2) + b"xy"
    arrays = of("arrays", one.array(one.ARRAY, inner + struct.pack("<IQ", 8, 0), 2))
    tensors = [one.tensor("a.weight", (4, 2), 0, 0), one.tensor("b.weight", (32, 3), 8, 32)]
    save("gguf", "whole", one.file([*numbers, of("name", one.words("test")), strings, arrays], tensors, 134))
    aligned = of("general.alignment", one.scalar("I", 64))
    save("gguf", "aligned", one.file([aligned], [one.tensor("a", (8,), 30, 64)], 80, alignment=64, version=2))
    save("gguf", "empty", one.file([], [], 0))
    save("gguf", "short", one.file([], tensors, 133))
    save("gguf", "overlap", one.file([], [one.tensor(name, (8,), 0, 0) for name in "ab"], 32))
    save("gguf", "long_string", one.file([of("k", one.words("a", 2**63))], [], 0))
    save("gguf", "deep", one.file([of("k", one.array(9, struct.pack("<IQ", 9, 1) * 5, 1))], [], 0))
    split = [of("split.no", one.scalar("H", 0)), of("split.count", one.scalar("H", 2))]
    save("gguf", "split", one.file([*split, of("split.tensors.count", one.scalar("i", 0))], [], 0))


def snapshot_seeds() -> None:
    """Of the tiny models that fuzz_snapshot.cpp describes."""
    magic = 0x4D464C58

    def full(positions: int, row_bytes: int) -> bytes:
        return struct.pack("<i", positions) + bytes(positions * row_bytes)

    hybrid = [4, 2, 1, 2, 12, 4]
    for positions in (0, 3):
        body = (bytes(16) + full(positions, 16)) * 2
        save("snapshot", f"hybrid_v1_{positions}", struct.pack("<8I", magic, 1, *hybrid) + body)
        save("snapshot", f"hybrid_v2_{positions}", struct.pack("<10I", magic, 2, *hybrid, 0, 0) + body)
    grouped = struct.pack("<10I", magic, 2, 2, 1, 1, 2, 0, 0, 0, 0)
    save("snapshot", "grouped_v2", grouped + full(2, 16) * 2)
    save("snapshot", "grouped_empty", grouped + full(0, 16) * 2)
    save("snapshot", "unequal_lengths", grouped + full(2, 16) + full(1, 16))
    save("snapshot", "negative_length", grouped + struct.pack("<i", -1) + full(2, 16))
    latent = struct.pack("<10I", magic, 2, 2, 1, 1, 2, 0, 0, 3, 2)
    save("snapshot", "latent_v2", latent + full(2, 20) * 2)
    save("snapshot", "latent_trailing", latent + full(2, 20) * 2 + b"\0")


def variant_seeds() -> None:
    for name, variant in PRESETS.items():
        save("variant", name, variant.with_layers(4).to_json())


if __name__ == "__main__":
    gguf_seeds()
    json_seeds()
    manifest_seeds()
    safetensors_seeds()
    snapshot_seeds()
    variant_seeds()
