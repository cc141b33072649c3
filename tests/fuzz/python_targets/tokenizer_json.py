"""tokenizer.json of a model's folder: tokens of texts, and texts of tokens, or a refusal; within time and memory."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from moeflux.text.tokenizer import Tokenizer

FOLDER = Path(tempfile.mkdtemp(prefix="moeflux-fuzz-"))
TEXTS = ("Hello, world! <|a|>  x", "a" * 300 + "b", " " * 300 + "é漢🦊\n\r\n12345")

SPLIT = {
    "type": "Split",
    "pattern": {"Regex": "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"},
    "behavior": "Isolated",
    "invert": False,
}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def byte_level(**changes: Any) -> dict[str, Any]:
    pieces = ["!", "H", "a", "b", "e", "l", "o", "w", "r", "d", "Ġ", "Ċ", "1", "2", "He", "ll", "Hell", "Ġw", "aa"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 19, "content": "<|a|>", **ADDED}, {"id": 20, "content": "x", **ADDED, "lstrip": True}],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, BYTES]},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": BYTES,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {piece: id for id, piece in enumerate(pieces)},
            "merges": [["H", "e"], ["l", "l"], ["He", "ll"], ["Ġ", "w"], ["a", "a"]],
        },
        **changes,
    }


def byte_fallback() -> dict[str, Any]:
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    made = byte_level(
        normalizer={"type": "Sequence", "normalizers": steps},
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
        decoder={"type": "Sequence", "decoders": decoders},
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
    )
    vocab = {"<unk>": 0, "<s>": 1, "▁": 2, "H": 3, "a": 4, "▁H": 5, "<0xC3>": 6, "<0xA9>": 7}
    made["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "vocab": vocab, "merges": ["▁ H"]}
    return made


def seeds() -> list[bytes]:
    return [json.dumps(made, ensure_ascii=False).encode() for made in (byte_level(), byte_fallback())]


def one(data: bytes) -> None:
    (FOLDER / "tokenizer.json").write_bytes(data)
    tokenizer = Tokenizer.from_folder(FOLDER)
    for text in TEXTS:
        for ids in (tokenizer.encode(text), tokenizer.encode_marked(text), list(tokenizer.prefix)):
            stream = tokenizer.stream(special=True, continues=False)
            assert "".join(map(stream.add, ids)) + stream.finish() == tokenizer.decode(ids)
    assert len(tokenizer) >= 0 and tokenizer.token_bytes(1 << 20) is not None
