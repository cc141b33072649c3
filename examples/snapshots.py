"""Snapshots: a long prompt is read once, saved, and continued in another process, or in many ways from the same place.

    python examples/snapshots.py save state.moeflux
    python examples/snapshots.py go-on state.moeflux        another process, or another day
    python examples/snapshots.py fork state.moeflux         several continuations of one prompt

A file goes with the model that made it: another one refuses it, and so does a version that computes other bits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import moeflux

PROMPT = "Once upon a time, there was a little fox who lived in a forest. One day, the fox met a bear. The bear said:"


def save(model: moeflux.Model, file: Path) -> None:
    with model.session() as session:
        # Up to the last token: what follows is chosen from what that one gives, so whoever goes on evaluates it.
        session.prefill(model.tokenizer.encode(PROMPT)[:-1])
        session.snapshot().save(file)
        print(f"{file}: {session.position} tokens, {file.stat().st_size / 1e6:.2f} MB")


def go_on(model: moeflux.Model, file: Path) -> None:
    with model.session() as session:
        session.restore(file)
        answer = session.complete(PROMPT, max_tokens=30, temperature=0)
        print(f"{answer.stats.reused_tokens} of {answer.stats.prompt_tokens} tokens were there:{answer}")


def fork(model: moeflux.Model, file: Path) -> None:
    """The continuations share the keys and values of the prompt."""
    with model.session() as session:
        session.restore(file)
        for seed in range(3):
            with session.fork() as other:
                print(f"{seed}:{other.complete(PROMPT, max_tokens=20, temperature=0.9, seed=seed)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Saved states.")
    parser.add_argument("what", choices=["save", "go-on", "fork"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", help="a folder, a GGUF file or a repository; default: the built-in model")
    arguments = parser.parse_args()
    with moeflux.load(arguments.model, sessions=2) as model:
        {"save": save, "go-on": go_on, "fork": fork}[arguments.what](model, arguments.file)


if __name__ == "__main__":
    main()
