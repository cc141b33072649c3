"""What a request says, checked once where it comes in. The error names the field, what was expected and what was found.

Each interface lists its fields in a table: which are used, which are ignored and why, and which are refused. A field
that is in no table is refused too, so nothing that a client asks for is dropped in silence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeflux import files
from moeflux.errors import ArgumentError, FormatError, found

__all__ = ["LIMITS", "Fields", "Limits", "RequestError", "Table", "parse_body"]


class RequestError(ArgumentError):
    """A request is wrong. `field` says where."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field = field
        self.status = status


@dataclass(frozen=True)
class Limits:
    """What a request may have at most."""

    body: int = 32 << 20  # bytes
    messages: int = 10_000  # messages, or items of `input`
    parts: int = 4096  # of the content of one message
    tools: int = 1024
    schema: int = 128 << 10  # bytes of one JSON schema; making a grammar of it takes time by its square
    depth: int = 24  # of lists and objects in a schema
    answers: int = 16  # n
    stop: int = 16  # stop strings
    stop_text: int = 1024  # characters of one
    logprobs: int = 20
    bias: int = 1024  # entries of logit_bias


LIMITS = Limits()


@dataclass(frozen=True)
class Table:
    """What becomes of each field of one interface. Notes are for docs/serve.md."""

    used: Mapping[str, str]
    ignored: Mapping[str, str]
    refused: Mapping[str, str]

    def check(self, values: Mapping[str, Any]) -> None:
        """RequestError for a field that is refused, or not known. What is null or empty asks for nothing."""
        for name, value in values.items():
            if name in self.used or name in self.ignored or value in (None, False, [], {}):
                continue
            if name in self.refused:
                raise RequestError(f"{name}: {self.refused[name]}", name)
            raise RequestError(
                f"{found(name, 80)}: expected a field of this interface (docs/serve.md lists them), found another", name
            )


def parse_body(data: bytes, limits: Limits = LIMITS) -> dict[str, Any]:
    if len(data) > limits.body:
        raise RequestError(f"body: expected at most {limits.body} bytes, found more", None, 413)
    try:
        value = files.parse_json(data, "body")
    except FormatError as error:
        raise RequestError(str(error)) from error
    if not isinstance(value, dict):
        raise RequestError(f"body: expected a JSON object, found {_kind(value)}")
    return value


class Fields(Mapping[str, Any]):
    """An object of a request. A member that is null is as one that is not there."""

    def __init__(self, value: Any, where: str = "", limits: Limits = LIMITS) -> None:
        if not isinstance(value, dict):
            raise RequestError(f"{where}: expected an object, found {_kind(value)}", where or None)
        self._values = {name: each for name, each in value.items() if each is not None}
        self._where = where
        self.limits = limits

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def wrong(self, name: str, expected: str, value: Any = None) -> RequestError:
        """What to raise where a member is not what was expected."""
        path = self.path(name)
        given = self.get(name) if value is None else value
        return RequestError(f"{path}: expected {expected}, found {_shown(given)}", path)

    def need(self, name: str) -> Any:
        if name not in self._values:
            path = self.path(name)
            raise RequestError(f"{path}: expected a value, found none", path)
        return self._values[name]

    def text(self, name: str, default: str = "", among: Collection[str] = ()) -> str:
        value = self.get(name, default)
        if not isinstance(value, str) or (among and value not in among and name in self):
            raise self.wrong(name, " or ".join(map(repr, among)) if among else "text")
        return value

    def needed_text(self, name: str, longest: int = 1 << 30) -> str:
        self.need(name)
        value = self.text(name)
        if not 0 < len(value) <= longest:
            raise self.wrong(name, f"text of 1 to {longest} characters")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def whole(self, name: str, low: int, high: int = (1 << 31) - 1) -> int | None:
        value = self.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high):
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not real or not low <= value <= high:
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def listed(self, name: str, most: int) -> list[Any]:
        value = self.get(name, [])
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        if len(value) > most:
            path = self.path(name)
            raise RequestError(f"{path}: expected at most {most} entries, found {len(value)}", path)
        return value

    def objects(self, name: str, most: int) -> list[Fields]:
        return [Fields(each, f"{self.path(name)}[{i}]", self.limits) for i, each in enumerate(self.listed(name, most))]

    def inner(self, name: str) -> Fields:
        """An object inside; an empty one where there is none."""
        return Fields(self.get(name, {}), self.path(name), self.limits)

    def schema(self, name: str) -> dict[str, Any]:
        """A JSON schema, of limited size and depth."""
        value = self.inner(name)._values if name in self else {}
        raw: dict[str, Any] = self.get(name, {}) if value or name in self else {}
        size = len(json.dumps(raw, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        if size > self.limits.schema:
            path = self.path(name)
            raise RequestError(f"{path}: expected a schema of at most {self.limits.schema} bytes, found {size}", path)
        if _depth(raw, self.limits.depth) > self.limits.depth:
            raise self.wrong(name, f"a schema that nests at most {self.limits.depth} deep", "a deeper one")
        return raw

    def stops(self, name: str) -> tuple[str, ...]:
        """Stop strings: one, or a list."""
        value = self.get(name, [])
        listed: Sequence[Any] = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or len(listed) > self.limits.stop:
            raise self.wrong(name, f"at most {self.limits.stop} texts")
        for each in listed:
            if not isinstance(each, str) or not 0 < len(each) <= self.limits.stop_text:
                raise self.wrong(name, f"texts of 1 to {self.limits.stop_text} characters", each)
        return tuple(listed)


def _depth(value: Any, most: int) -> int:
    inner: Iterable[Any] = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if most < 0:
        return 1
    return 1 + max((_depth(each, most - 1) for each in inner), default=0) if isinstance(value, dict | list) else 0


def _kind(value: Any) -> str:
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _shown(value: Any) -> str:
    """Numbers and short words as they are; of texts only that they are some: what people write stays out of errors."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 and value.isascii() and " " not in value else f"a text of {len(value)}"
    return _kind(value) if isinstance(value, dict | list) else found(value)
