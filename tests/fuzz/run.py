"""Builds the fuzz targets and runs them: hostile bytes into every reader of files.

    python tests/fuzz/run.py --seconds 600                 all targets, the time shared out among them
    python tests/fuzz/run.py --seconds 60 --target json    one of them
    python tests/fuzz/run.py --corpus-only                 seeds, regressions and a fixed series of mutations
    python tests/fuzz/run.py --seconds 3600 --plain        readers in C++ without sanitizers, at three times the rate

A clang++ with libFuzzer is used when there is one, else the C++ compiler at hand with our driver.cpp; --corpus-only
always takes the latter, so that it does the same everywhere. Targets of readers that are written in Python lie in
python_targets: python_driver.py runs them. Seeds lie in tests/fuzz/corpus/TARGET (those of a Python target in its
module), inputs that once failed in tests/fuzz/regressions/TARGET; what a run learns is kept in build/fuzz/corpus/TARGET
for the next. An input that crashes, hangs or breaks a promise of a target is a finding: it is written to
build/fuzz/findings/TARGET, and the exit status is 1. Fix the reader and move the input to the regressions. What is
learned without sanitizers is run with them in the end.

Python targets with the C++ below them under AddressSanitizer and UndefinedBehaviorSanitizer:

    tools/sanitize.sh asan --script tests/fuzz/run.py --seconds 600 --target chat_template
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "fuzz"
TARGETS = ("gguf", "json", "manifest", "safetensors", "snapshot", "variant")
PYTHON_TARGETS = tuple(sorted(path.stem for path in (HERE / "python_targets").glob("*.py")))
PYTHON_DRIVER = [sys.executable, str(HERE / "python_driver.py")]
CORPUS_ONLY_MUTATIONS = 2000
CORPUS_ONLY_PYTHON_MUTATIONS = 200
MAX_INPUT_BYTES = 1 << 14


@dataclass(frozen=True)
class Outcome:
    target: str
    executions: int
    edges: int
    finding: Path | None  # the input that failed


# ---- Building ---------------------------------------------------------------------------------------------------


def clang_with_libfuzzer() -> str | None:
    """A clang++ that links a libFuzzer program."""
    for name in ("clang++", *(f"clang++-{version}" for version in range(22, 13, -1))):
        compiler = shutil.which(name)
        if not compiler:
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cpp"
            source.write_text(
                'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
            )
            probe = [compiler, "-fsanitize=fuzzer,address,undefined", source.name, "-o", "probe"]
            if subprocess.run(probe, cwd=folder, capture_output=True).returncode == 0:
                return compiler
    return None


def cmake() -> str:
    """The cmake beside this Python, or the system's."""
    beside = Path(sys.executable).parent / "cmake"
    found = str(beside) if beside.exists() else shutil.which("cmake")
    if not found:
        raise SystemExit("cmake: expected it in the environment of this Python or on the PATH, found none")
    return found


def build(libfuzzer: str | None, targets: tuple[str, ...], checks: bool = True) -> Path:
    """Builds the targets and returns the folder with the programs."""
    folder = BUILD / ("libfuzzer" if libfuzzer else "driver" if checks else "plain")
    configure = [cmake(), "-S", str(ROOT), "-B", str(folder), "-DMOEFLUX_FUZZ=ON", "-DCMAKE_BUILD_TYPE=None"]
    configure += [
        f"-DCMAKE_CXX_FLAGS={'-O1' if checks else '-O2'} -g1",
        f"-DMOEFLUX_FUZZ_CHECKS={'ON' if checks else 'OFF'}",
        "-DMOEFLUX_METAL=OFF",
        f"-DMOEFLUX_LIBFUZZER={'ON' if libfuzzer else 'OFF'}",
    ]
    if libfuzzer:
        configure.append(f"-DCMAKE_CXX_COMPILER={libfuzzer}")
    programs = [f"fuzz_{target}" for target in targets]
    make = [cmake(), "--build", str(folder), "--parallel", str(os.cpu_count() or 1), "--target", *programs]
    for command in (configure, make):
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\n{result.stdout}")
    return folder / "tests" / "fuzz"


# ---- Running ----------------------------------------------------------------------------------------------------


