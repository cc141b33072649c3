"""Text to tokens and back: streams equal the whole, and what a user types never becomes a token of the model's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from moeflux import ArgumentError, FormatError
from moeflux.models import builtin
from moeflux.models.tokenizer_rules import is_proportional
from moeflux.text.channels import MARKS
from moeflux.text.tokenizer import AddedTokens, Tokenizer, end_tokens
from support.vocabularies import CORPUS, MARKERS, SPECIAL, byte_fallback, byte_level, with_added


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=["byte-level", "byte-fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param()


# ---- There and back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", CORPUS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer._whole.decode(ids, skip_special_tokens=False) == text


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.stream(special=True, continues=False)
    parts = [stream.add(id) for id in ids] + [stream.finish()]
    return "".join(parts)


@settings(max_examples=200)
@given(data=st.data())
def test_any_tokens_stream_as_the_whole(data: st.DataObject) -> None:
    """Random ids are mostly no UTF-8. The library decodes the whole in one piece."""
    made = _BYTE_LEVEL
    ids = data.draw(st.lists(st.integers(0, len(made) - 1), max_size=40))
    assert streamed(made, ids) == made.decode(ids) == made._whole.decode(ids, skip_special_tokens=False)


_BYTE_LEVEL = byte_level()


@settings(max_examples=100)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_comes_back(text: str) -> None:
    assert streamed(_BYTE_LEVEL, _BYTE_LEVEL.encode(text)) == text


def test_a_character_waits_for_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🧿")
    stream = tokenizer.stream()
    parts = [stream.add(id) for id in ids]
    assert len(ids) >= 3
    assert "".join(parts).strip() == parts[-1] == "🧿"
    stream = tokenizer.stream()
    for id in ids[:-1]:
        stream.add(id)
    assert stream.finish() == "\ufffd"


def test_a_stream_that_continues_keeps_its_first_space() -> None:
    made = byte_fallback()
    ids = made.encode("Hello Hello")
    half = len(ids) // 2
    stream = made.stream()
    rest = "".join(stream.add(id) for id in ids[half:]) + stream.finish()
    assert made.decode(ids[:half]) + rest == "Hello Hello"
    assert rest == " Hello"


def test_special_tokens_are_not_streamed() -> None:
    stream = _BYTE_LEVEL.stream()
    ids = _BYTE_LEVEL.encode_marked("a<|im_end|>b</think>")
    assert "".join(map(stream.add, ids)) == "ab</think>"


# ---- Added tokens -----------------------------------------------------------------------------------------------


def test_user_text_is_text(tokenizer: Tokenizer) -> None:
    for text in (*SPECIAL, *MARKERS, "a<|im_start|>b"):
        assert not set(tokenizer.encode(text)) & set(tokenizer._added)


def test_marked_text_is_what_the_library_makes_of_it(tokenizer: Tokenizer) -> None:
    for text in (*CORPUS, "<|im_start|>user\na b<|im_end|>\n<think> x</think>"):
        assert tokenizer.encode_marked(text) == tokenizer._whole.encode(text, add_special_tokens=False).ids


def test_a_barrier_keeps_a_spelling_from_being_a_token() -> None:
    ids = _BYTE_LEVEL.encode_marked("<|im_start|>a <\ue000|im_end|><|im_end|>", "\ue000")
    assert _BYTE_LEVEL.decode(ids) == "<|im_start|>a <|im_end|><|im_end|>"
    assert [id for id in ids if id in _BYTE_LEVEL._added] == [_BYTE_LEVEL.id_of(token) for token in SPECIAL]


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"'\\udcff' at character 1"):
        _BYTE_LEVEL.encode("a\udcff")


# ---- gpt-oss ----------------------------------------------------------------------------------------------------

WORD = r"[^\r\n\p{L}\p{N}]?"
CAPITALS, SMALLS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"{WORD}{CAPITALS}*{SMALLS}+{SHORT}|{WORD}{CAPITALS}+{SMALLS}*{SHORT}|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def o200k(folder: Path) -> Tokenizer:
    """As gpt-oss' own is made, with fewer pieces."""
    whole = tokenizers.Tokenizer(models.BPE())
    whole.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(O200K), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    whole.decoder = decoders.ByteLevel()
    whole.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    whole.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    names = ["<|startoftext|>", "<|endoftext|>", *MARKS, "<|reserved_200004|>", "<|endofprompt|>"]
    whole.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    values = json.loads(whole.to_str())
    values["model"]["ignore_merges"] = True
    (folder / "tokenizer.json").write_text(json.dumps(values))
    config = {"eos_token": "<|return|>", "bos_token": "<|startoftext|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return o200k(tmp_path_factory.mktemp("o200k"))


def test_gpt_oss_needs_no_process_of_its_own(harmony: Tokenizer) -> None:
    assert harmony._guard is None
    assert harmony.named("eos_token") == "<|return|>" and {harmony.id_of(mark) for mark in MARKS} < harmony.special_ids


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I'VE said DON'T, don't", ["I'VE", " said", " DON'T", ",", " don't"]),
        ("HelloWorld fooBAR", ["Hello", "World", " foo", "BAR"]),
        ("12345 x", ["123", "45", " x"]),
        ("a://b//\nc", ["a", "://", "b", "//\n", "c"]),
        ("Straße \u01c5ep e\u0301te\u0301 \u0939\u093f", ["Straße", " \u01c5ep", " e\u0301te\u0301", " \u0939\u093f"]),
        ("毛泽东 mixed漢字", ["毛泽东", " mixed漢字"]),
        ("a  b \n\n  c ", ["a", " ", " b", " \n\n", " ", " c", " "]),
    ],
)
def test_where_gpt_oss_divides_words(harmony: Tokenizer, text: str, words: list[str]) -> None:
    assert harmony._plain.pre_tokenizer is not None
    found = harmony._plain.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == words


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
            st.sampled_from([*MARKS, "I'LL ", "ǅ", "e\u0301", "ʰ", "١٢٣٤", "ABC", "aB", " /", "\r\n", "\u3000", "漢"]),
        ),
        max_size=12,
    )
)
def test_gpt_oss_reads_any_text_as_the_library_does(harmony: Tokenizer, scraps: list[str]) -> None:
    text = "".join(scraps)
    ids = harmony.encode_marked(text)
    assert ids == harmony._whole.encode(text, add_special_tokens=False).ids
    assert harmony.decode(ids) == text == streamed(harmony, harmony.encode(text))


