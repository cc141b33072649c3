"""Compares numbers that are the same on a busy machine as on an idle one with those of bench/gate/expected.json.

    python bench/gate/track.py                 measures and prints; exit status 1 if something got worse
    python bench/gate/track.py --update        the same, and expects from now on what it found
    python bench/gate/track.py --history lines.jsonl --plot history.svg
    python bench/gate/track.py --impossible ratio    on a machine of which no ratio is expected

These numbers gate, on small models that are made here from fixed seeds:
  counts      bytes read, allocations, system calls, submissions and waits of a step: exactly what is expected
  instructions  of a step, of a prefill and of a step behind a long context, op by op, and of choosing a token by
              callgrind, with the instruction sets that it knows; of a prefill, of a step and of choosing with it,
              with the others of this machine by `moeflux-bench --count`: at most 2% more
  ratios      bytes a second of a decode over the read bandwidth of the same run, multiply-adds of a prefill over the
              peak of the same run: at least 0.7 of what is expected. They show gross losses only, because the two meet
              noise at different times
Instructions are expected for one compiler and instruction set, and ratios for one processor. If
bench/gate/expected.json has none for them, they are printed and recorded, and not compared. If nothing at all of a kind
was compared, the run fails: otherwise it would pass for ever on a machine of which nothing is expected. --impossible
names a kind that cannot be compared where it runs. Speeds in tokens a second are recorded and never gate. System calls
are counted with every expert in memory, because reading experts consists of system calls.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import history_plot

from moeflux import Variant
from moeflux.conversion.synth import synth
from moeflux.measure.plots import check_plot
from moeflux.models.layers import (
    DenseMlp,
    GatedDelta,
    GroupedAttention,
    LatentAttention,
    Layer,
    Rope,
    RoutedExperts,
    Router,
    SharedExpert,
)
from moeflux.models.presets import preset
from moeflux.ops import isas

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = ROOT / "bench" / "gate" / "expected.json"
EVERYWHERE = "everywhere"
GATING = {"counts": "count", "instructions": "instructions", "ratios": "ratio"}
"""What --only names, and the kinds of numbers."""
MORE_INSTRUCTIONS = 1.02
LOWEST_RATIO = 0.7

SMALL = {"hidden_size": 128, "vocab_size": 512}
EXPERTS = {"count": 32, "per_token": 4, "intermediate": 64}
QWEN = dataclasses.replace(
    preset("a3b")
    .with_layers(4)
    .with_parts(GroupedAttention, heads=4, kv_heads=2, head_dim=64)
    .with_parts(Rope, dim=16)
    .with_parts(GatedDelta, key_heads=2, value_heads=4, key_dim=32, value_dim=32)
    .with_parts(RoutedExperts, **EXPERTS)
    .with_parts(SharedExpert, intermediate=64),
    **SMALL,
)


def smallest(model_type: str, mixer: GroupedAttention | LatentAttention, router: Router) -> Variant:
    """One layer with two experts."""
    experts = RoutedExperts(count=2, per_token=1, intermediate=64, router=router)
    return dataclasses.replace(QWEN, model_type=model_type, layers=(Layer(mixer, experts),), vocab_size=64)


SMALLEST = smallest(
    "qwen3_moe",
    GroupedAttention(heads=1, kv_heads=1, head_dim=64, rope=Rope(dim=64, theta=1e7)),
    Router(scoring="softmax"),
)
DEEPSEEK = dataclasses.replace(
    preset("cogito")
    .with_layers(5)
    .with_parts(LatentAttention, heads=4, q_rank=64, kv_rank=64, nope_dim=64, v_dim=64)
    .with_parts(Rope, dim=32)
    .with_parts(DenseMlp, intermediate=128)
    .with_parts(RoutedExperts, **EXPERTS)
    .with_parts(SharedExpert, intermediate=64),
    **SMALL,
)
SMALLEST_LATENT = smallest(
    "deepseek_v3",
    dataclasses.replace(DEEPSEEK.layers[0].mixer, heads=1),
    Router(scoring="noaux_tc", normalize=False, groups=1, groups_kept=1),
)
MODELS = {
    "qwen3_5_moe": QWEN,
    "deepseek_v3": DEEPSEEK,
    # This one is counted instruction by instruction: a hundred thousand a step.
    "smallest": SMALLEST,
    "smallest latent": SMALLEST_LATENT,
    # With a vocabulary of true size, to choose from.
    "vocabulary": dataclasses.replace(SMALLEST, hidden_size=64, vocab_size=248_320),
    # Of true width, more than caches hold.
    "a3b": dataclasses.replace(preset("a3b").with_layers(4).with_parts(RoutedExperts, count=32), vocab_size=8192),
}


# How tokens are chosen: for moeflux-bench --sampling.
CHOICES = {
    "temperature": "temperature=1",
    "top-p": "temperature=1,top_p=0.95",
    "everything": "temperature=0.9,top_k=200000,top_p=0.95,min_p=0.0001,"
    "repetition_penalty=1.1,presence_penalty=0.1,frequency_penalty=0.1",
}


@dataclass(frozen=True)
class Number:
    group: str  # where it is expected to be the same
    name: str
    value: float
    kind: str  # "count", "instructions", "ratio" or "time"

    def fault(self, expected: float) -> str | None:
        """The sentence about what is wrong with it."""
        if self.kind == "count" and self.value != expected:
            return f"expected exactly {expected:g}"
        if self.kind == "instructions" and self.value > MORE_INSTRUCTIONS * expected:
            return f"expected at most {MORE_INSTRUCTIONS:g} x {expected:.0f}, {self.value / expected - 1:+.1%}"
        if self.kind == "ratio" and self.value < LOWEST_RATIO * expected:
            return f"expected at least {LOWEST_RATIO:g} x {expected:.2f}"
        return None


# ---- Measuring --------------------------------------------------------------------------------------------------

Line = dict[str, Any]


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr}")
    return done.stdout


class Bench:
    """moeflux-bench on models that are made when they are first asked for."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program = program
        self.folder = folder

    def store(self, model: str) -> Path:
        variant: Variant = MODELS[model]
        if not (self.folder / model).exists():
            synth(self.folder / model, variant)
        return self.folder / model

    def command(self, model: str, *arguments: object) -> list[str]:
        return [str(self.program), str(self.store(model)), *map(str, arguments)]

    def run(self, model: str, *arguments: object) -> list[Line]:
        return [json.loads(line) for line in output_of(self.command(model, *arguments)).splitlines()]