def environment(python: bool) -> dict[str, str]:
    """Without the sanitizers' limits an allocation of terabytes would only be an exception. To Python it is one, and
    the driver of its targets looks at what comes of that."""
    return {
        **os.environ,
        "ASAN_OPTIONS": f"{os.environ.get('ASAN_OPTIONS', '')}:max_allocation_size_mb=2048"
        f":allocator_may_return_null={int(python)}:handle_abort=1:quarantine_size_mb=32",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def seeds(target: str) -> list[Path]:
    return [folder for folder in (HERE / "corpus" / target, HERE / "regressions" / target) if folder.is_dir()]


def followed(command: list[str]) -> tuple[int, str]:
    """Runs the command, its output shown as it comes; exit status and the last of it."""
    given = environment(python=command[0] == sys.executable)
    process = subprocess.Popen(
        command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        print("  " + line, end="", flush=True)
        lines = [*lines[-400:], line]
    return process.wait(), "".join(lines)


def keep_finding(target: str, content: bytes) -> Path:
    folder = BUILD / "findings" / target
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(content).hexdigest()[:16]
    path.write_bytes(content)
    return path


def run_driver(program: list[str], target: str, limit: list[str], learn: bool) -> Outcome:
    BUILD.mkdir(parents=True, exist_ok=True)
    current = BUILD / f"{target}.current"
    command = [*program, *limit, "--current", str(current)]
    command += ["--dictionary", str(HERE / f"{target}.dict")]
    folders = seeds(target)
    if learn:
        learned = BUILD / "corpus" / target
        learned.mkdir(parents=True, exist_ok=True)
        command += ["--save", str(learned)]
        folders.append(learned)
    current.unlink(missing_ok=True)
    status, output = followed([*command, *map(str, folders)])
    if status != 0 and not current.exists():
        raise SystemExit(f"{' '.join(command)}: expected it to run inputs, found that it ended before: {status}")
    counts = re.findall(r"(\d+) executions, (\d+) edges", output) or [("0", "0")]
    executions, edges = int(counts[-1][0]), int(counts[-1][1])
    if status == 0:
        return Outcome(target, executions, edges, None)
    record = current.read_bytes()
    executions, size = (int.from_bytes(record[at : at + 8], "little") for at in (0, 8))
    return Outcome(target, executions + 1, edges, keep_finding(target, record[16 : 16 + size]))


def run_libfuzzer(program: list[str], target: str, seconds: int) -> Outcome:
    learned = BUILD / "corpus" / target
    learned.mkdir(parents=True, exist_ok=True)
    artifacts = BUILD / "artifacts" / target
    artifacts.mkdir(parents=True, exist_ok=True)
    command = [*program, f"-max_total_time={seconds}", f"-dict={HERE / f'{target}.dict'}"]
    command += [f"-max_len={MAX_INPUT_BYTES}", f"-artifact_prefix={artifacts}/", "-print_final_stats=1", "-timeout=20"]
    status, output = followed([*command, str(learned), *map(str, seeds(target))])
    finding = None
    if status != 0:
        written = re.findall(r"Test unit written to (\S+)", output)
        finding = keep_finding(target, Path(written[-1]).read_bytes() if written else output.encode())
    executions = re.findall(r"stat::number_of_executed_units: (\d+)", output) or re.findall(r"#(\d+)", output) or ["0"]
    edges = re.findall(r"cov: (\d+)", output) or ["0"]
    return Outcome(target, int(executions[-1]), int(edges[-1]), finding)


def again(target: str, programs: Path) -> Outcome:
    """What was learned, once and unchanged."""
    return run_driver([str(programs / f"fuzz_{target}")], target, ["--runs", "0"], learn=True)


def run(target: str, programs: Path, libfuzzer: str | None, options: argparse.Namespace, seconds: int) -> Outcome:
    compiled = target in TARGETS
    program = [str(programs / f"fuzz_{target}")] if compiled else [*PYTHON_DRIVER, target]
    if compiled and libfuzzer:
        return run_libfuzzer(program, target, seconds)
    mutations = CORPUS_ONLY_MUTATIONS if compiled else CORPUS_ONLY_PYTHON_MUTATIONS
    limit = ["--runs", str(mutations)] if options.corpus_only else ["--seconds", str(seconds)]
    return run_driver(program, target, limit, learn=not options.corpus_only)


def driven_by(target: str, libfuzzer: str | None) -> str:
    if target not in TARGETS:
        return "Python, python_driver.py"
    return f"C++, {'libFuzzer of ' + libfuzzer if libfuzzer else 'driver.cpp'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=600, help="for all targets together")
    parser.add_argument("--target", choices=TARGETS + PYTHON_TARGETS, action="append", help="one; may be repeated")
    parser.add_argument("--corpus-only", action="store_true", help="seeds, regressions and a fixed series of mutations")
    parser.add_argument("--plain", action="store_true", help="without sanitizers; then what was learned with them")
    parser.add_argument("--driver", action="store_true", help="our driver even where there is libFuzzer")
    options = parser.parse_args()

    targets = tuple(options.target or TARGETS + PYTHON_TARGETS)
    compiled = tuple(target for target in targets if target in TARGETS)
    ours = options.corpus_only or options.driver or options.plain or not compiled
    libfuzzer = None if ours else clang_with_libfuzzer()
    programs = build(libfuzzer, compiled, not options.plain) if compiled else BUILD
    seconds = max(1, options.seconds // len(targets))
    outcomes = []
    for target in targets:
        print(f"{target}:", flush=True)
        outcomes.append(run(target, programs, libfuzzer, options, seconds))
    if options.plain and compiled:
        checked = build(None, compiled)
        outcomes += [again(target, checked) for target in compiled]

    print()
    for outcome in outcomes:
        found = f"FINDING {outcome.finding}" if outcome.finding else "no finding"
        counts = f"{outcome.executions:>12,} executions {outcome.edges:>8,} edges"
        print(f"{outcome.target:20} {counts}   {found}   ({driven_by(outcome.target, libfuzzer)})")
    return 1 if any(outcome.finding for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
