"""A build for users compiles several files as one: no two files of csrc may mean different things by one name."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


FLAGS = ["-std=c++20", "-fsyntax-only", "-fvisibility=hidden", f"-I{ROOT}/csrc", f"-I{ROOT}/metal", f"-I{ROOT}"]


def faults(sources: list[Path], *flags: str) -> str:
    """What the compiler says of them as one file."""
    command = [*str(COMPILER).split(), *FLAGS, *flags, "-x", "c++", "-"]
    unit = "".join(f'#include "{source}"\n' for source in sorted(sources))
    return subprocess.run(command, input=unit, capture_output=True, text=True, check=False).stderr


def known(*what: str) -> Path:
    """A file that there is when the compiler has once accepted all sources as they are now."""
    version = subprocess.run([*str(COMPILER).split(), "--version"], capture_output=True, check=True).stdout
    seen = hashlib.sha256(version + repr((COMPILER, FLAGS, what)).encode())
    for folder in ("csrc", "metal", "cuda", "gpu"):
        for file in sorted(each for each in (ROOT / folder).rglob("*") if each.is_file()):
            seen.update(f"{file}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
    return ROOT / "build" / "one-unit" / seen.hexdigest()


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("part", ["core", "bindings"])
def test_all_files_can_be_one(part: str) -> None:
    files = list((ROOT / "csrc").glob("*/*.cpp"))
    bindings = [file for file in files if file.parent.name == "python"]
    assert len(bindings) > 5 and len(files) > 50
    flags, version = [], ""
    if part == "core":
        files = [file for file in files if file not in bindings]
    else:
        pybind11 = pytest.importorskip("pybind11")
        version = pybind11.__version__
        folders = (sysconfig.get_path("include"), pybind11.get_include())
        files, flags = bindings, [*(f"-isystem{folder}" for folder in folders), '-DMOEFLUX_VERSION=""']
    if not (accepted := known(part, version, *flags)).exists():
        assert faults(files, *flags) == ""
        accepted.parent.mkdir(parents=True, exist_ok=True)
        accepted.touch()


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
def test_two_meanings_are_noticed(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.cpp").write_text(f"namespace {{ constexpr int size = {value}; }}\n")
    assert "redefinition" in faults(list(tmp_path.glob("*.cpp")))
