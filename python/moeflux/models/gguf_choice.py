"""Which of a repository's GGUF files a name asks for: all parts of one model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moeflux.errors import FormatError, NotFoundError
from moeflux.models.gguf import PART, SUFFIX
from moeflux.sizes import size_text

__all__ = ["Asked", "asked_of", "choose_gguf", "has_gguf"]

REPOSITORY = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?::(?P<tag>[A-Za-z0-9][\w.-]*)|/(?P<file>[\w.-][\w. /+-]*\.gguf))?"
    r"(?:@(?P<revision>[\w./-]+))?"
)
TAG = re.compile(r"(?:^|[-._/])((?:UD-)?(?:[IT]?Q\d\w*|BF16|FP?16|FP?32|MXFP4\w*|NVFP4\w*))$", re.IGNORECASE)
"""Ends the names of files with the type of most of their weights. "UD-" is a recipe that gives tensors other types."""
BESIDE = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""In the names of files that are no models: a vision tower, the weights of columns."""
SHOWN = 24


@dataclass(frozen=True)
class Asked:
    """A repository by its name, and what of it is wanted."""

    repository: str
    tag: str | None  # the type of a GGUF file
    file: str | None  # the name of one
    revision: str | None

    @property
    def gguf(self) -> bool:
        return self.tag is not None or self.file is not None

    def __str__(self) -> str:
        return self.repository + (f":{self.tag}" if self.tag else "") + (f"/{self.file}" if self.file else "")


def asked_of(name: object) -> Asked | None:
    """`owner/name`, `owner/name:TAG` or `owner/name/FILE.gguf`, each maybe with `@revision`; None for other names."""
    match = REPOSITORY.fullmatch(str(name))
    return Asked(**match.groupdict()) if match else None


def has_gguf(names: Iterable[str]) -> bool:
    return any(_is_model(name) for name in names)


def choose_gguf(asked: Asked, sizes: Mapping[str, int]) -> list[str]:
    """The files of the one model that is asked for, its first part first. FormatError where that is none or several,
    NotFoundError where parts of it are missing."""
    models: dict[str, list[str]] = {}
    for name in sorted(filter(_is_model, sizes)):
        models.setdefault(_whole(name), []).append(name)
    if asked.file is not None:
        found = [base for base in models if base == _whole(asked.file)]
    elif asked.tag is not None:
        found = [base for base in models if _tag(base).lower() == asked.tag.lower()]
    else:
        found = list(models)
    if len(found) != 1:
        choices = _choices(asked.repository, models, sizes, found or list(models))
        expected = "the name of one model in GGUF" if asked.gguf else "one model in GGUF"
        there = f"{len(found)}; " if found else "none of that name; " if asked.gguf else "none"
        raise FormatError(f"{asked}: expected {expected}, found {there}{choices}")
    parts = models[found[0]]
    part = PART.search(parts[0])
    count = int(part[2]) if part else 1
    if len(parts) != count:
        raise NotFoundError(f"{asked.repository}/{parts[0]}: expected {count} parts, found {len(parts)}")
    return parts


def _is_model(name: str) -> bool:
    return name.endswith(SUFFIX) and BESIDE.search(name.rpartition("/")[2]) is None


def _whole(name: str) -> str:
    """What the names of all parts begin with; parts of another number of parts are of another model."""
    part = PART.search(name)
    return name.removesuffix(SUFFIX) if part is None else f"{name[: part.start()]}"


def _tag(base: str) -> str:
    """That of the file, or of the folder that it is in."""
    inside, _, file = base.rpartition("/")
    match = TAG.search(file) or TAG.search(inside)
    return match[1] if match else ""


def _choices(repository: str, models: dict[str, list[str]], sizes: Mapping[str, int], found: list[str]) -> str:
    """Each as one would name it, with its size. A tag names a model if it has no other."""
    if not found:
        return ""
    tags = [_tag(base).lower() for base in models]

    def name(base: str) -> str:
        tag = _tag(base)
        return f":{tag}" if tag and tags.count(tag.lower()) == 1 else f"/{models[base][0]}"

    shown = [f"{name(base)} ({size_text(sum(sizes[part] for part in models[base]))})" for base in found[:SHOWN]]
    more = "" if len(found) <= SHOWN else f" and {len(found) - SHOWN} more"
    return f"behind {repository}, name one of {', '.join(shown)}{more}"
