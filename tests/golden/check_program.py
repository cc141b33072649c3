"""The template that we have for DeepSeek-V3.2: python tests/golden/check_program.py FOLDER

DeepSeek publishes a program in place of a chat template. SGLang has a copy of it, which is downloaded into FOLDER and
is no part of this repository. Conversations, with and without tools and thoughts, must become the same text. The copy
has lost the blank lines of what introduces the tools, which the published examples have: those are not compared.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

from moeflux.text.chat import OURS
from moeflux.text.template import Template

PACKAGE, WHEEL = "sglang==0.5.6", "sglang-0.5.6-py3-none-any.whl"
PROGRAM = "sglang/srt/entrypoints/openai/encoding_dsv32.py"


def tool(name: str) -> dict[str, Any]:
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": "Tells <é>.", "parameters": schema}}


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TOOLS = [tool("weather"), tool("now")]
INSTRUCTIONS, QUESTION, RESULT = turn("system", "Be kind.\n"), turn("user", "Weather?"), turn("tool", '{"a": "<é>"}')
BOTH = [called("weather", city="Zü\n<b>", days=3, list=[1, "é", None], ok=True, more={"a": 1.5}), called("now")]
CALL = turn("assistant", "Let me see.", reasoning_content="hm\nhm", tool_calls=BOTH)
AGAIN = turn("assistant", "", reasoning_content="again", tool_calls=BOTH[1:])
ANSWER = turn("assistant", "Done.", reasoning_content="so")
CONVERSATIONS = (
    [QUESTION],
    [INSTRUCTIONS, QUESTION],
    [INSTRUCTIONS, QUESTION, ANSWER, QUESTION],
    [INSTRUCTIONS, QUESTION, CALL, RESULT, RESULT],
    [QUESTION, CALL, RESULT, RESULT, AGAIN, RESULT],
    [INSTRUCTIONS, QUESTION, CALL, RESULT, RESULT, AGAIN, RESULT, ANSWER],
    [INSTRUCTIONS, QUESTION, CALL, RESULT, RESULT, ANSWER, QUESTION],
    [INSTRUCTIONS, QUESTION, CALL, RESULT, RESULT, ANSWER, QUESTION, AGAIN, RESULT],
)


def main(folder: Path) -> int:
    program, template = downloaded(folder), Template(OURS["deepseek_v32"].read_text())
    faults = 0
    for messages, tools, thinking in itertools.product(CONVERSATIONS, (None, TOOLS), (False, True)):
        variables = {"messages": messages, "tools": tools, "enable_thinking": thinking}
        begins = messages[-1]["role"] != "assistant"
        found = template.render({**variables, "add_generation_prompt": begins})
        expected = program.encode_messages(as_it_takes_them(messages, tools), "thinking" if thinking else "chat")
        if without_blank_lines(found) != expected:
            faults += 1
            print(f"expected {expected!r}, found {found!r}")
    print(f"DeepSeek-V3.2: {4 * len(CONVERSATIONS)} conversations, {faults} differ from its program's")
    return 1 if faults else 0


def downloaded(folder: Path) -> types.ModuleType:
    wheel = folder / WHEEL
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
        subprocess.run([*command, "--dest", folder], check=True)
    module = types.ModuleType("program")
    with zipfile.ZipFile(wheel) as opened:
        exec(opened.read(PROGRAM), module.__dict__)
    return module


def as_it_takes_them(messages: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
    """Arguments as text, and tools with the instructions."""
    made: list[dict[str, Any]] = json.loads(json.dumps(messages))  # which shares nothing, unlike a deep copy
    for message in made:
        for each in message.get("tool_calls", ()):
            each["function"]["arguments"] = json.dumps(each["function"]["arguments"])
    if tools:
        made = made if made[0]["role"] == "system" else [turn("system", ""), *made]
        made[0]["tools"] = tools
    return made


def without_blank_lines(text: str) -> str:
    head, sign, rest = text.partition("## Tools")
    introduction, end, rest = rest.partition("</functions>\n")
    return head + sign + re.sub(r"\n\n+", "\n", introduction) + end + rest


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
