"""Who may lean on whom in csrc: no include may point up. test_rooms.py is the same for the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# folder of csrc -> the folders whose headers it may include, besides its own.
MAY_INCLUDE = {
    "core": set(),
    "models": {"core"},
    "format": {"core", "models"},
    "io": {"core", "models", "format"},
    "kernels": {"core"},
    "backend": {"core", "kernels"},
    "gpu": {"core", "backend"},
    "metal": {"core", "backend", "gpu"},
    "cuda": {"core", "backend", "gpu"},
    "devices": {"core", "backend", "metal", "cuda"},
    "engine": {"core", "models", "format", "io", "backend", "devices"},
    "sampling": {"core", "kernels"},
    "decoder": {"core"},
    "python": {
        *("core", "models", "format", "io", "kernels", "backend", "metal", "cuda", "devices", "engine", "sampling"),
        "decoder",
    },
}
# The engine knows backends by their interface, what is built on that, and the clock that fits every one.
ENGINE_MAY_INCLUDE_OF_BACKEND = {
    "backend/activation_observer.h",
    "backend/backend.h",
    "backend/host_experts.h",
    "backend/mirror.h",
    "backend/timed_backend.h",
}
# moeflux.h, the whole C++ boundary, lies beside the folders.
BOUNDARY = "moeflux.h"
BOUNDARY_MAY_INCLUDE = {"core", "models", "engine", "sampling"}
MAY_INCLUDE_BOUNDARY = {"engine", "decoder", "python"}
# Kernel argument structs and sizes that shaders and host share.
SHADER_HEADERS = {"params.h": "metal", "cuda/params.h": "cuda"}  # each for one folder of csrc

INCLUDE = re.compile(r'^\s*#\s*(?:include|import)\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


def include_faults(csrc: Path) -> list[str]:
    """One sentence for each include that must not be."""
    faults = []
    files = (file for file in sorted(csrc.rglob("*")) if file.suffix in {".h", ".hpp", ".cpp", ".mm", ".m"})
    for file in files:
        relative = file.relative_to(csrc)
        folder = relative.parts[0] if len(relative.parts) > 1 else ""
        if folder not in MAY_INCLUDE and str(relative) != BOUNDARY:
            faults.append(f"{relative}: the folder is not in the table of layers")
            continue
        for quoted, angled in INCLUDE.findall(file.read_text()):
            reason = _quoted_fault(relative, folder, quoted) if quoted else _angled_fault(relative, folder, angled)
            if reason:
                faults.append(f"{relative}: includes {quoted or angled}: {reason}")
    return faults


def _quoted_fault(file: Path, folder: str, included: str) -> str:
    target = included.split("/")[0] if "/" in included else ""
    if included == BOUNDARY:
        return "" if folder in MAY_INCLUDE_BOUNDARY else "only engine, decoder and python know the boundary"
    if included in SHADER_HEADERS or included.startswith("../"):
        owner = SHADER_HEADERS.get(included)
        return "" if folder == owner else f"shared with shaders: for csrc/{owner} only"
    if target not in MAY_INCLUDE:
        return "expected a path from csrc, as in core/error.h"
    allowed = MAY_INCLUDE[folder] | {folder} if folder else BOUNDARY_MAY_INCLUDE
    if target not in allowed:
        return f"{folder or BOUNDARY} may lean on {', '.join(sorted(allowed - {folder})) or 'nothing'}"
    if folder == "engine" and target == "backend" and included not in ENGINE_MAY_INCLUDE_OF_BACKEND:
        return "the engine names no backend, only their interface"
    return ""


def _angled_fault(file: Path, folder: str, included: str) -> str:
    library = included.split("/")[0]
    if included in {"iomanip", "iostream", "locale", "ostream", "sstream"}:
        return "text is made by concat: streams write numbers as the process's locale does"
    if library in {"pybind11", "Python.h"} and folder != "python":
        return "the Python module alone knows pybind11"
    objective = library in {"Metal", "Foundation", "MetalKit", "QuartzCore", "objc"}
    if objective and not (folder == "metal" and file.suffix == ".mm"):
        return "for csrc/metal/*.mm only"
    return ""


# ---- The tests --------------------------------------------------------------------------------------------------


def test_includes_point_down() -> None:
    assert (ROOT / "csrc" / "core").is_dir()
    assert include_faults(ROOT / "csrc") == []


def test_the_table_has_no_circles() -> None:
    below: dict[str, set[str]] = {}

    def reach(folder: str, path: tuple[str, ...]) -> set[str]:
        assert folder not in path, f"circle: {' -> '.join((*path, folder))}"
        if folder not in below:
            below[folder] = MAY_INCLUDE[folder].union(*(reach(f, (*path, folder)) for f in MAY_INCLUDE[folder]))
        return below[folder]

    for folder in MAY_INCLUDE:
        reach(folder, ())


@pytest.mark.parametrize(
    ("path", "line", "fault"),
    [
        ("core/x.h", '#include "format/json.h"', "core may lean on nothing"),
        ("format/x.cpp", '#include "engine/engine.h"', "format may lean on core, models"),
        ("format/x.cpp", "#include <pybind11/pybind11.h>", "alone knows pybind11"),
        ("engine/x.cpp", "#  include <Python.h>", "alone knows pybind11"),
        ("engine/x.cpp", '#include "metal/device.h"', "engine may lean on"),
        ("engine/x.cpp", '#include "kernels/cpu/matvec.h"', "engine may lean on"),
        ("engine/x.cpp", '#include "backend/cpu_backend.h"', "the engine names no backend"),
        ("backend/x.cpp", '#include "metal/device.h"', "backend may lean on"),
        ("metal/device.h", "#include <Metal/Metal.h>", "for csrc/metal/*.mm only"),
        ("backend/x.mm", "#import <Foundation/Foundation.h>", "for csrc/metal/*.mm only"),
        ("kernels/cpu/x.cpp", '#include "params.h"', "shared with shaders"),
        ("devices/x.cpp", '#include "cuda/params.h"', "shared with shaders"),
        ("metal/x.cpp", '#include "../metal/params.h"', "shared with shaders"),
        ("metal/x.cpp", '#include "cuda/launches.h"', "metal may lean on"),
        ("format/x.cpp", '#include "json.h"', "expected a path from csrc"),
        ("io/x.cpp", '#include "moeflux.h"', "only engine, decoder and python"),
        ("moeflux.h", '#include "io/reader.h"', "moeflux.h may lean on"),
        ("helpers/x.h", "", "not in the table"),
    ],
)
def test_a_planted_include_is_found(tmp_path: Path, path: str, line: str, fault: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(f"#pragma once\n#include <vector>\n{line}\n")
    (found,) = include_faults(tmp_path)
    assert fault in found


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("metal/device.mm", "#include <Metal/Metal.h>"),
        ("metal/arguments.h", '#include "params.h"'),
        ("cuda/arguments.h", '#include "cuda/params.h"'),
        ("engine/decode.cpp", '#include "backend/backend.h"'),
        ("engine/decode.cpp", '#include "moeflux.h"'),
        ("python/register_ops.cpp", "#include <pybind11/numpy.h>"),
        ("kernels/cpu/matvec.cpp", '#include "kernels/cpu/matvec.h"'),
        ("core/x.cpp", '// #include "format/json.h" is what this must not do'),
    ],
)
def test_a_lawful_include_passes(tmp_path: Path, path: str, line: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(f"{line}\n")
    assert include_faults(tmp_path) == []
