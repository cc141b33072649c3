"""What drafts are worth when a given share of them is right: python bench/peers/speculation.py [FOLDER] [--right 0.7]

FOLDER is a store; without it, the built-in model is measured. The text is what the model itself writes, so it is known,
and a drafter that only tests have is right about each token with the given probability. Both ways take turns, A-B-B-A,
in one process. With one thread it is the time of the process that counts, whatever other programs do. All experts are
in memory.

With --mtp, the layer that drafts makes its guesses as ever, which takes its time, and then those of that drafter are
evaluated in their place: a layer with random weights is never right. `moeflux synth --mtp` makes a store with one.

With --auto, the engine decides how many to draft, and whether to: with the layer if the store has it. It tries that out
first, so let it write some hundreds of tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import moeflux
from moeflux import _core
from moeflux.models import builtin
from moeflux.stores.store import open_store

PROMPT = [3, 17, 5, 29, 11, 41, 7, 53]


def loaded(folder: Path, threads: int, text: list[int], right: float, speculate: str) -> moeflux.Model:
    with open_store(folder) as store:
        faults = _core.testing.Faults(text=text, right=right)
        engine = _core.testing.engine(
            faults, store.directory, threads=threads, speculate=speculate if text else "off", look_ahead="off"
        )
        return moeflux.Model(store, engine)


def write(model: moeflux.Model, tokens: int, threads: int) -> tuple[list[int], float, float]:
    """The text, the seconds that it took, and the share of the drafts that were right."""
    clock = time.process_time if threads == 1 else time.perf_counter
    session = model.session(max_context=len(PROMPT) + tokens + 8)
    text = [session.prefill(PROMPT).argmax()]
    began = clock()
    while len(text) < tokens:
        text.append(session.step(text[-1]).argmax())
    total = session.total_stats
    return [*PROMPT, *text], clock() - began, total.accepted / max(total.drafted, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=builtin.path())
    parser.add_argument("--right", type=float, default=0.7, help="the share of drafts that are right")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--mtp", action="store_true", help="with the layer that drafts")
    ways.add_argument("--auto", action="store_true", help="as many drafts as pay")
    asked = parser.parse_args()
    speculate = "auto" if asked.auto else "mtp" if asked.mtp else "lookup"
    plain = loaded(asked.folder, asked.threads, [], 0, speculate)
    text, _, _ = write(plain, asked.tokens, asked.threads)
    drafting = loaded(asked.folder, asked.threads, text, asked.right, speculate)
    write(drafting, asked.tokens, asked.threads)
    ratios, accepted = [], 0.0
    for _ in range(asked.rounds):
        seconds: dict[str, list[float]] = {"plain": [], "drafting": []}
        for name, model in (("plain", plain), ("drafting", drafting), ("drafting", drafting), ("plain", plain)):
            again, took, came = write(model, asked.tokens, asked.threads)
            assert again == text, "the text is not the same"
            seconds[name].append(took)
            accepted = came if name == "drafting" else accepted
        ratios.append(sum(seconds["plain"]) / sum(seconds["drafting"]))
        print(
            f"{1000 * sum(seconds['plain']) / 2 / asked.tokens:.2f} ms a token without drafts, "
            f"{1000 * sum(seconds['drafting']) / 2 / asked.tokens:.2f} with them, of which {accepted:.1%} came: "
            f"{ratios[-1]:.2f} x"
        )
    print(f"tokens a second with drafts, over those without: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
