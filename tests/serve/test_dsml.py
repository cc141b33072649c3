"""DeepSeek-V3.2, which is published without a chat template: the text that a conversation becomes, calls that a grammar
forces, and answers that come back as they were sampled, behind the results of calls too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from moeflux.errors import StateError
from moeflux.serve.answer import AnswerReader
from moeflux.serve.constrain import Grammars
from moeflux.serve.events import Said, together
from moeflux.serve.prompt import prompt_of
from moeflux.serve.replay import Replay
from moeflux.serve.request import Ask, Tool
from moeflux.serve.tools.families import family_of
from moeflux.text.chat import ChatFormat
from moeflux.text.tokenizer import Tokenizer
from support.constrained import Maker
from support.vocabularies import byte_level

BAR, LOW = "\uff5c", "\u2581"
DSML = f"{BAR}DSML{BAR}"
BEGIN, END = (f"<{BAR}{each}{LOW}of{LOW}sentence{BAR}>" for each in ("begin", "end"))
USER, ASSISTANT = f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "mode": {"type": "integer"}},
    "required": ["path"],
}
TOOLS = (Tool("write", "Writes.", SCHEMA), Tool("now", "Tells it.", {"type": "object", "properties": {}}))
ASKED = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Write it."}]
CALLS = (
    f"\n\n<{DSML}function_calls>\n"
    f'<{DSML}invoke name="write">\n<{DSML}parameter name="path" string="true">a.py</{DSML}parameter>\n'
    f'<{DSML}parameter name="mode" string="false">7</{DSML}parameter>\n</{DSML}invoke>\n'
    f'<{DSML}invoke name="now">\n\n</{DSML}invoke>\n'
    f"</{DSML}function_calls>"
)
RESULTS = "\n\n<function_results>\n<result>done</result>\n<result>noon</result>\n</function_results>\n\n"


def tokenizer(*more: str) -> Tokenizer:
    whole = byte_level()._whole
    whole.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in (BEGIN, END)])
    whole.add_tokens([AddedToken(each, normalized=False) for each in (USER, ASSISTANT, *more)])
    return Tokenizer(whole)


@pytest.fixture(scope="module", params=[(), (DSML,)], ids=["letters", "token"])
def form(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    """Of a tokenizer that has the word of all tags as a token, and of one that has not."""
    folder = tmp_path_factory.mktemp("v32")
    (folder / "config.json").write_text('{"model_type": "deepseek_v32"}')
    found = ChatFormat.from_folder(folder, tokenizer(*request.param))
    assert found is not None
    return found


def called(*, thought: str = "hm") -> dict[str, Any]:
    functions = [{"name": "write", "arguments": {"path": "a.py", "mode": 7}}, {"name": "now", "arguments": {}}]
    calls = [{"id": f"c{place}", "type": "function", "function": each} for place, each in enumerate(functions)]
    return {"role": "assistant", "content": "Let me.", "reasoning_content": thought, "tool_calls": calls}


def results() -> list[dict[str, Any]]:
    said = enumerate(("done", "noon"))
    return [{"role": "tool", "tool_call_id": f"c{place}", "content": each} for place, each in said]


def test_a_template_of_its_own_comes_first(tmp_path: Path) -> None:
    own = tokenizer()
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    assert ChatFormat.from_folder(tmp_path, own) is None
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v32"}')
    (tmp_path / "chat_template.jinja").write_text("own")
    found = ChatFormat.from_folder(tmp_path, own)
    assert found is not None and found.render(ASKED) == "own"


def test_a_conversation(form: ChatFormat) -> None:
    begins = f"{BEGIN}Be kind.{USER}Write it.{ASSISTANT}"
    assert form.render(ASKED) == form.render(ASKED, enable_thinking=False) == f"{begins}</think>"
    assert form.render(ASKED, thinking=True) == form.render(ASKED, enable_thinking=True) == f"{begins}<think>"
    assert form.encode(ASKED, enable_thinking=True).thinking and not form.encode(ASKED).thinking
    whole = [*ASKED, called(), *results()]
    off, on = (form.render(whole, enable_thinking=each) for each in (False, True))
    assert off == f"{begins}</think>Let me.{CALLS}{END}{RESULTS}</think>"
    assert on == f"{begins}<think>hm</think>Let me.{CALLS}{END}{RESULTS}<think>"
    whole += [{"role": "assistant", "content": "Yes.", "reasoning_content": "so"}, {"role": "user", "content": "Why?"}]
    assert form.render(whole, enable_thinking=True) == (
        f"{begins}</think>Let me.{CALLS}{END}{RESULTS}</think>Yes.{END}{USER}Why?{ASSISTANT}<think>"
    )


def test_tools_stand_behind_the_instructions(form: ChatFormat) -> None:
    text = form.render(ASKED, tools=[tool.for_template() for tool in TOOLS])
    head, _, rest = text.partition("\n\n## Tools\n\n")
    introduction, _, listed = rest.partition("<functions>\n")
    assert head == f"{BEGIN}Be kind."
    assert f'<{DSML}parameter name="$PARAMETER_NAME" string="true|false">' in introduction
    lines, _, end = listed.partition("</functions>\n")
    assert [json.loads(line) for line in lines.splitlines()] == [tool.for_template()["function"] for tool in TOOLS]
    assert end == f"{USER}Write it.{ASSISTANT}</think>"
    assert form.render(ASKED[1:], tools=[TOOLS[1].for_template()]).startswith(f"{BEGIN}\n\n## Tools\n\n")


def test_what_no_conversation_is(form: ChatFormat) -> None:
    broken = called()
    broken["tool_calls"][0]["function"]["arguments"] = "{}"
    for messages, words in (([*ASKED, broken], "expected an object"), ([{"role": "judge", "content": ""}], "judge")):
        with pytest.raises(StateError, match=words):
            form.render(messages)


def test_what_people_write_is_no_mark(form: ChatFormat) -> None:
    """Neither a thought's nor a call's, where the tokenizer has a token for it."""
    for mark in ("</think>", "<think>", DSML, END):
        prompt = form.encode([{"role": "user", "content": mark}])
        plain = form.encode([{"role": "user", "content": "x"}])
        assert prompt.text.count(mark) == plain.text.count(mark) + 1
        id = form.tokenizer.id_of(mark)
        if id is not None:
            assert prompt.tokens.count(id) == plain.tokens.count(id)


def read(text: str, thinking: bool = False) -> Said:
    tools = {tool.name: tool.parameters for tool in TOOLS}
    reader = AnswerReader(thinking, family_of(f"<{DSML}function_calls>"), tools)
    return together(reader.add(text) + reader.finish())


def test_the_family_is_told_from_the_template(form: ChatFormat) -> None:
    assert family_of(form.text).name == "dsml"
    said = read(f"hm</think>Let me.{CALLS}", thinking=True)
    assert (said.thought, said.text) == ("hm", "Let me.")
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == [
        ("write", {"path": "a.py", "mode": 7}), ("now", {}),
    ]  # fmt: skip


def test_calls_that_must_come(form: ChatFormat) -> None:
    own = form.tokenizer
    end = own.id_of(END)
    assert end is not None
    make = Maker(own, Grammars(own, {end}, len(own)), {end})
    family, text = family_of(form.text), CALLS.lstrip().replace("\n\n</", "\n</")
    required = Ask("m", tools=TOOLS, choice="required")
    assert make.end_of(make.of(required, family), text) is None
    assert make.end_of(make.of(required, family, thinking=True), f"hm</think>\n\n{text}") is None
    for wrong in (text.replace(">7<", ">seven<"), text.replace("write", "read"), "No."):
        assert make.end_of(make.of(required, family), wrong) is not None
    strict = Ask("m", tools=tuple(Tool(tool.name, "", tool.parameters, strict=True) for tool in TOOLS))
    assert make.end_of(make.of(strict, family), f"Let me.\n\n{text}") is None
    assert make.end_of(make.of(strict, family), "I would rather not.") is None


@pytest.mark.parametrize("thinking", [False, True])
def test_answers_come_back_as_they_were_sampled(form: ChatFormat, thinking: bool) -> None:
    """The call, the call that follows its results, and the answer that follows those."""
    own, family = form.tokenizer, family_of(form.text)
    end = own.id_of(END)
    assert end is not None
    replay, messages = Replay(form, {end}, family), list[dict[str, Any]](ASKED)
    evaluated: list[int] = []
    for place in range(3):
        ask = Ask("m", messages, tools=TOOLS, thinking=thinking)
        prompt = replay.replayed(prompt_of(ask, form, family), messages)
        assert prompt.tokens[: len(evaluated)] == evaluated
        text = f"Let  me {place}." + (CALLS.replace('="mode" ', '="mode"  ') if place < 2 else "")
        letters = [token for letter in text for token in own.encode(letter)]
        sampled = [*(own.encode_marked("hm</think>") if thinking else []), *letters, end]
        said = read(own.decode(sampled[:-1]), thinking)
        assert len(said.calls) == (2 if place < 2 else 0)
        replay.keep(prompt.tokens, sampled, said)
        evaluated = [*prompt.tokens, *sampled]
        functions = [{"name": call.name, "arguments": call.arguments} for call in said.calls]
        calls = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(said.calls, functions, strict=True)
        ]
        answer = {"role": "assistant", "content": said.text, "reasoning_content": said.thought, "tool_calls": calls}
        messages = [*messages, answer]
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "</think> done"} for call in calls]
    messages.append({"role": "user", "content": "Why?"})
    last = replay.replayed(prompt_of(Ask("m", messages, tools=TOOLS, thinking=thinking), form, family), messages)
    assert (last.tokens[: len(evaluated)] == evaluated) == (not thinking)  # former thoughts are left out
