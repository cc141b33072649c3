"""Does bench/track.py notice when a kernel loses a tenth of its speed? python bench/trip/trip.py

The moeflux-bench under build/ is linked once more with bench/trip/slower.cpp, which makes products with matrices do a
tenth of their work twice; nothing is compiled but that file. As it is the program must count the instructions that it
counts a moment later (so a gate that trips always is found out too), and the slower one must not pass.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import track  # noqa: E402

SYMBOL = "_ZN7moeflux3cpu10choose_isaERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"


def link_slower(harness: Path, folder: Path) -> Path:
    compiler = os.environ.get("CXX", "c++")
    build = harness.parents[1]
    planted, program = folder / "slower.o", folder / "moeflux-bench"
    source = ["-std=c++20", "-O2", f"-I{ROOT / 'csrc'}", "-c", str(ROOT / "bench" / "trip" / "slower.cpp")]
    subprocess.run([compiler, *source, "-o", str(planted)], check=True)
    objects = sorted(map(str, (build / "bench" / "CMakeFiles" / "moeflux-bench.dir").glob("*.o")))
    command = [
        compiler,
        *objects,
        str(planted),
        str(build / "libmoeflux_core.a"),
        "-pthread",
        "-ldl",
        f"-Wl,--wrap={SYMBOL}",
    ]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def main() -> int:
    harness = track.find_harness()
    with tempfile.TemporaryDirectory(prefix="moeflux-trip-") as name:
        folder = Path(name)
        print("as it is, twice")
        bench = track.Bench(harness, folder)
        expected = track.updated(track.measure(bench, "instructions"), {})
        without = track.compare(track.measure(bench, "instructions"), expected)
        print("products with matrices a tenth slower")
        slower = track.Bench(link_slower(harness, folder), folder)
        planted = track.compare(track.measure(slower, "instructions"), expected)
    for fault in planted:
        print(f"noticed: {fault}")
    # Every way of counting, at least as a whole step, and nothing without a loss.
    groups = [group for group in expected if any(fault.startswith(f"{group}: ") for fault in planted)]
    if without or groups != list(expected):
        print(f"expected a fault in each of {', '.join(expected)}, and none before; found {without + planted}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
