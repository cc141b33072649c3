"""NVIDIA's own compiler takes the text of every kernel, for the oldest chips and for new ones. It comes as a package
and needs neither GPU nor driver."""

from __future__ import annotations

import functools
import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from moeflux import _core

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None, reason="the package of NVRTC is for Linux on x86-64 and 64-bit Arm"
)

ARCHITECTURES = ("sm_75", "sm_90a", "sm_120")
QUICKLY = ["--Ofast-compile=max"]  # hardly optimised, which takes an eighth of the time
# Products of warpgroups need all of it: otherwise the compiler says that it had to put something between them.
WARPGROUPS = re.compile(r"(matmul|expert_(gate_up|down))_(many|most)_.*")


def parts(file: str, architecture: str) -> list[str]:
    """What is compiled of a file: its kernels one by one where some need all of it, so that the others do not."""
    units = _core.cuda_units(file)
    return units if architecture == "sm_90a" and any(map(WARPGROUPS.fullmatch, units)) else [file]


@functools.cache
def compiled(name: str, architecture: str) -> list[str]:
    """The kernels in what comes of it, if the compiler has nothing to say."""
    is_quick = architecture != "sm_90a" or not WARPGROUPS.fullmatch(name)
    cubin, said = _core.cuda_compile(name, architecture, QUICKLY if is_quick else [])
    assert cubin[:4] == b"\x7fELF" and said == "", (name, architecture, said)
    # A section of constants is a kernel's alone: its arguments are there.
    return sorted({found.decode() for found in re.findall(rb"\.nv\.constant0\.(\w+)", cubin)})


def test_nvrtc_takes_every_kernel_without_a_word(request: pytest.FixtureRequest) -> None:
    """And the files have the kernels that the host believes they have. Large files are compiled for one of the chips
    each; with --every-architecture, for all."""
    files = _core.cuda_kernel_files()
    every = request.config.getoption("--every-architecture")
    pairs = [
        (file, architecture)
        for number, file in enumerate(files)
        for place, architecture in enumerate(ARCHITECTURES)
        if every or len(_core.cuda_units(file)) == 1 or number % len(ARCHITECTURES) == place
    ]
    assert {architecture for _, architecture in pairs} == set(ARCHITECTURES)
    with ThreadPoolExecutor(2) as pool:
        found = [[pool.submit(compiled, part, pair[1]) for part in parts(*pair)] for pair in pairs]
        for (file, _), kernels in zip(pairs, found, strict=True):
            assert sorted(kernel for part in kernels for kernel in part.result()) == sorted(files[file])


def test_a_unit_has_its_kernel_and_no_other(request: pytest.FixtureRequest) -> None:
    """Of files that are compiled kernel by kernel, the first and the last. With --every-architecture, of all such."""
    files = _core.cuda_kernel_files()
    apart = [file for file in files if len(_core.cuda_units(file)) > 1]
    assert "matmul" in apart and "digits" not in apart
    some = apart if request.config.getoption("--every-architecture") else ("attention", "delta", "matmul", "rows")
    kernels = [kernel for file in some for kernel in (files[file][0], files[file][-1])]
    for kernel in kernels:
        assert compiled(kernel, "sm_90a") == [kernel]
