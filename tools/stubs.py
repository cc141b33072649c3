"""Writes the type stub of moeflux._core from the built module: python tools/stubs.py python/moeflux/_core.pyi"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HEADER = "# Made by `make stubs` from the built module; a test compares it with the module.\n"

# The generator writes what strict type checkers refuse: generics without arguments, None for what may be None. A test
# holds names and arguments to the module, these types are for the checkers.
PRECISE = {
    r"(?:(?<=-> )|(?<=: ))tuple(?![\[\w])": "tuple[typing.Any, ...]",
    r"(?:(?<=-> )|(?<=: ))list(?![\[\w])": "list[typing.Any]",
    r"(?:(?<=-> )|(?<=: ))dict(?![\[\w])": "dict[str, typing.Any]",
    r"\bos\.PathLike(?!\[)": "os.PathLike[str]",
    r"\bnumpy\.ndarray(?!\[)": "numpy.typing.NDArray[typing.Any]",
    r"\bcollections\.abc\.Callable(?!\[)": "collections.abc.Callable[..., typing.Any]",
    r"(\w+): ([A-Z]\w+) = None": r"\1: \2 | None = None",
    r"(trace|counts): (Routing\w+)\)": r"\1: \2 | None)",
    r"(moments): (ActivationMoments)\)": r"\1: \2 | None)",
    r"def parse_json\(text: str,": "def parse_json(text: str | bytes,",
    r"(def variant_identity\(.*\)) -> typing\.Any": r"\1 -> dict[str, typing.Any]",
    r"def __eq__\(self, (\w+): \w+\)": r"def __eq__(self, \1: object)",
    r"__hash__: typing\.ClassVar\[None\] = None$": "__hash__: typing.ClassVar[None] = None  # type: ignore[assignment]",
}

# What the ops of a backend give are arrays.
OPS = re.compile(r"^class Ops:\n(?:(?: .*)?\n)*", re.MULTILINE)
ARRAY = "numpy.typing.NDArray[typing.Any]"
ARRAYS = {
    r"-> typing\.Any:(?=\s+\.\.\.)": f"-> {ARRAY}:",
    r"-> tuple\[typing\.Any, \.\.\.\]:(?=\s+\.\.\.)": f"-> tuple[{ARRAY}, {ARRAY}]:",
    r"-> list\[typing\.Any\]:(?=\s+\.\.\.)": f"-> list[{ARRAY}]:",
}


def stub_text() -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", "moeflux._core", "--exit-code", "-o", folder]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            sys.exit(run.stderr)
        text = (Path(folder) / "moeflux" / "_core.pyi").read_text()
    # What pybind11 accepts by conversion is more than what we promise.
    text = text.replace("typing.SupportsInt | typing.SupportsIndex", "int")
    text = text.replace("typing.SupportsFloat | typing.SupportsIndex", "float")
    for pattern, precise in PRECISE.items():
        text = re.sub(pattern, precise, text, flags=re.MULTILINE)
    for pattern, arrays in ARRAYS.items():
        text = OPS.sub(lambda found, pattern=pattern, arrays=arrays: re.sub(pattern, arrays, found[0]), text)
    # What differs from build to build is no part of the type.
    text = re.sub(r"^__(version|commit)__.*\n", "", text, flags=re.MULTILINE).rstrip()
    text += "\n\n__commit__: str\n\n__version__: str\n"
    return formatted(HEADER + text)


def formatted(text: str) -> str:
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--isolated",
        "--line-length=120",
        "--stdin-filename=_core.pyi",
        "-",
    ]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(stub_text())