def compiler_of(line: Line) -> str:
    """The compiler, as in "GCC 12": one version makes about the same instructions of the same source."""
    return re.sub(r"^(\w+) (\d+).*$", r"\1 \2", line["compiler"])


def counts(bench: Bench) -> Iterator[Number]:
    for model in ("qwen3_5_moe", "deepseek_v3"):
        # A look-ahead may still read what no router has picked.
        common = ("--prefill", 16, "--decode", 32, "--reps", 1, "--look-ahead", "off")
        [*_, warm] = bench.run(model, *common, "--threads", 2)
        yield from per_step(f"{model}, resident", warm)
        # The portable kernels make the same bits, so the same choices of experts, on every machine.
        streamed = ("--threads", 1, "--isa", "portable", "--slots", 48, "--reads", "buffered")
        [*_, warm] = bench.run(model, *common, *streamed)
        yield Number(EVERYWHERE, f"{model}, 48 slots: bytes read a token", warm["bytes_read"] / warm["tokens"], "count")
        yield Number(EVERYWHERE, f"{model}, 48 slots: allocations a step", warm["allocations"] / 32, "count")
        [*_, warm] = bench.run(model, *common, "--threads", 1, "--sampling", CHOICES["everything"])
        allocations = warm["allocations"] / 32
        yield Number(EVERYWHERE, f"{model}, resident: allocations a step and a choice", allocations, "count")
        if sys.platform == "linux":
            for line in bench.run(model, "--count", "calls", "--prefill", 16, "--decode", 32):
                calls = line["system_calls"] / line["tokens"]
                yield Number(EVERYWHERE, f"{model}, resident: system calls a token of {line['of']}", calls, "count")


