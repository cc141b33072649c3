"""This machine, as far as Python can see it: the content of `moeflux info` without a target."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeflux import _core
from moeflux._core import __version__, isas
from moeflux.errors import DeviceError
from moeflux.files import system_text
from moeflux.models.presets import PRESETS
from moeflux.sizes import size_text

__all__ = ["Machine", "this_machine"]

FEATURES = (
    "sse4_2 avx2 fma f16c avx512f avx512bw avx512vl avx512_vnni avx_vnni avx512_bf16 avx512_fp16 amx_tile amx_int8 "
    "amx_bf16 asimd asimdhp asimddp i8mm bf16 sve sve2 sme"
).split()
"""Instruction sets that matter to matrix kernels, as Linux spells them."""


@dataclass(frozen=True)
class Machine:
    version: str
    python: str
    numpy: str
    platform: str
    cpu: str
    cpus: int
    cpu_features: list[str]
    memory_bytes: int
    backend: str
    metal: str  # the GPU, or why there is none
    cuda: str  # likewise

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "presets": list(PRESETS)}

    def __str__(self) -> str:
        rows = [
            ("moeflux", f"{self.version} (Python {self.python}, NumPy {self.numpy})"),
            ("platform", self.platform),
            ("cpu", f"{self.cpus} x {self.cpu}"),
            ("  features", " ".join(self.cpu_features) or "unknown"),
            ("memory", size_text(self.memory_bytes)),
            ("backend", self.backend),
            ("metal", self.metal),
            ("cuda", self.cuda),
            ("presets", ", ".join(PRESETS)),
        ]
        return "\n".join(f"{label:<20}{text}" for label, text in rows)


def this_machine() -> Machine:
    name, features = _linux_cpu() if sys.platform == "linux" else _mac_cpu()
    return Machine(
        version=__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=name or platform.processor() or platform.machine(),
        cpus=os.cpu_count() or 1,
        cpu_features=features,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        backend=f"{_core.chosen_backend('auto')}; cpu kernels for {', '.join(isas())}",
        metal=_gpu("metal", _core.metal_facts),
        cuda=_cuda(),
    )


def _gpu(name: str, facts: Callable[[], tuple[str, object]]) -> str:
    """The GPU's own name, or why it is not used."""
    try:
        found, _ = facts()
    except DeviceError as error:
        return f"absent: {str(error).removeprefix(f'{name}: ')}"
    return _core.device_failure() or found


def _cuda() -> str:
    found = _gpu("cuda", _core.cuda_facts)
    with contextlib.suppress(DeviceError):
        names = _core.cuda_names()
        if len(names) > 1 and found == names[0]:  # those that can be asked for by number
            return "; ".join(f"{number}: {name}" for number, name in enumerate(names))
    return found


def _linux_cpu() -> tuple[str, list[str]]:
    try:
        lines = system_text(Path("/proc/cpuinfo")).splitlines()
    except OSError:
        return "", []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip()}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return fields.get("model name", ""), [feature for feature in FEATURES if feature in flags]


def _mac_cpu() -> tuple[str, list[str]]:
    """From sysctl: the name, and FEAT_DotProd and its like where they are 1."""
    name = _sysctl("-n", "machdep.cpu.brand_string").strip()
    settings = (line.partition(":") for line in _sysctl("hw.optional.arm").splitlines())
    features = [key.rpartition(".")[2] for key, _, value in settings if value.strip() == "1"]
    wanted = ("FEAT_FP16", "FEAT_DotProd", "FEAT_I8MM", "FEAT_BF16", "FEAT_SME", "FEAT_SME2")
    return name, [feature for feature in features if feature in wanted]


def _sysctl(*arguments: str) -> str:
    try:
        return subprocess.run(["sysctl", *arguments], capture_output=True, text=True, timeout=10, check=False).stdout
    except OSError:
        return ""
