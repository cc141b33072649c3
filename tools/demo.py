"""What exists so far, on a small random model: python tools/demo.py FOLDER

Runs the commands of the README on files that it makes itself, then a few tokens through the NumPy oracle.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from pathlib import Path

import numpy as np

from moeflux import cli
from moeflux.oracle import Session
from moeflux.store import open_store

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))


def run(line: str) -> None:
    print(f"\n$ moeflux {line}", flush=True)
    status = cli.main(shlex.split(line))
    if status:
        sys.exit(status)


def tiny_checkpoint(folder: Path) -> None:
    """A checkpoint of random numbers as Hugging Face publishes them, the one that the tests use."""
    from golden import checkpoints

    print(f"\n$ python tests/golden/checkpoints.py {folder} qwen3_next")
    checkpoints.write("qwen3_next", folder / "qwen3_next")


def tokens(folder: Path, prompt: list[int], count: int) -> None:
    """Greedy tokens from the oracle: float64, exact and slow."""
    print(f"\nthe NumPy oracle on {folder}, prompt {prompt}:")
    with open_store(folder) as store:
        session = Session(store.variant, store)
        start = time.monotonic()
        logits = session.prefill(prompt)[-1]
        print(f"  prefill of {len(prompt)} tokens in {time.monotonic() - start:.1f} s")
        for _ in range(count):
            start = time.monotonic()
            token = int(np.argmax(logits))
            logits = session.step(token)
            print(f"  token {token:4d} at position {session.position - 1}, {time.monotonic() - start:.2f} s")


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run("info")
    run("info a3b")
    run(f"synth {folder}/synthetic --variant a3b --layers 4 --experts 16 --vocab 1024")
    run(f"info {folder}/synthetic")
    run(f"verify {folder}/synthetic")
    tiny_checkpoint(folder)
    run(f"convert {folder}/qwen3_next {folder}/converted --bits 4")
    run(f"verify {folder}/converted")
    tokens(folder / "converted", [3, 1, 4, 1, 5], 8)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
