"""The hit-rate curves of a replay, drawn with letters or as SVG."""

from __future__ import annotations

from itertools import pairwise
from xml.sax.saxutils import escape

from moeflux.routing.replay import OPTIMUM, Replay

__all__ = ["svg", "text_plot"]

MARKS = {"lru": "r", "lfu": "f", "none": "n", OPTIMUM: "*"}
COLOURS = {"lru": "#0072b2", "lfu": "#d55e00", "none": "#777777", OPTIMUM: "#009e73"}
"""Told apart by the colour-blind too."""

Curve = list[tuple[float, float]]  # (share of all experts, hit rate), ascending


def curves(replay: Replay) -> dict[str, Curve]:
    return {
        policy: [(replay.share(point.slots), point.hit_rate) for point in points]
        for policy, points in replay.curves.items()
    }


# ---- Letters ----------------------------------------------------------------------------------------------------


def text_plot(replay: Replay, width: int = 72, height: int = 20) -> str:
    """Draws the hit rate over the share of experts held, with straight lines between the sizes that were played."""
    canvas = [[" "] * (width + 1) for _ in range(height + 1)]
    for policy, curve in reversed(curves(replay).items()):  # the policies over the optimum where they meet
        for column in range(width + 1):
            rate = value_at(curve, column / width)
            if rate is not None:
                canvas[round((1 - rate) * height)][column] = MARKS[policy]
    lines = ["hits"]
    for row, cells in enumerate(canvas):
        label = f"{100 - 100 * row // height:>4}%" if row % (height // 4) == 0 else " " * 5
        lines.append(f"{label} |{''.join(cells).rstrip()}")
    axis = "".join("+" if column % (width // 4) == 0 else "-" for column in range(width + 1))
    lines.append(f"      {axis}")
    labels = "".join(f"{f'{quarter * 25}%':<{width // 4}}" for quarter in range(5)).rstrip()
    lines.append(f"      {labels}  of the experts in memory")
    lines.append("      " + "   ".join(f"{MARKS[policy]} {policy}" for policy in replay.curves))
    return "\n".join(lines)


def value_at(curve: Curve, x: float) -> float | None:
    """The value of a curve, or None outside of what was played. A lone point is drawn where it is."""
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    nearest = min(curve, key=lambda point: abs(point[0] - x))
    return nearest[1] if abs(nearest[0] - x) < 0.007 else None


# ---- SVG --------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 120, 56, 56


def svg(replay: Replay) -> str:
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x * plot_width, TOP + (1 - y) * plot_height

    trace = replay.trace
    title = f"{trace.model}: {trace.tokens} tokens, {trace.experts_per_token} of {trace.num_experts} experts a layer"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="#222222">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="28" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    for quarter in range(5):
        share = quarter / 4
        x, bottom = place(share, 0)
        left, y = place(0, share)
        right, top = place(1, 1)
        parts += [
            f'<path d="M{left:.1f} {y:.1f}H{right:.1f}M{x:.1f} {bottom:.1f}V{top:.1f}" stroke="#e2e2e2"/>',
            f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>',
            f'<text x="{x:.1f}" y="{bottom + 20:.1f}" text-anchor="middle">{share:.0%}</text>',
        ]
    x, bottom = place(0.5, 0)
    parts.append(f'<text x="{x:.1f}" y="{bottom + 42:.1f}" text-anchor="middle">of all experts in memory</text>')
    parts.append(f'<text x="{LEFT - 8}" y="{TOP - 12}" text-anchor="end">hits</text>')
    lowest = 0.0
    ends = sorted(curves(replay).items(), key=lambda item: -item[1][-1][1])
    for policy, curve in ends:
        points = [place(*point) for point in curve]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="6 4"' if policy == OPTIMUM else ""
        colour = COLOURS[policy]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        lowest = max(points[-1][1], lowest + 18)  # labels of curves that end together stand below each other
        parts.append(f'<text x="{LEFT + plot_width + 12}" y="{lowest + 4:.1f}" fill="{colour}">{policy}</text>')
    return "\n".join([*parts, "</svg>", ""])
