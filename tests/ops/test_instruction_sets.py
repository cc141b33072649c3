"""Which kernels there are is what the processor says, and no flag of the compiler."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from moeflux import _core, available_isas

CPUINFO = Path("/proc/cpuinfo")
NEEDED = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512vnni": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
}


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not CPUINFO.exists(), reason="no x86-64 under Linux, which says what it has"
)
def test_the_instruction_sets_are_those_that_linux_lists() -> None:
    """Linux lists what its processor has and what it saves the registers of. AMX also takes a permission."""
    line = next(line for line in CPUINFO.read_text().splitlines() if line.startswith("flags"))
    flags = set(line.split(":")[1].split())
    assert {name for name in available_isas() if name in NEEDED} == {
        name for name, needed in NEEDED.items() if needed <= flags
    }
    if _core.testing.missing_of_amx() == "tiles":  # and tests have a program in their place
        flags |= {"amx_tile", "amx_int8", "amx_bf16"}
    assert ("amx" in available_isas()) <= ({"amx_tile", "amx_int8", "amx_bf16", "avx512_vnni"} <= flags)
