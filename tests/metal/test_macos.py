"""macOS without a Mac: what it compiles differently is compiled to objects for Apple silicon. `make macos` does so with
everything, and holds the stand-in for Apple's headers to Apple's own data."""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the package ziglang is in the tests of Linux"
)


@pytest.fixture(scope="module")
def macos() -> ModuleType:
    spec = importlib.util.spec_from_file_location("macos", ROOT / "tools" / "macos.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_differs_there_is_compiled(macos: ModuleType, tmp_path: Path) -> None:
    differing = [file for file in macos.all_files() if file.suffix == ".mm" or "__APPLE__" in file.read_text()]
    assert {file.name for file in differing} >= {"apple_device.mm", "make_device.cpp", "reader.cpp"}
    for file in differing:
        macos.compile_file(file, tmp_path / f"{file.stem}.o")


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("[device_ newCommandQueue]", "[device_ commandQueue]", "no visible @interface|no known instance method"),
        ("atIndex:++index]", "atIndex:@\"one\"]", "incompatible|cannot initialize"),
        ("size_of(threadgroups) threadsPer", "threadgroups.x threadsPer", "no viable conversion|cannot initialize"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_refused(macos: ModuleType, tmp_path: Path, right: str, wrong: str, words: str) -> None:
    text = (ROOT / "csrc" / "metal" / "apple_device.mm").read_text()
    assert right in text
    (tmp_path / "wrong.mm").write_text(text.replace(right, wrong))
    with pytest.raises(macos.Refused, match=words):
        macos.compile_file(tmp_path / "wrong.mm", tmp_path / "wrong.o")
