"""Text to tokens and back, from the files of a checkpoint."""

from __future__ import annotations

import codecs
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from moeflux import files
from moeflux.errors import ArgumentError, Error, FormatError, found
from moeflux.models.model_files import ModelFiles, files_of
from moeflux.models.tokenizer_rules import TOKENIZER, check_added, is_proportional, read_rules
from moeflux.text.guarded import Guarded

__all__ = ["TextStream", "Tokenizer", "end_tokens", "shared_length"]

LONGEST_TEXT = 8 << 20  # characters that are made tokens at a time
WORD, SPACES = re.compile(r"\w"), re.compile(r"\s*")


@contextmanager
def _library(what: str) -> Generator[None, None, None]:
    """Turns errors of the library inside the `with` into ours. It raises nothing narrower, and a panic is no
    Exception."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        raise FormatError(f"{what}: {str(error)!s:.300}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise FormatError(f"{what}: the library gave up: {str(error)!s:.300}") from error


class Tokenizer:
    """The tokenizer of one model; immutable, and shared by any number of threads."""

    def __init__(
        self,
        whole: tokenizers.Tokenizer,
        config: dict[str, Any] | None = None,
        source: str = "tokenizer",
        guard: Guarded | None = None,
    ) -> None:
        """`guard` makes the tokens if `whole` might take unlimited time."""
        self.source = source
        self._guard = guard
        self.config = config or {}
        whole.no_truncation()
        whole.no_padding()
        self._whole = whole
        # It has the same model, vocabulary and rules but no added token, so it can only make tokens of plain text.
        self._plain = _without_added_tokens(whole)
        self._added: dict[int, tokenizers.AddedToken] = whole.get_added_tokens_decoder() | self._configured()
        self._ids = {token.content: id for id, token in self._added.items()}
        check_added(list(self._ids), source)
        self._search = AddedTokens(self._added)
        self._piece_bytes, self._strips_first_space = _byte_rule(whole, source)
        self.special_ids = frozenset(id for id, token in self._added.items() if token.special)

    @staticmethod
    def is_in(folder: str | Path) -> bool:
        return files_of(folder).has(TOKENIZER)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        beside = files_of(folder)
        path = beside.where(TOKENIZER)
        if not beside.has(TOKENIZER):
            raise FormatError(f"{path}: expected the tokenizer of the model, found nothing")
        data = beside.bytes_of(TOKENIZER)
        values = read_rules(data, path)
        # What loads within limits there loads here too, because loading depends on nothing but the file.
        guard = None if is_proportional(values) else Guarded(data, path)
        with _library(f"{path}: expected a tokenizer, found a file that cannot be one"):
            whole = tokenizers.Tokenizer.from_buffer(data)
            return cls(whole, _optional_json(beside, "tokenizer_config.json"), path, guard)

    # ---- Text to tokens -----------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that is only text: in it, `<|im_start|>` is twelve characters and no added token."""
        return self._text_ids([text])[0]

    def encode_marked(self, text: str, barrier: str = "") -> list[int]:
        """The tokens of a text in which added tokens count, as a chat template writes them.

        A spelling with a `barrier` in it does not count. Barriers are removed from the text between added tokens.
        """
        texts, found, at = [], [], 0
        for start, end, id in self._search.in_text(text):
            texts.append(text[at:start])
            found.append(id)
            at = end
        texts.append(text[at:])
        between = self._text_ids([each.replace(barrier, "") if barrier else each for each in texts])
        ids = between[0]
        for id, rest in zip(found, between[1:], strict=True):
            ids += [id, *rest]
        return ids

    def _text_ids(self, texts: list[str]) -> list[list[int]]:
        """The tokens of texts between added tokens, the first of which begins the whole."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:  # half of a surrogate pair, as a terminal's surrogateescape makes them
                found = text[error.start]
                raise ArgumentError(f"text: expected Unicode, found {found!r} at character {error.start}") from error
        size = sum(map(len, texts))
        if size > LONGEST_TEXT:
            raise ArgumentError(f"text: expected at most {LONGEST_TEXT} characters, found {size}")
        return self._encode("plain", texts[:1]) + (self._encode("later", texts[1:]) if texts[1:] else [])

    def _encode(self, which: str, texts: list[str], special: bool = False) -> list[list[int]]:
        """The tokens by one of the tokenizers that are derived from this one."""
        which = "plain" if which == "later" and self._later is self._plain else which
        whole = {"whole": self._whole, "plain": self._plain, "later": self._later}[which]
        if self._guard is not None:
            if which != "whole":
                state = whole.pre_tokenizer and whole.pre_tokenizer.__getstate__()
                self._guard.add(which, files.parse_json(state, self.source) if state else None)
            return self._guard.encode(which, texts, special)
        with _library(f"{self.source}: expected tokens of {sum(map(len, texts))} characters, found"):
            return [whole.encode(text, add_special_tokens=special).ids if text else [] for text in texts]

    @cached_property
    def _later(self) -> tokenizers.Tokenizer:
        """The tokenizer for text after an added token. It puts no space before the first word."""
        before = self._plain.pre_tokenizer
        if not isinstance(before, tokenizers.pre_tokenizers.Metaspace) or before.prepend_scheme != "first":
            return self._plain
        later = _without_added_tokens(self._whole)
        later.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
            replacement=before.replacement, prepend_scheme="never", split=before.split
        )
        return later

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """Tokens that precede any text that is not a chat: the tokenizer's post-processor puts them there."""
        with_all, text = (self._encode("whole", ["a"], special)[0] for special in (True, False))
        count = next((i for i in range(len(with_all)) if with_all[i : i + len(text)] == text), 0)
        return tuple(with_all[:count])

    # ---- Tokens to text -----------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], *, special: bool = True) -> str:
        """The text of tokens, with or without special ones. Bytes that are no UTF-8 become U+FFFD."""
        stream = self.stream(special=special, continues=False)
        return "".join(map(stream.add, ids)) + stream.finish()

    def stream(self, *, special: bool = False, continues: bool = True) -> TextStream:
        """Decodes tokens that come one by one. `continues`: text precedes them, so a leading space is kept."""
        return TextStream(self, special, continues)

    def token_bytes(self, id: int) -> bytes:
        """What a token adds to a text. Ids beyond the vocabulary, as models have for padding, add nothing."""
        if id in self._added:
            return self._added[id].content.encode()
        try:
            piece = self._whole.id_to_token(id)
        except OverflowError as error:
            raise ArgumentError(f"token: expected 0 to {len(self) - 1}, found {found(id)}") from error
        return self._piece_bytes(piece) if piece is not None else b""

    # ---- Names --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """One more than the highest id."""
        return self._count

    @cached_property
    def _count(self) -> int:
        return max([*self._whole.get_vocab(with_added_tokens=True).values(), *self._added], default=-1) + 1

    @property
    def added(self) -> tuple[str, ...]:
        """The spellings of the added tokens, in the order of their ids."""
        return tuple(self._added[id].content for id in sorted(self._added))

    def id_of(self, token: str) -> int | None:
        """The id of an added token by its spelling, or else of a piece of the vocabulary."""
        return self._ids.get(token, self._whole.token_to_id(token))

    def named(self, name: str) -> str | None:
        """A token that tokenizer_config.json names, such as "bos_token"."""
        value = self.config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None

    def _configured(self) -> dict[int, tokenizers.AddedToken]:
        """The added tokens that only tokenizer_config.json has."""
        listed = self.config.get("added_tokens_decoder", {})
        found = {}
        for id, entry in listed.items() if isinstance(listed, dict) else ():
            if not (id.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str)):
                raise FormatError(
                    f"{self.source}: tokenizer_config.json: added_tokens_decoder: expected id and content, "
                    f"found {id!r:.20}: {entry!r:.60}"
                )
            flags = {flag: bool(entry.get(flag, False)) for flag in ("single_word", "lstrip", "rstrip", "special")}
            found[int(id)] = tokenizers.AddedToken(entry["content"], normalized=False, **flags)
        return found


