"""Does bench/gate/track.py notice when a kernel loses a tenth of its speed? python bench/gate/trip.py

The moeflux-bench under build/ is linked once more with bench/gate/slower.cpp, which makes products with matrices do a
tenth of their work twice. Only that file is compiled. The unchanged program must count the same instructions when it
runs again a moment later, which finds a gate that always trips. The slower program must not pass.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "harness"))

import track  # noqa: E402
from relink import relink  # noqa: E402

SYMBOL = "_ZN7moeflux3cpu10choose_isaERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"


def main() -> int:
    harness = track.find_harness()
    with tempfile.TemporaryDirectory(prefix="moeflux-trip-") as name:
        folder = Path(name)
        print("as it is, twice")
        bench = track.Bench(harness, folder)
        expected = track.updated(track.measure(bench, "instructions"), {})
        without = track.compare(track.measure(bench, "instructions"), expected)
        print("products with matrices a tenth slower")
        source = ROOT / "bench" / "gate" / "slower.cpp"
        slower = track.Bench(relink(harness, [source], folder / "slower", link=f"-Wl,--wrap={SYMBOL}"), folder)
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
