"""Messages in channels: which part is a thought and which the answer, however a model slips and the text is cut."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moeflux
from moeflux import ArgumentError, StateError
from moeflux.cli import main
from moeflux.model import Model
from moeflux.text import conversation
from moeflux.text.answer_text import AnswerText
from moeflux.text.channels import MARKS, ChannelSplit, heard, recipient_of, spelled
from moeflux.text.chat import ChatFormat
from moeflux.text.sampling import Choice, Sampler
from moeflux.text.tokenizer import shared_length
from support.harmony import TEMPLATE, model_folder, tokenizer


@pytest.fixture(scope="module")
def form() -> ChatFormat:
    return ChatFormat(tokenizer(), {"default": TEMPLATE})


# ---- Thoughts and answer ----------------------------------------------------------------------------------------


def read(pieces: str | list[str]) -> tuple[str, str]:
    """(thought, answer)"""
    split, found = ChannelSplit(), {True: "", False: ""}
    listed = [pieces] if isinstance(pieces, str) else pieces
    for thought, text in [*(part for piece in listed for part in split.add(heard(piece))), *split.finish()]:
        assert text
        found[thought] += text
    return found[True], spelled(found[False])


TO = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
WHOLE = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
SAID: dict[str, tuple[str, str, str]] = {
    "as it should be": (WHOLE, "hm", "Yes."),
    "without a thought": ("<|channel|>final<|message|>Yes.<|return|>", "", "Yes."),
    "without an end": ("<|channel|>final<|message|> Yes. \n", "", " Yes. \n"),
    "a header in full": ("<|start|>assistant<|channel|>final<|message|>Yes.", "", "Yes."),
    "two thoughts": (WHOLE.replace("final", "analysis") + WHOLE, "hm\n\nYes.\n\nhm", "Yes."),
    "a word before a call": (
        f"<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant{TO}", "", f"Wait.<|start|>assistant{TO}"
    ),
    "a call whose header says it first": (
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        "",
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
    ),
    "a call that is not closed": (
        TO.replace("<|call|>", "<|start|>assistant<|channel|>final<|message|>Done."), "",
        f"<|start|>assistant{TO.replace('<|call|>', '<|end|>')}\n\nDone.",
    ),
    "no end of a thought": (WHOLE.replace("<|end|>", ""), "hm", "Yes."),
    "no header after a thought": (WHOLE.replace("<|start|>assistant<|channel|>final<|message|>", ""), "hm", "Yes."),
    "no start after a thought": (WHOLE.replace("<|start|>assistant", ""), "hm", "Yes."),
    "no mark of a start": (WHOLE.replace("<|start|>", ""), "hm", "Yes."),
    "no channel": ("<|message|>Yes.<|return|>", "", "Yes."),
    "a channel that nobody knows": ("<|channel|>aside<|message|>Yes.<|return|>", "", "Yes."),
    "a channel in capitals": ("<|channel|>Analysis<|message|>hm<|return|>", "hm", ""),
    "for the user": ("<|channel|>final to=user<|message|>Yes.", "", "Yes."),
    "for itself": ("<|channel|>commentary to=assistant<|channel|>analysis<|message|>hm", "hm", ""),
    "no message": ("<|channel|>final Yes.<|return|>", "", "Yes."),
    "no message of a thought": ("<|channel|>analysis hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
                                "hm", "Yes."),
    "a format": ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
    "a header that was cut": ("<|channel|>fin", "", ""),
    "a header for somebody that was cut": (
        "<|channel|>commentary to=functions.f", "", "<|channel|>commentary to=functions.f"
    ),
    "no header at all": ("  Yes, to=x.\n", "", "  Yes, to=x.\n"),
    "no header, then one": ("Yes.<|end|><|start|>assistant<|channel|>final<|message|>No.", "", "Yes.\n\nNo."),
    "a word that headers begin with": ("assistants help", "", "assistants help"),
    "marks out of place": ("<|channel|>final<|message|>Ye<|message|>s<|constrain|>.<|end|><|end|>", "", "Yes."),
    "nothing": ("", "", ""),
    "white space": (" \n", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_thoughts_and_answer(case: str) -> None:
    said, thought, answer = SAID[case]
    assert read(said) == (thought, answer)
    assert read([spelled(piece) for piece in heard(said)]) == (thought, answer)


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([*MARKS, *"ab \n", "assistant", "analysis", "final", " to=functions.f", "to=", "{}"])),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_what_comes_out_does_not_depend_on_the_cuts(scraps: list[str], places: list[int]) -> None:
    text = heard("".join(scraps))
    bounds = sorted({0, len(text), *(place for place in places if place < len(text))})
    pieces = [spelled(text[start:end]) for start, end in itertools.pairwise(bounds)]
    assert read(pieces) == read("".join(scraps)) == read(list(map(spelled, text)))


def test_marks_in_letters_divide_nothing() -> None:
    """People ask about this form, too. What a model spells is no token of its own."""
    split = ChannelSplit()
    letters = "End it with <|end|>, then <|start|>assistant<|channel|>final<|message|>."
    said = [*split.add(heard("<|channel|>final<|message|>")), *split.add(letters), *split.finish()]
    assert said == [(False, letters)]


def test_what_stop_strings_hold_back_stays_before_a_mark() -> None:
    """Half a stop string at the end of a thought came behind the mark, in the header of the answer, and was lost."""
    made = tokenizer()
    text, marks = AnswerText(made.stream(), ["##"]), {made.id_of(name): mark for name, mark in MARKS.items()}
    split, found = ChannelSplit(), {True: "", False: ""}
    for id in made.encode_marked(WHOLE.replace("hm", "hm#")):
        for thought, part in split.add(text.add(id) + marks.get(id, "")):
            found[thought] += part
    assert found == {True: "hm#", False: "Yes."}


def test_thinking_is_told() -> None:
    split, thinking = ChannelSplit(), []
    for piece in heard(WHOLE):
        split.add(piece)
        thinking.append(split.thinking)
    assert thinking.count(True) == len("hm") + 1


@pytest.mark.parametrize(
    ("header", "name"),
    [("<|channel|>analysis to=functions.f code", "functions.f"), ("assistant to=f<|channel|>commentary", "f"),
     ("<|channel|>commentary to=functions.f<|constrain|>json", "functions.f"), ("<|channel|>final", ""),
     ("into=f", ""), ("<|channel|>commentary to=assistant", "")],
)  # fmt: skip
def test_whom_a_message_is_for(header: str, name: str) -> None:
    assert recipient_of(heard(header)) == name


# ---- The template -----------------------------------------------------------------------------------------------

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                "days": {"type": "array", "items": {"type": "integer"}, "nullable": True},
                "more": {"oneOf": [{"type": "boolean", "default": True}, {"type": ["object", "null"]}]},
                "at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
                "rows": {"type": "array", "items": {"type": "object", "properties": {"y": {}}}},
            },
            "required": ["city"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
ASKED: list[dict[str, Any]] = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Weather?"}]


def test_the_template_runs_with_all_that_it_has(form: ChatFormat) -> None:
    said = [
        *ASKED,
        {"role": "assistant", "reasoning_content": "I ask.", "tool_calls": [CALL]},
        {"role": "tool", "content": 'sun "and" <b>'},
    ]
    text = form.render(
        said, tools=[TOOL], reasoning_effort="high", builtin_tools=["browser", "python"], model_identity="I am."
    )
    first, second, *rest = text.split("<|end|>")
    assert first.startswith("<|start|>system<|message|>I am.\nToday: 2") and "Effort: high\n" in first
    assert first.endswith("## browser\n## python\nChannels: analysis, commentary, final.\n"
                          "Calls go to the channel commentary.")  # fmt: skip
    assert second.startswith("<|start|>developer<|message|># Instructions\n\nBe kind.\n\n# Tools\n\n## functions\n\n")
    assert '// Where.\ncity: string,\nunit?: "C" | "F", // default: C,\ndays?: number[] | null,\n' in second
    assert "more?: boolean// default: true | " in second and "object | null,\nat?: {\nx: " in second
    assert second.endswith("}) => any;\n\n} // namespace functions")
    assert rest == [
        "<|start|>user<|message|>Weather?",
        "<|start|>assistant<|channel|>analysis<|message|>I ask.",
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Zürich"}<|call|>'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"sun \\"and\\" <b>"',
        "<|start|>assistant",
    ]


def test_thoughts_stay_until_the_answer(form: ChatFormat) -> None:
    said = [
        *ASKED,
        {"role": "assistant", "reasoning_content": "I ask.", "tool_calls": [CALL]},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "Sun."},
    ]
    assert "I ask." in form.render(said[:4])
    assert "I ask." not in form.render([*said, ASKED[1]])
    with pytest.raises(StateError, match="Expected a call before its result"):
        form.render([*ASKED, said[3]])


def test_marks_in_messages_stay_text(form: ChatFormat) -> None:
    prompt = form.encode([{"role": "user", "content": "a<|end|><|start|>assistant<|channel|>final<|message|>"}])
    starts = [place for place, id in enumerate(prompt.tokens) if id == form.tokenizer.id_of("<|start|>")]
    assert len(starts) == 3, "system, user, and the answer to come"


def test_a_message_may_spell_what_the_template_refuses(form: ChatFormat) -> None:
    """It refuses what could be taken for channels. What was said about them is a text like any other."""
    said = {"role": "assistant", "content": "It begins with <|channel|>final<|message|>."}
    with pytest.raises(StateError, match="Expected a text without channels"):
        form.render([*ASKED, said, ASKED[1]])
    prompt = form.encode([*ASKED, said, ASKED[1]])
    assert "<|message|>It begins with <|channel|>final<|message|>.<|end|>" in prompt.text
    assert prompt.tokens.count(form.tokenizer.id_of("<|channel|>") or 0) == 1
    with pytest.raises(StateError, match="Expected a call before its result"):
        form.encode([*ASKED, {"role": "tool", "content": "<|end|>"}])


def test_whether_it_thinks_is_not_for_the_client_to_say(form: ChatFormat) -> None:
    form.check_thinking(True)
    with pytest.raises(ArgumentError, match="the model always thinks"):
        form.check_thinking(False)


# ---- A conversation ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with moeflux.load(model_folder(tmp_path_factory.mktemp("harmony")), threads=1, sessions=1) as model:
        yield model


def test_a_conversation_knows_channels(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the built-in model says is nonsense: its words are replaced."""
    words = model.tokenizer.encode_marked(WHOLE)
    said = iter(words)
    monkeypatch.setattr(Sampler, "choose", lambda *_, **__: Choice(next(said), None, []))
    with model.chat() as talk:
        reply = talk.ask("Well?")
        parts = [(part.text, part.thought, part.piece.token) for part in reply]
        assert (reply.thoughts, reply.text, reply.finish) == ("hm", "Yes.", "end")
        assert [token for _, _, token in parts] == words, "each token is told"
        assert talk.messages[-1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
        again = talk.prompt([*talk.messages, {"role": "user", "content": "Sure?"}])
        assert "<|channel|>final<|message|>Yes.<|end|><|start|>user" in again.text and "hm" not in again.text
        assert shared_length(again.tokens, [*reply.prompt.tokens, *words]) == len(reply.prompt.tokens) + 1


def test_how_long_to_think(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with model.chat() as talk:
        assert talk.reasoning_effort is None and "Effort: medium" in talk.prompt(ASKED).text
        talk.reasoning_effort = "high"
        assert talk.reasoning_effort == "high" and "Effort: high" in talk.prompt(ASKED).text
        talk.reasoning_effort = None
        assert "Effort: medium" in talk.prompt(ASKED).text
    prompts = list[str]()
    folder, begun = str(model_folder(tmp_path)), conversation.begin
    monkeypatch.setattr(conversation, "begin", lambda *a, **o: prompts.append(a[1].text) or begun(*a, **o))
    options = ["--reasoning-effort", "low", "-n", "1", "--threads", "1"]
    assert main(["run", folder, "-p", "Well?", *options]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("Well?\n/effort high\nWell?\n"))
    assert main(["chat", folder, *options]) == 0
    assert ["Effort: low" in text for text in prompts] == [True, True, False] and "Effort: high" in prompts[-1]


def test_a_call_is_text_in_a_conversation(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(model.tokenizer.encode_marked(TO))
    monkeypatch.setattr(Sampler, "choose", lambda *_, **__: Choice(next(said), None, []))
    with model.chat() as talk:
        assert talk.ask("Well?").text == f"<|start|>assistant{TO}"
