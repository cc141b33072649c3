"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json have it.

A file has its vocabulary, its merges or scores, what kind each token is, and the name of the rules that cut a text into
words. The rules themselves are those of tokenizer_rules, for the names that are known. Other names are refused: rules
that are nearly right give other tokens now and then, and nobody notices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from moeflux.errors import FormatError
from moeflux.models.gguf import GgufValues
from moeflux.models.tokenizer_rules import DEEPSEEK3, GPT2, GPT4O, KIMI_K2, LLAMA3, QWEN2, QWEN35

__all__ = ["end_ids", "has_tokenizer", "tokenizer_config", "tokenizer_json"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens."""

WORDS = {
    "gpt-2": (GPT2,),
    "olmo": (GPT2,),
    "llama-bpe": (LLAMA3,),
    "chatglm-bpe": (LLAMA3,),
    "glm4": (LLAMA3,),
    "qwen2": (QWEN2,),
    "qwen35": (QWEN35,),
    "deepseek-v3": DEEPSEEK3,
    "kimi-k2": (KIMI_K2,),
    "gpt-4o": (GPT4O,),
    "minimax-m2": (GPT4O,),
}
"""`tokenizer.ggml.pre` -> the patterns that cut a text into words, one after the other."""
COMPOSED = ("qwen2", "qwen35")
"""Those that compose characters first (NFC)."""
WHOLE_WORDS = ("llama-bpe", "glm4")
"""Those that take a word of the vocabulary as it is, whatever the merges."""

ENDS = ("eos", "eot", "eom")
"""Names of tokens that end an answer, each in `tokenizer.ggml.NAME_token_id`."""
END_SPELLINGS = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|return|>", "<|call|>", "<turn|>", "<|user|>",
     "<|observation|>"}
)  # fmt: skip
"""Control tokens that end an answer by their spelling: files name one of them, and generation_config.json had more."""
NAMED = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",
}
"""How `tokenizer.ggml.NAME_token_id` spells a name -> how tokenizer_config.json does."""

GGML = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
SPACE = "\u2581"
"""What SentencePiece has in place of a space."""


def has_tokenizer(values: GgufValues) -> bool:
    return f"{GGML}model" in values.keys and values.text(f"{GGML}model") != "none"


def tokenizer_json(values: GgufValues) -> bytes:
    model = values.text(f"{GGML}model")
    if model not in MODELS:
        raise values.fail(f"{GGML}model", f"one of {', '.join(MODELS)}")
    return json.dumps(MODELS[model](values), ensure_ascii=False).encode()


def tokenizer_config(values: GgufValues) -> dict[str, Any]:
    config: dict[str, Any] = {}
    spelled = tokens_of(values) if has_tokenizer(values) else []
    for own, name in NAMED.items():
        id = values.token(f"{GGML}{own}_token_id")
        if id is not None and id < len(spelled):
            config[name] = spelled[id]
    templates = [{"name": "default", "template": values.text(TEMPLATE)}] if TEMPLATE in values.keys else []
    for name, _ in values.under(f"{TEMPLATE}."):
        templates.append({"name": name, "template": values.text(f"{TEMPLATE}.{name}")})
    if templates:
        config["chat_template"] = templates if len(templates) > 1 else templates[0]["template"]
    return config


def end_ids(values: GgufValues) -> list[int]:
    """The tokens that end an answer."""
    said = (values.token(f"{GGML}{name}_token_id") for name in ENDS)
    named = {id for id in said if id is not None}
    if not has_tokenizer(values):
        return sorted(named)
    tokens = tokens_of(values)
    kinds = kinds_of(values, len(tokens))
    if named and max(named) >= len(tokens):
        raise FormatError(f"{values.path}: {GGML}*_token_id: expected ids below {len(tokens)}, found {max(named)}")
    spelled = enumerate(zip(tokens, kinds, strict=True))
    return sorted(named | {id for id, (token, kind) in spelled if kind == CONTROL and token in END_SPELLINGS})


# ---- The parts --------------------------------------------------------------------------------------------------


def tokens_of(values: GgufValues) -> list[str]:
    tokens = values.listed(f"{GGML}tokens", str)
    if not tokens:
        raise values.fail(f"{GGML}tokens", "a list of tokens")
    return tokens


def kinds_of(values: GgufValues, count: int) -> list[int]:
    kinds = values.listed(f"{GGML}token_type", int) or [NORMAL] * count
    if len(kinds) != count or not all(NORMAL <= kind <= BYTE for kind in kinds):
        raise FormatError(
            f"{values.path}: {GGML}token_type: expected {count} kinds of {NORMAL} to {BYTE}, one a token, "
            f"found {len(kinds)} of {min(kinds)} to {max(kinds)}"
        )
    return kinds


def byte_level(values: GgufValues) -> dict[str, Any]:
    """Byte-level BPE, as GPT-2 has it."""
    words = values.text(f"{GGML}pre")
    if words not in WORDS:
        raise values.fail(f"{GGML}pre", f"one of {', '.join(sorted(WORDS))}")
    tokens = tokens_of(values)
    kinds = kinds_of(values, len(tokens))
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in WORDS[words]
    ]
    bytes_of_words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": added_tokens(tokens, kinds),
        "normalizer": {"type": "NFC"} if words in COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_of_words]},
        "post_processor": first_token(values, tokens, default=words == "llama-bpe"),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": vocabulary(values, tokens, kinds),
            "merges": merges(values, {*tokens}),
            "ignore_merges": words in WHOLE_WORDS,
        },
    }


def with_scores(values: GgufValues) -> dict[str, Any]:
    """As SentencePiece makes them: a pair of tokens is merged by the score of what it makes."""
    tokens = tokens_of(values)
    kinds = kinds_of(values, len(tokens))
    known = vocabulary(values, tokens, kinds)
    return spelled(values, tokens, kinds, known, merges_by_score(values, tokens, kinds, known))


def with_merges(values: GgufValues) -> dict[str, Any]:
    """The same, but for a list of merges. Of Gemma 4."""
    tokens = tokens_of(values)
    kinds = kinds_of(values, len(tokens))
    return spelled(values, tokens, kinds, vocabulary(values, tokens, kinds), merges(values, {*tokens}))


def spelled(
    values: GgufValues, tokens: list[str], kinds: list[int], known: dict[str, int], pairs: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Spaces are a character of their own, and bytes spell what no token does."""
    begins = values.flag(f"{GGML}add_space_prefix", True)
    unknown = values.token(f"{GGML}unknown_token_id")
    space: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back: dict[str, Any] = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []
    return {
        "version": "1.0",
        "added_tokens": added_tokens(tokens, kinds),
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": SPACE}] if begins else []), space],
        },
        "pre_tokenizer": None,
        "post_processor": first_token(values, tokens, default=True),
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "vocab": known,
            "merges": pairs,
            "unk_token": tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def merges_by_score(
    values: GgufValues, tokens: list[str], kinds: list[int], known: dict[str, int]
) -> list[tuple[str, str]]:
    """Every pair of tokens that makes another, those first that make the one of the highest score."""
    scores = values.listed(f"{GGML}scores", float)
    if len(scores) != len(tokens):
        raise FormatError(f"{values.path}: {GGML}scores: expected {len(tokens)}, one a token, found {len(scores)}")
    made = []
    for token, kind, score in zip(tokens, kinds, scores, strict=True):
        if kind == NORMAL:
            cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
            made += [
                (-score, known[one], known[other], one, other) for one, other in cuts if {one, other} <= known.keys()
            ]
    return [pair[3:] for pair in sorted(made)]


MODELS = {"gpt2": byte_level, "llama": with_scores, "gemma4": with_merges}
"""`tokenizer.ggml.model` -> what makes the tokenizer.json."""


def vocabulary(values: GgufValues, tokens: list[str], kinds: list[int]) -> dict[str, int]:
    """Without what fills the vocabulary up, which nobody says and a model does not mean."""
    made: dict[str, int] = {}
    for id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind != UNUSED and made.setdefault(token, id) != id:
            raise FormatError(
                f"{values.path}: {GGML}tokens: expected each once, found {token!r:.60} as {made[token]} and as {id}"
            )
    return made


def merges(values: GgufValues, known: set[str]) -> list[list[str]]:
    """A merge is two tokens and a space between them; a token may begin with a space itself."""
    made = []
    for merge in values.listed(f"{GGML}merges", str):
        at = merge.find(" ", 1)
        pair = [merge[:at], merge[at + 1 :]]
        if at < 0 or not known.issuperset((*pair, "".join(pair))):
            raise FormatError(
                f"{values.path}: {GGML}merges: expected two tokens and a space between them that make another, "
                f"found {merge!r:.60}"
            )
        made.append(pair)
    return made


def added_tokens(tokens: list[str], kinds: list[int]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": id, "content": token, "special": kind != USER_DEFINED, **flags}
        for id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED) and token
    ]


def first_token(values: GgufValues, tokens: list[str], *, default: bool) -> dict[str, Any] | None:
    """What puts a token before every text that is not a chat, where the file asks for it."""
    id = values.token(f"{GGML}bos_token_id")
    if not values.flag(f"{GGML}add_bos_token", default and id is not None):
        return None
    if id is None or id >= len(tokens):
        raise values.fail(f"{GGML}bos_token_id", f"the id of one of {len(tokens)} tokens, for each text begins with it")
    first, text = {"SpecialToken": {"id": tokens[id], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {tokens[id]: {"id": tokens[id], "ids": [id], "tokens": [tokens[id]]}},
    }
