"""Kernel libraries from .metal and .cuh files, by the hash of everything that goes into them. They lie in the user's
cache folder, for all clones: to compile the kernels takes minutes. What nobody has used for a month goes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from emulator.compilers import KEPT, CompileError, Compiler, compiler
from emulator.tokens import tokens
from emulator.translate import Translation, translate, wrappers
from emulator.translate_cuda import cuda_wrappers, translate_cuda

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNTIME = HERE / "runtime"
METAL = ROOT / "metal"
CUDA = ROOT / "cuda"
GPU = ROOT / "gpu"  # what both include
USUAL = "sm_90a"  # the chip whose kernels are run unless a test says otherwise

DIALECT = ["-std=c++17", "-ffreestanding", "-fno-exceptions", "-fno-rtti", "-DMSL_CPU"]
# The same bits from both builds and from every compiler: nothing contracted, nothing reordered.
CODE = ["-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-sanitize=undefined", "-fno-stack-protector"]
CODE += ["-fPIC", "-fvisibility=hidden", "-g1", "-w"]
FAST = ["-O2"]
CHECKED = ["-O1", "-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0"]
CHECKED += ["-mllvm", "-tsan-instrument-read-before-write=1"]  # the first may read what was never written
CHECKED += ["-fno-vectorize", "-fno-slp-vectorize"]  # accesses of 32 bytes or more would be announced to nobody
UNUSED = 30 * 86400  # seconds
RUNTIME_FLAGS = ["-std=c++20", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]


@dataclass(frozen=True)
class Source:
    path: Path
    text: str  # C++
    translation: Translation | None = None  # of Metal's text


def _macros(architecture: str) -> list[str]:
    """What cuda/basics.h defines for a chip. Of most files the text is the same for all."""
    number = int(re.sub(r"\D", "", architecture))
    late = ["-DMOEFLUX_COPIES", "-DMOEFLUX_CLUSTERS"] if number >= 90 else []
    return late + (["-DMOEFLUX_WARPGROUPS"] if architecture == "sm_90a" else [])


def preprocessed(path: Path, by: Compiler, architecture: str = USUAL) -> str:
    macros = _macros(architecture) if path.suffix == ".cuh" else ["-D__METAL__=1", "-D__METAL_VERSION__=310"]
    return by.run(
        *("-E", "-x", "c++", "-std=c++17", "-nostdinc", "-undef", *macros),
        # As a system's, ours would come behind those that zig adds whatever it is told.
        *(f"-I{HERE / 'include'}", f"-I{CUDA if path.suffix == '.cuh' else METAL}", f"-I{GPU}", path),
    )


def source(path: Path, by: Compiler, architecture: str = USUAL) -> Source:
    if path.suffix == ".cuh":
        body, kernels = translate_cuda(tokens(preprocessed(path, by, architecture)))
        return Source(path, _assembled("cuda.h", body, cuda_wrappers(kernels)))
    translation = translate(preprocessed(path, by))
    return Source(path, _assembled("keywords.h", translation.body, wrappers(translation)), translation)


def _source_text(path: Path, by: Compiler, architecture: str) -> str:
    """Of source(). Kept by the hash of all that may be in it, for to make it takes half a second."""
    headers = [*(file for folder in (CUDA, METAL, GPU) for file in folder.glob("*.h")), *HERE.glob("include/*")]
    content = "\0".join(file.read_text() for file in (path, *sorted(headers)))
    kept, there = _kept(f"{path.stem}-source", content, f"{by.version} {path.suffix} {architecture}", ".cpp")
    if not there:
        into_place(kept, lambda to: to.write_text(source(path, by, architecture).text))
    return kept.read_text()


def _assembled(shim: str, body: str, table: str) -> str:
    """The same text in every clone: its paths are relative to the clone's folder. What a GPU unrolls is a loop here,
    whose steps have the same bits, and which takes a sixth of the time to compile."""
    body = re.sub(r"^[ \t]*#pragma unroll\b.*$", "", body, flags=re.MULTILINE)
    text = f'#include "{RUNTIME}/abi.h"\n#include "{HERE}/shim/{shim}"\n{body}\n# 1 "wrappers" 3\n{table}'
    return text.replace(f"{ROOT}/", "")


@functools.cache
def _shared_hash() -> str:
    """Of what every kernel includes, of what translates them, and of the machine that code is made for."""
    whole = hashlib.sha256("\0".join((*_machine(), host_compiler().run("--version"))).encode())
    for file in sorted([*HERE.glob("shim/*.h"), RUNTIME / "abi.h", *HERE.glob("translate*.py"), HERE / "build.py"]):
        whole.update(file.read_bytes())
    return whole.hexdigest()


def _machine() -> list[str]:
    """What -march=native may depend on."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else [platform.processor()]
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    return [platform.machine(), *sorted({line for line in lines if line.partition(":")[0].strip() in wanted})]


def _kept(name: str, content: str, make: str, suffix: str) -> tuple[Path, bool]:
    """Where the result of `make` from `content` belongs, and whether it is there."""
    key = hashlib.sha256("\0".join((_shared_hash(), content, make)).encode()).hexdigest()[:20]
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{name}-{key}{suffix}"
    there = path.exists()
    if there:
        os.utime(path)
    else:
        _let_go()
    return path, there


@functools.cache
def _let_go() -> None:
    """Of what nobody has used for long."""
    for path in KEPT.iterdir():
        with contextlib.suppress(OSError):  # another process was quicker
            if path.stat().st_mtime < time.time() - UNUSED:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@functools.cache
def _runtime_objects() -> tuple[Path, ...]:
    """Compiled by the compiler of the project, which has a C++ library."""
    objects = []
    headers = "".join(file.read_text() for file in sorted(RUNTIME.glob("*.h")))
    for file in sorted(RUNTIME.glob("*.cpp")):
        path, there = _kept(file.stem, file.read_text() + headers, " ".join(RUNTIME_FLAGS), ".o")
        if not there:
            into_place(path, lambda to, file=file: host_compiler().run(*RUNTIME_FLAGS, "-c", file, "-o", to))
        objects.append(path)
    return tuple(objects)


def host_compiler() -> Compiler:
    return Compiler("host", (os.environ.get("CXX", "c++"),), "")


def into_place(path: Path, make) -> None:
    """So that who comes at the same time never sees half a file."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        make(unfinished)
        unfinished.rename(path)


def library(path: Path, checked: bool, by: Compiler | None = None, architecture: str = USUAL) -> Path:
    """The shared library of one file of kernels, those of CUDA for a chip."""
    by = by or compiler()
    text = _source_text(path, by, architecture)
    flags = [*DIALECT, *CODE, *(CHECKED if checked else FAST)]
    kind = "checked" if checked else "fast"
    code, there = _kept(f"{path.stem}-{kind}", text, " ".join((by.version, *flags)), ".o")
    if not there:
        with tempfile.TemporaryDirectory(dir=KEPT) as folder:
            file = Path(folder) / "kernel.cpp"
            file.write_text(text)
            into_place(code, lambda to: by.run(*flags, f"-I{ROOT}", "-c", file, "-o", to))
    # The runtime goes into every library, its names hidden: nothing of it meets a sanitizer's own.
    objects = [code, *_runtime_objects()]
    result, there = _kept(f"{path.stem}-{kind}", "\0".join(file.name for file in objects), "", ".so")
    if not there:
        link = ["-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", *objects, "-lm", "-ldl", "-o"]
        into_place(result, lambda to: host_compiler().run(*link, to))
    return result


__all__ = ["CUDA", "METAL", "CompileError", "host_compiler", "library", "preprocessed", "source"]
