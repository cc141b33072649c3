"""A build for users compiles several files as one: no two files of csrc may mean different things by one name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def faults(sources: list[Path], *flags: str) -> str:
    """What the compiler says of them as one file."""
    command = [
        *str(COMPILER).split(),
        "-std=c++20",
        "-fsyntax-only",
        "-fvisibility=hidden",
        f"-I{ROOT}/csrc",
        f"-I{ROOT}/metal",
        f"-I{ROOT}",
        *flags,
    ]
    unit = "".join(f'#include "{source}"\n' for source in sorted(sources))
    return subprocess.run([*command, "-x", "c++", "-"], input=unit, capture_output=True, text=True, check=False).stderr


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("part", ["core", "bindings"])
def test_all_files_can_be_one(part: str) -> None:
    files = list((ROOT / "csrc").glob("*/*.cpp"))
    bindings = [file for file in files if file.parent.name == "python"]
    assert len(bindings) > 5 and len(files) > 50
    if part == "core":
        assert faults([file for file in files if file not in bindings]) == ""
    else:
        pybind11 = pytest.importorskip("pybind11")
        folders = (sysconfig.get_path("include"), pybind11.get_include())
        assert faults(bindings, *(f"-isystem{folder}" for folder in folders), '-DMOEFLUX_VERSION=""') == ""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
def test_two_meanings_are_noticed(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.cpp").write_text(f"namespace {{ constexpr int size = {value}; }}\n")
    assert "redefinition" in faults(list(tmp_path.glob("*.cpp")))
