"""Draws numbers over commits: a small picture for each, with a scale of its own from zero."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moeflux.measure.plots import COLOURS, draw

KINDS = {"count": COLOURS[0], "instructions": COLOURS[2], "ratio": COLOURS[1], "time": COLOURS[3]}
"""Those that gate in colour."""
COLUMNS, WIDTH, HEIGHT = 3, 4.0, 1.5

Series = list[tuple[str, float]]  # (commit, value), in the order of the runs


def plot(lines: Iterable[str], path: Path) -> None:
    """`lines`: of the history, a run each."""
    runs: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]
    series: dict[tuple[str, str, str], Series] = {}
    for run in runs:
        for number in run["numbers"]:
            key = (number["kind"], number["group"], number["name"])
            series.setdefault(key, []).append((run["commit"], number["value"]))
    order = list(KINDS)
    keys = sorted(series, key=lambda key: (order.index(key[0]), key[1], key[2]))
    rows = -(-len(keys) // COLUMNS)

    def picture(figure: Any) -> None:
        for place, (kind, group, name) in enumerate(keys):
            axes = figure.add_subplot(rows, COLUMNS, place + 1)
            values = [value for _, value in series[kind, group, name]]
            commits = [commit for commit, _ in series[kind, group, name]]
            axes.plot(values, "-o", color=KINDS[kind], ms=3)
            axes.annotate(f" {values[-1]:.5g}", (len(values) - 1, values[-1]), color=KINDS[kind], va="center")
            axes.set_ylim(0, 1.15 * max(values) or 1)
            axes.set_xticks([0, len(values) - 1], [commits[0], commits[-1] if len(commits) > 1 else ""])
            axes.set_title(f"{name}\n{group}", fontsize=8, loc="left")
            axes.tick_params(labelsize=7)

    draw(path, picture, (COLUMNS * WIDTH, max(1, rows) * HEIGHT))
