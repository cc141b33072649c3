"""Answers as people ask for them: whole, awaited, within a time, of tokens alone; and what they look like."""

from __future__ import annotations

import asyncio
import pickle
import shutil
from pathlib import Path

import pytest

import moeflux
from moeflux import ArgumentError, FormatError, builtin

STORY = "Once upon a time"


@pytest.fixture(scope="module")
def model() -> moeflux.Model:
    return moeflux.load(threads=2)


@pytest.fixture(scope="module")
def textless(tmp_path_factory: pytest.TempPathFactory) -> moeflux.Model:
    """The built-in model without the files that text needs."""
    folder = tmp_path_factory.mktemp("textless") / "model"
    shutil.copytree(builtin.path(), folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    return moeflux.load(folder, threads=2)


# ---- Whole ------------------------------------------------------------------------------------------------------


def test_a_completion_is_its_text_and_knows_how_it_came_about(model: moeflux.Model) -> None:
    options = {"max_tokens": 12, "temperature": 0.8, "seed": 3}
    generation = model.session().generate(STORY, **options)
    expected = "".join(piece.text for piece in generation)
    answer = model.session().complete(STORY, **options)
    assert isinstance(answer, str) and answer == expected and f"{STORY}{answer}" == STORY + expected
    assert (type(answer.text), answer.text) == (str, expected)
    assert (answer.finish, answer.stop_string, list(answer.tokens)) == ("length", None, generation.tokens)
    assert answer.stats.tokens == len(answer.tokens) == 12 and answer.stats.prompt_tokens == len(generation.prompt)
    assert repr(answer) == f"Completion({expected!r}, finish='length', tokens=12)"
    assert answer.upper() == expected.upper() and hash(answer) == hash(expected)


def test_a_completion_has_what_was_asked_for(model: moeflux.Model) -> None:
    answer = model.session().complete(STORY, stop=[" a"], temperature=0, max_tokens=40, logprobs=2)
    assert (answer.finish, answer.stop_string) == ("stop", " a")
    assert all(piece.logprob is not None and len(piece.top) == 2 for piece in answer.pieces)
    with pytest.raises(ArgumentError, match="found heat"):
        model.session().complete(STORY, heat=1)


def test_a_completion_travels_as_text(model: moeflux.Model) -> None:
    answer = model.session().complete(STORY, max_tokens=3, temperature=0)
    assert pickle.loads(pickle.dumps(answer.text)) == answer


def test_waiting_for_a_generation(model: moeflux.Model) -> None:
    generation = model.session().generate(STORY, max_tokens=5, temperature=0)
    assert generation.wait() is generation and generation.finish == "length" and len(generation.tokens) == 5
    assert generation.wait().text == generation.text, "once more changes nothing"


# ---- In a conversation ------------------------------------------------------------------------------------------


def test_a_reply_that_nobody_iterates_has_its_text(model: moeflux.Model) -> None:
    expected = "".join(part.text for part in model.chat().ask("What is 3 plus 4?", temperature=0))
    talk = model.chat()
    reply = talk.ask("What is 3 plus 4?", temperature=0)
    assert reply.finish is None and reply.stats.tokens == 0
    assert reply.text == expected == "3 plus 4 is 7." and reply.thoughts == ""
    assert reply.finish == "end" and reply.stats.tokens == len(reply.generation.tokens)
    assert talk.messages[-1] == {"role": "assistant", "content": expected}
    again = talk.ask("What is 3 plus 4?", temperature=0)
    assert again.wait() is again and len(talk.messages) == 4


def test_a_reply_tells_what_it_has_said_to_who_listens(model: moeflux.Model) -> None:
    reply = model.chat().ask("What is 3 plus 4?", temperature=0)
    texts = []
    for part in reply:
        texts.append(part.text)
        assert reply.text == "".join(texts)
    assert reply.finish == "end"


def test_an_answer_that_nobody_listened_to_is_not_lost(model: moeflux.Model, tmp_path: Path) -> None:
    talk = model.chat()
    talk.ask("What is 3 plus 4?", temperature=0)
    talk.ask("What is the capital of France?", temperature=0)
    said = [message["content"] for message in talk.messages]
    assert said == ["What is 3 plus 4?", "3 plus 4 is 7.", "What is the capital of France?"]
    talk.save(tmp_path / "talk")
    assert talk.messages[-1]["content"] == "The capital of France is Paris."
    talk.ask("Why?", temperature=0)
    talk.undo()
    assert [message["content"] for message in talk.messages][2:] == [said[2], "The capital of France is Paris."]
    talk.ask("Why?", temperature=0)
    talk.clear()
    assert talk.messages == []


# ---- Awaited ----------------------------------------------------------------------------------------------------


def test_generations_and_replies_can_be_awaited(model: moeflux.Model) -> None:
    async def story() -> list[int | None]:
        generation = model.session().generate(STORY, max_tokens=6, temperature=0)
        return [piece.token async for piece in generation]

    async def talk() -> str:
        return "".join([part.text async for part in model.chat().ask("What is 3 plus 4?", temperature=0)])

    async def both() -> tuple[list[int | None], str]:
        return await asyncio.gather(story(), talk())

    tokens, answer = asyncio.run(both())
    assert tokens == list(model.session().complete(STORY, max_tokens=6, temperature=0).tokens)
    assert answer == "3 plus 4 is 7."


def test_a_task_that_is_cancelled_leaves_the_session_at_rest(model: moeflux.Model) -> None:
    session = model.session()
    generation = session.generate([5] * 2000, max_tokens=6, temperature=0)

    async def listen() -> None:
        async for _ in generation:
            pass

    async def given_up() -> None:
        task = asyncio.create_task(listen())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert generation.finish is None or generation.finish == "cancelled"
        session.clear()  # another caller would get StateError

    asyncio.run(given_up())
    assert generation._cancel.is_set()


def test_an_error_reaches_who_awaits(model: moeflux.Model) -> None:
    session = model.session()
    generation = session.generate(STORY, max_tokens=6, temperature=0)

    async def used_otherwise() -> None:
        await anext(generation)
        session.step(5)
        with pytest.raises(moeflux.StateError, match="found it used otherwise"):
            await anext(generation)

    asyncio.run(used_otherwise())
    assert generation.finish == "failed"


# ---- Within a time ----------------------------------------------------------------------------------------------


def test_a_timeout_ends_an_answer_as_far_as_it_came(model: moeflux.Model) -> None:
    session = model.session()
    generation = session.generate(STORY, temperature=0, ignore_end=True, timeout=1e-9)
    assert generation.wait().finish == "timeout" and generation.tokens == []
    generation = session.generate(STORY, temperature=0, ignore_end=True, timeout=0.3, max_tokens=100_000)
    pieces = list(generation)
    assert generation.finish == "timeout" and generation.text == "".join(piece.text for piece in pieces)
    generation = session.generate(STORY, temperature=0, max_tokens=3, timeout=1000)
    assert generation.wait().finish == "length"
    generation = session.generate(STORY, temperature=0, timeout=1000)
    next(generation)
    generation.close()
    assert generation.finish == "cancelled", "by its caller, not by the clock"


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "5"])
def test_timeouts_that_are_none(model: moeflux.Model, timeout: float) -> None:
    with pytest.raises(ArgumentError, match="timeout: expected seconds, more than 0, found"):
        model.session().generate(STORY, timeout=timeout)


