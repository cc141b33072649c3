"""Chat templates: a program that comes with a download ends, within its memory, whatever it is."""

from __future__ import annotations

from typing import Any

from moeflux.text.template import Template

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "image"}]},
    {"role": "assistant", "content": "<think>hm</think>Let me see.", "tool_calls": [CALL]},
    {"role": "tool", "content": "sun"},
]
VARIABLES = {
    "messages": MESSAGES, "tools": [CALL], "documents": None, "add_generation_prompt": True, "bos_token": "<s>",
}  # fmt: skip

SEEDS = [
    "{{ bos_token }}{% for m in messages %}{{ '<|' ~ m.role ~ '|>' + m['content'] | string | trim }}{% endfor %}",
    "{% macro part(c, first=false) %}{% if c is string %}{{ c }}{% else %}{% for i in c %}{% if i.type == 'image' %}"
    "{% continue %}{% endif %}{{ i['text'] }}{% endfor %}{% endif %}{% endmacro %}{{ part(messages[1].content) }}",
    "{% set ns = namespace(a=[1], n=0) %}{% for i in range(3) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}",
    "{% for m in messages[::-1] %}{% if loop.index0 > 1 %}{% break %}{% endif %}{{ m | tojson(indent=2) }}{% endfor %}",
    "{{ tools | tojson }}{% set x %}{{ 'a' * 3 }}{% endset %}{{ x | upper }}{{ '%s' % 'a' }}{{ '{}'.format(3) }}",
    "{%- if messages | length > 9 %}{{ raise_exception('too long') }}{% endif -%}{% generation %}a{% endgeneration %}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | list }}",
    "{{ strftime_now('%Y') }}{{ dict(a=1) | items | list }}{{ [3, 1] | sort | first }}{{ 'a-b'.split('-') | last }}",
    "{{ 'a'.center(9) }}{{ 'a' | center(9) }}{{ 'a'.encode() }}{{ (1).to_bytes(2, 'big') }}{{ 2 ** 10 // 3 % 5 }}",
]


def seeds() -> list[bytes]:
    return [seed.encode() for seed in SEEDS]


def one(data: bytes) -> None:
    text = Template(data.decode(errors="replace"), "t").render(VARIABLES)
    assert isinstance(text, str)
