"""Templates that would hang or fill the memory: each ends, in a process that is limited to its plan and 64 MB."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.memory_group import MemoryGroup, memory_group

CHILD = Path(__file__).parents[1] / "support" / "template_child.py"


def doubled(start: str, more: str, then: str, times: int = 60) -> str:
    """`a` and `b` are made twice as large, over and over."""
    again = f"{{% set n.a={more} %}}{{% set n.b={more.replace('n.a', 'n.b')} %}}"
    return f"{{% set n=namespace(a={start},b={start}) %}}{{% for i in range({times}) %}}{again}{{% endfor %}}{then}"


LISTS = ("[1]", "[n.a,n.a]")
TUPLES = ("(1,)", "(n.a,n.a)")
LONG = "{% set s='a b '*2000000 %}"
LOOPS = "{%% for a in range(9999) %%}{%% for b in range(9999) %%}%s{%% endfor %%}{%% endfor %%}"
MANY = "{% set l=range(100000)|list %}{% set l=l*30 %}"

BOMBS = {
    # Loops and calls
    "loops": LOOPS % "",
    "text of loops": "{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "text that is set": "{% set x %}{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endset %}",
    "plain text in loops": LOOPS % ("y" * 999),
    "a macro for ever": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for i in [9] recursive %}{% if i %}{{ loop([i-1,i-1]*9) }}{% endif %}{% endfor %}",
    "cycles": "{% for a in range(99999) %}{{ cycler('x'*999999).next() }}{% endfor %}",
    "words": "{{ lipsum(n=100000, min=5000, max=9000) }}",
    # Lists that hold themselves many times over
    "equal lists": doubled(*LISTS, "{{ n.a == n.b }}"),
    "ordered lists": doubled(*LISTS, "{{ n.a < n.b }}"),
    "a list in a list": doubled(*LISTS, "{{ n.a in [n.b] }}"),
    "a list counted": doubled(*LISTS, "{{ [n.b].count(n.a) }}"),
    "a list looked for": doubled(*LISTS, "{{ [n.b].index(n.a) }}"),
    "lists tested": doubled(*LISTS, "{{ [n.a]|select('equalto', n.b)|list }}"),
    "lists sorted": doubled(*LISTS, "{{ [n.a, n.b]|sort }}"),
    "the largest list": doubled(*LISTS, "{{ [n.a, n.b]|max }}"),
    "lists grouped": doubled(*LISTS, "{{ [{'k': n.a}, {'k': n.b}]|groupby('k') }}"),
    "hashed tuples": doubled(*TUPLES, "{{ {n.a: 1} }}"),
    "unique tuples": doubled(*TUPLES, "{{ [n.a, n.b]|unique|list }}"),
    "tuples as keys": doubled(*TUPLES, "{{ dict([(n.a, 1)]) }}"),
    "a list as text": doubled(*LISTS, "{{ n.a }}"),
    "a list as a string": doubled(*LISTS, "{{ n.a|string|length }}"),
    "a list as JSON": doubled(*LISTS, "{{ n.a|tojson }}"),
    "a list printed": doubled(*LISTS, "{{ n.a|pprint }}"),
    "a list in a format": doubled(*LISTS, "{{ '%s' % (n.a,) }}"),
    "a list in another format": doubled(*LISTS, "{{ '{}'.format(n.a) }}"),
    "a list flattened": doubled("[[1]]", "n.a + n.a", "{{ n.a|sum(start=[]) }}"),
    # Texts that grow
    "text and text": doubled("'aa'", "n.a ~ n.a", "{{ n.a }}"),
    "text plus text": doubled("'aa'", "n.a + n.a", "{{ n.a }}"),
    "text formatted": doubled("'aa'", "'%s%s' % (n.a, n.a)", "{{ n.a }}"),
    "text joined": doubled("'aa'", "[n.a, n.a]|join", "{{ n.a }}"),
    "text times": "{{ 'a' * 10000000000 }}",
    "bytes times": "{{ 'a'.encode() * 2000000000 }}",
    "bytes of a number": "{{ (1).to_bytes(2000000000, 'big') }}",
    "list times": "{{ ([0] * 2000000000)|length }}",
    "center": "{{ 'a'.center(2000000000) }}",
    "ljust": "{{ 'a'.ljust(2000000000) }}",
    "rjust": "{{ 'a'.rjust(2000000000) }}",
    "zfill": "{{ 'a'.zfill(2000000000) }}",
    "expandtabs": "{{ ('\\t' * 1000).expandtabs(100000000) }}",
    "the filter center": "{{ 'a'|center(2000000000) }}",
    "indent": "{{ ('a\\n' * 100000)|indent(100000) }}",
    "wordwrap": LONG + "{{ (s * 4)|wordwrap(1) }}",
    "replace": "{% set s = 'a' * 100000 %}{{ s.replace('a', s) }}",
    "the filter replace": "{% set s = 'a' * 100000 %}{{ s|replace('a', s) }}",
    "join": "{% set s = 'a' * 100000 %}{{ s.join(s) }}",
    "the filter join": "{% set s = 'a' * 100000 %}{{ s|join(s) }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "format, used often": "{{ ('{0}' * 2000).format('a' * 1000000) }}",
    "the filter format": "{{ ('%(x)s' * 2000)|format(x='a' * 1000000) }}",
    "a wide format": "{{ '%9999999999d' % 1 }}{{ '%999999999d' % 1 }}",
    "wide formats": "{{ ('{:999999}' * 2000).format(*([1] * 2000)) }}",
    "a width that is given": "{{ '{:>{}}'.format(1, 999999999) }}",
    "a width of its own": "{{ '%*d' % (999999999, 1) }}",
    "a time": "{% for i in range(99999) %}{{ strftime_now('%c' * 1000000) }}{% endfor %}",
    "JSON, indented": "{{ range(1000)|list|tojson(indent=1000000) }}",
    "JSON, parted": "{{ range(1000)|list|tojson(separators=('a' * 1000000, ':')) }}",
    "a list of a text": LONG + "{{ s|list|length }}",
    "titles": LONG + "{% for i in range(99999) %}{{ s|title|length }}{% endfor %}",
    "upper": LONG + "{% for i in range(99999) %}{{ s|upper|length }}{% endfor %}",
    "splits": LONG + "{% for i in range(99999) %}{{ s.split()|length }}{% endfor %}",
    "partition": "{% for i in range(99999) %}{{ ('a' * 9999999).partition('b')|length }}{% endfor %}",
    "a text counted": "{% for i in range(99999) %}{{ ('a' * 9999999).count('ab') }}{% endfor %}",
    "escape": "{{ ('<' * 9999999)|escape }}",
    "urlencode": "{{ ('ä' * 9999999)|urlencode }}",
    "urlize": LOOPS % "{{ ('http://a.b ' * 9 * n)|urlize|length }}",
    "striptags": LOOPS % "{{ ('<a>b' * 999 * n)|striptags|length }}",
    # Lists and generators
    "a list of lists": "{{ range(99999)|map('string')|map('center', 100000)|list|length }}",
    "a generator": MANY + "{{ l|map('string')|map('center', 999)|map('upper')|map('length')|sum }}",
    "generators of generators": MANY + "{{ (l|batch(1)|map('list')|list * 99)|map('length')|sum }}",
    "sum": MANY + "{% for i in range(9999) %}{{ l|sum }}{% endfor %}",
    "sort": MANY + "{% for i in range(9999) %}{{ (l|sort(reverse=i % 2 == 0))|length }}{% endfor %}",
    "unique": MANY + "{% for i in range(9999) %}{{ l|unique|list|length }}{% endfor %}",
    "reverse": MANY + "{% for i in range(9999) %}{{ l|reverse|list|length }}{% endfor %}",
    "slices": MANY + "{% for i in range(9999) %}{{ l[::-1]|length }}{% endfor %}",
    "fill": "{{ [1]|batch(2000000000, 'x')|list|length }}",
    "parts": "{{ [1]|slice(2000000000)|list|length }}",
    # Numbers
    "a power": "{{ 9 ** (9 ** 9) }}",
    "powers": "{{ 9999 ** 999999 % 7 }}",
    "a product": doubled("9", "n.a * n.a", "{{ n.a % 7 }}"),
    "products": "{% set x = 2 ** 9999999 %}" + LOOPS % "{{ (x * x + b) is even }}",
    "a quotient": "{% set x = 2 ** 99999999 %}{{ x // 3 ** 9999999 % 7 }}",
    "a shift": "{{ (2).__lshift__(2000000000) }}{{ 2 ** 2000000000 % 3 }}",
    "a number of a text": LOOPS % "{{ ('9' * 400 * n)|int // 7 ** 3000 }}",
    "digits": "{{ '%.2000000000f' % 0.5 }}{{ '{:.2000000000f}'.format(0.5) }}",
    "round": LOOPS % "{{ (n / 3)|round(300) }}",
    # Templates that are hard to compile
    "a long template": "{{ messages[0].role }}" * 40000,
    "many blocks": "{% if n %}a{% endif %}" * 40000,
    "a long expression": "{{ 1" + " + 1" * 200000 + " }}",
    "a constant": "{{ ['a' * 9999999]|map('upper')|list }}" * 99,
    "parentheses": "{{ " + "(" * 100000 + "1" + ")" * 100000 + " }}",
    "nested blocks": "{% if n %}" * 5000 + "{% endif %}" * 5000,
    "nested lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "a too long template": "x" * 1_000_001,
    "an old trick": "{{ (0-32000001)|_wrote }}{% for i in range(9999) %}{{ 'x' * 9999999 }}{% endfor %}",
}


class Child:
    """A process that is started again after one was ended, so that one template's fault does not affect the next."""

    def __init__(self, group: MemoryGroup | None) -> None:
        self.group = group
        self.process: subprocess.Popen[str] | None = None
        self.own = 0  # what the plan has for itself

    def ended(self, template: str) -> tuple[str, str, int]:
        if self.process is None or self.process.poll() is not None:
            self.begin()
        line = self.said(json.dumps(template))
        assert line, "the process was ended"
        return tuple(json.loads(line))

    def begin(self) -> None:
        self.end()
        command = [sys.executable, str(CHILD)]
        command = self.group.command(command) if self.group else command
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        total, renderer = map(int, self.process.stdout.readline().split())
        self.own = total - renderer
        if self.group:
            self.group.limit(total + 64_000_000)
        self.process.stdin.write("\n")

    def said(self, line: str) -> str:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """In a control group where one can be made. Elsewhere its own peak is looked at, and the limits of the other
    process are the system's."""
    with memory_group() as group:
        made = Child(None if isinstance(group, str) else group)
        yield made
        made.end()


def killed(child: Child) -> int:
    return child.group.killed() if child.group else 0


@pytest.mark.parametrize("name", BOMBS)
def test_it_ends_within_its_limits(child: Child, name: str) -> None:
    before = killed(child)
    error, words, peak = child.ended(BOMBS[name])
    assert error == "FormatError", words
    assert re.match(r"t: (line \d+: )?expected ", words)
    assert killed(child) == before
    assert peak <= child.own


def test_what_is_honest_is_rendered(child: Child) -> None:
    """The same process still renders, after all of these."""
    text = "{% for m in messages %}{{ m.role ~ ': ' ~ m['content'] | upper }}{% endfor %}{{ n }}"
    assert child.ended(text)[:2] == ("text", "user: HELLO7")
