"""moeflux-bench linked once more, with parts of it replaced."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def relink(harness: Path, sources: list[Path], program: Path, *, before: Path | None = None, link: str = "") -> Path:
    """`sources`, compiled, stand before the library of which `harness` is made; their headers are looked for in the
    folder `before` first."""
    compiler = os.environ.get("CXX", "c++")
    folders = [f"-I{folder}" for folder in (before, ROOT / "csrc") if folder]
    program.parent.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> str:
        target = program.with_name(f"{source.stem}.o")
        command = [compiler, "-std=c++20", "-O2", "-ffp-contract=off", *folders, "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as several:
        planted = list(several.map(compiled, sources))
    build = harness.parents[1]
    objects = sorted(map(str, (build / "bench" / "CMakeFiles" / "moeflux-bench.dir").glob("*.o")))
    options = ["-pthread", "-ldl", *([link] if link else [])]
    libraries = [str(build / f"libmoeflux_{name}.a") for name in ("core", "commit")]
    subprocess.run([compiler, *objects, *planted, *libraries, *options, "-o", str(program)], check=True)
    return program
