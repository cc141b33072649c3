"""Trains small tokenizers of both kinds."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from moeflux.text.tokenizer import Tokenizer

CORPUS = [
    "", " ", "  leading and trailing  ", "Hello, world!", "line\r\n\r\n\tnext", "naïve café, Straße",
    "e\u0301 a\u0308 \u0e19\u0e49\u0e33 हिन्दी", "毛泽东 全心全意 こんにちは 한국어", "🦊🚀👩‍👩‍👧‍👦🏳️‍🌈", "مرحبا שלום",
    "def f(x):\n    return x**2  # π≈3.14\n", "\x00\x01\ufffd\u2028", "<|im_start|>user\nhi<|im_end|><think></think>",
]  # fmt: skip
SPECIAL = ("<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>")


def with_added(whole: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    whole.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    whole.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return whole


def byte_level() -> Tokenizer:
    whole = tokenizers.Tokenizer(models.BPE())
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    whole.train_from_iterator(CORPUS, trainer)
    return Tokenizer(with_added(whole))


def byte_fallback() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdeHlowr", "▁H", "é", "漢"]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    whole = tokenizers.Tokenizer(models.BPE(vocabulary, [("▁", "H")], unk_token="<unk>", byte_fallback=True))
    whole.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    whole.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(with_added(whole))
