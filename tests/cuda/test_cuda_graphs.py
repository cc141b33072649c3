"""The emulated NVIDIA GPU lets kernels of a graph come as early as a card does: what they read before they wait is what
was there before the graph, unless all edges are ordinary."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_uint32, c_uint64, c_void_p
from pathlib import Path

import pytest

from emulator import cuda_gpu
from emulator.build import library
from support.metal import needs_device

pytestmark = needs_device

KERNELS = """
#include "basics.h"
struct GiveParams {
  u32* to;
  u64 word;
};
extern "C" __global__ void give(const GiveParams params) {
  begin_kernel();
  *params.to = u32(params.word);
}
extern "C" __global__ void give_late(const GiveParams params) {
  wait_for_previous();
  let_next_come();
  *params.to = u32(params.word);
}
struct LookParams {
  const u32* from;
  u32* to;
  u64 waits_first;
};
extern "C" __global__ void look(const LookParams params) {
  let_next_come();
  if (params.waits_first) wait_for_previous();
  const u32 found = *params.from;
  wait_for_previous();
  *params.to = found;
}
"""

PINNED = 3  # portable, and mapped
ORDINARY, PROGRAMMATIC = bytes(8), bytes([1, 0, 1, 0, 0, 0, 0, 0])
OLD, NEW = 7, 8


class Launch(ctypes.Structure):
    _fields_ = [
        ("function", c_void_p),
        ("extents", c_uint32 * 7),  # of the grid and of a block, and bytes of shared memory
        ("params", ctypes.POINTER(c_void_p)),
        ("extra", c_void_p),
    ]


class Driver:
    """A stream, kernels, and three words that the host sees, too."""

    def __init__(self, kernels: Path) -> None:
        self._calls = ctypes.CDLL(str(cuda_gpu.driver_library()))
        self("cuCtxPushCurrent_v2", None)
        self.stream, self._module, words = c_void_p(), c_void_p(), c_void_p()
        self("cuStreamCreate", ctypes.byref(self.stream), 1)
        self("cuModuleLoadData", ctypes.byref(self._module), f"moeflux stand-in cubin\n{kernels}\n".encode())
        self("cuMemHostAlloc", ctypes.byref(words), ctypes.c_size_t(12), PINNED)
        self.words = (c_uint32 * 3).from_address(words.value)

    def __call__(self, name: str, *arguments: object) -> None:
        assert getattr(self._calls, name)(*arguments) == 0, name

    def place(self, i: int) -> int:
        return ctypes.addressof(self.words) + 4 * i

    def run(self, launches: list[tuple[str, list[int]]], edges: list[bytes]) -> None:
        graph, exec_ = c_void_p(), c_void_p()
        self("cuGraphCreate", ctypes.byref(graph), 0)
        nodes = (c_void_p * len(launches))()
        for i, (name, numbers) in enumerate(launches):
            function, node = c_void_p(), c_void_p()
            self("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
            params = (c_uint64 * len(numbers))(*numbers)
            pointers = (c_void_p * 1)(ctypes.addressof(params))
            launch = Launch(function, (c_uint32 * 7)(1, 1, 1, 1, 1, 1, 0), pointers)
            self("cuGraphAddKernelNode", ctypes.byref(node), graph, None, ctypes.c_size_t(0), ctypes.byref(launch))
            nodes[i] = node.value
        behind = ctypes.byref(nodes, ctypes.sizeof(c_void_p))
        self("cuGraphAddDependencies_v2", graph, nodes, behind, b"".join(edges), ctypes.c_size_t(len(edges)))
        self("cuGraphInstantiateWithFlags", ctypes.byref(exec_), graph, c_uint64(0))
        self("cuGraphLaunch", exec_, self.stream)
        self("cuStreamSynchronize", self.stream)
        self("cuGraphExecDestroy", exec_)
        self("cuGraphDestroy", graph)

    def close(self) -> None:
        self("cuMemFreeHost", c_void_p(self.place(0)))
        self("cuModuleUnload", self._module)
        self("cuStreamDestroy_v2", self.stream)
        self("cuCtxPopCurrent_v2", None)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graphs") / "early.cuh"
    path.write_text(KERNELS)
    return library(path, checked=False)


@pytest.fixture
def driver(only_emulated: None, kernels: Path) -> Iterator[Driver]:
    cuda_gpu.install()
    driver = Driver(kernels)
    yield driver
    driver.close()
    assert cuda_gpu.live_objects() == 0


# As an H100 with driver 580 had it: docs/cuda-evidence.md.
@pytest.mark.parametrize(
    ("edges", "early"),
    [
        ([PROGRAMMATIC, ORDINARY], OLD),
        ([PROGRAMMATIC, PROGRAMMATIC], OLD),
        ([ORDINARY, ORDINARY], NEW),
        ([ORDINARY, PROGRAMMATIC], OLD),
    ],
)
def test_what_is_read_before_the_wait(driver: Driver, edges: list[bytes], early: int) -> None:
    for waits_first, expected in ((0, early), (1, NEW)):
        driver.words[:] = [OLD, 0, 0]
        launches = [
            ("give", [driver.place(2), 1]),
            ("give", [driver.place(0), NEW]),
            ("look", [driver.place(0), driver.place(1), waits_first]),
        ]
        driver.run(launches, edges)
        assert list(driver.words) == [NEW, expected, 1]


# Where a kernel waits before it lets the next one come, whatever was before it has ended when that comes.
@pytest.mark.parametrize(("first", "second", "early"), [("give", "give_late", NEW), ("give_late", "give", OLD)])
def test_what_a_kernel_that_waits_first_holds_up(driver: Driver, first: str, second: str, early: int) -> None:
    driver.words[:] = [OLD, 0, 0]
    launches = [
        (first, [driver.place(0), NEW]),
        (second, [driver.place(2), 1]),
        ("look", [driver.place(0), driver.place(1), 0]),
    ]
    driver.run(launches, [PROGRAMMATIC, PROGRAMMATIC])
    assert list(driver.words) == [NEW, early, 1]
