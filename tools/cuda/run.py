"""Dispatches that were recorded on the emulated device, run by an NVIDIA GPU and compared. Needs CuPy and nothing of
moeflux, so that it can be carried to a machine that has only that.

    python run.py FOLDER [--only WORD]      FOLDER has *.cubin, kernels.json, cases.npz
    python run.py FOLDER --bug NAME         one of the planted bugs, for compute-sanitizer to find
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from pathlib import Path

import cupy
import numpy as np

# Of the largest number of a result. Both sides are f32 in one order; exp and its like may differ in the last bits.
LARGEST_ERROR = 2e-5


class Kernels:
    def __init__(self, folder: Path) -> None:
        self.buffers: dict[str, list[int]] = {}
        self.functions: dict[str, cupy.RawKernel] = {}
        for file, kernels in json.loads((folder / "kernels.json").read_text()).items():
            module = cupy.RawModule(path=str(folder / f"{file}.cubin"))
            for name, buffers in kernels.items():
                self.buffers[name] = buffers
                self.functions[name] = module.get_function(f"msl_{name}")

    def launch(self, name: str, before: dict[int, np.ndarray], groups: tuple, threads: tuple) -> dict[int, np.ndarray]:
        # Each in memory of its own, of exactly its size: memcheck sees one byte too many.
        device = {i: cupy.cuda.alloc(max(1, array.nbytes)) for i, array in before.items()}
        for i, array in before.items():
            device[i].copy_from_host(array.ctypes.data, array.nbytes)
        arguments = tuple(np.uint64(device[i].ptr) for i in self.buffers[name])
        self.functions[name](groups, threads, arguments)
        cupy.cuda.Device().synchronize()
        after = {i: np.empty_like(array) for i, array in before.items()}
        for i, array in after.items():
            device[i].copy_to_host(array.ctypes.data, array.nbytes)
        return after


def error_of(found: np.ndarray, expected: np.ndarray) -> float:
    """Bits that are equal are none; else f32 in proportion to the largest."""
    if np.array_equal(found, expected):
        return 0.0
    a, b = found.view(np.float32).astype(np.float64), expected.view(np.float32).astype(np.float64)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    worst, scale = (float(np.max(np.nan_to_num(np.abs(x)), initial=0.0)) for x in (a - b, b))
    return worst / scale if scale else float("inf") if worst else 0.0


def run_cases(folder: Path, only: str) -> int:
    kernels = Kernels(folder)
    cases: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
    with np.load(folder / "cases.npz") as file:
        for key in file.files:
            case, _, part = key.rpartition("/")
            if only in case:
                cases[case][part] = file[key]
    worst: dict[str, float] = collections.defaultdict(float)
    count: collections.Counter[str] = collections.Counter()
    equal = bad = 0
    start = time.time()
    for case, parts in cases.items():
        name = case.split("/")[1]
        before = {int(key[6:]): array for key, array in parts.items() if key.startswith("before")}
        grid = tuple(int(extent) for extent in parts["grid"])
        after = kernels.launch(name, before, grid[:3], grid[3:])
        error = 0.0
        for i, array in after.items():
            error = max(error, error_of(array, parts.get(f"after{i}", before[i])))
        worst[name] = max(worst[name], error)
        count[name] += 1
        equal += error == 0
        if error > LARGEST_ERROR:
            bad += 1
            print(f"FAILED {case}: error {error:.2e}")
    for name in sorted(worst):
        print(f"{name:32} {count[name]:4} cases, largest error {worst[name]:.1e}")
    print(f"{len(cases)} cases of {len(worst)} kernels: {bad} failed, {equal} bit-equal, {time.time() - start:.1f} s")
    return bad


def run_bug(folder: Path, name: str) -> int:
    kernels = Kernels(folder / "bugs")
    buffers = {i: np.zeros(256, np.uint8) for i in kernels.buffers[name]}
    try:
        kernels.launch(name, buffers, (1, 1, 1), (64, 1, 1))
    except Exception as error:
        print(f"{name}: {type(error).__name__}")
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--bug", default="", metavar="NAME")
    arguments = parser.parse_args()
    cupy.cuda.set_allocator(None)  # no pool: its blocks would hide what is out of bounds
    if arguments.bug:
        raise SystemExit(run_bug(arguments.folder, arguments.bug))
    raise SystemExit(run_cases(arguments.folder, arguments.only) > 0)


if __name__ == "__main__":
    main()
