"""What models write: calls of tools in every family. Nothing is an error, and nothing depends on where the text was
cut."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from moeflux.serve import tools
from moeflux.serve.answer import AnswerReader
from moeflux.serve.events import Arguments, CallBegin, CallEnd, Event, together
from moeflux.serve.tools.families import FAMILIES

TOOLS = {
    "write": {"properties": {"path": {"type": "string"}, "mode": {"type": "integer"}, "tags": {"type": "array"}}},
    "now": {"properties": {}},
}
BAR, LOW = "\uff5c", "\u2581"

SEEDS = [
    '<think>hm</think>Yes.\n<tool_call>\n{"name": "write", "arguments": {"path": "a", "mode": 3,}}\n</tool_call>',
    '<tool_call>[{"arguments": "{\\"path\\": \\"a\\"}", "name": "write"}, {"name": "now"}]</tool_call> rest',
    "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=mode>\n3\n</function>\n</tool_call>",
    "<function=now>\n</function>\n</tool_call>\n<tool_call>now\n<arg_key>tags</arg_key><arg_value>[1]</arg_value>",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>"
    '{"path": "a\n", "tags": [True, None]}<|tool_call_end|><|tool_calls_section_end|>',
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.write "
    '<|constrain|>json<|message|>{"path": "a", "mode": 3<|call|><|start|>assistant<|channel|>final<|message|>Yes.',
    f"<{BAR}tool{LOW}calls{LOW}begin{BAR}><{BAR}tool{LOW}call{LOW}begin{BAR}>function<{BAR}tool{LOW}sep{BAR}>write\n"
    f"```json\n{{}}\n```<{BAR}tool{LOW}call{LOW}end{BAR}><{BAR}tool{LOW}calls{LOW}end{BAR}>",
    '<|channel>thought\nhm<channel|><|tool_call>call:write{path:<|"|>a "b"<|"|>,tags:[None,\'c\'],mode:3}<tool_call|>',
]


def seeds() -> list[bytes]:
    return [bytes([place]) + seed.encode() for place, seed in enumerate(SEEDS)]


COVERED = (str(Path(tools.__file__).parent),)


def one(data: bytes) -> None:
    if not data:
        return
    family, cut = FAMILIES[data[0] % len(FAMILIES)], bool(data[0] & 64)
    text = family.heard(data[1:].decode(errors="replace"))

    def read(pieces: list[str]) -> list[Event]:
        ids = map(str, itertools.count())
        reader = AnswerReader(bool(data[0] & 128), family, TOOLS, lambda: next(ids))
        return [event for piece in pieces for event in reader.add(piece)] + reader.finish(cut)

    whole = read([text])
    middle = len(text) // 2
    assert together(read([text[:middle], text[middle:]])) == together(whole)
    open_call = False
    for event in whole:
        assert open_call == isinstance(event, Arguments | CallEnd)
        open_call = (open_call or isinstance(event, CallBegin)) and not isinstance(event, CallEnd)
    assert not open_call
    for call in together(whole).calls:
        assert call.complete or cut
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)
