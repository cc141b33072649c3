"""What "auto" is on a machine with an NVIDIA GPU: CUDA where it works; the CPU, with a warning, where it should; the
CPU, and nothing to say, where there is no GPU. And what is kept of what the compiler made."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import moeflux
from emulator import cuda_gpu
from moeflux import DeviceError, _core
from moeflux.models import builtin
from support.metal import needs_device

pytestmark = needs_device


@pytest.fixture(autouse=True)
def device(only_emulated: None, on_cuda: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, and a file of one kernel in place of each of ours."""
    for file in _core.cuda_kernel_files():
        (tmp_path / f"{file}.cuh").write_text(
            f'struct P {{ float* x; }};\nextern "C" __global__ void {file}(const P p) {{ p.x[0] = 1; }}\n'
        )
    monkeypatch.setenv("MOEFLUX_CUDA_DIR", str(tmp_path))
    monkeypatch.setenv("MOEFLUX_CACHE", str(tmp_path / "cache"))
    cuda_gpu.install()
    cuda_gpu.builds()
    yield tmp_path / "cache" / "cuda"
    assert cuda_gpu.live_objects() == 0
    cuda_gpu.remove(on_cuda)


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFLUX_BACKEND", "auto")


def load(**options: str) -> moeflux.Model:
    return moeflux.load(builtin.path(), memory=None, context=64, **options)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"driver_version": 11040}, "expected a driver for CUDA 12.0 or newer, found one for 11.4: update the NVIDIA"),
        ({"major": 7}, "expected a GPU of compute capability 7.5 or newer, found an emulated NVIDIA GPU of 7.0"),
        ({"major": 13}, r"NVRTC 13.0 does not know an emulated NVIDIA GPU \(compute capability 13.0\): pip install -U"),
        ({"fail_in": b"cuModuleLoadData", "fail_at": 0, "fail_with": 222}, "does not take what NVRTC 13.0 made of"),
    ],
)
def test_auto_is_the_cpu_where_cuda_does_not_work(auto: None, how: dict[str, int | bytes], reason: str) -> None:
    with cuda_gpu.emulating(**how):
        _core.testing.set_cuda_libraries(*[str(cuda_gpu.driver_library())] * 2)
        with pytest.warns(UserWarning, match=f"CUDA does not work here, the CPU does the work: cuda: .*{reason}"):
            model = load()
        assert "cpu" in repr(model)


def test_auto_is_the_cpu_without_a_word_where_there_is_no_gpu(auto: None) -> None:
    with cuda_gpu.emulating(devices=0), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (_core.chosen_backend("auto"), _core.device_failure()) == ("cpu", "")
        with pytest.raises(DeviceError, match="cuda: expected an NVIDIA GPU, found a driver and no GPU"):
            load(backend="cuda")
    _core.testing.set_cuda_libraries("/no/such/libcuda.so.1", "/no/such/libnvrtc.so")
    assert (_core.chosen_backend("auto"), _core.device_failure()) == ("cpu", "")
    with pytest.raises(DeviceError, match=r"cuda: expected the NVIDIA driver \(libcuda.so.1\), found none"):
        load(backend="cuda")


def test_auto_is_cuda_where_it_works(auto: None) -> None:
    assert (_core.chosen_backend("auto"), _core.device_failure()) == ("cuda", "")
    name, facts = _core.cuda_facts()
    assert name == "an emulated NVIDIA GPU" and dict(facts)["NVRTC"] == "13.0"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_no_gpu(auto: None) -> None:
    """The driver cannot be started again there: "auto" is the CPU, and who asks for the GPU is told why."""
    assert _core.chosen_backend("auto") == "cuda"
    child = os.fork()
    if child == 0:
        try:
            with pytest.warns(UserWarning, match="the CPU does the work: cuda: .* a child that was forked from it"):
                model = load()
            assert "cpu" in repr(model) and model.session().prefill([1, 2, 3])
            with pytest.raises(DeviceError, match=r"forked from it \(\d+\): start the child as a new program"):
                load(backend="cuda")
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0) == (child, 0)
    assert _core.chosen_backend("auto") == "cuda"


def test_kernels_are_compiled_once(device: Path) -> None:
    """And again when what is kept is damaged, or another compiler made it. Without a compiler, what is kept will do."""
    units = ["digits", "elementwise", "embed_4", "row_4"]
    assert _core.cuda_to_compile(units) == units
    for unit in units:
        _core.cuda_make(unit)
    assert cuda_gpu.builds() == ["digits", "elementwise", "matrix_rows", "row"] and _core.cuda_to_compile(units) == []
    kept = sorted(device.iterdir())
    assert len(kept) == len(units) and all(file.suffix == ".cubin" for file in kept)
    whole = kept[0].read_bytes()
    for damaged in (b"", whole[:30], whole[:-1], whole[:-1] + b"x", b"\0" * len(whole), b"moeflux cubin 1\n\n\n"):
        kept[0].write_bytes(damaged)
        (again,) = _core.cuda_to_compile(units)
        _core.cuda_make(again)
        assert len(cuda_gpu.builds()) == 1 and kept[0].read_bytes() == whole
    with cuda_gpu.emulating(checked=True):  # the stand-in's compiler is 13.1 then
        cuda_gpu.install()
        assert _core.cuda_to_compile(units) == units
    cuda_gpu.install(compiler=False)
    assert _core.cuda_to_compile(units) == []
    _core.cuda_make(units[0])
    kept[0].unlink()
    with pytest.raises(DeviceError, match=r'found none: pip install "moeflux\[cuda\]"'):
        for unit in units:
            _core.cuda_make(unit)


def test_a_unit_is_a_kernel_or_a_file(device: Path) -> None:
    """Each kernel of a large file is compiled by itself, and kept under a key of its own."""
    files = _core.cuda_kernel_files()
    assert _core.cuda_units("matmul") == files["matmul"] and _core.cuda_units("digits") == ["digits"]
    for unit in ("matmul_one_4_64", "matmul_one_4", "matmul"):
        assert _core.cuda_to_compile([unit]) == [unit]
        _core.cuda_make(unit)
        assert _core.cuda_to_compile([unit]) == []
    assert len(list(device.iterdir())) == 3
    with pytest.raises(DeviceError, match="cuda: expected a kernel or a file of kernels, found matmul_one_7"):
        _core.cuda_make("matmul_one_7")


def test_writers_at_the_same_time(device: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_core.cuda_make, ["digits"] * 8))
    assert _core.cuda_to_compile(["digits"]) == [] and len(list(device.iterdir())) == 1


def test_a_cache_that_nobody_may_write_is_done_without(device: Path) -> None:
    device.parent.write_text("a file where the folder would be")
    _core.cuda_make("digits")
    assert cuda_gpu.builds() == ["digits"] and _core.cuda_to_compile(["digits"]) == ["digits"]


def test_kernels_that_do_not_compile(device: Path, tmp_path: Path) -> None:
    (tmp_path / "row.cuh").write_text('struct P { float* x; };\nextern "C" __global__ void f(const P p) { y(); }\n')
    with pytest.raises(DeviceError, match=r"cuda: row\.cuh does not compile for sm_90a: .*'y'"):
        _core.cuda_make("row_4")
