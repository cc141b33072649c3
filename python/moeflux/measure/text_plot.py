"""The hit-rate curves of a replay, drawn with letters."""

from __future__ import annotations

from itertools import pairwise

from moeflux.routing.replay import OPTIMUM, Replay

__all__ = ["text_plot"]

MARKS = {"lru": "r", "lfu": "f", "none": "n", OPTIMUM: "*"}

Curve = list[tuple[float, float]]  # (share of all experts, hit rate), ascending


def curves(replay: Replay) -> dict[str, Curve]:
    return {
        policy: [(replay.share(point.slots), point.hit_rate) for point in points]
        for policy, points in replay.curves.items()
    }


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