def per_step(what: str, line: Line) -> Iterator[Number]:
    for name, member in (
        ("bytes read a token", "bytes_read"),
        ("allocations a step", "allocations"),
        ("submissions a step", "submissions"),
        ("waits a step", "waits"),
    ):
        yield Number(EVERYWHERE, f"{what}: {name}", line[member] / line["tokens"], "count")


OPS = re.compile(r"^\s*([\d,]+) \([^)]*\)\s+\S+?:moeflux::(?:CpuCommands::(\w+)|EngineSession::(step|prefill))\(")
NOT_OPS = {"convert_to_int16", "input_of", "unit_outputs", "gate_and_up", "down", "prepare", "run_attention"}


@dataclass(frozen=True)
class Profile:
    """Calls of a session that callgrind counts op by op."""

    model: str
    call: str
    what: str
    prefill: int
    steps: int
    isa: str = "avx2"

    def numbers(self, bench: Bench, compiler: str) -> Iterator[Number]:
        arguments = ("--isa", self.isa, "--prefill", self.prefill, "--decode", self.steps)
        text = callgrind(bench, self.model, f"moeflux::EngineSession::{self.call}", *arguments)
        found: dict[str, int] = {}
        for row in text.splitlines():
            if match := OPS.match(row):
                name = match[2] or match[3]
                found[name] = max(found.get(name, 0), int(match[1].replace(",", "")))
        if self.call not in found or "matmul" not in found:
            expected = f"EngineSession::{self.call} and CpuCommands::matmul"
            raise SystemExit(f"callgrind_annotate: expected {expected}, found {', '.join(found) or 'neither'}")
        calls = WALKS * (self.steps if self.call == "step" else 1)
        for name, total in found.items():
            if name not in NOT_OPS:
                what = self.what if name == self.call else f"{name} in {self.what}"
                name = f"{self.model}: instructions of {what}"
                yield Number(f"{compiler}, {self.isa}", name, total / calls, "instructions")


WALKS = 2
"""That --count makes."""
STEPS = 4
PROFILES = [
    *(Profile(model, "step", "a step", 16, STEPS) for model in ("qwen3_5_moe", "deepseek_v3")),
    *(Profile(model, "prefill", "a prefill of 64", 64, 0) for model in ("qwen3_5_moe", "deepseek_v3")),
    *(Profile(model, "step", "a step behind 1024", 1024, STEPS) for model in ("smallest", "smallest latent")),
    Profile("smallest", "step", "a step", 8, STEPS, "portable"),
    Profile("smallest", "prefill", "a prefill of 64", 64, 0, "portable"),
]


