"""metal/params.h as Python: its structs and its sizes, so that nothing is written down twice."""

from __future__ import annotations

import ctypes
import functools
import re

import numpy as np

from emulator.build import METAL

_TYPES = {"uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64, "float": ctypes.c_float}


@functools.cache
def _text() -> str:
    return re.sub(r"//[^\n]*", "", (METAL / "params.h").read_text())


@functools.cache
def sizes() -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"MOEFLUX_SHARED uint32_t (\w+) = (\d+);", _text())}


@functools.cache
def _struct(name: str) -> type[ctypes.Structure]:
    body = re.search(rf"struct {name} {{(.*?)}};", _text(), re.DOTALL)
    assert body, f"params.h: no struct {name}"
    members = re.findall(r"(\w+) (\w+);", body.group(1))
    return type(name, (ctypes.Structure,), {"_fields_": [(member, _TYPES[type]) for type, member in members]})


def layouts() -> list[tuple[str, int, list[tuple[str, int]]]]:
    """Of every struct: its name, its size, and where its members are."""
    found = []
    for name in re.findall(r"struct (\w+) {", _text()):
        struct = _struct(name)
        members = [(member, getattr(struct, member).offset) for member, _ in struct._fields_]
        found.append((name, ctypes.sizeof(struct), members))
    return found


def params(name: str, **values: float) -> np.ndarray:
    """One struct as bytes. Every member must be given."""
    struct = _struct(name)
    members = {member for member, _ in struct._fields_}
    assert members == set(values), f"{name}: expected {sorted(members)}, found {sorted(values)}"
    return np.frombuffer(bytes(struct(**values)), np.uint8).copy()


def blocks(name: str, rows: list[dict[str, int]]) -> np.ndarray:
    """An array of structs."""
    return np.concatenate([params(name, **row) for row in rows])
