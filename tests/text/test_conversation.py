"""Conversations: what is asked and answered, taken back, tried again, kept and gone on with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import moeflux
from moeflux import ArgumentError, FormatError, IoError, StateError, _core, builtin
from moeflux.runtime.snapshot import Snapshot
from moeflux.text.chat import ChatFormat
from moeflux.text.conversation import Conversation, Reply
from moeflux.text.sampling import Choice, Sampler
from support.engine import load_faulty

THINKING = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and message.reasoning_content and loop.last -%}
<think>
{{ message.reasoning_content }}
</think>

{% endif -%}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


@pytest.fixture(scope="module")
def model() -> moeflux.Model:
    return moeflux.load(builtin.path(), threads=2)


def said(reply: Reply) -> str:
    return "".join(part.text for part in reply if not part.thought)


def greedy(talk: Conversation, text: str) -> str:
    return said(talk.ask(text, temperature=0, max_tokens=40))


def test_an_option_that_the_template_does_not_know_is_refused(model: moeflux.Model) -> None:
    with pytest.raises(ArgumentError, match="sytem: expected system, tools, thinking or a variable of the chat templ"):
        model.chat(sytem="Be kind.")


def test_five_turns_are_evaluated_once(model: moeflux.Model) -> None:
    talk = model.chat()
    questions = ["What is 3 plus 4?", "And the capital of France?", "What is the opposite of hot?", "Hello!", "Why?"]
    for question in questions:
        before = talk.session.total_stats.tokens
        reply = talk.ask(question, temperature=0, max_tokens=40)
        said(reply)
        new = talk.session.total_stats.tokens - before
        assert new <= len(model.tokenizer.encode(question)) + 12 + len(reply.generation.tokens)
        assert talk.messages[-2:] == [
            {"role": "user", "content": question},
            {"role": "assistant", "content": reply.text},
        ]
        # As if nothing had been there before.
        alone = model.session().generate(reply.prompt, temperature=0, max_tokens=40, continues=False)
        assert "".join(piece.text for piece in alone) == reply.text
    assert len(talk.messages) == 10


def test_retry_undo_and_clear(model: moeflux.Model) -> None:
    talk = model.chat(system="Be kind.")
    first = greedy(talk, "What is 3 plus 4?")
    greedy(talk, "Tell me a story.")
    again = talk.retry(temperature=1.5, seed=4, max_tokens=40)
    assert said(again) != "" and len(talk.messages) == 5
    assert talk.messages[-1]["content"] == again.text
    talk.undo()
    assert [message["content"] for message in talk.messages] == ["Be kind.", "What is 3 plus 4?", first]
    talk.undo()
    with pytest.raises(StateError, match="undo: expected a question"):
        talk.undo()
    with pytest.raises(StateError, match="retry: expected an answer"):
        talk.retry()
    talk.set_system("Be brief.")
    greedy(talk, "Hello!")
    talk.clear()
    assert talk.messages == [{"role": "system", "content": "Be brief."}] and talk.system == "Be brief."
    talk.set_system(None)
    assert talk.messages == []


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(model: moeflux.Model) -> None:
    talk = model.chat()
    reply = talk.ask("Tell me a story about a rabbit named Daisy.", temperature=0)
    for _ in zip(range(6), reply):  # noqa: B905
        pass
    reply.cancel()
    list(reply)
    assert talk.messages[-1] == {"role": "assistant", "content": reply.text} and reply.text
    assert reply.generation.finish == "cancelled"
    # One that nobody listens to any more ends there; one that nobody ever listened to is given in full.
    left = talk.ask("And then?", temperature=0)
    next(left)
    next(left)
    talk.ask("Why?", temperature=0)
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "user", "assistant", "user"]
    assert talk.messages[3]["content"] == left.text
    assert left.generation.finish == "cancelled"
    talk.ask("What?", temperature=0)
    assert [message["content"] for message in talk.messages[4::2]] == ["Why?", "What?"] and len(talk.messages) == 7
    assert talk.messages[5]["role"] == "assistant" and talk.messages[5]["content"]


def test_an_answer_does_not_go_on_in_a_session_that_was_used_otherwise(model: moeflux.Model) -> None:
    talk = model.chat()
    reply = talk.ask("Tell me a story about a rabbit named Daisy.", temperature=0)
    for _ in zip(range(6), reply):  # noqa: B905
        pass
    talk.session.step(5)
    with pytest.raises(StateError, match="expected the session as its last piece left it"):
        next(reply)
    assert talk.messages[-1] == {"role": "assistant", "content": reply.text} and reply.text
    assert greedy(talk, "Why?") == greedy(restarted(talk), "Why?")


def restarted(talk: Conversation) -> Conversation:
    """The same messages but for the last question and its answer, in a session that holds nothing."""
    other = Conversation(talk.session.model)
    other.messages = talk.messages[:-2]
    return other


def test_a_failure_leaves_what_was_said(model: moeflux.Model) -> None:
    plan = _core.FaultPlan("error", 100)
    faulty = load_faulty(builtin.path(), fault=plan, expert_slots=64, look_ahead="off")
    talk = faulty.chat()
    with pytest.raises(IoError):
        greedy(talk, "What is 3 plus 4?")
    assert talk.messages == []
    talk.session.clear()
    assert greedy(talk, "What is 3 plus 4?") == "3 plus 4 is 7."
    short = model.chat(session=model.session(max_context=30))
    assert greedy(short, "What is 3 plus 4?") == "3 plus 4 is 7."
    with pytest.raises(ArgumentError, match="expected at most 30 tokens"):
        greedy(short, "What is the capital of France?")
    assert len(short.messages) == 2


def test_thoughts_are_kept_apart(model: moeflux.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in model does not think: its words are replaced."""
    monkeypatch.setitem(model._text.__dict__, "chat_format", ChatFormat(model.tokenizer, {"default": THINKING}))
    talk = model.chat()
    reply = talk.ask("Hello!", max_tokens=30)
    words = model.tokenizer.encode("<think>\nlet me see\n</think>\n\nYes, of course.")
    forced = iter(words)
    monkeypatch.setattr(Sampler, "choose", lambda *_, **__: Choice(next(forced, 8178), None, []))
    parts = [(part.thought, part.text) for part in reply]
    assert "".join(text for thought, text in parts if thought) == reply.thoughts == "let me see"
    assert "".join(text for thought, text in parts if not thought) == reply.text == "Yes, of course."
    assert talk.messages[-1] == {"role": "assistant", "content": "Yes, of course.", "reasoning_content": "let me see"}
    # The template drops thoughts of earlier answers: saving brings the state to where the next question begins.
    talk._settle(None)
    text = model.tokenizer.decode(talk.session.tokens)
    assert text.startswith("<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\nYes, of course.<|im_end|>")


