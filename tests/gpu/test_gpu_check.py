"""`moeflux doctor --metal`, on the emulated GPU: all passes, and what fails is a row of the table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulator import gpu
from moeflux import _core
from moeflux.cli import main
from support.metal import needs_device

pytestmark = needs_device


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    gpu.install()
    yield
    assert gpu.live_objects() == 0


def test_all_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--metal"]) == 0
    text = capsys.readouterr().out
    assert "gpu                     an emulated GPU" in text and "recommended working set" in text
    assert "FAILED" not in text and "passed" in text.splitlines()[-1]
    for row in ("compile matmul  ", "matvec 3-bit g32", "attention 512 bf16", "gated_delta", "a whole model"):
        assert f"  {row}" in text


def test_kernels_that_are_wrong_are_rows_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file with an error, one with a kernel that computes something else."""
    for file in (Path(__file__).parents[2] / "metal").iterdir():
        text = file.read_text()
        if file.name == "route.metal":
            text = text.replace("inline bool is_nan", "inline boole is_nan")
        if file.name == "delta.metal":
            text = text.replace("const float correction = (value - ", "const float correction = (value + ")
        (tmp_path / file.name).write_text(text)
    monkeypatch.setenv("MOEFLUX_METAL_DIR", str(tmp_path))
    assert main(["doctor", "--metal", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    failed = {check["name"]: check["failure"] for check in report["checks"] if check["failure"]}
    assert {"compile route", "route_softmax", "route_grouped", "top_k", "gated_delta"} <= set(failed)
    assert "route.metal does not compile" in failed["compile route"] and "boole" in failed["compile route"]
    assert failed["gated_delta"].startswith("off by ")
    assert report["failures"] == len(failed) < len(report["checks"]) / 4


def test_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.remove()
    assert main(["doctor", "--metal"]) != 0
    assert "metal: expected macOS on Apple silicon" in capsys.readouterr().err


def test_every_kernel_is_made_ready() -> None:
    assert sum(_core.metal_compile(file) for file in _core.metal_shader_files()) > 90
