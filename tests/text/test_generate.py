"""Generation: pieces add up, answers end where they should, and what a session holds already changes no bit."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moeflux
from golden import checkpoints
from moeflux import ArgumentError, StateError, builtin
from moeflux.models.layers import GatedDelta
from moeflux.runtime.logits import Logits
from moeflux.text.generate import Generation
from moeflux.text.reuse import NEAR, checkpoint_places, reach
from moeflux.text.sampling import log_probabilities
from moeflux.text.stop_text import StopText
from support.engine import folders

STORY = "Once upon a time, there was a little fox who"


@pytest.fixture(scope="module")
def model() -> moeflux.Model:
    return moeflux.load(builtin.path(), threads=2)


@pytest.fixture(scope="module")
def models(model: moeflux.Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, moeflux.Model]:
    """The built-in one, and a tiny one of every architecture."""
    folder = folders(tmp_path_factory.mktemp("generate"))
    tiny = {name: moeflux.load(folder(name), threads=2) for name in checkpoints.CHECKPOINTS}
    return {"builtin": model, **tiny}


MODELS = ("builtin", *checkpoints.CHECKPOINTS)


def text_of(generation: Generation) -> str:
    return "".join(piece.text for piece in generation)


# ---- Pieces -----------------------------------------------------------------------------------------------------


def test_greedy_is_the_likeliest_token_each_time(model: moeflux.Model) -> None:
    prompt = model.tokenizer.encode(STORY)
    session, expected = model.session(), []
    logits = session.prefill(prompt)
    for _ in range(40):
        expected.append(logits.argmax())
        logits = session.step(expected[-1])
    generation = model.session().generate(STORY, max_tokens=40, temperature=0)
    text = text_of(generation)
    assert generation.tokens == expected
    assert (generation.text, generation.finish) == (text, "length")
    assert text == model.tokenizer.stream().add(expected[0]) + model.tokenizer.decode(expected[1:])
    assert text.startswith(" lived in a village by the sea.")


def test_the_model_ends_its_answer(model: moeflux.Model) -> None:
    assert model.chat_format is not None
    prompt = model.chat_format.encode([{"role": "user", "content": "What is the capital of France?"}])
    pieces = list(generation := model.session().generate(prompt, temperature=0))
    assert generation.text == "The capital of France is Paris."
    assert generation.finish == "end"
    assert pieces[-1].token in model.end_tokens and pieces[-1].text == ""
    assert [piece.token for piece in pieces] == generation.tokens
    longer = model.session().generate(prompt, temperature=0, ignore_end=True, max_tokens=20)
    assert len(text_of(longer)) > len(generation.text)
    comma = model.tokenizer.encode(" capital")
    assert len(comma) == 1
    shorter = model.session().generate(prompt, temperature=0, stop_tokens=comma)
    assert (text_of(shorter), shorter.finish) == ("The", "end")


def test_a_seed_gives_one_text_whatever_the_threads_and_slots(model: moeflux.Model) -> None:
    few = moeflux.load(builtin.path(), threads=1, expert_slots=24, chunk=3)
    asked = {"max_tokens": 60, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}
    texts = [text_of(each.session().generate(STORY, seed=5, **asked)) for each in (model, few, model)]
    assert texts[0] == texts[1] == texts[2]
    generation = model.session().generate(STORY, **asked)
    assert text_of(generation) != texts[0]
    assert text_of(model.session().generate(STORY, sampling=generation.sampling, max_tokens=60)) == generation.text


def test_logprobs_are_those_of_the_raw_logits(model: moeflux.Model) -> None:
    asked = {"temperature": 1.0, "seed": 2, "logit_bias": {5: 3.0}}
    pieces = list(model.session().generate(STORY, max_tokens=6, logprobs=4, **asked))
    prompt = model.tokenizer.encode(STORY)
    answer = [piece.token for piece in pieces]
    raw = model.session().prefill([*prompt, *answer[:-1]], logits="all")[len(prompt) - 1 :]
    expected = log_probabilities(raw)
    for row, piece in enumerate(pieces):
        order = np.argsort(-expected[row], kind="stable")[:4].tolist()
        assert [id for id, _ in piece.top] == order
        found = [piece.logprob, *(value for _, value in piece.top)]
        assert np.allclose(found, expected[row, [piece.token, *order]], rtol=0, atol=1e-9)
    assert math.isclose(np.exp(expected[0]).sum(), 1)
    assert next(model.session().generate(STORY)).logprob is None


def test_characters_of_many_tokens_arrive_whole(model: moeflux.Model) -> None:
    """A model that is made to write them: all else is forbidden."""
    text = "🦊 naïve 毛"
    ids = model.tokenizer.encode(text)
    assert len(ids) > len(text)
    stream = model.tokenizer.stream()
    parts = []
    session = model.session()
    for id in ids:
        generation = session.generate(STORY, max_tokens=1, temperature=0, logit_bias={id: 1e4})
        list(generation)
        assert generation.tokens == [id]
        parts.append(stream.add(id))
    assert "".join(parts) + stream.finish() == text
    cut = session.generate(STORY, max_tokens=1, temperature=0, logit_bias={ids[0]: 1e4})
    assert text_of(cut) == "\ufffd"  # the fox had only begun


# ---- Ends -------------------------------------------------------------------------------------------------------


def test_stop_strings_across_tokens(model: moeflux.Model) -> None:
    whole = text_of(model.session().generate(STORY, max_tokens=60, temperature=0))
    for stop in ("village by", "e by the s", ".", " One day Sam", "z\x00", "hungry. "):
        at = whole.find(stop)
        generation = model.session().generate(STORY, max_tokens=60, temperature=0, stop=["never this", stop])
        pieces = list(generation)
        assert generation.text == "".join(piece.text for piece in pieces) == (whole[:at] if at >= 0 else whole)
        assert generation.stop_string == (stop if at >= 0 else None)
        assert generation.finish == ("stop" if at >= 0 else "length")


@settings(max_examples=300)
@given(data=st.data())
def test_stop_strings_do_not_depend_on_where_the_text_is_cut(data: st.DataObject) -> None:
    letters = st.text("ab", min_size=1, max_size=4)
    text = data.draw(st.text("abc", max_size=30))
    stops = data.draw(st.lists(letters, min_size=1, max_size=3))
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected = text
    if ends:
        expected = min(
            (text[: ends[0]].removesuffix(stop) for stop in stops if text[: ends[0]].endswith(stop)), key=len
        )
    watch, got, found = StopText(stops), "", None
    while text and found is None:
        size = data.draw(st.integers(1, 5))
        part, found = watch.add(text[:size])
        got, text = got + part, text[size:]
    assert got + ("" if found else watch.finish()) == expected
    assert (found is not None) == bool(ends)


def test_a_full_context_ends_it(model: moeflux.Model) -> None:
    prompt = model.tokenizer.encode(STORY)
    session = model.session(max_context=len(prompt) + 4)
    generation = session.generate(prompt, temperature=0)
    assert len(list(generation)) == 5 and generation.finish == "context"
    assert session.position == session.max_context
    with pytest.raises(ArgumentError, match=rf"prompt: expected at most {len(prompt) + 4} tokens \(the context\)"):
        next(session.generate([*prompt] * 2))


def test_cancelling(model: moeflux.Model) -> None:
    session = model.session()
    generation = session.generate(STORY, temperature=0, stop=[" lived in a villages"])
    for _ in zip(range(3), generation):  # noqa: B905
        pass
    assert generation.text == ""  # held back
    generation.cancel()
    assert [piece.text for piece in generation] == [" lived in a"]
    assert generation.finish == "cancelled" and len(generation.tokens) == 3
    whole = session.generate(STORY, max_tokens=20, temperature=0)
    assert text_of(whole) == text_of(model.session().generate(STORY, max_tokens=20, temperature=0))


def test_ctrl_c_ends_it_as_cancelled(model: moeflux.Model) -> None:
    generation = model.session().generate(STORY, on_progress=lambda done, total: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        next(generation)
    assert generation.finish == "cancelled" and list(generation) == []
    reply = model.chat().ask("Hello!", on_progress=lambda done, total: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        list(reply)
    assert reply.generation.finish == "cancelled"


def test_a_failure_is_no_end(model: moeflux.Model) -> None:
    generation = model.session(max_context=4).generate(STORY)
    with pytest.raises(ArgumentError):
        next(generation)
    assert generation.finish == "failed" and list(generation) == []


def test_closing(model: moeflux.Model) -> None:
    session = model.session()
    generation = session.generate(STORY, temperature=0, stop=[" lived in a villages"])
    for _ in zip(range(3), generation):  # noqa: B905
        pass
    generation.close()
    generation.close()
    assert (generation.text, generation.finish) == (" lived in a", "cancelled")
    never = session.generate(STORY)
    tokens = session.tokens
    never.close()
    assert (never.text, never.finish, session.tokens) == ("", "cancelled", tokens)


def test_cancelling_a_prompt(model: moeflux.Model) -> None:
    small = moeflux.load(builtin.path(), threads=2, chunk=4)
    session = small.session()
    seen = []
    generation = session.generate(STORY, on_progress=lambda done, total: seen.append((done, total)) or done < 8)
    assert list(generation) == [] and generation.finish == "cancelled"
    assert seen == [(4, 11), (8, 11)] and session.position == 8
    assert text_of(session.generate(STORY, max_tokens=9, temperature=0)) == text_of(
        model.session().generate(STORY, max_tokens=9, temperature=0)
    )


MEDDLING = {
    "another generation": lambda session: list(session.generate("My dog is called", max_tokens=3, temperature=0)),
    "a step": lambda session: session.step(5),
    "a prefill": lambda session: session.prefill([5, 6], logits="all"),
    "a rewind": lambda session: session.rewind(3, exact=False),
    "a new start": lambda session: session.clear(),
    "a restore": lambda session: session.restore(session.snapshot()),
}


@pytest.mark.parametrize("what", MEDDLING)
def test_an_answer_that_was_left_goes_on_where_it_was_or_not_at_all(model: moeflux.Model, what: str) -> None:
    session = model.session()
    left = session.generate(STORY, max_tokens=12, temperature=0)
    for _ in range(4):
        next(left)
    MEDDLING[what](session)
    tokens, text = session.tokens, left.text
    with pytest.raises(StateError, match="expected the session as its last piece left it, found it used otherwise"):
        next(left)
    assert (session.tokens, left.text, len(left.tokens)) == (tokens, text, 4)
    assert list(left) == []
    whole = session.generate(STORY, max_tokens=12, temperature=0)
    assert text_of(whole) == text_of(model.session().generate(STORY, max_tokens=12, temperature=0))


def test_a_thread_that_comes_between_the_look_and_the_step(
    model: moeflux.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = model.session()
    left = session.generate(STORY, max_tokens=12, temperature=0)
    next(left)
    logits = session.step(5)
    monkeypatch.setattr(Logits, "current", True)
    with pytest.raises(StateError, match="expected the logits that the token was chosen from, found the session used"):
        next(left)
    assert session.position == 12
    session.step(6, after=logits)
    with pytest.raises(StateError, match="chosen from"):
        session.step(7, after=logits)
    assert session.tokens[-2:] == [5, 6]


def test_an_answer_that_was_left_goes_on_after_looking_around(model: moeflux.Model) -> None:
    session = model.session()
    left = session.generate(STORY, max_tokens=12, temperature=0)
    parts = [next(left).text for _ in range(4)]
    session.checkpoint()
    assert session.snapshot().position == session.rewind(session.position) == session.position
    session.prefill([])
    model.session().step(5)
    parts += [piece.text for piece in left]
    assert "".join(parts) == text_of(model.session().generate(STORY, max_tokens=12, temperature=0))


def test_stats_add_up() -> None:
    few = moeflux.load(builtin.path(), threads=2, expert_slots=128)
    session = few.session()
    generation = session.generate(STORY, max_tokens=8, temperature=0)
    pieces = list(generation)
    stats, total = generation.stats, session.total_stats
    assert (stats.prompt_tokens, stats.reused_tokens, stats.tokens) == (11, 0, 8)
    assert stats.bytes_read == total.bytes_read == sum(piece.stats.bytes_read for piece in pieces) > 0
    assert (stats.expert_hits, stats.expert_misses) == (total.expert_hits, total.expert_misses)
    assert 0 < stats.hit_rate < 1 and stats.tokens_per_second > 0
    assert "11 tokens" in str(stats) and stats.to_dict()["tokens"] == 8
    again = session.generate(STORY, max_tokens=1, temperature=0)
    list(again)
    assert again.stats.bytes_read < stats.bytes_read


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, "max_tokens: expected at least 1"),
        ({"stop": [""]}, "stop: expected a list of texts"),
        ({"stop": "word"}, "stop: expected a list of texts"),
        ({"logprobs": -1}, "logprobs: expected 0 to 1024"),
        ({"temprature": 1}, "found temprature"),
        ({"top_p": 2}, "top_p"),
    ],
)
def test_what_cannot_be(model: moeflux.Model, options: dict, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        model.session().generate(STORY, **options)


@pytest.mark.parametrize("prompt", ["", [], [8192], [-1], [1.5]])
def test_prompts_that_are_none(model: moeflux.Model, prompt: object) -> None:
    with pytest.raises(ArgumentError):
        list(model.session().generate(prompt, max_tokens=1))


# ---- Reuse: from what a session holds == from nothing, bit for bit ----------------------------------------------


def from_nothing(model: moeflux.Model, tokens: list[int]) -> np.ndarray:
    return model.session().prefill(tokens).numpy()


def walk(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, count).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_reuse_is_exact(models: dict[str, moeflux.Model], name: str) -> None:
    model = models[name]
    session = model.session(max_context=512)
    recurrent = bool(model.variant.layers_with(GatedDelta))
    system, first, answer, second = (walk(count, seed) for seed, count in enumerate((30, 25, 12, 40)))
    opened = [*system, *first, 7]

    def arrive(tokens: list[int], borders: list[int]) -> int:
        logits, reused = reach(session, tokens, borders)
        assert logits is not None and session.tokens == tokens
        assert np.array_equal(logits.numpy(), from_nothing(model, tokens))
        return reused

    assert arrive(opened, [30, 55]) == 0
    for token in answer:
        session.step(token)
    # It goes on.
    longer = [*opened, *answer, *second]
    assert arrive(longer, [67]) == len(opened) + len(answer)
    # The answer is taken out, as templates take out thoughts: from the checkpoint at the border before it.
    other = [*opened[:55], *second]
    assert arrive(other, [55]) == 55
    # Another conversation with the same instructions.
    assert arrive([*system, *second], [30]) == 30
    # The same prompt again: its last token has to be evaluated in any case.
    assert arrive([*system, *second], [30]) == (30 if recurrent else 69)
    # A shorter one, and one that has nothing in common.
    assert arrive(system[:20], []) == (0 if recurrent else 19)
    assert arrive([9, *system], []) == 0


@pytest.mark.parametrize("name", MODELS)
def test_reuse_after_a_restore(models: dict[str, moeflux.Model], name: str, tmp_path: Path) -> None:
    model = models[name]
    first, more = walk(40, 1), walk(9, 2)
    session = model.session()
    session.prefill(first)
    session.snapshot().save(tmp_path / "known")
    other = model.session()
    other.restore(tmp_path / "known")
    logits, reused = reach(other, [*first, *more])
    assert reused == 40
    assert logits is not None and np.array_equal(logits.numpy(), from_nothing(model, [*first, *more]))


@settings(max_examples=25)
@given(data=st.data())
def test_any_wandering_is_exact(models: dict[str, moeflux.Model], data: st.DataObject) -> None:
    """Texts that share beginnings of all lengths, with borders anywhere, one after the other in one session."""
    model = models["qwen3_5_moe"]
    session = model.session(max_context=256)
    trunk = walk(120, 4)
    for _ in range(data.draw(st.integers(1, 5))):
        tokens = trunk[: data.draw(st.integers(0, 120))] + walk(
            data.draw(st.integers(1, 30)), data.draw(st.integers(0, 3))
        )
        borders = data.draw(st.lists(st.integers(0, 160), max_size=4))
        logits, _ = reach(session, tokens, borders)
        assert logits is not None and np.array_equal(logits.numpy(), from_nothing(model, tokens))


def test_checkpoints_are_made_where_they_are_worth_a_cut() -> None:
    assert checkpoint_places([NEAR - 1, NEAR, 2 * NEAR - 1, 90, 100, 120], 0, 120) == [NEAR, 90]
    assert checkpoint_places([10, 50], 40, 100) == []
    assert checkpoint_places([10, 60], 40, 100) == [60]