class AddedTokens:
    """Finds added tokens in a text, in time proportional to its length: it looks at each place once for each length of
    a token that begins with the character there."""

    def __init__(self, added: dict[int, tokenizers.AddedToken]) -> None:
        self._by_content = {token.content: (id, token) for id, token in added.items()}
        lengths: dict[str, set[int]] = {}
        for content in self._by_content:
            lengths.setdefault(content[0], set()).add(len(content))
        self._lengths = {first: sorted(each, reverse=True) for first, each in lengths.items()}
        self._first = re.compile("[" + "".join(map(re.escape, lengths)) + "]") if lengths else None

    def in_text(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, id) from left to right. Of tokens that begin at one place, the longest is taken, as in the
        library. If a token takes white space at a side, that belongs to it."""
        at = seen = 0
        for first in self._first.finditer(text) if self._first else ():
            place = first.start()
            found = self._longest(text, place) if place >= seen else None
            if found is None:
                continue
            id, token = found
            seen = place + len(token.content)
            if not self._stands(token, text, place):
                continue
            start = at + len(text[at:place].rstrip()) if token.lstrip else place
            at = SPACES.match(text, seen).end() if token.rstrip else seen  # type: ignore[union-attr]
            seen = at
            yield start, at, id

    def _longest(self, text: str, place: int) -> tuple[int, tokenizers.AddedToken] | None:
        for length in self._lengths[text[place]]:
            found = self._by_content.get(text[place : place + length])
            if found is not None:
                return found
        return None

    @staticmethod
    def _stands(token: tokenizers.AddedToken, text: str, place: int) -> bool:
        """Whether it stands by itself, if it must be a word of its own."""
        end = place + len(token.content)
        return not token.single_word or not (WORD.match(text[place - 1 : place]) or WORD.match(text[end : end + 1]))


class TextStream:
    """Turns tokens into text as they come: never half a character, never a lost space.

    All that `add` returns, followed by `finish`, is what `decode` makes of the same tokens.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool, continues: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = frozenset() if special else tokenizer.special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer._strips_first_space and not continues

    def hides(self, id: int) -> bool:
        """Whether a token is none of the text."""
        return id in self._hidden

    def add(self, id: int) -> str:
        """The characters that this token completes."""
        if id in self._hidden:
            return ""
        data = self._tokenizer.token_bytes(id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """The rest of the text when no more tokens come: U+FFFD for a character that was begun."""
        return self._utf8.decode(b"", final=True)


# ---- Which tokens end a text ------------------------------------------------------------------------------------


def end_tokens(folder: str | Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every token that any file of the checkpoint calls the end. generation_config.json and config.json name it by id,
    tokenizer_config.json by its spelling. The files often disagree, and always because one leaves a token out."""
    ends: set[int] = set()
    beside = files_of(folder)
    for name in ("generation_config.json", "config.json"):
        path = beside.where(name)
        config = _optional_json(beside, name)
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                ends |= _ids(part.get("eos_token_id"), f"{path}: eos_token_id")
    spelled = None if tokenizer is None else tokenizer.named("eos_token")
    if tokenizer is not None and spelled is not None and (id := tokenizer.id_of(spelled)) is not None:
        ends.add(id)
    return frozenset(ends)


def _ids(value: Any, where: str) -> set[int]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(id, bool) or not isinstance(id, int) or id < 0 for id in listed):
        raise FormatError(f"{where}: expected a token id or a list of them, found {value!r:.60}")
    return set(listed)


def _optional_json(beside: ModelFiles, name: str) -> dict[str, Any]:
    if not beside.has(name):
        return {}
    value = beside.json_of(name)
    if not isinstance(value, dict):
        raise FormatError(f"{beside.where(name)}: expected an object, found {type(value).__name__}")
    return value


# ---- From a tokenizer.json --------------------------------------------------------------------------------------


def _without_added_tokens(whole: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer without added tokens. It shares the model, which holds nearly all the memory."""
    plain = tokenizers.Tokenizer(whole.model)
    if whole.normalizer is not None:
        plain.normalizer = whole.normalizer
    if whole.pre_tokenizer is not None:
        plain.pre_tokenizer = whole.pre_tokenizer
    return plain


def _byte_rule(whole: tokenizers.Tokenizer, source: str) -> tuple[Any, bool]:
    """How a piece of the vocabulary becomes bytes, and whether a text loses the space it begins with."""
    decoder = whole.decoder
    if isinstance(decoder, tokenizers.decoders.ByteLevel):
        return _byte_level, False
    if isinstance(decoder, tokenizers.decoders.Metaspace):
        return _metaspace, decoder.prepend_scheme != "never"
    if isinstance(decoder, tokenizers.decoders.Sequence):
        steps = files.parse_json(decoder.__getstate__(), source)["decoders"]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return _byte_level, False
        if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
            return _byte_fallback, any(step["type"] == "Strip" and step["start"] for step in steps)
    found = "nothing" if decoder is None else type(decoder).__name__
    raise FormatError(f"{source}: decoder: expected ByteLevel, Metaspace or ByteFallback, found {found}")


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet. A visible character stands for each byte: its own if it has one."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_characters()
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([BYTE_OF[character] for character in piece])
    except KeyError:  # not in that alphabet, so it stands for itself
        return piece.encode()


def _metaspace(piece: str) -> bytes:
    return piece.replace("▁", " ").encode()


def _byte_fallback(piece: str) -> bytes:
    match = BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else _metaspace(piece)


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common from the beginning."""
    count = min(len(one), len(other))
    return next((i for i in range(count) if one[i] != other[i]), count)
