"""Measures what streaming costs a model that is all in memory:

    python bench/peers/unstreamed/unstreamed.py MODEL [--rounds 5]

It compares moeflux-bench, with every expert in its slot, with the same program linked with an engine that knows no
slots, leases, tickets or look-ahead (bench/peers/unstreamed/engine). They take turns, A-B-B-A. It prints every sample
and the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCH = HERE.parents[1]
sys.path += [str(BENCH / room) for room in ("gate", "harness", "peers")]

import track  # noqa: E402
from relink import ROOT, relink  # noqa: E402
from turns import run, take_turns  # noqa: E402

STREAMS, DOES_NOT = "as it is", "without streaming"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="one that fits into memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="moeflux-unstreamed-") as folder:
        return compare(arguments, Path(folder))


def compare(arguments: argparse.Namespace, folder: Path) -> int:
    harness = track.find_harness()
    ours = HERE
    rest = [path for path in (ROOT / "csrc" / "engine").rglob("*.cpp") if path.name != "expert_side.cpp"]
    mine = ours / "engine" / "experts" / "expert_side.cpp"
    other = relink(harness, [mine, *rest], folder / "unstreamed", before=ours)

    def speeds(program: Path) -> dict[str, float]:
        """Medians of the warm walks, in tokens a second."""
        command = [str(program), str(arguments.model), "--threads", str(arguments.threads)]
        command += ["--prefill", str(arguments.prefill), "--decode", str(arguments.decode)]
        lines = [json.loads(line) for line in run(command).text.splitlines()]
        warm = [line for line in lines if line.get("what") in ("prefill", "decode") and line["rep"] > 0]
        return {
            what: statistics.median(line["tokens_per_second"] for line in warm if line["what"] == what)
            for what in ("prefill", "decode")
        }

    runs = {STREAMS: lambda: speeds(harness), DOES_NOT: lambda: speeds(other)}
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for name, sample in take_turns(runs, arguments.rounds):
        samples[name].append(sample)
        print(f"{name:>18}  prefill {sample['prefill']:7.1f}  decode {sample['decode']:6.2f} tok/s", flush=True)
    for what in ("prefill", "decode"):
        streams, does_not = (statistics.median(s[what] for s in samples[name]) for name in (STREAMS, DOES_NOT))
        print(f"{what}: {streams:.2f} of {does_not:.2f} tokens/s, {streams / does_not:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
