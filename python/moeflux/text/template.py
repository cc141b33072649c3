"""Chat templates: jinja as transformers runs it, with the same names for a template to find."""

from __future__ import annotations

import functools
import json
import re
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.utils import Namespace

from moeflux.errors import FormatError, StateError
from moeflux.text.sandbox import Sandbox, current, rendering

__all__ = ["Template"]

MAX_SOURCE = 4_000_000  # characters of the template itself


class Template:
    """A compiled template; immutable, shared by any number of threads."""

    def __init__(self, text: str, source: str = "chat template") -> None:
        self.source = source
        if len(text) > MAX_SOURCE:
            raise FormatError(f"{source}: expected at most {MAX_SOURCE} characters, found {len(text)}")
        try:
            self._template = _environment().from_string(text)
        except TemplateSyntaxError as error:
            raise FormatError(f"{source}: line {error.lineno}: expected a template, found: {error.message}") from error
        except (RecursionError, SyntaxError, MemoryError) as error:  # nested deeper than Python compiles
            raise FormatError(f"{source}: expected a template, found one that nests too deep: {error}") from error

    def render(self, variables: dict[str, Any], barrier: str = "") -> str:
        """The text for these variables, which must be plain JSON values. FormatError when it passes a limit,
        StateError with the template's own words when it refuses them. `barrier` is never escaped by `tojson`."""
        with rendering(self.source, barrier):
            try:
                return "".join(self._template.generate(variables))
            except _Refused as error:
                raise StateError(f"{self.source}: the template refuses this conversation: {error.message}") from error
            except SecurityError as error:
                raise FormatError(f"{self.source}: expected to touch only what it is given, found: {error}") from error
            except RecursionError as error:
                raise FormatError(
                    f"{self.source}: expected to end, found a macro that calls itself for ever"
                ) from error
            except (FormatError, MemoryError, KeyboardInterrupt):
                raise
            except Exception as error:  # the template is a program, and may fail in any way
                raise StateError(f"{self.source}: {_line_of(error)}{type(error).__name__}: {error}") from error


class _Refused(TemplateError):
    """raise_exception was called."""


def _line_of(error: BaseException) -> str:
    """Where in the template, as jinja left it in the traceback."""
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return f"line {line}: " if line is not None else ""


# ---- What a template finds --------------------------------------------------------------------------------------


class _Generation(Extension):
    """{% generation %} marks what a model says, for training. Here it is only text."""

    tags = frozenset(("generation",))

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Without attributes that lead into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `namespace(self=...)` works, as in jinja
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _Namespace._check(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace's attribute {name!r}")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Not the class, whose attributes lead into Python."""
    return dict(*args, **kwargs)


def _raise_exception(message: Any = "") -> None:
    raise _Refused(str(message))


def _strftime_now(format: str) -> str:
    if re.search(r"\d{3,}", format) or len(format) > 1000:  # a width, which some systems honour
        raise SecurityError(f"a time's format {format!r:.60}")
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As Python writes JSON: jinja's own would escape < and >, which models never saw escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    barrier = current().barrier
    return "".join(c if c < "\x80" or c == barrier else json.dumps(c)[1:-1] for c in text)


@functools.cache
def _environment() -> Sandbox:
    names = {
        "dict": _dict,
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    extensions = [_Generation, loopcontrols]
    return Sandbox({"tojson": _tojson}, names, trim_blocks=True, lstrip_blocks=True, extensions=extensions)
