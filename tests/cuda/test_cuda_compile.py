"""NVIDIA's own compiler takes the text of every kernel, for the oldest chips and for new ones. It comes as a package
and needs neither GPU nor driver."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest

from moeflux import _core

ARCHITECTURES = ("sm_75", "sm_90a", "sm_120")
# These take most of the time, so each is compiled for one of them; --every-architecture compiles all for all.
LARGE = {
    "attention": "sm_75",
    "expert_down": "sm_75",
    "expert_down_decoded": "sm_120",
    "expert_gate_up": "sm_90a",
    "expert_gate_up_decoded": "sm_75",
    "matmul": "sm_120",
    "matmul_decoded": "sm_90a",
    "matmul_rows": "sm_90a",
}


@pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None, reason="the package of NVRTC is for Linux on x86-64 and 64-bit Arm"
)
def test_nvrtc_takes_every_kernel_without_a_word(request: pytest.FixtureRequest) -> None:
    """With the least optimisation, which takes half of the time."""

    def said(pair: tuple[str, str]) -> str:
        cubin, words = _core.cuda_compile(*pair, ["--ptxas-options=-O0"])
        assert cubin[:4] == b"\x7fELF"
        return words

    files = sorted(_core.cuda_kernel_files(), reverse=True)
    large = {} if request.config.getoption("--every-architecture") else LARGE
    assert len(files) > 5 and large.keys() <= set(files)
    pairs = [(file, each) for file in files for each in ARCHITECTURES if large.get(file, each) == each]
    with ThreadPoolExecutor(2) as pool:
        assert [pair for pair, words in zip(pairs, pool.map(said, pairs), strict=True) if words] == []