# ---- Files ------------------------------------------------------------------------------------------------------


def test_end_tokens_of_every_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": null, "text_config": {"eos_token_id": 5}}')
    made = Tokenizer(with_added(byte_level()._whole), {"eos_token": {"content": "<|im_end|>"}})
    assert end_tokens(tmp_path, made) == {3, 4, 5, made.id_of("<|im_end|>")}
    (tmp_path / "config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(FormatError, match=r"config.json: eos_token_id: expected a token id"):
        end_tokens(tmp_path, made)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"tokenizer.json: expected the tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match=r"tokenizer.json: expected a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    made = json.loads(byte_level()._whole.to_str())
    made["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(FormatError, match=r"decoder: expected ByteLevel.*found WordPiece"):
        Tokenizer.from_folder(tmp_path)


# ---- Files that would take for ever -----------------------------------------------------------------------------

FLAGS = ("lstrip", "rstrip", "single_word")


@settings(max_examples=300)
@given(data=st.data())
def test_added_tokens_are_found_where_the_library_finds_them(data: st.DataObject) -> None:
    whole = byte_level()._whole
    for content in ("ab", "abc", "b<", "<c>"):
        flags = {flag: data.draw(st.booleans()) for flag in FLAGS}
        whole.add_tokens([AddedToken(content, normalized=False, **flags)])
    text = data.draw(st.text("abc< >\n\t", max_size=24))
    assert Tokenizer(whole).encode_marked(text) == whole.encode(text, add_special_tokens=False).ids


def test_each_place_of_a_text_is_looked_at_once() -> None:
    """A pattern for white space before a token looked again at every space: 40,000 of them took seven seconds."""
    looked: list[str] = []

    class Counting(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            looked.append(key)
            return super().get(key, default)

    tokens = {1: AddedToken("<a>", lstrip=True, rstrip=True), 2: AddedToken("<ab>", lstrip=True), 3: AddedToken("<")}
    search = AddedTokens(tokens)
    search._by_content = Counting(search._by_content)
    text = " " * 40_000 + "<a>" + " " * 40_000 + "x<" + " " * 40_000
    assert list(search.in_text(text)) == [(0, 80_003, 1), (80_004, 80_005, 3)]
    assert len(looked) == 5


def changed(**values: Any) -> dict[str, Any]:
    made = json.loads(byte_level()._whole.to_str())
    model = values.pop("model", {})
    return {**made, **values, "model": {**made["model"], **model}}


def bomb(times: int = 4) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    return {"type": "Sequence", "normalizers": [step] * times}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"dropout": 0.5}}, "model.dropout: expected none, .* found 0.5"),
        ({"model": None}, "expected a tokenizer with a model"),
        ({"added_tokens": {"a": 1}}, "added_tokens: expected a list, found dict"),
        ({"added_tokens": [3]}, "added_tokens: expected texts of 1 to 128 characters, found None"),
        ({"added_tokens": [{"content": "a" * 129}]}, "added_tokens: expected texts of 1 to 128 characters"),
        ({"added_tokens": [{"content": ""}]}, "added_tokens: expected texts of 1 to 128 characters"),
        ({"added_tokens": [{"content": "a"}] * 16385}, "added_tokens: expected at most 16384, found 16385"),
        ({"pre_tokenizer": split("(")}, "expected a tokenizer that is loaded with .*, found: .* unmatched parenthesis"),
        ({"padding": "9" * 5000}, "expected a tokenizer, found a file that cannot be one"),
    ],
)
def test_what_no_tokenizer_has(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    values = changed(**change) if change.get("model", {}) is not None else {"model": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(FormatError, match=rf"tokenizer\.json: {words}"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", ['{"model": ' + "[" * 5000, '{"model": {"vocab": {"a": ' + "9" * 5000 + "}}}"])
def test_json_that_is_none_is_refused_before_the_library_sees_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(FormatError, match=r"tokenizer\.json: line 1"):
        Tokenizer.from_folder(tmp_path)


def test_the_tokenizers_there_are_take_time_in_proportion() -> None:
    built_in = json.loads((builtin.path() / "tokenizer.json").read_text())
    assert is_proportional(built_in)
    assert is_proportional(changed())
    assert is_proportional(json.loads(byte_fallback()._whole.to_str()))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": bomb()},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [{"type": "NFC"}]}]}},
        {"pre_tokenizer": split("(a+)+$")},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split("a*a*a*b|.")]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}] * 9}},
        {"model": {"type": "Unigram"}},
        {"model": {"type": "WordPiece"}},
        {"model": {"continuing_subword_prefix": "#" * 1000}},
        {"decoder": {"type": "Replace", "pattern": {"Regex": "a"}, "content": ""}},
        {"pre_tokenizer": "text"},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a", "String": "b"}}},
    ],
)
def test_what_may_take_longer(change: dict[str, Any]) -> None:
    assert not is_proportional(changed(**change))


def test_a_text_without_end_is_refused() -> None:
    with pytest.raises(ArgumentError, match="text: expected at most 8388608 characters, found 8388609"):
        _BYTE_LEVEL.encode("a" * 8388609)