def callgrind(bench: Bench, model: str, function: str, *arguments: object) -> str:
    """What callgrind_annotate says of the calls of a function."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        command = ["valgrind", "--quiet", "--tool=callgrind", f"--callgrind-out-file={out}"]
        command += ["--collect-atstart=no", f"--toggle-collect={function}*"]
        output_of([*command, *bench.command(model, "--count", "nothing", *arguments)])
        return output_of(["callgrind_annotate", "--inclusive=yes", "--threshold=100", "--auto=no", str(out)])


def instructions_by_callgrind(bench: Bench) -> Iterator[Number]:
    [line, *_] = bench.run("smallest", "--prefill", 1, "--decode", 0, "--threads", 1, "--reps", 1)
    compiler = compiler_of(line)
    for profile in PROFILES:
        if profile.isa in isas():
            yield from profile.numbers(bench, compiler)
    for name, sampling in CHOICES.items() if "avx2" in isas() else ():
        arguments = ("--isa", "avx2", "--prefill", 1, "--decode", STEPS, "--sampling", sampling)
        text = callgrind(bench, "vocabulary", "moeflux::Sampler::choose", *arguments)
        total = re.search(r"^\s*([\d,]+) .*PROGRAM TOTALS", text, re.MULTILINE)
        if total is None:
            raise SystemExit("callgrind_annotate: expected PROGRAM TOTALS, found none")
        instructions = int(total[1].replace(",", "")) / (STEPS * WALKS)
        what = f"vocabulary: instructions of a choice, {name}"
        yield Number(f"{compiler}, avx2", what, instructions, "instructions")


def instructions_by_stepping(bench: Bench) -> Iterator[Number]:
    """With the instruction sets that callgrind does not know."""
    for isa in isas():
        if isa in {profile.isa for profile in PROFILES}:
            continue
        common = ("--count", "instructions", "--isa", isa, "--prefill", 8, "--decode", 1)
        lines = bench.run("smallest", *common)
        group = f"{compiler_of(lines[0])}, {isa}"
        for line in lines:
            what = {"prefill": "a prefill of 8", "decode": "a step"}[line["of"]]
            yield Number(group, f"smallest: instructions of {what}", line["instructions"], "instructions")
        if isa != isas()[0]:  # choosing is the same with every one
            continue
        for line in bench.run("smallest", *common, "--sampling", CHOICES["everything"]):
            if line["of"] == "decode":
                what = "smallest: instructions of a choice and a step"
                yield Number(group, what, line["instructions"], "instructions")


def ratios_and_times(bench: Bench) -> Iterator[Number]:
    """The best of some walks, because other programs disturb that one least."""
    lines = bench.run("a3b", "--prefill", 256, "--decode", 16, "--threads", 1, "--reps", 4, "--roofline")
    limits = lines[0]
    machine = f"{limits['machine']['cpu']}, {limits['isa']}"
    warm = [line for line in lines if line.get("rep")]
    decode = [line for line in warm if line["what"] == "decode"]
    share = max(line["share_of_read_bandwidth"] for line in decode)
    yield Number(machine, "a3b: decode, share of the read bandwidth", share, "ratio")
    peak = limits["multiply_adds"].get(limits["isa"])
    products = [line for line in warm if line["what"] == "op" and line["of"] == "prefill" and line["products"]]
    if peak:
        for op in ("matmul", "expert_ffn"):
            rates = {}
            for rep in {line["rep"] for line in products}:
                chosen = [line for line in products if line["rep"] == rep and line["op"] == op]
                rates[rep] = sum(line["products"] for line in chosen) / sum(line["seconds"] for line in chosen)
            yield Number(machine, f"a3b: prefill, {op}, share of the peak", max(rates.values()) / peak, "ratio")
    for what in ("prefill", "decode"):
        speed = max(line["tokens_per_second"] for line in warm if line["what"] == what)
        yield Number(machine, f"a3b: {what}, tokens a second", speed, "time")
    yield Number(machine, "read bandwidth, GB/s", limits["read_bandwidth"] / 1e9, "time")


def measure(bench: Bench, only: str) -> list[Number]:
    numbers: list[Number] = []
    if only in ("all", "counts"):
        numbers += counts(bench)
    if only in ("all", "instructions"):
        if shutil.which("valgrind") and shutil.which("callgrind_annotate"):
            numbers += instructions_by_callgrind(bench)
        else:
            print("no valgrind here: no instructions with AVX2, op by op", file=sys.stderr)
        if sys.platform == "linux":
            numbers += instructions_by_stepping(bench)
    if only in ("all", "ratios"):
        numbers += ratios_and_times(bench)
    return numbers


# ---- Comparing --------------------------------------------------------------------------------------------------

Expected = dict[str, dict[str, float]]


def compare(numbers: Iterable[Number], expected: Expected) -> list[str]:
    """Prints every number, and returns the sentences about those that are not as expected."""
    faults = []
    for number in numbers:
        known = expected.get(number.group, {}).get(number.name)
        verdict = ""
        if number.kind != "time":
            verdict = "nothing expected here" if known is None else number.fault(known) or "as expected"
            if known is not None and (fault := number.fault(known)):
                faults.append(f"{number.group}: {number.name}: {fault}, found {shown(number.value)}")
        print(f"{number.group:>24}  {number.name:<62} {shown(number.value):>14}  {verdict}")
    measured = {(number.group, number.name) for number in numbers}
    groups = {number.group for number in numbers}
    kinds = {number.group: number.kind for number in numbers}
    for group in sorted(groups & set(expected)):
        if kinds[group] in ("count", "instructions"):
            faults += [
                f"{group}: {name}: was not measured" for name in expected[group] if (group, name) not in measured
            ]
    return faults


def not_compared(numbers: Iterable[Number], expected: Expected, kinds: Iterable[str]) -> list[str]:
    """A sentence for each of these kinds of which nothing was compared with anything."""
    compared = {number.kind for number in numbers if number.name in expected.get(number.group, {})}
    found = {kind: sorted({number.group for number in numbers if number.kind == kind}) for kind in GATING.values()}
    return [
        f"{kind}: nothing was compared: "
        + (f"nothing is expected of {', '.join(found[kind])}" if found[kind] else "it cannot be measured here")
        + f"; --update expects what this machine finds, --impossible {kind} says that it cannot be compared here"
        for kind in kinds
        if kind not in compared
    ]


def shown(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 or value == int(value) else f"{value:.3f}"


def updated(numbers: Iterable[Number], expected: Expected) -> Expected:
    """Replaces the groups that were measured by what was found. The others stay."""
    found: Expected = {}
    for number in numbers:
        if number.kind != "time":
            digits = 4 if number.kind == "ratio" else 0 if number.kind == "instructions" else 6
            found.setdefault(number.group, {})[number.name] = round(number.value, digits)
    return {group: found.get(group, expected.get(group, {})) for group in sorted({*expected, *found})}


def record(numbers: Iterable[Number], file: Path) -> None:
    """One JSON line: this commit, and everything that was measured."""
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%h %cI"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    line = {
        "commit": commit[0] if commit else "unknown",
        "committed": commit[1] if commit else None,
        "measured": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "numbers": [dataclasses.asdict(number) for number in numbers],
    }
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


def find_harness() -> Path:
    found = sorted(ROOT.glob("build/*/bench/moeflux-bench"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit("moeflux-bench: expected under build/, found none: make setup builds it")
    return found[-1]


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", type=Path, help="moeflux-bench; default: the newest under build/")
    parser.add_argument("--only", choices=["all", *GATING], default="all")
    parser.add_argument(
        "--impossible",
        choices=GATING.values(),
        action="append",
        default=[],
        metavar="KIND",
        help=f"of {', '.join(GATING.values())}: nothing of it can be compared here",
    )
    parser.add_argument("--update", action="store_true", help="write what was found into bench/gate/expected.json")
    parser.add_argument("--history", type=Path, metavar="FILE", help="JSON lines, one a run, to append to")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="every number of the history over its commits")
    arguments = parser.parse_args(words)
    if arguments.plot and not arguments.history:
        parser.error("--plot: expected --history too, whose numbers it draws")
    if arguments.plot:
        check_plot(arguments.plot)  # the run takes minutes
    return arguments


def main(words: list[str] | None = None) -> int:
    arguments = parse(words)
    expected: Expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    with tempfile.TemporaryDirectory(prefix="moeflux-track-") as folder:
        numbers = measure(Bench(arguments.harness or find_harness(), Path(folder)), arguments.only)
    kinds = [GATING[arguments.only]] if arguments.only in GATING else GATING.values()
    faults = compare(numbers, expected)
    faults += not_compared(numbers, expected, (kind for kind in kinds if kind not in arguments.impossible))
    if arguments.history:
        record(numbers, arguments.history)
    if arguments.plot:
        history_plot.plot(arguments.history.read_text().splitlines(), arguments.plot)
    if arguments.update:
        EXPECTED.write_text(json.dumps(updated(numbers, expected), indent=2) + "\n")
        print(f"{EXPECTED.relative_to(ROOT)}: written")
        return 0
    for fault in faults:
        print(f"worse: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
