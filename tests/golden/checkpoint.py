"""A checkpoint in memory, and the files that it is published as. NumPy only, and exact."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from golden.elements import from_int4, from_mxfp4, mxfp4_blocks, normal, to_bf16

HIDDEN, LAYERS, VOCAB = 128, 4, 384
"""Of all checkpoints, unless they are made with others."""

HIDDEN, LAYERS, VOCAB = 128, 4, 384


@dataclass
class Checkpoint:
    """One model as published: its config and its tensors, each with its safetensors dtype and raw array."""

    name: str
    config: dict[str, Any]
    tensors: dict[str, tuple[str, np.ndarray]] = field(default_factory=dict)

    def add(self, tensor: str, values: np.ndarray, dtype: str = "BF16") -> None:
        assert tensor not in self.tensors, tensor
        encode = {"BF16": to_bf16, "F16": lambda v: v.astype(np.float16), "F32": lambda v: v.astype(np.float32)}
        encode["U8"] = lambda v: v
        self.tensors[tensor] = (dtype, np.ascontiguousarray(encode[dtype](values)))

    def matrix(self, tensor: str, *shape: int, gain: float = 1.0) -> None:
        """Normal weights that keep the size of a unit input times `gain`. The last axis is the input."""
        self.add(tensor, normal(f"{self.name}/{tensor}", shape, gain / np.sqrt(shape[-1])))

    def norm(self, tensor: str, width: int, centre: float) -> None:
        self.add(tensor, centre + normal(f"{self.name}/{tensor}", (width,), 0.25))

    def decoded(self) -> Checkpoint:
        """The same with the numbers that its int4 or MXFP4 stands for, in f32. What was in MXFP4 is then the other way
        round, as gpt_oss has plain experts."""
        config = {key: value for key, value in self.config.items() if key != "quantization_config"}
        plain = Checkpoint(self.name, config, dict(self.tensors))
        for key in [key for key in self.tensors if key.endswith("weight_packed")]:
            at = key.removesuffix("_packed")
            (_, words), (_, scales) = plain.tensors.pop(key), plain.tensors.pop(f"{at}_scale")
            del plain.tensors[f"{at}_shape"]
            plain.tensors[at] = ("F32", from_int4(words, scales))
        for key in [key for key in self.tensors if key.endswith("_blocks")]:
            at = key.removesuffix("_blocks")
            (_, codes), (_, scales) = plain.tensors.pop(key), plain.tensors.pop(f"{at}_scales")
            plain.tensors[at] = ("F32", np.ascontiguousarray(from_mxfp4(codes, scales).swapaxes(1, 2)))
        return plain

    def mxfp4(self, tensor: str, *shape: int, gain: float = 1.0) -> None:
        """As `matrix`, in blocks."""
        codes, scales = mxfp4_blocks(normal(f"{self.name}/{tensor}", shape, gain / np.sqrt(shape[-1])))
        self.add(f"{tensor}_blocks", codes, "U8")
        self.add(f"{tensor}_scales", scales, "U8")

    def swiglu(self, prefix: str, hidden: int, intermediate: int) -> None:
        self.matrix(f"{prefix}gate_proj.weight", intermediate, hidden, gain=1.5)
        self.matrix(f"{prefix}up_proj.weight", intermediate, hidden, gain=1.5)
        self.matrix(f"{prefix}down_proj.weight", hidden, intermediate)


def safetensors_bytes(tensors: dict[str, tuple[str, np.ndarray]]) -> bytes:
    """8-byte little-endian header length, JSON header padded with spaces to 8 bytes, data in the header's order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for _, array in tensors.values())


def tokenizer_files() -> dict[str, str]:
    """A byte-level tokenizer: ids 0-255 are the bytes, then an end-of-text and a start token."""
    # Printable bytes stand for themselves, the rest for the code points from 256 on, as GPT-2 began.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    glyph = {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": 256, "content": "<|end|>", **special}, {"id": 257, "content": "<|start|>", **special}],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "vocab": {glyph[byte]: byte for byte in range(256)}, "merges": []},
    }  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|start|>"}
    return {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps(settings, indent=2)}
