"""What of tools/train needs no torch: the generator, the corpus, tokens, windows, the schedule, the command line.

The rest has its tests in tools/train/tests (`make train-test`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from moeflux.text.chat import ChatFormat
from moeflux.text.tokenizer import Tokenizer
from tools.train import config, schedule
from tools.train.config import PRESETS, Course
from tools.train.corpus import prepare, survey
from tools.train.documents import Document, read_documents, text_files
from tools.train.errors import TrainingError
from tools.train.generate import Generator, write_corpus
from tools.train.tokenizer import Encoder, save_tokenizer, train_tokenizer
from tools.train.windows import Batches, Data, Stream

ROOT = Path(__file__).resolve().parents[2]


# ---- Generated text ---------------------------------------------------------------------------------------------


def documents(count: int, seed: int = 1) -> list[dict]:
    return list(islice(Generator(seed).documents(), count))


def test_the_generator_repeats_itself_by_seed() -> None:
    assert documents(50) == documents(50)
    assert documents(50) != documents(50, seed=2)


def test_generated_text_is_whole() -> None:
    """No brace is left over, no article is wrong, no line starts small, questions take turns with answers."""
    texts = []
    for document in documents(2000):
        messages = [message for message in document.get("messages", []) if message["role"] != "system"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        texts += [document["text"]] if "text" in document else [message["content"] for message in messages]
    for text in texts:
        assert "{" not in text and "|" not in text and "  " not in text, text
        assert not any(f" {wrong} " in f" {text} " for wrong in ("a apple", "a owl", "an fox", "a island")), text
        for line in filter(None, text.split("\n\n")):
            assert line[0] in '"' or not line[0].islower(), text


def test_stories_say_what_their_answers_say() -> None:
    generator, told = Generator(5), 0
    for _ in range(300):
        story = generator.a_story()
        for question, answer in story.questions:
            if question.startswith("What did") and " lose?" in question:
                lost = answer.removesuffix(".").split(" ")[-1]
                assert f"the {lost}" in story.text
                told += 1
    assert told > 10


def test_sums_are_right() -> None:
    generator = Generator(1)
    count = 0
    for _ in range(500):
        words = generator.arithmetic()[1].split(".")[0].split(" ")
        if len(words) == 5 and words[3] == "is":
            a, b, result = int(words[0]), int(words[2]), int(words[4])
            assert result == {"plus": a + b, "minus": a - b, "times": a * b}[words[1]]
            count += 1
    assert count > 300


# ---- The corpus -------------------------------------------------------------------------------------------------


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello <|im_end|>"}]}


def test_documents_of_every_file(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("One.\n\nStill one.\n<|endoftext|>\nTwo <|endoftext|> inside.\n<|endoftext|>\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.jsonl").write_text(lines({"text": "Three."}, CHAT) + "\n")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    files = text_files([tmp_path])
    assert [file.name for file in files] == ["b.txt", "c.jsonl"]
    chat = Document(messages=(("user", "Hi"), ("assistant", "Hello <|im_end|>")))
    texts = ["One.\n\nStill one.", "Two <|endoftext|> inside.", "Three."]
    assert list(read_documents(files)) == [*map(Document, texts), chat]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"caf\xe9", "expected UTF-8, found byte 0xe9"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2: expected a JSON object"),
        ("a.jsonl", b"[1]", 'line 1: expected {"text"'),
        ("a.jsonl", b'{"prompt": "x"}', "found the fields ['prompt']"),
        ("a.jsonl", b'{"messages": [{"role": "tool", "content": "x"}]}', "expected a role of system, user, assistant"),
        ("a.pdf", b"", "expected a folder or a file of .txt"),
    ],
)
def test_a_bad_file_is_named(name: str, content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TrainingError, match=name.replace(".", r"\.")) as error:
        list(read_documents(text_files([tmp_path / name])))
    assert sentence in str(error.value)


def test_repeated_documents_count_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Some  Text\n<|endoftext|>\nsome text\n<|endoftext|>\nanother")
    (tmp_path / "b.jsonl").write_text(lines({"text": "SOME TEXT"}, CHAT, CHAT))
    found = survey(text_files([tmp_path]), 0.0)
    assert (found.documents, found.repeated) == ({"prose": 2, "chat": 1}, 3)


def test_held_out_documents_are_whole_stable_and_never_all(tmp_path: Path) -> None:
    texts = [f"{number} " * 40 for number in range(100, 200)]
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(texts))
    found = survey(text_files([tmp_path]), 0.1).held_out["prose"]
    assert len(found) == 10
    (tmp_path / "b.txt").write_text("\n<|endoftext|>\n".join(f"more {number}" * 9 for number in range(5)))
    assert len(survey(text_files([tmp_path]), 0.1).held_out["prose"] & found) >= 9
    (tmp_path / "a.txt").write_text("only one")
    (tmp_path / "b.txt").unlink()
    assert survey(text_files([tmp_path]), 0.9).held_out["prose"] == set()


# ---- Tokens -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    write_corpus(folder / "corpus" / "made.jsonl", 300, seed=1)
    (folder / "corpus" / "more.jsonl").write_text(lines(CHAT, {"text": "<|im_start|> and <think> are text here. Ünï."}))
    files = text_files([folder / "corpus"])
    save_tokenizer(train_tokenizer(read_documents(files), 600, 2), folder / "tokenizer", 512)
    return folder


def test_the_tokenizer_is_as_large_as_asked_and_knows_its_tokens(corpus: Path) -> None:
    tokenizer = Tokenizer.from_folder(corpus / "tokenizer")
    assert len(tokenizer) == 600
    assert [tokenizer.id_of(token) for token in ("<|endoftext|>", "<|image_pad|>")] == [584, 599]
    generation = json.loads((corpus / "tokenizer" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|endoftext|>")]


def test_chats_are_encoded_as_the_template_writes_them(corpus: Path) -> None:
    """Also where a message spells special tokens: they stay text."""
    tokenizer = Tokenizer.from_folder(corpus / "tokenizer")
    form = ChatFormat.from_folder(corpus / "tokenizer", tokenizer)
    chats = [document for document in read_documents(text_files([corpus / "corpus"])) if document.kind == "chat"]
    assert len(chats) > 100 and any("<|im_end|>" in content for chat in chats for _, content in chat.messages)
    encoder = Encoder(corpus / "tokenizer")
    for chat, ids in zip(chats, encoder.encode_batch(chats), strict=True):
        messages = [{"role": role, "content": content} for role, content in chat.messages]
        assert ids == [*form.encode(messages, add_generation_prompt=False).tokens, encoder.end_of_text]


def test_prose_stays_text(corpus: Path) -> None:
    tokenizer, text = Tokenizer.from_folder(corpus / "tokenizer"), "<|im_start|> <think> Ünï 漢字 🙂"
    [ids] = Encoder(corpus / "tokenizer").encode_batch([Document(text)])
    assert ids == [*tokenizer.encode(text), tokenizer.id_of("<|endoftext|>")]
    assert tokenizer.decode(ids[:-1]) == text


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(TrainingError, match="expected at least 272"):
        train_tokenizer([Document("a")], 100, 2)


def test_prepared_tokens_are_those_of_the_documents(corpus: Path, tmp_path: Path) -> None:
    report = prepare([corpus / "corpus"], corpus / "tokenizer", tmp_path / "data", 0.2)
    data, encoder = Data(tmp_path / "data"), Encoder(corpus / "tokenizer")
    everything = {kind: [data.tokens(part, kind) for part in ("train", "held-out")] for kind in ("prose", "chat")}
    for kind, (train, held_out) in everything.items():
        ends = [int((tokens == encoder.end_of_text).sum()) for tokens in (train, held_out)]
        assert report["documents"][kind] == sum(ends) and min(ends) > 0
        assert 0.15 < len(held_out) / (len(train) + len(held_out)) < 0.3

    def cut(tokens: np.ndarray) -> set[bytes]:
        return {part.tobytes() for part in np.split(tokens, np.flatnonzero(tokens == encoder.end_of_text) + 1)} - {b""}

    for train, held_out in everything.values():
        assert not cut(train) & cut(held_out)
    (tmp_path / "data" / "train-chat.tokens").write_bytes(b"\0\0")
    with pytest.raises(TrainingError, match=r"train-chat\.tokens: expected \d+ tokens, found 1"):
        data.tokens("train", "chat")


# ---- Windows ----------------------------------------------------------------------------------------------------


def test_a_pass_visits_every_window_once() -> None:
    stream = Stream(np.arange(1000, dtype=np.uint16), 10, seed=1)
    for _ in range(3):
        windows = stream.take(stream.count)
        assert np.array_equal(np.diff(windows), np.ones_like(windows[:, 1:]))
        assert len(np.unique(windows[:, 0])) == stream.count == 98
        assert len(np.unique(windows[:, 0] % 10)) == 1
    assert not np.array_equal(stream.take(98), windows)


def test_a_stream_goes_on_where_it_was() -> None:
    tokens = np.arange(333, dtype=np.uint32)
    whole, later = Stream(tokens, 8, seed=4), Stream(tokens, 8, seed=4)
    windows = whole.take(100)
    later.taken = 37
    assert np.array_equal(later.take(63), windows[37:])


@pytest.mark.parametrize("length", [9, 10, 17, 18, 25])
def test_short_texts_have_windows_within_them(length: int) -> None:
    stream = Stream(np.arange(length, dtype=np.uint16), 8, seed=1)
    assert stream.count >= 1 and stream.take(20).max() < length
    assert Stream(np.arange(8, dtype=np.uint16), 8, seed=1).count == 0


def test_batches_have_the_share_of_chats_that_is_asked(corpus: Path, tmp_path: Path) -> None:
    prepare([corpus / "corpus"], corpus / "tokenizer", tmp_path, 0.0)
    batches = Batches(Data(tmp_path), 16, seed=1)
    sizes = {len(batches.next(8, 0.3)) for _ in range(50)}
    assert sizes == {8} and batches.streams["chat"].taken == pytest.approx(120, abs=1)
    state = batches.state_dict()
    again = Batches(Data(tmp_path), 16, seed=1)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert np.array_equal(again.next(8, 0.3), batches.next(8, 0.3))
    with pytest.raises(TrainingError, match="expected at least 1000001 tokens of one kind"):
        Batches(Data(tmp_path), 1000000, seed=1)


# ---- The schedule and the settings ------------------------------------------------------------------------------


def test_the_rate_rises_stays_and_falls() -> None:
    course = Course(steps=100, warmup=10, decay=0.4, learning_rate=1.0)
    rates = [schedule.rate(course, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9:60] == [1.0] * 51
    assert np.all(np.diff(rates[59:]) < 0) and rates[-1] == pytest.approx(schedule.LAST_RATE)
    steady = replace(course, warmup=0, decay=0.0)
    assert {schedule.rate(steady, step) for step in range(100)} == {1.0}


def test_the_last_steps_are_quantised() -> None:
    course = Course(steps=100, quantised=0.15)
    assert [schedule.is_quantised(course, step) for step in (0, 84, 85, 99)] == [False, False, True, True]
    assert not schedule.is_quantised(replace(course, quantised=0.0), 99)


def test_chats_come_as_asked() -> None:
    course = Course(steps=100, decay=0.4, chat=0.1, chat_end=0.5)
    assert schedule.chat_share(course, 0, natural=0.3) == pytest.approx(0.1)
    assert schedule.chat_share(replace(course, chat=0.0), 0, natural=0.3) == pytest.approx(0.3)
    assert schedule.chat_share(course, 99, natural=0.3) == pytest.approx(0.5)
    assert [schedule.chat_share(course, 99, natural) for natural in (0.0, 1.0)] == [0.0, 1.0]


def test_settings_are_saved_and_set_by_name(tmp_path: Path) -> None:
    asked = config.changed(
        PRESETS["toy"], {"steps": "7", "learning_rate": "1e-4", "hidden_size": "64", "tie_word_embeddings": "false"}
    )
    assert (asked.course.steps, asked.course.learning_rate) == (7, 1e-4)
    assert (asked.shape.hidden_size, asked.shape.tie_word_embeddings) == (64, False)
    config.save(asked, tmp_path / "config.json")
    assert config.load(tmp_path / "config.json") == asked
    for preset in PRESETS.values():
        config.check(preset)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("stepz", "1", "expected one of hidden_size"),
        ("steps", "x", "expected int, found 'x'"),
        ("steps", "0", "expected more than 0"),
        ("learning_rate", "-1", "expected more than 0"),
        ("hidden_size", "96", "expected a multiple of the group of 64"),
        ("bits", "7", "expected 2, 3, 4, 5, 6 or 8"),
        ("decay", "1.5", "a share of at most 1"),
        ("num_experts_per_tok", "9", "expected at most num_experts, 8"),
        ("context", "2048", "expected at most max_position_embeddings, 1024"),
        ("num_attention_heads", "3", None),
        ("num_key_value_heads", "2", None),
        ("linear_num_key_heads", "4", "expected a multiple of linear_num_key_heads"),
        ("partial_rotary_factor", "0.05", "expected an even part of head_dim"),
    ],
)
def test_settings_are_checked(name: str, value: str, sentence: str | None) -> None:
    if sentence is None:
        config.check(config.changed(PRESETS["toy"], {name: value}))
        return
    with pytest.raises(TrainingError, match=name.removesuffix("z")) as error:
        config.check(config.changed(PRESETS["toy"], {name: value}))
    assert sentence in str(error.value)


# ---- The command line -------------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.train", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_help_teaches() -> None:
    shown = run("--help")
    assert shown.returncode == 0 and "moeflux convert work/hf work/store" in shown.stdout
    assert run().returncode == 2


def test_the_command_line_prepares_a_corpus(tmp_path: Path) -> None:
    corpus, tokenizer, data = (str(tmp_path / name) for name in ("corpus", "tokenizer", "data"))
    made = run("generate", f"{corpus}/made.jsonl", "--documents", "200")
    assert made.returncode == 0, made.stderr
    made = run("tokenizer", corpus, "-o", tokenizer, "--vocabulary", "400", "--frequency", "2")
    assert made.returncode == 0 and "400 tokens" in made.stdout, made.stderr
    made = run("prepare", corpus, "-t", tokenizer, "-o", data)
    assert made.returncode == 0 and "prose: " in made.stdout, made.stderr


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    wrong = run("prepare", str(tmp_path), "-t", str(tmp_path), "-o", str(tmp_path / "data"))
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1) and "expected files of .txt" in wrong.stderr
    wrong = run("train", str(tmp_path), "-o", str(tmp_path / "run"), "--set", "steps")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1) and "expected NAME=VALUE" in wrong.stderr
