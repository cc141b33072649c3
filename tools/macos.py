"""What can be said about macOS without a Mac.

python tools/macos.py compile [FILE ...]    to Mach-O objects for Apple silicon, by the package ziglang, which brings
                                            Darwin's headers; Apple's frameworks are the tests' stand-in. All of
                                            csrc but its Python module when no file is named
python tools/macos.py api FOLDER            the stand-in against Apple's own data: PyObjC's record of the SDK (enum
                                            values, types) and metal-cpp's list of selectors, downloaded from PyPI
                                            into FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[1]
STAND_IN = ROOT / "tests" / "emulator" / "apple" / "include"
TARGET = "aarch64-macos.14.0"
MACH_O, ARM64, OBJECT = 0xFEEDFACF, 0x0100000C, 1
FLAGS = ["-std=c++20", "-O0", f"-I{ROOT}/csrc", f"-I{ROOT}/metal", f"-I{STAND_IN}", "-Wall", "-Wextra", "-Werror"]
OBJECTIVE = ["-x", "objective-c++", "-fobjc-arc", "-fblocks"]


class Refused(Exception):
    """The compiler's words."""


# ---- Compiling ------------------------------------------------------------------------------------------------------


def all_files() -> list[Path]:
    found = [*ROOT.glob("csrc/**/*.cpp"), *ROOT.glob("csrc/**/*.mm")]
    return sorted(file for file in found if file.parent.name != "python")


def compile_file(file: Path, to: Path) -> None:
    """A Mach-O object for arm64."""
    cache = str(ROOT / "build" / "emulator" / "zig")
    language = OBJECTIVE if file.suffix == ".mm" else []
    done = subprocess.run(
        [sys.executable, "-m", "ziglang", "c++", "-target", TARGET, *FLAGS, *language, "-c", file, "-o", to],
        capture_output=True, text=True, check=False,
        env=os.environ | {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache},
    )  # fmt: skip
    if done.returncode:
        raise Refused(done.stderr.strip())
    magic, cpu, _, kind = struct.unpack("<4I", to.read_bytes()[:16])
    if (magic, cpu, kind) != (MACH_O, ARM64, OBJECT):
        raise Refused(f"{file}: expected a Mach-O object for arm64, found {magic:x}, {cpu:x}, {kind}")


