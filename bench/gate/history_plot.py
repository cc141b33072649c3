"""Draws numbers over commits as SVG: a small picture for each, with a scale of its own from zero."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from xml.sax.saxutils import escape

COLOURS = {"count": "#0072b2", "instructions": "#009e73", "ratio": "#d55e00", "time": "#777777"}
"""Those that gate in colour; told apart by the colour-blind too."""
COLUMNS, WIDTH, HEIGHT = 3, 400, 130
LEFT, TOP, DRAWN = 16, 44, 54

Series = list[tuple[str, float]]  # (commit, value), in the order of the runs


def svg(lines: Iterable[str]) -> str:
    """`lines`: of the history, a run each."""
    runs: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]
    series: dict[tuple[str, str, str], Series] = {}
    for run in runs:
        for number in run["numbers"]:
            key = (number["kind"], number["group"], number["name"])
            series.setdefault(key, []).append((run["commit"], number["value"]))
    order = list(COLOURS)
    keys = sorted(series, key=lambda key: (order.index(key[0]), key[1], key[2]))
    rows = -(-len(keys) // COLUMNS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{COLUMNS * WIDTH}" height="{rows * HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="#222222">',
        "<title>moeflux over its commits</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for index, (kind, group, name) in enumerate(keys):
        x, y = index % COLUMNS * WIDTH, index // COLUMNS * HEIGHT
        parts.append(f'<g transform="translate({x} {y})">')
        parts += picture(name, group, series[kind, group, name], COLOURS[kind])
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def picture(name: str, group: str, values: Series, colour: str) -> list[str]:
    highest = max(value for _, value in values) or 1
    width = WIDTH - 5 * LEFT

    def place(index: int, value: float) -> tuple[float, float]:
        return LEFT + width * (index / max(1, len(values) - 1)), TOP + DRAWN * (1 - value / highest)

    points = [place(index, value) for index, (_, value) in enumerate(values)]
    last_x, last_y = points[-1]
    bottom = TOP + DRAWN + 15
    return [
        f'<text x="{LEFT}" y="18" font-weight="600">{escape(name)}</text>',
        f'<text x="{LEFT}" y="33" fill="#777777">{escape(group)}</text>',
        f'<path d="M{LEFT} {TOP + DRAWN}H{LEFT + width}" stroke="#e2e2e2"/>',
        f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none" stroke="{colour}" '
        f'stroke-width="2"/>',
        *(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}">'
            f"<title>{escape(commit)}: {value:g}</title></circle>"
            for (x, y), (commit, value) in zip(points, values, strict=True)
        ),
        f'<text x="{last_x + 8:.1f}" y="{last_y + 4:.1f}" fill="{colour}">{values[-1][1]:.5g}</text>',
        f'<text x="{LEFT}" y="{bottom}" fill="#777777">{escape(values[0][0])}</text>',
        f'<text x="{LEFT + width}" y="{bottom}" fill="#777777" text-anchor="end">{escape(values[-1][0])}</text>',
    ]
