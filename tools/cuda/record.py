"""What the kernels' tests dispatch on the emulated device, written down for another machine: every buffer before, and
those that changed after. What was recorded is right: the tests hold it to the oracle in the same run.

    python tools/cuda/record.py FILE.npz
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from emulator import gpu  # noqa: E402
from emulator.device import Library  # noqa: E402

TESTS = ["attention", "delta", "elementwise", "matmul", "route"]
LARGE = 1 << 20  # bytes
OF_ONE_SHAPE = 1  # cases that are kept: more say little


class Recorder:
    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.count = 0
        self._before: list[np.ndarray | None] = []
        self._shapes: collections.Counter[Any] = collections.Counter()
        self._seen: set[bytes] = set()

    def told(self, kernel: str, buffers: list[np.ndarray | None], groups: Any, threads: Any, after: bool) -> None:
        if not after:
            self._before = [None if buffer is None else buffer.copy() for buffer in buffers]
            return
        shape = (kernel, groups, threads, tuple(0 if b is None else len(b) for b in buffers))
        content = hashlib.sha256(repr(shape).encode())
        for buffer in self._before:
            content.update(b"-" if buffer is None else buffer.tobytes())
        if content.digest() in self._seen or self._shapes[shape] == OF_ONE_SHAPE:
            return
        self._seen.add(content.digest())
        self._shapes[shape] += 1
        at = f"{self.count:05d}/{kernel}"
        self.arrays[f"{at}/grid"] = np.array([*groups, *threads], np.uint32)
        for i, (before, buffer) in enumerate(zip(self._before, buffers, strict=True)):
            if before is None or buffer is None:
                continue
            before, buffer = trimmed(before, buffer)
            self.arrays[f"{at}/before{i}"] = before
            if not np.array_equal(before, buffer):
                self.arrays[f"{at}/after{i}"] = buffer.copy()
        self.count += 1


def trimmed(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without what nobody used of a large buffer that is there for many."""
    if len(before) < LARGE:
        return before, after
    used = np.flatnonzero(before | after)
    end = (int(used[-1]) // 16 + 1) * 16 if len(used) else 16
    return before[:end], after[:end]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    recorder = Recorder()
    dispatch = Library.dispatch

    def recorded(self: Library, name: str, buffers: Any, groups: Any, threads: Any, **options: Any) -> None:
        """Those that the tests dispatch themselves."""
        whole = [None if b is None else b.reshape(-1).view(np.uint8) for b in buffers]
        extents = tuple((*groups, 1, 1)[:3]), tuple((*threads, 1, 1)[:3])
        recorder.told(name, whole, *extents, False)
        dispatch(self, name, buffers, groups, threads, **options)
        recorder.told(name, whole, *extents, True)

    Library.dispatch = recorded  # type: ignore[method-assign]
    with gpu.watching(recorder.told):
        files = [ROOT / "tests" / "gpu" / f"test_gpu_{name}.py" for name in TESTS]
        status = pytest.main(
            ["-q", "-x", "-k", "not cuda", *map(str, files), str(ROOT / "tests/metal/test_metal_forms.py")]
        )
    if status:
        raise SystemExit(f"record.py: the tests failed with status {status}: nothing was written")
    np.savez_compressed(arguments.file, **recorder.arrays)
    kernels = {name.split("/")[1] for name in recorder.arrays}
    print(f"{recorder.count} dispatches of {len(kernels)} kernels, {arguments.file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
