"""A _core whose system refuses memory, mappings or threads when a test says so. See refusing.cpp."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("memory", "mappings", "threads")


def _core_of_the_package() -> str:
    shipped = importlib.util.find_spec("moeflux._core")
    assert shipped is not None and shipped.origin is not None
    return shipped.origin


def library() -> Path | None:
    """It lies beside the _core under test, where that was built for tests."""
    build = Path(_core_of_the_package()).resolve().parents[3]
    for folder in (build, Path(sys.prefix) / "cmake"):
        found = folder / "tests" / "refusing" / "_core.so"
        if found.exists():
            return found
    return None


def needed_library() -> Path:
    """The module whose system refuses, as the build of the package under test left it; without one, no test."""
    found = library()
    if found is None and ROOT / "build" in Path(_core_of_the_package()).resolve().parents:
        pytest.fail("tests/refusing is not built: `make setup` turns it on in the editable install")
    if found is None:
        pytest.skip("this install has no _core that refuses: an editable one has")
    return found


@dataclass
class Calls:
    made: int = 0


class System:
    """Installed in place of moeflux._core: in a process that has not imported it."""

    def __init__(self, path: Path) -> None:
        assert "moeflux._core" not in sys.modules
        spec = importlib.util.spec_from_file_location("moeflux._core", path)
        assert spec is not None and spec.loader is not None
        sys.modules["moeflux._core"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._refuse = ctypes.CDLL(str(path)).moeflux_refuse
        self._refuse.argtypes, self._refuse.restype = [ctypes.c_int, ctypes.c_int64], ctypes.c_int64

    @contextmanager
    def refusing(self, kind: str, at: int) -> Iterator[Calls]:
        """Call number `at` within is refused, counted from 0; how many there were is known behind it."""
        calls = Calls()
        self._refuse(KINDS.index(kind), at)
        try:
            yield calls
        finally:
            calls.made = self._refuse(KINDS.index(kind), -1)
