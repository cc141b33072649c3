"""How fast the CPU computes experts of one row with the bits of CUDA (`cpu_experts=`), beside what this machine's
memory gives to as many threads that only read.

    python bench/host_experts.py [--hidden 2048] [--intermediate 512] [--threads 1 2] [--together 1 4] [--bits 4 8]

The experts together are far larger than most caches. Prints a line of JSON for each setting; rates are of the experts'
own bytes, the best of several passes.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from moeflux import QuantFormat, _core

BYTES = 512 << 20
PASSES = 7

Array = np.ndarray
Shapes = tuple[tuple[int, int], ...]


class Matrix:
    """Codes of noise, scales of a 64th."""

    def __init__(self, format: QuantFormat, rows: int, columns: int, rng: np.random.Generator) -> None:
        self.format = format
        self.weight = rng.integers(0, 1 << 32, (rows, format.weight_row_bytes(columns) // 4), np.uint32)
        self.scales: Array | None = np.full((rows, columns // format.group_size), 0x3C80, np.uint16)
        self.biases = self.scales


def expert(format: QuantFormat, shapes: Shapes, seed: int) -> tuple[Matrix, Matrix, Matrix]:
    rng = np.random.default_rng(seed)
    gate, up, down = (Matrix(format, *shape, rng) for shape in shapes)
    return gate, up, down


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--together", type=int, nargs="+", default=[1, 4], help="experts at a time")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--group", type=int, default=64)
    arguments = parser.parse_args()
    hidden, inner = arguments.hidden, arguments.intermediate
    x = np.random.default_rng(1).standard_normal(hidden).astype(np.float32)
    memory = _core.ReadBandwidth(max(arguments.threads))
    for bits in arguments.bits:
        format = QuantFormat.affine(bits, arguments.group)
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        size = sum(
            rows * (format.weight_row_bytes(columns) + 2 * format.scale_row_bytes(columns)) for rows, columns in shapes
        )
        experts = [expert(format, shapes, seed) for seed in range(BYTES // size)]
        for threads in arguments.threads:
            ops = _core.Ops("cpu", "", threads, timed=False, exact=False)
            for together in arguments.together:
                seconds = min(ops.digit_expert_seconds(x, experts, inner, together) for _ in range(PASSES))
                found = {
                    "format": str(format),
                    "threads": threads,
                    "isa": ops.isa,
                    "together": together,
                    "expert_bytes": size,
                    "bytes_per_second": len(experts) * size / seconds,
                    "seconds_per_expert": seconds / len(experts),
                    "memory_bytes_per_second": memory.measure(threads),
                }
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
