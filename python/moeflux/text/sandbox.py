"""What a chat template may do: reach nothing but what it is given, end, and leave the memory alone.

A template is a program that comes with a download. Loops and calls are counted; whatever makes text is asked beforehand
how much that would be. Jinja's sandbox keeps it away from Python, and this keeps it within bounds.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from moeflux.errors import FormatError

__all__ = ["Sandbox", "current", "rendering"]

MAX_STEPS = 1_000_000  # turns of loops and calls of one rendering
MAX_SECONDS = 20.0
MAX_TEXT = 32_000_000  # characters of one value
MAX_MADE = 8 * MAX_TEXT  # of all values and texts together
MAX_COUNT = 1_000_000  # a number that says how wide or how often
MAX_BITS = 4096  # of a whole number


class Rendering:
    """One of them, and what it may still do."""

    def __init__(self, source: str, barrier: str) -> None:
        self.source = source
        self.barrier = barrier
        self.steps = MAX_STEPS
        self.left = MAX_MADE
        self.deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise FormatError(f"{self.source}: expected to end within {MAX_STEPS} steps, found it going on")
        if time.monotonic() > self.deadline:
            raise FormatError(f"{self.source}: expected to end within {MAX_SECONDS:.0f} s, found it going on")

    def fits(self, size: int) -> None:
        """Of a value that is about to be made."""
        if size > MAX_TEXT:
            raise FormatError(f"{self.source}: expected values of at most {MAX_TEXT} characters, found a longer one")

    def made(self, value: Any) -> Any:
        """Counts what has been made, kept or not."""
        if isinstance(value, str):
            self.fits(len(value))
            self.left -= len(value)
        elif isinstance(value, (list, tuple, dict)):
            self.left -= 64 * len(value)
        if self.left < 0:
            raise FormatError(f"{self.source}: expected at most {MAX_MADE} characters in all, found more")
        return value

    def count(self, values: Any) -> None:
        for value in values:
            if isinstance(value, int) and abs(value) > MAX_COUNT:
                raise FormatError(f"{self.source}: expected numbers up to {MAX_COUNT}, found {value!r:.20}")

    def text_of(self, *values: Any) -> None:
        """Of values that will be made text: a list may hold itself many times over, and be short."""
        size, stack = 0, list(values)
        while stack:
            value = stack.pop()
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, dict):
                stack += value.keys()
                stack += value.values()
            elif isinstance(value, (list, tuple)):
                stack += value
            size += 16
            self.fits(size)


_active = threading.local()


@contextmanager
def rendering(source: str, barrier: str) -> Iterator[None]:
    """Around one, in this thread. `source` begins every message."""
    _active.rendering = Rendering(source, barrier)
    try:
        yield
    finally:
        del _active.rendering


def current() -> Rendering:
    return _active.rendering


# ---- What is counted ---------------------------------------------------------------------------------------------


class _Counting(NodeTransformer):
    """Counts every turn of a loop and every text written, and makes of `~` and slices something that can be asked."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, _count(0, node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        self.generic_visit(node)
        length = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        return [_count(length, node.lineno), node] if length else [node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter("_concat", nodes.List(node.nodes, lineno=node.lineno), node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filter("_slice", node, node.lineno) if isinstance(node.arg, nodes.Slice) else node


def _count(length: int, line: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_filter("_wrote", nodes.Const(length), line), lineno=line)


def _filter(name: str, value: nodes.Expr, line: int) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=line)


class _Generator(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        super().visit_Template(_Counting().visit(node), frame)


# ---- What is asked beforehand -------------------------------------------------------------------------------------

WIDTH = re.compile(r"\d{7,}|\*|\{[^{}]*\{")  # a number that nobody can see through, or that comes as an argument
GROWING = {"center", "ljust", "rjust", "zfill", "expandtabs", "replace", "join"}
# Filters that look into a list and make no text of it.
LOOKING = set(
    "attr batch count d default dictsort first groupby items last length list map max min reject rejectattr reverse "
    "select selectattr slice sort sum unique _slice _wrote".split()
)


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates are rendered within `rendering`. They find jinja's filters and these; of
    jinja's globals three, and these."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _Generator

    def __init__(self, filters: dict[str, Any], globals: dict[str, Any], **options: Any) -> None:
        # Folded at compile time an expression would have no limits.
        super().__init__(optimized=False, cache_size=0, finalize=_finalize, **options)
        known = {**self.filters, **filters, "_concat": _concat, "_slice": _slice, "_wrote": _wrote}
        # Slow on what an attacker writes, or not the same twice.
        for name in ("pprint", "random", "urlize", "wordwrap"):
            del known[name]
        self.filters = {name: _checked(name, function) for name, function in known.items()}
        self.globals = {name: self.globals[name] for name in ("range", "cycler", "joiner")} | globals

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        limits, many = current(), (str, list, tuple)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
            if bits > MAX_BITS:
                raise FormatError(f"{limits.source}: expected numbers of at most {MAX_BITS} bits, found {bits}")
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right)
        elif operator == "*" and isinstance(left, many) and isinstance(right, int):
            limits.fits(len(left) * right)
        elif operator == "*" and isinstance(left, int) and isinstance(right, many):
            limits.fits(left * len(right))
        return limits.made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def check(*args: Any, **kwargs: Any) -> Any:
            _check_format(value.__self__, (args, kwargs))
            return wrapped(*args, **kwargs)

        return check

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # names that no keyword can have
        limits = current()
        limits.step()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name in GROWING:
            limits.count((*args, *kwargs.values()))
            if name == "join":
                items = list(args[0]) if args else []
                args = (items, *args[1:])
                limits.text_of(items)
                limits.fits(len(owner) * len(items))
            elif name == "replace" and len(args) >= 2:
                _check_replace(owner, args[0], args[1])
        return limits.made(super().call(__context, __obj, *args, **kwargs))


def _check_format(pattern: str, values: Any) -> None:
    limits = current()
    if WIDTH.search(pattern):
        raise FormatError(f"{limits.source}: expected small plain numbers in a format, found {pattern!r:.60}")
    limits.text_of(values)


def _check_replace(text: Any, old: Any, new: Any) -> None:
    if all(isinstance(each, str) for each in (text, old, new)):
        current().fits(len(text) + text.count(old) * len(new))


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is asked first how large its result can be."""
    skipped = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    @functools.wraps(function)
    def check(*args: Any, **kwargs: Any) -> Any:
        limits, own = current(), args[skipped:]
        limits.step()
        limits.count((*own[1:], *kwargs.values()))
        if name not in LOOKING:
            limits.text_of(*own)
        if name == "format":
            _check_format(str(own[0]), (own[1:], kwargs))
        elif name == "replace" and len(own) >= 3:
            _check_replace(*own[:3])
        elif name == "indent" and own and isinstance(own[0], str):
            limits.fits(len(own[0]) + (own[0].count("\n") + 1) * _width(own[1:], kwargs))
        elif name == "join" and own:
            items = list(own[0])
            limits.fits(len(items) * len(str(own[1] if len(own) > 1 else kwargs.get("d", ""))))
            args = (*args[:skipped], items, *own[1:])
        return limits.made(function(*args, **kwargs))

    return check


def _width(args: Any, kwargs: dict[str, Any]) -> int:
    width = args[0] if args else kwargs.get("width", 4)
    return width if isinstance(width, int) else len(str(width))


# ---- What the counting leaves in a template -----------------------------------------------------------------------


def _concat(values: list[Any]) -> str:
    return "".join(map(str, values))


def _wrote(length: int) -> None:
    current().left -= length  # looked at with the next value that is made, for this is itself a step


def _slice(value: Any) -> Any:
    return value  # every filter's result is counted


@pass_context  # so that nothing is done at compile time
def _finalize(context: Any, value: Any) -> Any:
    limits = current()
    if isinstance(value, str):
        return limits.made(value)
    limits.text_of(value)
    return limits.made(str(value))