def test_going_on_another_day(model: moeflux.Model, tmp_path: Path) -> None:
    talk = model.chat(system="Be kind.")
    greedy(talk, "What is 3 plus 4?")
    greedy(talk, "What is the capital of France?")
    talk.save(tmp_path / "talk")
    expected = greedy(talk, "And of Italy?")
    other = moeflux.load(builtin.path(), threads=1, expert_slots=64).chat()
    other.load(tmp_path / "talk")
    assert len(other.messages) == 5
    before = other.session.total_stats.tokens
    reply = other.ask("And of Italy?", temperature=0, max_tokens=40)
    assert said(reply) == expected
    assert other.session.total_stats.tokens - before < 14 + len(reply.generation.tokens)  # not all of it again
    kept = Snapshot.load(tmp_path / "talk", model.variant).tokens
    assert reply.prompt.tokens[: len(kept)] == list(kept)


def test_files_that_are_no_conversation(model: moeflux.Model, tmp_path: Path) -> None:
    talk = model.chat()
    greedy(talk, "What is 3 plus 4?")
    talk.save(tmp_path / "good")
    talk.session.snapshot().save(tmp_path / "session")
    before = list(talk.messages), talk.session.tokens
    with pytest.raises(FormatError, match="expected a saved conversation, found a session without one"):
        talk.load(tmp_path / "session")
    good = Snapshot.load(tmp_path / "good", model.variant)
    content = json.loads(good.conversation)
    for wrong in ("x", "[]", "{}", json.dumps(content | {"messages": [1]}), json.dumps(content | {"variables": 3})):
        dataclasses.replace(good, conversation=wrong).save(tmp_path / "wrong")
        with pytest.raises(FormatError, match=r"wrong: conversation: (expected messages and variables|line 1)"):
            talk.load(tmp_path / "wrong")
    with pytest.raises(IoError):
        talk.load(tmp_path / "nothing")
    data = bytearray((tmp_path / "good").read_bytes())
    data[data.rindex(b"plus")] ^= 1  # of the messages, which come last
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(FormatError, match='"conversation": expected xxh64'):
        talk.load(tmp_path / "bad")
    with pytest.raises(IoError, match="No such file"):
        talk.save(tmp_path / "no" / "folder")
    assert (talk.messages, talk.session.tokens) == before


def test_a_model_without_a_template(model: moeflux.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model._text.__dict__, "chat_format", None)
    with pytest.raises(StateError, match="expected a model with a chat template"):
        model.chat()
