"""Vocabularies in the values of GGUF files."""

from __future__ import annotations

from collections.abc import Sequence

import gguf

from moeflux.text.tokenizer import BYTE_OF

GLYPHS = {byte: glyph for glyph, byte in BYTE_OF.items()}
TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}<|start|>assistant"


def add_tokenizer(
    writer: gguf.GGUFWriter, *, words: str = "qwen2", vocab: int = 384, merges: Sequence[str] = ()
) -> None:
    """That of the checkpoints: ids 0 to 255 are the bytes, then the end of a text and a start. What remains is filled
    up."""
    tokens = [GLYPHS[byte] for byte in range(256)] + ["<|end|>", "<|start|>"]
    kinds = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 2
    filled = vocab - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list(tokens + [f"[PAD{len(tokens) + i}]" for i in range(filled)])
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * filled)
    writer.add_token_merges(list(merges))
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(257)
    writer.add_chat_template(TEMPLATE)
