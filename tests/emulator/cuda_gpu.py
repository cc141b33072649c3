"""The engine's own CUDA backend on an emulated device: stand-ins for NVIDIA's driver and for NVRTC, in a shared library
that the engine is told to open in place of theirs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from emulator.build import CUDA, HERE, host_compiler, into_place, library
from emulator.compilers import BUILD
from moeflux import _core

ROOT = HERE.parents[1]
NVIDIA = HERE / "nvidia"
FLAGS = ["-std=c++20", "-O1", "-g1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/csrc"]
FLAGS += ["-Wl,-Bsymbolic", "-Wl,-z,defs"]

OUT_OF_MEMORY = 2
FAULT = 719  # of a kernel: the context is lost


class _Emulation(ctypes.Structure):
    _fields_ = [
        ("order", ctypes.c_uint32),
        ("delay", ctypes.c_uint32),
        ("fail_at", ctypes.c_int64),
        ("fail_with", ctypes.c_int32),
        ("fail_in", ctypes.c_char * 40),
        ("fault_at", ctypes.c_int64),
        ("memory", ctypes.c_uint64),
        ("driver_version", ctypes.c_int32),
        ("devices", ctypes.c_int32),
        ("major", ctypes.c_int32),
        ("minor", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
        ("checked", ctypes.c_bool),
        ("check_only", ctypes.c_char * 40),
    ]


@dataclass(frozen=True)
class Emulation:
    """How the device behaves."""

    order: int = 0  # of threads
    delay: int = 0  # microseconds before a stream goes on with what it was given
    fail_at: int = -1  # the call, from 0, that fails
    fail_with: int = OUT_OF_MEMORY
    fail_in: bytes = b""  # which calls count
    fault_at: int = -1  # the kernel, from 0, that breaks off
    memory: int = 12 << 30
    driver_version: int = 13000
    devices: int = 1
    major: int = 9
    minor: int = 0
    multiprocessors: int = 4
    checked: bool = False  # every load and store of what is loaded meanwhile
    check_only: bytes = b""  # kernels whose names begin so


_Build = ctypes.CFUNCTYPE(
    ctypes.c_bool, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_bool, ctypes.c_void_p, ctypes.c_size_t
)


@functools.cache
def driver_library() -> Path:
    """The shared library that is driver and compiler, made anew when anything in it has changed."""
    inputs = [*NVIDIA.iterdir(), HERE / "runtime" / "abi.h", ROOT / "csrc" / "cuda" / "driver_api.h", Path(__file__)]
    key = hashlib.sha256(host_compiler().version.encode())
    for file in sorted(inputs):
        key.update(file.read_bytes())
    result = BUILD / f"nvidia-{key.hexdigest()[:20]}.so"
    if not result.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        sources = sorted(NVIDIA.glob("*.cpp"))
        into_place(result, lambda to: host_compiler().run(*FLAGS, *sources, "-ldl", "-lpthread", "-o", to))
    return result


_builds: list[str] = []
_one_at_a_time = threading.Lock()


def builds() -> list[str]:
    """The files that the stand-in's compiler was given, since it was last asked."""
    found, _builds[:] = list(_builds), []
    return found


@_Build
def _build(text: bytes, architecture: bytes, checked: bool, answer: int, room: int) -> bool:
    """A kernel library for the stand-in's compiler."""
    try:
        name = re.search(rb'#line 1 "(\w+)\.cuh"', text)
        stem = name.group(1).decode() if name else "text"
        _builds.append(stem)
        with _one_at_a_time:  # units of a file come from several threads, and are one library
            return _answer(answer, room, str(_library(stem, text, architecture.decode(), checked)))
    except Exception as error:  # anything: there is nobody here to hear of it
        return not _answer(answer, room, f"{type(error).__name__}: {error}")


@functools.cache
def _library(stem: str, text: bytes, architecture: str, checked: bool) -> Path:
    """With all kernels of the file, whichever was asked for."""
    if _is_ours(stem, text):  # which other tests have compiled, too
        return library(CUDA / f"{stem}.cuh", checked, architecture=architecture)
    path = BUILD / "sources" / f"{stem}-{hashlib.sha256(text).hexdigest()[:16]}" / f"{stem}.cuh"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            unfinished = Path(folder) / path.name
            unfinished.write_bytes(text)
            unfinished.rename(path)
    return library(path, checked, architecture=architecture)


def _is_ours(stem: str, text: bytes) -> bool:
    return (
        stem in _core.cuda_kernel_files()
        and _core.cuda_kernel_text(stem).encode() == text
        and not os.environ.get("MOEFLUX_CUDA_DIR")
    )


def _answer(answer: int, room: int, said: str) -> bool:
    encoded = said.encode()[: room - 1] + b"\0"
    ctypes.memmove(answer, encoded, len(encoded))
    return True


@functools.cache
def _driver() -> ctypes.CDLL:
    found = ctypes.CDLL(str(driver_library()))
    found.nvrtc_build_with(_build)
    for name in ("calls", "launches", "graph_launches", "live_objects", "device_bytes"):
        getattr(found, f"cuda_{name}").restype = ctypes.c_int64
    return found


def install(*, preferred: bool = False, compiler: bool = True) -> None:
    """From now on `backend="cuda"` is the emulated device; `preferred`: so is "auto", whatever else there is."""
    _driver()
    os.environ["MOEFLUX_BACKEND"] = "cuda" if preferred else "cpu"
    path = str(driver_library())
    _core.testing.set_cuda_libraries(path, path if compiler else "/no/such/libnvrtc.so")


def remove(on_cuda: str | None) -> None:
    """As it was before: `on_cuda` is the option of that name."""
    if on_cuda == "emulated":
        install(preferred=True)
        return
    os.environ["MOEFLUX_BACKEND"] = "cuda" if on_cuda else "cpu"
    _core.testing.set_cuda_libraries("", "")


@contextlib.contextmanager
def emulating(**how: Any) -> Iterator[None]:
    """How the device behaves within the block, see Emulation; calls are counted from its beginning."""
    _emulate(Emulation(**how))
    try:
        yield
    finally:
        _emulate(Emulation())


def _emulate(how: Emulation) -> None:
    _driver().cuda_emulate(ctypes.byref(_Emulation(*astuple(how))))


def calls() -> int:
    return _driver().cuda_calls()


def launches() -> int:
    return _driver().cuda_launches()


def graph_launches() -> int:
    return _driver().cuda_graph_launches()


def device_bytes() -> int:
    return _driver().cuda_device_bytes()


def live_objects() -> int:
    """0 when nobody uses the device any more, unless something leaks."""
    gc.collect()
    return _driver().cuda_live_objects()


__all__ = [
    "FAULT",
    "OUT_OF_MEMORY",
    "Emulation",
    "builds",
    "calls",
    "device_bytes",
    "driver_library",
    "emulating",
    "graph_launches",
    "install",
    "launches",
    "live_objects",
    "remove",
]
