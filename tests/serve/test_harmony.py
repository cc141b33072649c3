"""gpt-oss' channels: calls however they are written, histories as its templates take them, answers that are forced, and
all of it through every interface."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import moeflux
from moeflux.model import Model
from moeflux.serve.answer import AnswerReader
from moeflux.serve.constrain import Grammars
from moeflux.serve.events import Arguments, CallBegin, CallEnd, Event, Said, together
from moeflux.serve.prompt import prompt_of
from moeflux.serve.request import Ask, Form, Tool
from moeflux.serve.tools.families import FAMILIES
from moeflux.serve.tools.harmony import arranged, described
from moeflux.text.channels import heard
from moeflux.text.tokenizer import shared_length
from support.constrained import Maker
from support.harmony import model_folder
from support.live_server import Live

(HARMONY,) = (family for family in FAMILIES if family.name == "harmony")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "mode": {"type": "integer"}},
    "required": ["path"],
}
TOOLS: dict[str, Any] = {"write": SCHEMA, "now": {"type": "object", "properties": {}}}
WRITE, NOW = Tool("write", "Writes.", SCHEMA), Tool("now", "Tells it.", TOOLS["now"])
NEXT = "<|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>I must  write.<|end|>{NEXT}"
HEAD = "<|channel|>commentary to=functions.write <|constrain|>json<|message|>"
CALL = HEAD + '{"path":  "a"}<|call|>'
FINAL = "<|channel|>final<|message|>Done.<|return|>"


def events(pieces: str | list[str], *, cut: bool = False, tools: Any = TOOLS) -> list[Event]:
    count = iter(range(100))
    reader = AnswerReader(False, HARMONY, tools, lambda: f"call_{next(count)}")
    listed = [pieces] if isinstance(pieces, str) else pieces
    return [event for piece in listed for event in reader.add(heard(piece))] + reader.finish(cut)


def read(text: str, *, cut: bool = False, tools: Any = TOOLS) -> Said:
    return together(events(text, cut=cut, tools=tools))


def calls(said: Said) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in said.calls]


# ---- Calls ------------------------------------------------------------------------------------------------------

ONE = [("write", {"path": "a"})]
SLIPS: dict[str, tuple[str, str, Any]] = {
    "as it should be": (CALL, "", ONE),
    "in the header of the role": (' to=functions.write<|channel|>commentary json<|message|>{"path": "a"}', "", ONE),
    "a thought's channel": ('<|channel|>analysis to=functions.write code<|message|>{"path": "a"}<|call|>', "", ONE),
    "no format": (CALL.replace(" <|constrain|>json", ""), "", ONE),
    "no space": (CALL.replace(" <|constrain|>", "<|constrain|>"), "", ONE),
    "no end": (CALL.removesuffix("<|call|>"), "", ONE),
    "another end": (CALL.replace("<|call|>", "<|return|>"), "", ONE),
    "no end, another call": (CALL.replace("<|call|>", NEXT) + CALL, "", ONE + ONE),
    "two calls": (CALL + NEXT + CALL.replace("write", "now"), "", [*ONE, ("now", {"path": "a"})]),
    "two calls without a header": (CALL + CALL, "", ONE + ONE),
    "no prefix": (CALL.replace("functions.", ""), "", ONE),
    "a tool that there is not": (CALL.replace("write", "fly"), "", [("fly", {"path": "a"})]),
    "a brace too few": (CALL.replace("}", ""), "", ONE),
    "a text too few": (CALL.replace('"}', ""), "", ONE),
    "a brace too many": (CALL.replace("}", "}}"), "}", ONE),
    "text after JSON": (CALL.replace("}", "} I write it.") + FINAL, "I write it.\n\nDone.", ONE),
    "JSON in a string": (HEAD + r'"{\"path\": \"a\"}"<|call|>', "", ONE),
    "a fence": (HEAD + '```json\n{"path": "a"}\n```<|call|>', "", ONE),
    "no arguments": (HEAD.replace("write", "now") + "<|call|>", "", [("now", {})]),
    "white space": (HEAD + '\n{"path": "a"}\n<|call|>', "", ONE),
    "a word before": (f"<|channel|>commentary<|message|>I write.<|end|>{NEXT}{CALL}", "I write.", ONE),
    "an answer after it": (CALL + NEXT + FINAL, "Done.", ONE),
}  # fmt: skip


@pytest.mark.parametrize("slip", SLIPS)
def test_slips_are_understood(slip: str) -> None:
    text, said_text, found = SLIPS[slip]
    said = read(THOUGHT + text)
    assert (said.thought, said.text, calls(said)) == ("I must  write.", said_text, found)
    assert all(call.complete for call in said.calls)
    whole = heard(THOUGHT + text)  # where a mark is one character
    assert together(events(list(whole))) == said
    for place in range(len(whole)):
        assert together(events([whole[:place], whole[place:]])) == said


def test_text_without_a_header_is_text() -> None:
    said = read(f"I write.\n{CALL}")
    assert (said.text, calls(said)) == ("I write.", ONE)


@pytest.mark.parametrize(
    "text",
    [
        f"{NEXT}<|channel|>commentary to=functions.a,b<|message|>{{}}<|call|>",
        f"{NEXT}<|channel|>commentary to=python code<|message|>print(1)<|call|>",
        f"{NEXT}{HEAD}[1]<|call|>",
        f"{NEXT}{HEAD}write it<|call|>",
        "<|channel|>commentary to=functions.write <|constrain|>json",
    ],
)
def test_what_cannot_be_read_is_text(text: str) -> None:
    assert read(text) == Said(text=text)


def test_without_tools_calls_are_text() -> None:
    assert read(THOUGHT + CALL, tools={}) == Said(text=NEXT + CALL, thought="I must  write.")


def test_what_a_model_spells_is_no_mark() -> None:
    """A file about this very form is written as it is."""
    value = "Then <|call|> ends it, and <|start|>assistant begins."
    reader = AnswerReader(False, HARMONY, TOOLS)
    found = [*reader.add(heard(HEAD)), *reader.add(json.dumps({"path": value})), *reader.add(heard("<|call|>"))]
    assert calls(together(found + reader.finish())) == [("write", {"path": value})]


def test_arguments_come_as_they_form() -> None:
    found = events(list(heard(CALL)))
    begin = next(place for place, event in enumerate(found) if isinstance(event, CallBegin))
    end = next(place for place, event in enumerate(found) if isinstance(event, CallEnd))
    assert end - begin > 10 and all(isinstance(event, Arguments) for event in found[begin + 1 : end])


def test_a_call_that_was_cut_stays_open() -> None:
    for size in range(len(HEAD) + 1, len(CALL) - len("}<|call|>")):
        (call,) = read(CALL[:size], cut=True).calls
        assert not call.complete
    assert read(CALL.removesuffix("<|call|>"), cut=True).calls[0].complete


# ---- What templates take ----------------------------------------------------------------------------------------


def call_of(name: str, id: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": {}}}


def test_results_follow_their_calls() -> None:
    said = {"role": "assistant", "content": "I do.", "reasoning_content": "hm",
            "tool_calls": [call_of("a", "1"), call_of("b", "2"), call_of("c", "3")]}  # fmt: skip
    results = [{"role": "tool", "tool_call_id": id, "content": id} for id in ("2", "1", "9")]
    asked = {"role": "user", "content": "Well?"}
    shown = [
        (message["role"], [call["id"] for call in message.get("tool_calls", ())] or message["content"])
        for message in arranged([asked, said, *results, asked])
    ]
    assert shown == [("user", "Well?"), ("assistant", ["1"]), ("assistant", ["2"]), ("tool", "2"), ("tool", "1"),
                     ("tool", "9"), ("assistant", ["3"]), ("user", "Well?")]  # fmt: skip
    in_order = arranged([said, *({**result, "tool_call_id": id} for result, id in zip(results, "123", strict=True))])
    assert [message["role"] for message in in_order] == ["assistant", "tool"] * 3
    assert in_order[0]["reasoning_content"] == "hm\n\nI do." and in_order[0]["content"] == ""
    assert said["content"] == "I do.", "the request itself was changed"


def test_what_templates_would_leave_out_or_break_at() -> None:
    said = [{"role": "system", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"},
            {"role": "system", "content": "d"}]  # fmt: skip
    assert arranged(said) == [said[0], {"role": "assistant", "content": "b"}, {"role": "user", "content": "d"}]
    spec = {"properties": {"enum": {"type": "string"}, "default": {"enum": [1, 2], "default": 1}}}
    (tool,) = described([{"type": "function", "function": {"name": "f", "parameters": spec}}])
    assert tool["function"]["parameters"]["properties"] == {
        "enum": {"type": "string"}, "default": {"enum": [1, 2], "default": "1"}
    }  # fmt: skip


# ---- Through the interfaces -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with moeflux.load(model_folder(tmp_path_factory.mktemp("harmony")), threads=1, sessions=1) as model:
        yield model


@pytest.fixture
def server(running: Live) -> Live:
    running.scheduler.script = lambda prompt: THOUGHT + CALL if prompt.count("functions.write to=") == 0 else FINAL
    running.scheduler.seen.clear()
    return running


def last_prompt(server: Live) -> list[int]:
    return server.scheduler.seen[-1][0].prompt


OPENAI_TOOL: Any = {"type": "function", "function": {"name": "write", "parameters": SCHEMA}}


def test_chat_completions(server: Live, client: Any) -> None:
    asked: list[Any] = [{"role": "user", "content": "Write."}]
    options: dict[str, Any] = {"model": "m", "tools": [OPENAI_TOOL], "reasoning_effort": "minimal"}
    answer = client.chat.completions.create(messages=asked, **options)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.model_dump()["reasoning_content"] == "I must  write."
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"path": "a"}
    assert answer.usage.completion_tokens_details.reasoning_tokens > 3
    text = server.desk.tokenizer.decode(last_prompt(server))
    assert "Effort: low" in text and "type write = (_: {" in text

    chunks = [*client.chat.completions.create(messages=asked, stream=True, **options)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thought = "".join(delta.model_dump().get("reasoning_content") or "" for delta in deltas)
    parts = [part.function.arguments for delta in deltas for part in delta.tool_calls or ()]
    assert thought == "I must  write." and json.loads("".join(filter(None, parts))) == {"path": "a"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_responses(server: Live, client: Any) -> None:
    tool: Any = {"type": "function", "name": "write", "parameters": SCHEMA, "strict": False}
    first = client.responses.create(model="m", input="Write.", tools=[tool], reasoning={"effort": "high"})
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    assert "Effort: high" in server.desk.tokenizer.decode(last_prompt(server))
    output: Any = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "ok"}
    again = client.responses.create(
        model="m", input=[output], tools=[tool], reasoning={"effort": "high"}, previous_response_id=first.id
    )
    assert again.output_text == "Done." and evaluated_once(server)
    kinds = [each.type for each in client.responses.create(model="m", input="Write.", tools=[tool], stream=True)]
    assert "response.function_call_arguments.delta" in kinds and kinds[-1] == "response.completed"


def test_messages(server: Live, anthropic: Any) -> None:
    tool: Any = {"name": "write", "input_schema": SCHEMA}
    asked: list[Any] = [{"role": "user", "content": "Write."}]
    answer = anthropic.messages.create(model="m", max_tokens=99, messages=asked, tools=[tool])
    assert [block.type for block in answer.content] == ["thinking", "tool_use"] and answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": answer.content[1].id, "content": "ok"}
    asked += [{"role": "assistant", "content": [block.model_dump() for block in answer.content]},
              {"role": "user", "content": [result]}]  # fmt: skip
    with anthropic.messages.stream(model="m", max_tokens=99, messages=asked, tools=[tool]) as stream:
        assert stream.get_final_text() == "Done."
    assert evaluated_once(server)
    server.scheduler.script = lambda prompt: " assistant<|return|>"
    begun: list[Any] = [asked[0], {"role": "assistant", "content": "The fox"}]
    assert anthropic.messages.create(model="m", max_tokens=99, messages=begun).content[0].text == " assistant"
    end = server.desk.tokenizer.decode(last_prompt(server))
    assert end.endswith("<|start|>assistant<|channel|>final<|message|>The fox")


# ---- What was sampled comes back --------------------------------------------------------------------------------


def evaluated_once(server: Live) -> bool:
    """Whether the prompt of a turn goes on where the answer before it ended."""
    (first, _), (second, _) = server.scheduler.seen[-2:]
    whole = [*first.prompt, *server.desk.tokenizer.encode_marked(THOUGHT + CALL)]
    assert second.prompt[: len(whole)] == whole
    rest = server.desk.tokenizer.decode(second.prompt[len(whole) :])
    assert rest == '<|start|>functions.write to=assistant<|channel|>commentary<|message|>"ok"<|end|><|start|>assistant'
    return True


def ask_with(messages: list[dict[str, Any]], server: Live) -> list[int]:
    return list(server.desk.prepare(Ask("m", messages, tools=(WRITE, NOW))).prompt.tokens)


def test_a_turn_after_the_answer_is_as_the_template_says(server: Live, client: Any) -> None:
    """It leaves the thoughts of former turns out: what is before them is not evaluated again."""
    said: list[Any] = [{"role": "user", "content": "Write."}]
    for _ in range(2):
        message = client.chat.completions.create(model="m", messages=said, tools=[OPENAI_TOOL]).choices[0].message
        said.append(message.model_dump(exclude_none=True))
        if message.tool_calls:
            said.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "ok"})
    assert evaluated_once(server)
    (first, _), (second, _) = server.scheduler.seen[-2:]
    client.chat.completions.create(model="m", messages=[*said, said[0]], tools=[OPENAI_TOOL])
    third = last_prompt(server)
    assert "I must" not in server.desk.tokenizer.decode(third)
    assert shared_length(third, second.prompt) == len(first.prompt), "the header of the call, and then no thought"
    # An answer that had no thought stays, up to the token that ended it.
    server.scheduler.script = lambda prompt: FINAL
    client.chat.completions.create(model="m", messages=said[:1], tools=[OPENAI_TOOL])
    client.chat.completions.create(model="m", messages=[said[0], said[-1], said[0]], tools=[OPENAI_TOOL])
    answered = [*server.scheduler.seen[-2][0].prompt, *server.desk.tokenizer.encode_marked(FINAL)]
    assert shared_length(last_prompt(server), answered) == len(answered) - 1


def test_two_calls_of_one_answer_do_not_keep_others_from_coming_back(server: Live, client: Any) -> None:
    said: list[Any] = [{"role": "user", "content": "Write."}]
    message = client.chat.completions.create(model="m", messages=said, tools=[OPENAI_TOOL]).choices[0].message
    sampled = server.desk.tokenizer.encode_marked(THOUGHT + CALL)
    two = [{"id": id, "type": "function", "function": {"name": "now", "arguments": "{}"}} for id in "12"]
    results = [{"role": "tool", "tool_call_id": id, "content": "ok"} for id in "12"]
    (call,) = message.tool_calls
    said += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "ok"},
        {"role": "assistant", "content": "", "tool_calls": two},
        *results,
    ]
    client.chat.completions.create(model="m", messages=said, tools=[OPENAI_TOOL])
    prompt = last_prompt(server)
    assert any(prompt[at : at + len(sampled)] == sampled for at in range(len(prompt)))
    assert server.desk.tokenizer.decode(prompt).count("<|start|>functions.now to=assistant") == 2


# ---- Answers that are forced ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def make(model: Model) -> Maker:
    grammars = Grammars(model.tokenizer, model.end_tokens, model.variant.vocab_size)
    return Maker(model.tokenizer, grammars, model.end_tokens)


def test_a_call_must_come(make: Maker) -> None:
    forced = Ask("m", tools=(WRITE, NOW), choice="required")
    call = CALL.removesuffix("<|call|>").replace("  ", " ")
    for text in (call, THOUGHT + call, f"{call}<|end|>{NEXT}{call}"):
        assert make.end_of(make.of(forced, HARMONY), text) is None
    for text in (FINAL, THOUGHT + FINAL, call.replace("write", "fly"), call.replace("path", "where")):
        assert make.end_of(make.of(forced, HARMONY), text) is not None
    named = Ask("m", tools=(WRITE, NOW), choice="tool:now", parallel=False)
    assert make.end_of(make.of(named, HARMONY), HEAD.replace("write", "now") + "{}") is None
    for text in (call, (HEAD.replace("write", "now") + "{}" + f"<|end|>{NEXT}") * 2):
        assert make.end_of(make.of(named, HARMONY), text) is not None


def test_an_answer_must_be_json(make: Maker) -> None:
    forced = Ask("m", form=Form({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}))
    answer = '<|channel|>final<|message|>{"a": 3}'
    assert make.end_of(make.of(forced, HARMONY), THOUGHT + answer) is None
    assert make.end_of(make.of(forced, HARMONY), answer.replace("3", "b")) is not None


def test_strict_tools_are_held_to_their_schemas_when_they_are_called(make: Maker) -> None:
    strict = Ask("m", tools=(Tool("write", "", SCHEMA, strict=True),))
    call = CALL.removesuffix("<|call|>").replace("  ", " ")
    said = f"<|channel|>commentary<|message|>I write.<|end|>{NEXT}{call}"
    for text in (FINAL.removesuffix("<|return|>"), said, THOUGHT + call):
        assert make.end_of(make.of(strict, HARMONY), text) is None
    assert make.end_of(make.of(strict, HARMONY), said.replace('"a"', "1")) is not None


def test_efforts_are_those_that_there_are(server: Live, model: Model) -> None:
    assert model.chat_format is not None
    for given, told in {"none": "low", "minimal": "low", "low": "low", "medium": "medium", "xhigh": "high"}.items():
        ask = Ask("m", [{"role": "user", "content": "x"}], optional={"reasoning_effort": given})
        assert f"Effort: {told}\n" in prompt_of(ask, model.chat_format, HARMONY).text
