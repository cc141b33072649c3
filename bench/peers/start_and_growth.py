"""What a start costs, and what a model's size costs: python bench/peers/start_and_growth.py start|growth FOLDER

start   opens a large store and goes to the first token, in a process of its own, with a warm page cache and a quarter
        of the experts in memory. It makes the store in FOLDER/start (20 GB) unless it is there. It also measures what a
        start cannot do without: the interpreter with its imports, and one thread that reads the same bytes into new
        memory. The difference is ours.
growth  decodes with models that differ in one thing. By active bytes: 2, 4, 8 and 16 experts per token; a line through
        the times tells what a byte and what a token costs. By experts in all: 32, 64, 128 and 256 per layer, 8 per
        token; the time should be the same. Everything is in memory, models take turns, and figures are medians.

The layers are those of Qwen3.6-35B-A3B. The program prints JSON lines, and sentences on stderr. --remove removes the
models.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import mmap
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "gate"))

from track import find_harness  # noqa: E402
from turns import run, take_turns  # noqa: E402

from moeflux import Variant  # noqa: E402
from moeflux.conversion.synth import synth  # noqa: E402
from moeflux.models.layers import RoutedExperts  # noqa: E402
from moeflux.models.presets import preset  # noqa: E402
from moeflux.stores.store import open_store  # noqa: E402

A3B = preset("a3b")
TOUCHED = 4 << 30  # more than a first token needs
FIRST_TOKEN = """
import json, sys, time
import moeflux
imported = time.perf_counter()
model = moeflux.load(sys.argv[1], expert_slots=int(sys.argv[2]), context=512)
loaded = time.perf_counter()
session = model.session()
session.step(1).argmax()
stats = session.stats
print(json.dumps({"load_seconds": loaded - imported, "token_seconds": time.perf_counter() - loaded,
                  "expert_bytes": stats.bytes_read, "dense_bytes": model._engine.memory.dense_weights}))
"""


def store(folder: Path, variant: Variant) -> Path:
    if not (folder / "moeflux.json").exists():
        print(f"{folder}: being made", file=sys.stderr)
        synth(folder, variant, force=True)
    return folder


def memory_of(size: int) -> mmap.mmap:
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_HUGEPAGE)
    return room


def touch(size: int) -> None:
    """Touches so much memory and lets it go. A virtual machine's host takes back free memory, and giving it again costs
    more than all that is measured here."""
    with memory_of(size) as room:
        room[:: mmap.PAGESIZE] = bytes(-(-size // mmap.PAGESIZE))


def read_seconds(path: Path, size: int) -> float:
    """The time in which one thread reads so many bytes from the page cache into new memory."""
    with path.open("rb", buffering=0) as file, memory_of(size) as room:
        start, done = time.perf_counter(), 0
        with memoryview(room) as memory:
            while done < size:
                read = file.readinto(memory[done : done + (1 << 22)])
                if not read:
                    file.seek(0)
                done += read or 0
        return time.perf_counter() - start


def start(folder: Path, rounds: int) -> None:
    path = store(folder / "start", A3B)
    slots = A3B.experts.count * A3B.num_layers // 4
    with open_store(path) as opened:
        size = sum(Path(file).stat().st_size for file in opened.directory.files)
        dense = next(Path(file) for file in opened.directory.files if "packed_experts" not in str(file))
    for turn in range(rounds + 1):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import moeflux"], check=True)
        imports = time.perf_counter() - began
        touch(TOUCHED)
        began = time.perf_counter()
        ran = run([sys.executable, "-c", FIRST_TOKEN, str(path), str(slots)])
        seconds = time.perf_counter() - began
        if turn == 0:
            continue  # the page cache was not warm yet
        parts = json.loads(ran.text)
        touch(TOUCHED)
        reading = read_seconds(dense, parts["dense_bytes"] + parts["expert_bytes"])
        line = {"what": "start", "store_bytes": size, "seconds": seconds, "imports": imports, "reading": reading}
        print(json.dumps({**line, **parts, "others": ran.others}), flush=True)
        rest = seconds - imports - reading
        print(
            f"{size / 1e9:.1f} GB: {seconds:.2f} s = imports {imports:.2f} + reading {reading:.2f} + {rest:.2f}; "
            f"load {parts['load_seconds']:.2f}, first token {parts['token_seconds']:.2f}, others {ran.others:.0%}",
            file=sys.stderr,
        )


def growth(folder: Path, rounds: int) -> None:
    shape = dataclasses.replace(A3B.with_layers(4), vocab_size=8192)
    by_bytes = {k: shape.with_parts(RoutedExperts, count=64, per_token=k) for k in (2, 4, 8, 16)}
    by_number = {e: shape.with_parts(RoutedExperts, count=e) for e in (32, 64, 128, 256)}
    harness = find_harness()

    def measured(path: Path) -> dict[str, float]:
        arguments = ["--prefill", "64", "--decode", "64", "--threads", "1", "--reps", "3"]
        lines = [json.loads(line) for line in run([str(harness), str(path), *arguments]).text.splitlines()]
        warm = [line for line in lines if line["what"] == "decode" and line["rep"]]
        best = min(warm, key=lambda line: line["seconds"])
        return {"seconds": best["seconds"] / best["tokens"], "bytes": best["bytes_touched"] / best["tokens"]}

    def medians(kind: str, variants: dict[int, Variant]) -> dict[int, tuple[float, float]]:
        paths = {n: store(folder / f"growth-{kind}-{n}", variant) for n, variant in variants.items()}
        samples: dict[str, list[dict[str, float]]] = {str(n): [] for n in paths}
        for name, sample in take_turns({str(n): lambda p=p: measured(p) for n, p in paths.items()}, rounds):
            samples[name].append(sample)
            print(json.dumps({"what": "growth", "by": kind, kind: int(name), **sample}), flush=True)
        return {
            n: (statistics.median(s["seconds"] for s in samples[str(n)]), samples[str(n)][0]["bytes"]) for n in paths
        }

    active = medians("active", by_bytes)
    seconds, touched = np.array([each[0] for each in active.values()]), np.array([each[1] for each in active.values()])
    slope, offset = np.polyfit(touched, seconds, 1)
    worst = np.max(np.abs(seconds - (slope * touched + offset)) / seconds)
    print(
        f"a token: {1e3 * offset:.2f} ms and its bytes at {1e-9 / slope:.1f} GB/s; no point further than {worst:.1%} "
        "from that line",
        file=sys.stderr,
    )
    number = {n: each[0] for n, each in medians("experts", by_number).items()}
    spread = max(number.values()) / min(number.values()) - 1
    words = ", ".join(f"{n}: {1e3 * each:.2f} ms" for n, each in number.items())
    print(f"a token by experts a layer: {words}; {spread:.1%} from the fastest to the slowest", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["start", "growth"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--remove", action="store_true", help="the models, when it is done")
    arguments = parser.parse_args()
    try:
        {"start": start, "growth": growth}[arguments.what](arguments.folder, arguments.rounds)
    finally:
        if arguments.remove:
            for made in arguments.folder.glob(f"{arguments.what}*"):
                shutil.rmtree(made)


if __name__ == "__main__":
    main()
