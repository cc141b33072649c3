"""The compilers that can take kernels: clang 19 or newer, or the clang of the package ziglang."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "build" / "emulator"
# Of the user: what is compiled there serves all clones.
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moeflux-emulator"
OLDEST_CLANG = 19  # its predecessors do not convert __bf16


@dataclass(frozen=True)
class Compiler:
    name: str
    command: tuple[str, ...]
    version: str

    def run(self, *arguments: str | Path) -> str:
        """Its output and its warnings; an error is a CompileError with them."""
        # zig keeps the libraries that it has built, and every object, in its caches.
        cache = {"ZIG_GLOBAL_CACHE_DIR": str(BUILD / "zig"), "ZIG_LOCAL_CACHE_DIR": str(BUILD / "zig")}
        command = [*self.command, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | cache)
        if done.returncode:
            raise CompileError(done.stderr.strip()[-6000:] or f"status {done.returncode} of {' '.join(command)}")
        return done.stdout


class CompileError(Exception):
    pass


def _version(*command: str) -> str:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


@functools.cache
def compilers() -> tuple[Compiler, ...]:
    """Every one there is, the best first."""
    found = []
    for name in ("clang++-19", "clang++-20", "clang++-21", "clang++"):
        version = re.search(r"clang version (\d+)", _version(name)) if shutil.which(name) else None
        if version and int(version.group(1)) >= OLDEST_CLANG:
            found.append(Compiler("clang", (name,), _version(name)))
            break
    if importlib.util.find_spec("ziglang"):
        zig = (sys.executable, "-m", "ziglang", "c++")
        found.append(Compiler("ziglang", zig, _version(*zig)))
    return tuple(found)


def compiler() -> Compiler:
    if not compilers():
        raise CompileError(f"no compiler for kernels: install clang {OLDEST_CLANG} or newer, or `pip install ziglang`")
    return compilers()[0]
