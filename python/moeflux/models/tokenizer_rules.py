"""Checks what a tokenizer.json holds before the library sees it.

The library runs what the file says. It may have patterns whose matching takes exponential time, and replacements that
each multiply a text by a thousand. The forms that are listed here are known to take time and memory in proportion to
the text. A file with other forms is no error: it runs where the system bounds it.
"""

from __future__ import annotations

from typing import Any

from moeflux import files
from moeflux.errors import FormatError

__all__ = ["MAX_ADDED", "TOKENIZER", "check_added", "is_proportional", "read_rules"]

TOKENIZER = "tokenizer.json"
MAX_ADDED = 16384  # added tokens
LONGEST_ADDED = 128  # characters of one
MAX_STEPS = 8  # of a sequence

LETTERS = r"[^\r\n\p{L}\p{N}]?"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CAPITAL, SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
UPPER, LOWER = rf"[{CAPITAL}&&[^\p{{Han}}]]", rf"[{SMALL}&&[^\p{{Han}}]]"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{SHORT}|{LETTERS}\p{{L}}+|\p{{N}}{{1,3}}|{TAIL}"
"""Of GPT-4, too."""
QWEN2 = rf"{SHORT}|{LETTERS}\p{{L}}+|\p{{N}}|{TAIL}"
QWEN35 = (
    rf"{SHORT}|{LETTERS}[\p{{L}}\p{{M}}]+|\p{{N}}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""One after the other."""
KIMI_K2 = rf"[\p{{Han}}]+|{LETTERS}{UPPER}*{LOWER}+{SHORT}?|{LETTERS}{UPPER}+{LOWER}*{SHORT}?|\p{{N}}{{1,3}}|{TAIL}"
GPT4O = (
    rf"{LETTERS}[{CAPITAL}]*[{SMALL}]+{SHORT}?|{LETTERS}[{CAPITAL}]+[{SMALL}]*{SHORT}?|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of gpt-oss and MiniMax-M2, too."""
PATTERNS = frozenset({GPT2, LLAMA3, QWEN2, QWEN35, *DEEPSEEK3, KIMI_K2, GPT4O})
"""Each match of these looks at the characters that it takes, and at as many more at most."""


def read_rules(data: bytes, where: str) -> dict[str, Any]:
    """What a tokenizer.json says, without its vocabulary and merges. FormatError for what no model's tokenizer has."""
    values = files.parse_json(data, where, without=frozenset(("vocab", "merges")))
    check_shape(values, where)
    rules: dict[str, Any] = values
    return rules


def check_shape(values: Any, where: str) -> None:
    """FormatError for what no model's tokenizer has."""
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        raise FormatError(f"{where}: expected a tokenizer with a model, found {type(values).__name__}")
    if values["model"].get("dropout"):
        raise FormatError(
            f"{where}: model.dropout: expected none, for the same text gives the same tokens, "
            f"found {values['model']['dropout']!r:.40}"
        )
    added = values.get("added_tokens") or []
    if not isinstance(added, list):
        raise FormatError(f"{where}: added_tokens: expected a list, found {type(added).__name__}")
    check_added([entry.get("content") if isinstance(entry, dict) else None for entry in added], where)


def check_added(contents: list[Any], where: str) -> None:
    """Limits the added tokens, because every text is searched for them."""
    if len(contents) > MAX_ADDED:
        raise FormatError(f"{where}: added_tokens: expected at most {MAX_ADDED}, found {len(contents)}")
    for content in contents:
        if not isinstance(content, str) or not 1 <= len(content) <= LONGEST_ADDED:
            raise FormatError(
                f"{where}: added_tokens: expected texts of 1 to {LONGEST_ADDED} characters, found {content!r:.60}"
            )


def is_proportional(values: dict[str, Any]) -> bool:
    """Whether time and memory are known to be in proportion to the text, whatever the text."""
    model = values["model"]
    return (
        model.get("type") == "BPE"
        and all(not model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix"))
        and _fits(values.get("normalizer"), "normalizers", _normalizer)
        and _fits(values.get("pre_tokenizer"), "pretokenizers", _pre_tokenizer)
        and _fits(values.get("post_processor"), "processors", _post_processor)
        and _fits(values.get("decoder"), "decoders", _decoder)
    )


def _fits(value: Any, steps: str, fits: Any, inside: bool = False) -> bool:
    if value is None:
        return not inside
    if not isinstance(value, dict):
        return False
    if value.get("type") != "Sequence":
        return bool(fits(value))
    listed = value.get(steps)
    return (
        not inside
        and isinstance(listed, list)
        and len(listed) <= MAX_STEPS
        and all(_fits(step, steps, fits, inside=True) for step in listed)
    )


def _is_text(value: Any, max_length: int, min_length: int = 1) -> bool:
    return isinstance(value, str) and min_length <= len(value) <= max_length


def _replaces(step: dict[str, Any]) -> bool:
    """Whether it replaces one text by another that is no longer."""
    pattern = step.get("pattern")
    return (
        isinstance(pattern, dict)
        and pattern.keys() == {"String"}
        and _is_text(pattern["String"], 8)
        and _is_text(step.get("content"), 1, min_length=0)
    )


def _normalizer(step: dict[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "Prepend":
        return _is_text(step.get("prepend"), 8)
    return kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase") or (kind == "Replace" and _replaces(step))


def _pre_tokenizer(step: dict[str, Any]) -> bool:
    kind, pattern = step.get("type"), step.get("pattern")
    if kind != "Split":
        return kind in ("ByteLevel", "Digits") or (kind == "Metaspace" and _is_text(step.get("replacement"), 1))
    if not isinstance(pattern, dict) or len(pattern) != 1:
        return False
    return _is_text(pattern.get("String"), 8) or (
        isinstance(pattern.get("Regex"), str) and pattern["Regex"] in PATTERNS
    )


def _post_processor(step: dict[str, Any]) -> bool:
    return step.get("type") in ("ByteLevel", "TemplateProcessing")


def _decoder(step: dict[str, Any]) -> bool:
    kind = step.get("type")
    return kind in ("ByteLevel", "Metaspace", "ByteFallback", "Fuse", "Strip") or (
        kind == "Replace" and _replaces(step)
    )