def compile_all(files: list[Path]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            try:
                compile_file(file, Path(folder) / "object.o")
            except Refused as error:
                failed += 1
                print(f"{file}: {error}")
    print(f"{len(files) - failed} of {len(files)} files are objects for {TARGET}")
    return failed


# ---- The stand-in ---------------------------------------------------------------------------------------------------


def declared() -> tuple[dict[str, int], dict[str, tuple[str, list[str]]]]:
    """Of Metal.h: enum values by name, and return type and argument types by selector."""
    done = subprocess.run(
        ["clang++-19", "-x", "objective-c++", "-std=c++20", "-fobjc-arc", "-fobjc-runtime=macosx", "-fblocks",
         "--target=arm64-apple-macosx14.0", "-fsyntax-only", "-nostdlibinc", f"-I{STAND_IN}",
         "-Xclang", "-ast-dump=json", STAND_IN / "Metal" / "Metal.h"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    values: dict[str, int] = {}
    selectors: dict[str, tuple[str, list[str]]] = {}
    for node, owner in _nodes(json.loads(done.stdout), ""):
        if node.get("kind") == "EnumConstantDecl" and node["name"].startswith("MTL"):
            values[node["name"]] = _value(node) or 0
        elif node.get("kind") == "ObjCMethodDecl" and owner.startswith("MTL"):
            arguments = [each["type"] for each in node.get("inner", []) if each.get("kind") == "ParmVarDecl"]
            selectors[node["name"]] = (_encoding(node["returnType"]), [_encoding(each) for each in arguments])
    return values, selectors


def _nodes(node: dict[str, Any], owner: str) -> Iterator[tuple[dict[str, Any], str]]:
    if node.get("kind") in ("ObjCProtocolDecl", "ObjCInterfaceDecl"):
        owner = node.get("name", "")
    yield node, owner
    for each in node.get("inner", []):
        yield from _nodes(each, owner)


def _value(node: dict[str, Any]) -> int | None:
    if "value" in node and node.get("kind") in ("ConstantExpr", "IntegerLiteral"):
        return int(node["value"])
    return next((value for each in node.get("inner", []) if (value := _value(each)) is not None), None)


def _encoding(type: dict[str, str]) -> str:
    """As Objective-C writes types; nothing where there is no telling."""
    if "MTLSize" in type["qualType"]:
        return "{MTLSize=QQQ}"
    plain = type.get("desugaredQualType", type["qualType"]).replace("const ", "")
    known = {"bool": "Z", "unsigned long": "Q", "unsigned long long": "Q", "long": "q", "double": "d", "void": "v"}
    return "Z" if type["qualType"] == "BOOL" else known.get(plain, "")


def download(package: str, folder: Path) -> zipfile.ZipFile:
    if not list(folder.glob(f"{package.replace('-', '_')}-*.whl")):
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
             "--python-version", "3.12", "--platform", "macosx_15_0_arm64", "--platform", "macosx_10_13_universal2",
             "--dest", folder, package],
            check=True,
        )  # fmt: skip
    return zipfile.ZipFile(next(folder.glob(f"{package.replace('-', '_')}-*.whl")))


def sdk(folder: Path) -> tuple[dict[str, int], dict[str, Any], set[str]]:
    """As PyPI's packages know it: enum values, what is known of methods by selector, every selector."""
    metadata = download("pyobjc-framework-metal", folder).read("Metal/_metadata.py").decode()
    values = {name: int(value) for name, value in re.findall(r"\$?(MTL\w+)@(-?\d+)", metadata)}
    methods: dict[str, Any] = {}
    objc = MagicMock()
    objc.registerMetaDataForSelector = lambda _, name, known: methods.setdefault(name.decode(), known)
    sys.modules["objc"] = objc
    exec(compile(metadata, "_metadata.py", "exec"), types.ModuleType("metadata").__dict__)
    bridge = download("mlx-metal", folder).read("mlx/include/metal_cpp/Metal/MTLHeaderBridge.hpp").decode()
    return values, methods, set(re.findall(r'"([A-Za-z_][\w:]*)"', bridge)) | set(methods)


def check_api(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    values, selectors = declared()
    known_values, methods, known = sdk(folder)
    wrong = [f"{name}: expected {known_values.get(name)}, found {value}" for name, value in values.items()
             if known_values.get(name) != value]  # fmt: skip
    wrong += [f"{name}: expected a selector of the SDK, found none" for name in selectors if name not in known]
    compared = 0
    for name, (result, arguments) in selectors.items():
        about = methods.get(name, {})
        pairs = [(result, about.get("retval", {}))]
        pairs += [(arguments[i - 2], each) for i, each in about.get("arguments", {}).items() if i - 2 < len(arguments)]
        for found, each in pairs:
            expected = each.get("type", b"")
            expected = expected.decode() if isinstance(expected, bytes) else expected
            if not found or not expected or expected[0] not in "Qqd{ZB":
                continue
            compared += 1
            if found != expected.replace("B", "Z"):
                wrong.append(f"{name}: expected {expected}, found {found}")
    print(
        "\n".join([*wrong, f"{len(values)} values, {len(selectors)} selectors, {compared} types: {len(wrong)} differ"])
    )
    return len(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("compile").add_argument("files", nargs="*", type=Path)
    commands.add_parser("api").add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compile":
        raise SystemExit(compile_all(arguments.files or all_files()) > 0)
    raise SystemExit(check_api(arguments.folder) > 0)


if __name__ == "__main__":
    main()