def test_a_cancel_that_sets_itself(model: moeflux.Model) -> None:
    cancel = moeflux.Cancel()
    cancel.set_after(1000)
    assert not cancel.is_set()
    session = model.session()
    session.step(5, cancel=cancel)
    cancel.set_after(0)
    assert cancel.is_set()
    cancel.set_after(1000)
    assert cancel.is_set(), "once set it stays so"
    with pytest.raises(moeflux.Cancelled):
        session.prefill([5] * 100, cancel=cancel)
    for seconds in (-1, float("nan")):
        with pytest.raises(ArgumentError, match="seconds: expected 0 or more"):
            cancel.set_after(seconds)
    forever = moeflux.Cancel()
    forever.set_after(float("inf"))
    assert not forever.is_set()


# ---- Of tokens alone --------------------------------------------------------------------------------------------


def test_tokens_in_and_out_need_no_tokenizer(model: moeflux.Model, textless: moeflux.Model) -> None:
    prompt = model.tokenizer.encode(STORY)
    options = {"max_tokens": 10, "temperature": 0.9, "seed": 4}
    answer = textless.session().complete(prompt, **options)
    assert answer.tokens == model.session().complete(prompt, **options).tokens
    assert answer == "" and not textless.has_tokenizer and model.has_tokenizer
    ends = textless.session().complete(prompt, temperature=0, stop_tokens=[answer.tokens[0]], seed=4)
    assert ends.finish in ("end", "length", "context")
    for refused in (
        lambda: textless.session().generate(STORY),
        lambda: textless.session().generate(prompt, stop=["x"]),
        textless.chat,
    ):
        with pytest.raises(FormatError, match="expected the tokenizer of the model, found nothing"):
            refused()


# ---- What they look like ----------------------------------------------------------------------------------------


def test_what_they_look_like(model: moeflux.Model) -> None:
    session = model.session(max_context=64)
    logits = session.prefill([5, 6, 7])
    where = f"Session({model.variant.name}, position 3 of 64)"
    assert repr(logits) == f"Logits({model.variant.vocab_size} of {where})"
    session.step(8)
    where = f"Session({model.variant.name}, position 4 of 64)"
    assert repr(logits) == f"Logits({model.variant.vocab_size} of {where}, which has gone on)"
    generation = session.generate(STORY, max_tokens=2, temperature=0)
    prompt = len(generation.prompt)
    assert repr(generation) == f"Generation({prompt} + 0 tokens, text='')"
    generation.wait()
    assert repr(generation) == f"Generation({prompt} + 2 tokens, finish='length', text={generation.text!r})"
    talk = model.chat(session=session, system="Be kind.")
    session.clear()
    assert repr(talk) == f"Conversation(messages=1, session=Session({model.variant.name}, position 0 of 64))"
    reply = talk.ask("Hello!", temperature=0, max_tokens=1)
    assert repr(reply) == "Reply(0 tokens, text='')", "looking does not begin it"
    assert reply.wait().finish == "length" and "finish='length'" in repr(reply)
