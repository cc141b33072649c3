"""Tokenizers, chat templates and ends of answers from the values of GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import tokenizers

import moeflux
from moeflux import FormatError
from moeflux.cli import main
from moeflux.models.gguf import GgufValues
from moeflux.models.gguf_tokenizer import WORDS, tokenizer_json
from moeflux.models.tokenizer_rules import is_proportional, read_rules
from moeflux.text.chat import ChatFormat
from moeflux.text.sampling import Sampling
from moeflux.text.tokenizer import Tokenizer, end_tokens
from support import gguf_files
from support.vocabularies import CORPUS, byte_level

Writer = gguf.GGUFWriter
Kind = gguf.TokenType


def trained(words: str) -> tokenizers.Tokenizer:
    """A tokenizer whose merges would differ under other rules."""
    whole = tokenizers.Tokenizer.from_str(byte_level()._whole.to_str())
    rules = json.loads(whole.to_str())
    splits = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in WORDS[words]
    ]
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    rules["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*splits, last]}
    return tokenizers.Tokenizer.from_str(json.dumps(rules))


def written(
    path: Path, whole: tokenizers.Tokenizer, words: str, more: Callable[[Writer], object] | None = None
) -> Path:
    """A file that has nothing but a vocabulary."""
    added = whole.get_added_tokens_decoder()
    names = {id: token for token, id in whole.get_vocab(with_added_tokens=True).items()}
    ids = range(max(names) + 1)
    writer = Writer(path, "test")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list([names[id] for id in ids])
    kinds = {True: Kind.CONTROL, False: Kind.USER_DEFINED}
    writer.add_token_types([kinds[added[id].special] if id in added else Kind.NORMAL for id in ids])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(whole.to_str())["model"]["merges"]])
    if more:
        more(writer)
    for close in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        close()
    writer.close()
    return path


@pytest.mark.parametrize("words", WORDS)
def test_tokens_are_those_of_the_tokenizer(words: str, tmp_path: Path) -> None:
    whole = trained(words)
    found = Tokenizer.from_folder(written(tmp_path / "m.gguf", whole, words))
    wanted = Tokenizer(whole)
    composed = words in ("qwen2", "qwen35")
    for text in CORPUS:
        if composed and "\u0301" in text:
            continue  # the trained one does not compose
        assert found.encode(text) == wanted.encode(text)
        assert found.encode_marked(text) == wanted.encode_marked(text)
        assert found.decode(found.encode(text)) == text
    assert found.added == wanted.added and found.special_ids == wanted.special_ids


@pytest.mark.parametrize("words", WORDS)
def test_the_rules_take_time_in_proportion_to_the_text(words: str, tmp_path: Path) -> None:
    data = tokenizer_json(GgufValues(written(tmp_path / "m.gguf", trained(words), words)))
    assert is_proportional(read_rules(data, "made"))


def test_merges_of_words_with_spaces(tmp_path: Path) -> None:
    """As in Gemma: a space is a character, no text begins with one by itself, and bytes spell the rest."""
    tokens = ["<pad>", "<bos>", "\u2581", "a", "b", "ab", "\u2581a", *(f"<0x{byte:02X}>" for byte in range(256))]
    writer = Writer(tmp_path / "m.gguf", "test")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    kinds = [Kind.CONTROL] * 2 + [Kind.NORMAL] * 5 + [Kind.BYTE] * 256
    writer.add_token_types(kinds)
    writer.add_token_merges(["\u2581 a", "a b"])  # the first wins
    writer.add_add_space_prefix(False)
    writer.add_bos_token_id(1)
    for close in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        close()
    writer.close()
    found = Tokenizer.from_folder(tmp_path / "m.gguf")
    names = [found._whole.id_to_token(id) for id in found.encode("ab ab\n\u00e9")]
    assert names == ["ab", "\u2581a", "b", "<0x0A>", "<0xC3>", "<0xA9>"]
    assert found.prefix == (1,) and found.decode(found.encode("ab ab\n\u00e9")) == "ab ab\n\u00e9"


def test_characters_are_composed_where_the_rules_say_so(tmp_path: Path) -> None:
    for words, same in (("qwen2", True), ("llama-bpe", False)):
        found = Tokenizer.from_folder(written(tmp_path / f"{words}.gguf", trained(words), words))
        assert (found.encode("e\u0301") == found.encode("\u00e9")) is same


def test_a_first_token(tmp_path: Path) -> None:
    def first(writer: Writer) -> None:
        writer.add_bos_token_id(3)
        writer.add_add_bos_token(True)

    found = Tokenizer.from_folder(written(tmp_path / "m.gguf", trained("qwen2"), "qwen2", first))
    assert found.prefix == (3,) and found.named("bos_token") == found._whole.id_to_token(3)
    without = Tokenizer.from_folder(written(tmp_path / "n.gguf", trained("qwen2"), "qwen2"))
    assert without.prefix == () and without.named("bos_token") is None


def test_ends_and_templates(tmp_path: Path) -> None:
    def more(writer: Writer) -> None:
        writer.add_eos_token_id(7)
        writer.add_eot_token_id(9)
        writer.add_chat_template([{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}])

    whole = trained("gpt-2")
    path = written(tmp_path / "m.gguf", whole, "gpt-2", more)
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer.named("eos_token") == whole.id_to_token(7)
    values = GgufValues(path)
    assert {7, 9, whole.token_to_id("<|im_end|>")} == set(moeflux.models.gguf_tokenizer.end_ids(values))
    form = ChatFormat.from_folder(path, tokenizer)
    assert form is not None and form.text in ("ab", "ba")


def test_how_tokens_are_drawn(tmp_path: Path) -> None:
    def asks(writer: Writer, _: gguf_files.Tensors) -> None:
        writer.add_sampling_temp(0.7)
        writer.add_sampling_top_k(20)
        writer.add_sampling_top_p(0.8)

    found = Sampling.default(gguf_files.write("qwen3_moe", tmp_path / "m.gguf", change=asks))
    assert (found.temperature, found.top_k, found.top_p) == (0.7, 20, 0.8)
    assert Sampling.default(gguf_files.write("qwen3_moe", tmp_path / "n.gguf")).temperature == 0


BAD: list[tuple[str, Callable[[Writer], object], str]] = [
    ("other rules", lambda w: w.add_tokenizer_pre("bert"), r"tokenizer.ggml.pre: expected one of .*found 'bert'"),
    (
        "another model",
        lambda w: w.add_tokenizer_model("rwkv"),
        r"tokenizer.ggml.model: expected one of gpt2, llama, gemma4, found 'rwkv'",
    ),
    ("no tokens", lambda w: w.add_array("tokenizer.ggml.tokens", [1]), r"ggml.tokens: expected a list of str, found"),
    ("a token twice", lambda w: w.add_token_list(["a"] * 404), r"tokens: expected each once, found 'a' as 0 and as 1"),
    ("fewer kinds", lambda w: w.add_token_types([1, 1]), r"token_type: expected 404 kinds of 1 to 6, .*found 2 of 1"),
    ("an unknown kind", lambda w: w.add_token_types([1] * 403 + [9]), r"token_type: .*found 404 of 1 to 9"),
    ("a merge of one", lambda w: w.add_token_merges(["ab"]), r"merges: expected two tokens .*found 'ab'"),
    ("a merge of others", lambda w: w.add_token_merges(["zz zz"]), r"merges: expected two tokens .*found 'zz zz'"),
    ("a first token beyond", lambda w: (w.add_bos_token_id(999), w.add_add_bos_token(True)), r"bos_token_id: expected"),
    ("an end that is no id", lambda w: w.add_array("tokenizer.ggml.eos_token_id", [1]), r"expected the id of a token"),
]


@pytest.mark.parametrize(("change", "message"), [each[1:] for each in BAD], ids=[each[0] for each in BAD])
@pytest.mark.filterwarnings("ignore:Duplicated key name")
def test_what_is_wrong_is_named(change: Callable[[Writer], object], message: str, tmp_path: Path) -> None:
    def more(writer: Writer) -> None:
        other = Writer(None, "test")
        change(other)
        writer.kv_data[0] |= {key: value for key, value in other.kv_data[0].items() if key.startswith("tokenizer.")}

    path = written(tmp_path / "m.gguf", trained("qwen2"), "qwen2", more)
    with pytest.raises(FormatError, match=f"^{path}: .*{message}"):
        Tokenizer.from_folder(path)


# ---- A whole model ----------------------------------------------------------------------------------------------


def test_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt to text, by the template of the file; the answer is that of the tokens."""
    file = gguf_files.write("qwen3_moe", tmp_path / "m.gguf", type="Q8_0")
    assert main(["run", str(file), "-p", "Hi", "--max-tokens", "8", "--temperature", "0", "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    with moeflux.load(file, threads=1, sessions=1) as model:
        assert model.end_tokens == {256}
        form = model.chat_format
        assert form is not None
        prompt = form.encode([{"role": "user", "content": "Hi"}])
        assert prompt.text == "<|start|>user\nHi<|end|><|start|>assistant"
        session = model.session()
        answer = [session.prefill(prompt.tokens).argmax()]
        while len(answer) < 8 and answer[-1] not in model.end_tokens:
            answer.append(session.step(answer[-1]).argmax())
        assert printed.rstrip("\n") == model.tokenizer.decode(answer, special=False).rstrip("\n")


def test_end_tokens_of_a_model(tmp_path: Path) -> None:
    file = gguf_files.write("qwen3_moe", tmp_path / "m.gguf")
    assert end_tokens(file, Tokenizer.from_folder(file)) == {256}
    without = gguf_files.write("qwen3_moe", tmp_path / "n.gguf", tokens=False)
    assert not Tokenizer.is_in(without) and end_tokens(without, None) == frozenset()
