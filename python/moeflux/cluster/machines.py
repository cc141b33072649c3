"""Which machines there are: what `moeflux.load(path, machines=...)` and `--machines` are given."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from moeflux import files
from moeflux.errors import ArgumentError, FormatError, found
from moeflux.sizes import parse_size

__all__ = ["MAX_MACHINES", "Link", "Machine", "Machines", "machines_of"]

MAX_MACHINES = 256
OPTIONS = ("threads", "readers")
"""What machines may have each in its own way. None of it changes a result."""


@dataclass(frozen=True)
class Machine:
    """One of those that share a model's layers. What is None is found out, or chosen."""

    name: str
    node: str | None = None  # of Ray: its address, name or number; None: the machine that loads the model
    path: str | None = None  # of the model there; None: as where it is loaded
    address: str = "127.0.0.1"  # of that machine, at which it takes rows from the one before
    memory: int | str | None = None  # budget of the process there; None: that of the call
    disk: float | None = None  # bytes a second of reads, as doctor measures them
    memory_rate: float | None = None  # bytes a second of reads from memory by all cores, likewise
    layers: tuple[int, int] | None = None  # the first, and the one behind the last; None: chosen
    options: dict[str, Any] = field(default_factory=dict)  # of OPTIONS


@dataclass(frozen=True)
class Link:
    """What lies between two machines, for estimates."""

    seconds: float = 0.0001  # from one to the next, for however few bytes
    rate: float = 1.25e9  # bytes a second

    def takes(self, size: float) -> float:
        return self.seconds + size / self.rate


@dataclass(frozen=True)
class Machines:
    machines: tuple[Machine, ...]
    ray: str | None = None  # address of a Ray cluster that runs; None: one of this machine, for this program alone
    address: str = "127.0.0.1"  # of the machine that loads the model, at which it takes what the last stage gives
    link: Link = field(default_factory=Link)

    def __post_init__(self) -> None:
        names = [machine.name for machine in self.machines]
        if not 1 <= len(names) <= MAX_MACHINES:
            raise ArgumentError(f"machines: expected 1 to {MAX_MACHINES}, found {len(names)}")
        if len({*names}) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ArgumentError(f"machines: expected names that differ, found {twice!r:.60} twice")
        if len({machine.layers is None for machine in self.machines}) > 1:
            without = next(machine.name for machine in self.machines if machine.layers is None)
            raise ArgumentError(f"machines: expected layers of all or of none, found none of {without!r:.60}")


def machines_of(given: object) -> Machines:
    """A number stands for so many processes on this machine; text and paths for a file; else the values themselves."""
    if isinstance(given, Machines):
        return given
    if isinstance(given, str | Path):
        text = str(given)
        return machines_of(int(text)) if text.isascii() and text.isdigit() and len(text) < 6 else read(Path(given))
    if isinstance(given, Sequence) and all(isinstance(each, Machine) for each in given):
        return Machines(tuple(given))
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise ArgumentError(f"machines: expected a number, a file or a list of Machine, found {found(given)}")
    count = operator.index(given)
    if not 1 <= count <= MAX_MACHINES:
        raise ArgumentError(f"machines: expected 1 to {MAX_MACHINES}, found {found(given)}")
    return Machines(tuple(Machine(str(number)) for number in range(1, count + 1)))


# ---- The file ---------------------------------------------------------------------------------------------------


def read(path: Path) -> Machines:
    """A JSON file of the fields of Machines, in which "machines" is a list of the fields of Machine."""
    content = _object(files.read_json(files.expanded(path)), str(path), [each.name for each in fields(Machines)])
    listed = content.get("machines")
    if not isinstance(listed, list):
        raise FormatError(f"{path}: machines: expected a list, found {found(listed)}")
    try:
        values: dict[str, Any] = {
            "machines": tuple(_machine(each, f"{path}: machines[{i}]") for i, each in enumerate(listed))
        }
        if "link" in content:
            link = _object(content["link"], f"{path}: link", ["seconds", "rate"])
            given = {name: _rate(link[name], f"{path}: link: {name}") for name in link}
            values["link"] = Link(**given)
        for name in ("ray", "address"):
            if name in content:
                values[name] = _text(content[name], f"{path}: {name}")
        return Machines(**values)
    except ArgumentError as error:
        raise FormatError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def _machine(given: object, where: str) -> Machine:
    values = dict(_object(given, where, [each.name for each in fields(Machine)]))
    if "name" not in values:
        raise FormatError(f"{where}: name: expected one, found none")
    for name in ("name", "node", "path", "address"):
        if name in values:
            values[name] = _text(values[name], f"{where}: {name}")
    for name in ("disk", "memory_rate"):
        if name in values:
            values[name] = _rate(values[name], f"{where}: {name}")
    if "memory" in values and values["memory"] != "auto":
        values["memory"] = parse_size(f"{where}: memory", values["memory"])
    if "layers" in values:
        values["layers"] = _range(values["layers"], f"{where}: layers")
    for name, value in _object(values.get("options", {}), f"{where}: options", OPTIONS).items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise FormatError(f"{where}: options: {name}: expected a whole number, found {found(value)}")
    return replace(Machine(values.pop("name")), **values)


def _object(given: object, where: str, known: Sequence[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise FormatError(f"{where}: expected an object, found {found(given)}")
    for name in given:
        if name not in known:
            raise FormatError(f"{where}: expected {', '.join(known)}, found {name!r:.60}")
    return given


def _text(given: object, where: str) -> str:
    if not isinstance(given, str) or not given:
        raise FormatError(f"{where}: expected text, found {found(given)}")
    return given


def _rate(given: object, where: str) -> float:
    """A number, or a size a second as "6GB"."""
    if isinstance(given, str):
        return float(parse_size(where, given))
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < 1e18:
        raise FormatError(f"{where}: expected a number above 0, found {found(given)}")
    return float(given)


def _range(given: object, where: str) -> tuple[int, int]:
    if not (isinstance(given, list) and len(given) == 2 and all(type(each) is int for each in given)):
        raise FormatError(f"{where}: expected [first, one behind the last], found {found(given)}")
    return given[0], given[1]
