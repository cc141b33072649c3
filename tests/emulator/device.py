"""Kernels by name, dispatched over NumPy arrays."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

BUFFERS = 31
ORDERS = (0, 1, 20, 21)  # ascending, descending, two at random
EVERY_ORDER = False  # conftest.py sets it


def runs() -> list[tuple[bool, int]]:
    """How a kernel is run, whose bits must always be the same: checked or not, and in which order. Up and down without
    the checker, and once at random under it. That finds a fault in whatever order threads run (test_emulator.py). With
    --every-order, all are run both ways."""
    if EVERY_ORDER:
        return [(checked, order) for checked in (False, True) for order in ORDERS]
    return [(False, ORDERS[0]), (False, ORDERS[1]), (True, ORDERS[-1])]


class Buffer(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


class _Options(ctypes.Structure):
    _fields_ = [
        ("order", ctypes.c_uint32),
        ("check", ctypes.c_bool),
        ("strict", ctypes.c_bool),
        ("open_ended", ctypes.c_bool),
    ]


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("parameter_count", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
    ]


_Wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_bool)


class Fault(Exception):
    """What the checker found, a problem a line."""


class Library:
    """One compiled file of kernels."""

    def __init__(self, path: Path, checked: bool) -> None:
        self.path, self.checked = path, checked
        self._library = ctypes.CDLL(str(path))
        self._library.msl_report.restype = ctypes.c_char_p
        self._library.msl_kernels.restype = ctypes.POINTER(_Kernel)
        count = ctypes.c_uint32()
        table = self._library.msl_kernels(ctypes.byref(count))
        self._kernels = {table[i].name.decode(): table[i] for i in range(count.value)}

    @property
    def names(self) -> list[str]:
        return list(self._kernels)

    def dispatch(
        self,
        name: str,
        buffers: Sequence[np.ndarray | None],
        threadgroups: Sequence[int],
        threads: Sequence[int],
        *,
        order: int = 0,
        strict: bool = True,
    ) -> None:
        """Changes the arrays that the kernel writes. Raises Fault."""
        bound = (Buffer * BUFFERS)()
        for place, array in zip(bound, buffers, strict=False):
            if array is not None:
                assert array.flags.c_contiguous
                place.data, place.bytes = array.ctypes.data, array.nbytes
        options = _Options(order, self.checked, strict and self.checked, False)
        problems = self._library.msl_dispatch(
            ctypes.byref(self._kernels[name]), bound, _extent(threadgroups), _extent(threads), ctypes.byref(options)
        )
        self._raise_if(problems)

    def launch(
        self,
        name: str,
        params: ctypes.Structure,
        memory: Sequence[np.ndarray],
        blocks: int,
        threads: int,
        *,
        order: int = 0,
        before: Callable[[], None] | None = None,
    ) -> None:
        """A kernel of CUDA's, which finds `memory` by its addresses. `before` is the kernel that it waits for."""
        bound = (Buffer * len(memory))(*[Buffer(array.ctypes.data, array.nbytes) for array in memory])
        options = _Options(order, self.checked, self.checked, False)
        wait = _Wait(lambda *_: before()) if before else ctypes.cast(None, _Wait)
        problems = self._library.msl_launch(
            ctypes.byref(self._kernels[name]), ctypes.byref(params), bound, len(memory), _extent([blocks]),
            _extent([threads]), 0, ctypes.byref(options), wait, None
        )  # fmt: skip
        self._raise_if(problems)

    def _raise_if(self, problems: int) -> None:
        if problems:
            raise Fault(self._with_lines(self._library.msl_report().decode()))

    def _with_lines(self, report: str) -> str:
        """Places in the code, written @hex, as lines of the kernel's file."""
        return re.sub(r"@([0-9a-f]+)", lambda at: self._line(int(at.group(1), 16)), report)

    def _line(self, offset: int) -> str:
        # The call, not what it returns to. Inlined functions come innermost first: the shim's are not of interest.
        command = ["addr2line", "-i", "-s", "-e", str(self.path), hex(offset - 1)]
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
        except OSError:
            found = []
        own = (line for line in found if line.partition(":")[0].endswith((".metal", ".cuh")))
        return next(own, found[0] if found else hex(offset))


def _extent(sizes: Sequence[int]) -> ctypes.Array:
    return (ctypes.c_uint32 * 3)(*(*sizes, 1, 1)[:3])
