"""Calls as published chat templates write them: python tests/golden/check_calls.py FOLDER

Where check_text.py has downloaded them into FOLDER, the templates of the families that have a reader write a
conversation with two calls, or with one where a message can have no more. Its reader must find the same calls in that
text, and what was sampled must take its place again, token for token.
"""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from moeflux.serve.answer import AnswerReader  # noqa: E402
from moeflux.serve.events import Call, Said, together  # noqa: E402
from moeflux.serve.prompt import prompt_of  # noqa: E402
from moeflux.serve.replay import Replay  # noqa: E402
from moeflux.serve.request import Ask, Tool  # noqa: E402
from moeflux.serve.tools.families import family_of  # noqa: E402
from moeflux.text.channels import MARKS  # noqa: E402
from moeflux.text.chat import ChatFormat  # noqa: E402
from moeflux.text.speech import GEMMA_MARKS  # noqa: E402
from moeflux.text.tokenizer import Tokenizer  # noqa: E402
from support.vocabularies import byte_level  # noqa: E402

# Template -> its family, and whether it announces an answer after the result of a call, which replay needs.
EXPECTED = {
    "GLM-4.6": ("glm", True),
    "GLM-4.7-Flash": ("glm", True),
    "MiniMax-M2": ("minimax", True),
    "Qwen-QwQ-32B": ("hermes", True),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", True),
    "Qwen-Qwen3-0.6B": ("hermes", True),
    "Qwen3-Coder": ("qwen-xml", True),
    "Qwen3.5-4B": ("qwen-xml", True),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek", False),
    "google-gemma-4-31B-it": ("gemma", True),
    "google-gemma-4-31B-it-interleaved": ("gemma", True),
    "moonshotai-Kimi-K2": ("kimi", True),
    "openai-gpt-oss-120b": ("harmony", True),
}
BAR, LOW = "\uff5c", "\u2581"
DEEPSEEK = (
    "Assistant", "User", "begin of sentence", "end of sentence", "tool calls begin", "tool call begin", "tool sep",
    "tool call end", "tool calls end", "tool output begin", "tool output end",
)  # fmt: skip
ADDED = [
    "<tool_call>", "</tool_call>", "<|im_assistant|>", "<|im_user|>", "<|im_system|>", "<|im_middle|>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>", "<|assistant|>", "<|user|>", "<|observation|>", "<|system|>", "[gMASK]", "<sop>",
    "<minimax:tool_call>", "</minimax:tool_call>", "]~!b[", "]~b]", "[e~[",
    "<|turn>", "<turn|>", "<|think|>", "<|tool>", "<tool|>",
    *MARKS, *GEMMA_MARKS, *(f"<{BAR}{name.replace(' ', LOW)}{BAR}>" for name in DEEPSEEK),
]  # fmt: skip
ENDS = (
    "<|im_end|>", "[e~[", f"<{BAR}end{LOW}of{LOW}sentence{BAR}>", "<|user|>", "<|observation|>", "<|call|>",
    "<turn|>", "<|tool_response>",
)  # fmt: skip
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "text": {"type": "string"}}
SCHEMAS: dict[str, Any] = {"weather": {"type": "object", "properties": PROPERTIES}, "now": {"type": "object"}}
TOOLS = tuple(Tool(name, "Tells it.", schema) for name, schema in SCHEMAS.items())
CALLS = [("weather", {"city": "Zürich", "days": 3, "text": 'a\n  <b> & "c"\n'}), ("now", {})]
ASKED = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Weather?"}]


def main(folder: Path) -> int:
    whole = byte_level()._whole
    whole.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ADDED])
    tokenizer, wrong, seen = Tokenizer(whole), 0, set[str]()
    for name, text in templates(folder):
        if name in EXPECTED:
            seen.add(name)
            found = check(ChatFormat(tokenizer, {"default": text}, name), *EXPECTED[name])
            wrong += found != "right"
            print(f"{name}: {found}")
    missing = EXPECTED.keys() - seen
    print(f"{len(seen)} templates, {wrong} wrong{', missing: ' + ', '.join(sorted(missing)) if missing else ''}")
    return 1 if wrong or missing else 0


def templates(folder: Path) -> Iterator[tuple[str, str]]:
    (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as opened:
        for member in opened:
            if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                file = opened.extractfile(member)
                assert file is not None
                yield Path(member.name).stem, file.read().decode()


def check(form: ChatFormat, family_name: str, replays: bool) -> str:
    family, tokenizer = family_of(form.text), form.tokenizer
    if family.name != family_name:
        return f"expected family {family_name}, found {family.name}"
    ends = {id for token in ENDS if (id := tokenizer.id_of(token)) is not None}
    replay, asked = Replay(form, ends, family), prompt_of(Ask("m", ASKED, tools=TOOLS), form, family)

    def read(text: str, thinking: bool) -> Said:
        reader = AnswerReader(thinking, family, SCHEMAS)
        return together(reader.add(family.heard(text)) + reader.finish())

    def sent_back(said: Said) -> list[dict[str, Any]]:
        functions = [{"name": call.name, "arguments": call.arguments} for call in said.calls]
        calls = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(said.calls, functions, strict=True)
        ]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in said.calls]
        answer = {"role": "assistant", "content": said.text, "tool_calls": calls, "reasoning_content": said.thought}
        return [*ASKED, answer, *results]

    expected = CALLS[:1] if family.one_call else CALLS
    calls = [Call(f"c{place}", name, json.dumps(arguments)) for place, (name, arguments) in enumerate(expected)]
    made = Said("Let me see.", "hm", calls)
    written = prompt_of(Ask("m", sent_back(made), tools=TOOLS), form, family).tokens
    begin = len(asked.tokens)
    while written[:begin] != asked.tokens[:begin]:  # what opens a thought in the prompt is part of the answer here
        begin -= 1
    end = next(at for at in range(begin, len(written)) if written[at] in ends)
    said = read(tokenizer.decode(written[begin:end]), False)
    if [(call.name, json.loads(call.arguments)) for call in said.calls] != expected:
        return f"expected the calls that it writes, found {said}"

    other_spaces = tokenizer.decode(written[begin:end]).replace('": ', '":  ')
    sampled = [*tokenizer.encode_marked(other_spaces), written[end]]
    start = asked.tokens[:begin]
    replay.keep(start, sampled, read(tokenizer.decode(sampled[:-1]), False))
    messages = sent_back(said)
    again = replay.replayed(prompt_of(Ask("m", messages, tools=TOOLS), form, family), messages)
    evaluated = [*start, *sampled]
    if (again.tokens[: len(evaluated)] == evaluated) != replays:
        return f"expected what was sampled {'' if replays else 'not '}to come back, found the opposite"
    return "right"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
