"""Compares moeflux with llama.cpp and mlx-lm, with everything in memory: same shapes, threads and contexts, in turn.

    python bench/peers/peers.py FOLDER [--rounds 5] [--rows NAME,NAME] [--json FILE] [--plot FILE]

bench/peers/prepare.sh makes FOLDER (`make bench-peers` does both). It has the engines, and each model as a store, which
mlx-lm is given too, and as GGUF with as many bytes. Each measurement is a process of its own, and every round reverses
the order of the one before, A-B-B-A. All are warm: llama-bench warms up, and the first walk of moeflux-bench, or a
first frontier, does not count. moeflux decodes the likeliest tokens and the others random ones, so all pick experts all
over a random model. Keys and values have 16 bits in both. The program prints every sample, then medians and ratios to
the best of the others; a row's target is for its ratio. `others` is the share of the processors that other programs
took: a comparison is worth nothing if that is not near zero.

An engine that needs minutes for a sample takes part in fewer rounds. mlx-lm computes with one thread on a CPU. It is in
rows decode-1, deepseek-1 and prefill-512, in two rounds, with 32 tokens and 8 steps after them. moeflux reads 32768
tokens in two rounds and then decodes five times; llama.cpp reads them in one. llama-bench does not warm up for a prompt
of 4096, which would double its time. The program says on stderr how long each round took.

rows: decode-1, decode-2         one and two threads, after 512 tokens, layers of Qwen3.6-35B-A3B
      prefill-512, prefill-4096  two threads, the same model
      deepseek-1, deepseek-2     decode of layers with latent attention, of the width of Cogito-V2-671B
      context                    decode at 32768 tokens beside that at 1024
only on request:
      prefill-vnni               512 tokens, without AMX on our side
      context-llama              contexts of llama.cpp
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turns import Ran, run, take_turns

from moeflux.measure.plots import COLOURS, check_plot, draw

ROOT = Path(__file__).resolve().parents[2]

OURS, LLAMA, MLX = "moeflux", "llama.cpp", "mlx-lm"


@dataclass(frozen=True)
class Row:
    model: str
    what: str  # "prefill" or "decode"
    threads: int
    context: int  # of a decode: tokens before it; of a prefill: tokens in all
    target: float | None = None  # of our speed over the best of the others
    beside: int | None = None  # a context to compare with, in place of another engine
    engine: str = OURS  # whose contexts are compared
    mlx: bool = False
    isa: str | None = None  # our kernels; None: the best that the machine has


ROWS = {
    "decode-1": Row("a3b", "decode", 1, 512, 2.0, mlx=True),
    "decode-2": Row("a3b", "decode", 2, 512, 2.0),
    "prefill-512": Row("a3b", "prefill", 2, 512, 4.0, mlx=True),
    "prefill-4096": Row("a3b", "prefill", 2, 4096, 4.0),
    "prefill-vnni": Row("a3b", "prefill", 2, 512, 1.5, isa="avx512vnni"),
    "deepseek-1": Row("deepseek", "decode", 1, 512, 1.5, mlx=True),
    "deepseek-2": Row("deepseek", "decode", 2, 512, 1.5),
    "context": Row("a3b", "decode", 2, 32768, 0.7, 1024),
    "context-llama": Row("a3b", "decode", 2, 32768, None, 1024, LLAMA),
}
DEFAULT_ROWS = [name for name, row in ROWS.items() if row.engine == OURS and not row.isa]
LONG = 8192  # tokens that are read once a process


@dataclass(frozen=True)
class Sample:
    speed: float  # tokens a second
    ran: Ran
    details: dict[str, Any]

    def __str__(self) -> str:
        share = self.details.get("share_of_read_bandwidth")
        return f"{self.speed:9.2f} tok/s  {self.ran}" + (f"  {share:.0%} of the read bandwidth" if share else "")


class Engines:
    def __init__(self, folder: Path, harness: Path, decode: int) -> None:
        self.folder = folder
        self.harness = harness
        self.decode = decode

    def ours(self, row: Row, context: int) -> Sample:
        command = [str(self.harness), str(self.folder / row.model), "--threads", str(row.threads)]
        command += ["--kv", "bf16"] + (["--isa", row.isa] if row.isa else [])
        if context > LONG:
            # One walk: everything has been read long before the end. A frontier more is a few tokens.
            frontiers = ",".join(str(context + 8 * i) for i in range(5))
            command += ["--prefill", frontiers, "--reps", "0"]
        else:
            command += ["--prefill", str(context), "--reps", "1"]
        command += ["--decode", str(self.decode if row.what == "decode" else 0)]
        ran = run(command)
        lines = [line for line in map(json.loads, ran.text.splitlines()) if line["what"] == row.what]
        if context <= LONG:
            lines = lines[-1:]  # warm
        middle = sorted(lines, key=lambda line: line["tokens_per_second"])[len(lines) // 2]
        return Sample(middle["tokens_per_second"], ran, middle)

    def llama(self, row: Row, context: int) -> Sample:
        command = [str(self.folder / "llama" / "bin" / "llama-bench"), "-m", str(self.folder / f"{row.model}.gguf")]
        command += ["-t", str(row.threads), "-r", "1", "-o", "json"]
        if row.what == "prefill":
            command += ["-p", str(context), "-n", "0"] + (["--no-warmup"] if context > 1024 else [])
        else:
            command += ["-p", "0", "-n", str(self.decode), "-d", str(context)]
        ran = run(command)
        [line] = json.loads(ran.text)
        return Sample(line["avg_ts"], ran, line)

    def mlx(self, row: Row) -> Sample:
        packages = os.pathsep.join(str((self.folder / name).resolve()) for name in ("mlx", "gguf"))
        command = [sys.executable, str(ROOT / "bench" / "peers" / "run_mlx.py"), str(self.folder / row.model)]
        ran = run(command, PYTHONPATH=packages)
        line = json.loads(ran.text.splitlines()[-1])
        return Sample(line["speed"][row.what], ran, line)


def contenders(row: Row, engines: Engines) -> dict[str, Callable[[], Sample]]:
    """Whose ratio is asked for first."""
    if row.beside:
        engine = engines.ours if row.engine == OURS else engines.llama
        return {
            f"{row.engine}, {context} tokens": lambda context=context: engine(row, context)
            for context in (row.context, row.beside)
        }
    return {
        OURS: lambda: engines.ours(row, row.context),
        LLAMA: lambda: engines.llama(row, row.context),
    } | ({MLX: lambda: engines.mlx(row)} if row.mlx else {})


def fewer_rounds(row: Row) -> dict[str, int]:
    """Of those that need minutes for a sample."""
    return {MLX: 2, f"{row.engine}, {row.context} tokens": 2 if row.engine == OURS else 1}


@dataclass(frozen=True)
class Outcome:
    row: str
    medians: dict[str, float]
    ratio: float
    others: float  # the most that other programs took
    rounds: int

    def __str__(self) -> str:
        target = ROWS[self.row].target
        words = ", ".join(f"{name} {speed:.2f}" for name, speed in self.medians.items())
        against = f" (target {target})" if target else ""
        return f"{self.row:<13} ratio {self.ratio:5.2f}{against}   {words} tok/s   others up to {self.others:.0%}"


def compare(name: str, engines: Engines, rounds: int) -> tuple[Outcome, list[dict[str, Any]]]:
    row = ROWS[name]
    runs = contenders(row, engines)
    samples: dict[str, list[Sample]] = {contender: [] for contender in runs}
    lines = []
    for contender, sample in take_turns(runs, rounds, fewer_rounds(row)):
        samples[contender].append(sample)
        print(f"{name:<13} {contender:<28} {sample}", flush=True)
        system = {"cpu_seconds": sample.ran.cpu_seconds, "others": sample.ran.others}
        lines.append(
            {"row": name, "contender": contender, "tokens_per_second": sample.speed, **system, "run": sample.details}
        )
    medians = {contender: statistics.median(each.speed for each in taken) for contender, taken in samples.items()}
    ours, *rest = medians.values()
    best = max(rest)
    others = max(sample.ran.others for taken in samples.values() for sample in taken)
    return Outcome(name, medians, ours / best, others, rounds), lines


# ---- Plot -------------------------------------------------------------------------------------------------------

ENGINES = dict(zip((OURS, LLAMA, MLX), COLOURS, strict=False))


def plot(outcomes: list[Outcome], path: Path) -> None:
    """A bar for every contender of a row, the fastest of the row as long as the picture is wide."""
    bars = [(outcome, name, speed) for outcome in outcomes for name, speed in outcome.medians.items()]

    def picture(figure: Any) -> None:
        axes = figure.subplots()
        for place, (outcome, name, speed) in enumerate(bars):
            share = 100 * speed / max(outcome.medians.values())
            axes.barh(place, share, color=ENGINES[name.partition(",")[0]])
            axes.annotate(f" {speed:.1f} tok/s", (share, place), va="center")
        labels = [f"{outcome.row} ({outcome.ratio:.2f}): {name}" for outcome, name, _ in bars]
        axes.set_yticks(range(len(bars)), labels)
        axes.set(xlim=(0, 120), xlabel="of the fastest of the row, %")
        axes.invert_yaxis()
        axes.set_title("Tokens a second, medians of interleaved runs; in parentheses: ours over the best other")

    draw(path, picture, (10, 1.2 + 0.35 * len(bars)))


# ---- Command line -----------------------------------------------------------------------------------------------


def rows(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in ROWS:
            raise argparse.ArgumentTypeError(f"expected rows among {', '.join(ROWS)}, found {name!r}")
    return names


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rows", type=rows, default=DEFAULT_ROWS, metavar="NAME,...", help="default: all but the last two"
    )
    parser.add_argument("--decode", type=int, default=64, metavar="N", help="steps that are timed; default: 64")
    parser.add_argument("--harness", type=Path, help="moeflux-bench; default: the newest under build/")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every sample, a JSON object a line")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="SVG, PNG or PDF; extra `plot`")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.plot:
        check_plot(arguments.plot)  # the runs take an hour
    harness = arguments.harness
    if harness is None:
        found = sorted(ROOT.glob("build/*/bench/moeflux-bench"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise SystemExit("moeflux-bench: expected under build/, found none: make setup builds it")
        harness = found[-1]
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    engines = Engines(arguments.folder, harness, arguments.decode)
    outcomes = []
    for name in arguments.rows:
        outcome, lines = compare(name, engines, arguments.rounds)
        outcomes.append(outcome)
        if arguments.json:
            with arguments.json.open("a") as out:
                for line in lines:
                    out.write(json.dumps({"commit": commit.stdout.strip(), **line}) + "\n")
    print(f"\nmedians of {arguments.rounds} rounds")
    for outcome in outcomes:
        print(outcome)
    if arguments.plot:
        plot(outcomes, arguments.plot)


if __name__ == "__main__":
    main()
