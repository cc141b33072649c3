"""What "auto" is on a machine with a GPU: Metal where it works; the CPU, with a warning, where it should; the CPU, and
nothing to say, where the GPU is not one of those that the kernels are for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import moeflux
from emulator import gpu
from moeflux import ArgumentError, DeviceError, _core
from moeflux.cli import main
from moeflux.machine.machine import this_machine
from moeflux.measure import doctor
from moeflux.models import builtin
from support.metal import needs_device

pytestmark = needs_device


@pytest.fixture(autouse=True)
def device(on_metal: bool) -> Iterator[None]:
    gpu.install()
    yield
    gpu.install(preferred=on_metal)
    gc.collect()
    assert gpu.live_objects() == 0


def load(**options: str) -> moeflux.Model:
    return moeflux.load(builtin.path(), memory=None, context=64, **options)


def test_auto_is_metal_where_it_works() -> None:
    assert _core.chosen_backend("auto") == "cpu"
    gpu.install(preferred=True)
    assert _core.device_failure() == ""
    assert "an emulated GPU" in repr(load())


def test_auto_is_the_cpu_where_metal_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFLUX_METAL_DIR", str(tmp_path))
    for file in _core.metal_shader_files():
        (tmp_path / f"{file}.metal").write_text("kernel void nothing(device float* x [[buffer(0)]]) { x[0] = y; }\n")
    gpu.install(preferred=True)
    with pytest.warns(UserWarning, match=r"Metal does not work here, the CPU does the work: \w+\.metal does not"):
        model = load()
    assert "cpu" in repr(model)
    with pytest.raises(DeviceError, match=r"does not compile: .*undeclared identifier 'y'"):
        load(backend="metal")


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (6, "expected an Apple GPU (M1 or newer), found an emulated GPU"),  # those of hosted runners are such
        (0, "expected a GPU that Metal drives, found none"),
    ],
)
def test_a_gpu_that_is_not_supported_is_no_warning(
    family: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Warnings are errors here. The machine and doctor say why; asked for by name, it is an error."""
    monkeypatch.setenv("MOEFLUX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "QUICK", replace(doctor.QUICK, seconds=0.01, file_bytes=20 * doctor.DEFAULT_EXPERT))
    with gpu.emulating(family=family):
        gpu.install(preferred=True)
        assert (_core.chosen_backend("auto"), _core.device_failure()) == ("cpu", "")
        assert "cpu" in repr(load())
        machine = this_machine()
        assert machine.backend.startswith("cpu; ") and machine.metal == f"absent: {reason}"
        with pytest.raises(DeviceError) as error:
            load(backend="metal")
        assert str(error.value) == f"metal: {reason}"
        assert main(["doctor", "--quick", str(tmp_path)]) == 0
        assert f"metal               absent: {reason}\n" in capsys.readouterr().out
        assert main(["doctor", "--metal"]) == 2
        assert capsys.readouterr().err == f"moeflux doctor: metal: {reason}\n"


def test_the_environment_says_what_auto_is(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.install(preferred=True)
    for wanted, found in (("cpu", "cpu"), ("metal", "metal"), ("auto", "metal")):
        monkeypatch.setenv("MOEFLUX_BACKEND", wanted)
        assert _core.chosen_backend("auto") == found
        assert _core.chosen_backend("cpu") == "cpu"
    monkeypatch.setenv("MOEFLUX_BACKEND", "gpu")
    with pytest.raises(ArgumentError, match='MOEFLUX_BACKEND: expected auto, cpu, cuda or metal, found "gpu"'):
        load()


def test_no_gpu() -> None:
    gpu.remove()
    with pytest.raises(DeviceError, match="metal: expected macOS on Apple silicon"):
        _core.metal_facts()
    with pytest.raises(ArgumentError, match='backend: expected auto, cpu, cuda or metal, found "gpu"'):
        _core.chosen_backend("gpu")
