"""Makes the pictures of README.md and docs/performance.md: python tools/pictures.py

terminal.svg    what a terminal shows when these commands run here, now
streaming.svg   decoding beside llama.cpp, all in memory and under one limit
roofline.svg    the products of a model against what the machine can read and multiply

The figures of the last two are read from the tables of docs/performance.md, so they say what it says.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from moeflux.measure.plots import COLOURS, draw

DOCS = Path(__file__).resolve().parents[1] / "docs"
COMMANDS = (
    'moeflux run -p "What is the capital of France?" --temperature 0',
    "moeflux plan Qwen3.6-35B-A3B --memory 8GB --context 8192",
    'moeflux run --raw -p "Once upon a time, there was a fox who" --temperature 0 -n 40 --expert-slots 64 --stats',
)
WIDTH = 128


def main() -> None:
    (DOCS / "terminal.svg").write_text(recorded(COMMANDS))
    text = (DOCS / "performance.md").read_text()
    draw(DOCS / "streaming.svg", streaming(text), (7.6, 3.2))
    draw(DOCS / "roofline.svg", roofline(text), (7.6, 4.8))


# ---- The terminal -----------------------------------------------------------------------------------------------


def recorded(commands: tuple[str, ...]) -> str:
    """A picture of what they print, to stdout and stderr as it comes."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    for command in commands:
        console.print(Text("$ ", "green") + Text(command, "bold"))
        words = [sys.executable, "-m", *shlex.split(command)]
        run = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
        console.print(Text(run.stdout.rstrip() + "\n"))
    # Its fonts would be asked for at somebody else's server.
    plain = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="moeflux", code_format=plain, unique_id="moeflux")


# ---- Beside llama.cpp ---------------------------------------------------------------------------------------------


def rows_of(text: str, heading: str) -> list[list[str]]:
    """The cells of the tables of a section."""
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]


def number(cell: str) -> float:
    """The median; the range follows it in parentheses."""
    return float(cell.split()[0].rstrip(","))


def speeds(text: str) -> dict[str, tuple[float, float]]:
    """Tokens a second that moeflux and llama.cpp decode with two threads."""
    inside = next(
        row for row in rows_of(text, "Beside llama.cpp and mlx-lm, in memory") if row[0] == "decode, 2 threads"
    )
    found = {"all in memory": (number(inside[1]), number(inside[2]))}
    for row in rows_of(text, "Beside llama.cpp, under one memory limit"):
        if row[1:2] == ["decode"]:
            found[f"a third in memory,\nread-ahead of {row[0]}"] = (number(row[2]), number(row[3]))
    return found


def streaming(text: str) -> Any:
    measured = speeds(text)

    def picture(figure: Any) -> None:
        axes = figure.subplots()
        for place, pair in enumerate(measured.values()):
            for engine, speed in enumerate(pair):
                at = place + 0.38 * engine
                axes.barh(at, speed, 0.36, color=COLOURS[engine], label=("moeflux", "llama.cpp (mmap)")[engine])
                axes.annotate(f" {speed:g}", (speed, at), va="center")
        axes.set_yticks([place + 0.19 for place in range(len(measured))], list(measured))
        axes.invert_yaxis()
        axes.set_xlabel("decoded tokens a second, 2 cores")
        axes.set_xlim(0, 1.12 * max(max(pair) for pair in measured.values()))
        axes.grid(visible=False, axis="y")
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[:2], labels[:2], frameon=False, loc="lower right")

    return picture


# ---- The roofline -------------------------------------------------------------------------------------------------

# Of the model of that table: how many there are of each in a token, columns, rows, bits.
PRODUCTS = {
    "experts": (8 * 8, 2048, 3 * 512, 4),
    "2048 -> 12352": (6, 2048, 12352, 4),
    "4096 -> 2048": (8, 4096, 2048, 4),
    "2048 -> 9216": (2, 2048, 9216, 4),
    "2048 -> 1024": (8, 2048, 1024, 4),
    "512 -> 2048": (8, 512, 2048, 4),
    "8 bits": (8, 2048, 256, 8),
}
KINDS = {"experts": ("*", 12), "matrices": ("o", 6), "8 bits": ("s", 6)}
"""Mark and size of each; whatever has no kind of its own is a matrix of 4 bits."""
PREFILL = 512
LIMITS = {"read": 30e9, "multiplied": 5e12 / 2}
"""With two threads: bytes a second, the higher of the two that are given; multiply-adds a second, where an activation
has two bytes."""


def points(text: str) -> dict[str, list[tuple[float, float]]]:
    """(multiply-adds for each byte of weights, multiply-adds a second) of decode and of prefill, two threads."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, *times in rows_of(text, "A whole model in memory"):
        if name in PRODUCTS:
            count, columns, rows, bits = PRODUCTS[name]
            products = count * columns * rows
            bytes_ = products * (bits + 32 / 64) / 8  # a scale and a bias of 16 bits for each 64 weights
            # A chunk reads each expert once, and its tokens share them.
            tokens = PREFILL * 8 / 256 if name == "experts" else PREFILL
            decode, prefill = float(times[3]) / 1e6, float(times[7]) / 1e6
            found[name] = [(products / bytes_, products / decode), (tokens * products / bytes_, products / prefill)]
    return found


def roofline(text: str) -> Any:
    measured = points(text)

    def picture(figure: Any) -> None:
        axes = figure.subplots()
        edge = LIMITS["multiplied"] / LIMITS["read"]
        axes.plot([0.5, edge, 2000], [0.5 * LIMITS["read"], *2 * [LIMITS["multiplied"]]], color=COLOURS[3])
        axes.annotate("30 GB/s read", (4, 4 * LIMITS["read"]), rotation=32, ha="right", va="bottom")
        axes.annotate("AMX, activations of 16 bits", (2000, LIMITS["multiplied"]), ha="right", va="bottom")
        for phase, (label, colour) in enumerate((("a decoded token", COLOURS[0]), ("a prefill of 512", COLOURS[1]))):
            for name, places in measured.items():
                x, y = places[phase]
                shape = {"experts": "*", "8 bits": "s"}.get(name, "o")
                named = (
                    f"{label}: {'experts' if shape == '*' else 'matrices of 8 bits' if shape == 's' else 'matrices'}"
                )
                seen = axes.get_legend_handles_labels()[1]
                size = 12 if shape == "*" else 6
                axes.plot(x, y, shape, color=colour, ms=size, label=None if named in seen else named, ls="none")
        axes.set(xscale="log", yscale="log", xlabel="multiply-adds for each byte of weights", xlim=(0.5, 2000))
        axes.set_ylabel("multiply-adds a second")
        axes.legend(frameon=False, loc="lower right")

    return picture


if __name__ == "__main__":
    main()
