"""`moeflux doctor --metal` and `--cuda`, on the emulated GPUs: all passes, and what fails is a row of the table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emulator import cuda_gpu, gpu
from moeflux import _core
from moeflux.cli import main
from support.gpu_ops import EMULATORS, REAL
from support.metal import needs_device

pytestmark = needs_device

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def devices(on_cuda: str | None) -> Iterator[None]:
    gpu.install()
    if "cuda" not in REAL:
        cuda_gpu.install()
    yield
    assert gpu.live_objects() == 0
    cuda_gpu.remove(on_cuda)


@pytest.mark.parametrize(
    ("which", "name", "fact", "file"),
    [
        ("metal", "an emulated GPU", "recommended working set", "matmul"),
        ("cuda", "an emulated NVIDIA GPU", "compute capability", "matmul_rows"),
    ],
)
def test_all_passes(capsys: pytest.CaptureFixture[str], which: str, name: str, fact: str, file: str) -> None:
    assert main(["doctor", f"--{which}"]) == 0
    text = capsys.readouterr().out
    assert (f"gpu                     {name}" in text or which in REAL) and fact in text
    assert "FAILED" not in text and "passed" in text.splitlines()[-1]
    rows = ("open the GPU", "matvec 3-bit g32", "experts Q4_K", "matmul NVFP4", "attention 512 bf16", "gated_delta")
    rows += ("a whole model", *(("shortlist", "bits of experts 4-bit g64") if which == "cuda" else ()))
    assert all(f"  {row}" in text for row in (f"compile {file}  ", *rows))


def broken(capsys: pytest.CaptureFixture[str], which: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """What failed and why, and all checks."""
    assert main(["doctor", f"--{which}", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    failed = {check["name"]: check["failure"] for check in report["checks"] if check["failure"]}
    assert report["failures"] == len(failed)
    return failed, report["checks"]


def changed(folder: Path, kind: str, changes: dict[str, tuple[str, str]]) -> None:
    """The folder of kernels, in which files have other words."""
    for file in (ROOT / kind).iterdir():
        text = file.read_text()
        if file.name in changes:
            assert changes[file.name][0] in text
            text = text.replace(*changes[file.name])
        (folder / file.name).write_text(text)


def test_kernels_that_are_wrong_are_rows_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file with an error, one with a kernel that computes something else."""
    error = ("inline bool is_nan", "inline boole is_nan")
    changed(
        tmp_path, "metal", {"route.metal": error, "delta.metal": ("correction = (value - ", "correction = (value + ")}
    )
    monkeypatch.setenv("MOEFLUX_METAL_DIR", str(tmp_path))
    failed, checks = broken(capsys, "metal")
    assert {"compile route", "route_softmax", "route_grouped", "top_k", "gated_delta"} <= set(failed)
    assert "route.metal does not compile" in failed["compile route"] and "boole" in failed["compile route"]
    assert failed["gated_delta"].startswith("off by ")
    assert len(failed) < len(checks) / 4


def test_kernels_of_an_nvidia_gpu_likewise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one whose sums differ in their last bit."""
    changes = {
        "delta.cuh": ("correction = (value - ", "correction = (value + "),
        "digits.cuh": ("fragment_rows + row] = group;", "fragment_rows + row] = {group.unit * 1.0000001f, group.sum};"),
        "shortlist.cuh": ("float greatests[", "floa greatests["),
    }
    changed(tmp_path, "cuda", changes)
    monkeypatch.setenv("MOEFLUX_CUDA_DIR", str(tmp_path))
    failed, checks = broken(capsys, "cuda")
    assert all(failed[name].startswith("off by ") for name in ("gated_delta", "bits of experts 4-bit g64"))
    assert not any(name.startswith("experts ") for name in failed)  # these may differ a little
    assert {"compile shortlist", "shortlist"} <= set(failed) and "floa" in failed["compile shortlist"]
    assert len(failed) < len(checks) / 4


@pytest.mark.parametrize("which", EMULATORS)
def test_no_gpu(capsys: pytest.CaptureFixture[str], which: str) -> None:
    if which in REAL:
        pytest.skip("it is there")
    if which == "metal":
        gpu.remove()
    else:
        _core.testing.set_cuda_libraries("/no/such/libcuda.so", "/no/such/libnvrtc.so")
    assert main(["doctor", f"--{which}"]) != 0
    said = {"metal": "metal: expected macOS on Apple silicon", "cuda": "cuda: "}
    assert said[which] in capsys.readouterr().err


def test_every_kernel_is_made_ready() -> None:
    assert sum(_core.metal_compile(file) for file in _core.metal_shader_files()) > 230
