"""Pictures of what was measured, by matplotlib (extra `plot`): as SVG, PNG or PDF, as the name of the file ends."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moeflux import files
from moeflux.errors import ArgumentError, IoError, NotFoundError
from moeflux.measure.bench import ORDER, Row
from moeflux.measure.evaluate import Evaluation
from moeflux.measure.together import Together
from moeflux.routing.replay import OPTIMUM, Replay
from moeflux.routing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "bench_plot",
    "check_plot",
    "draw",
    "evaluation_plot",
    "replay_plot",
    "together_plot",
    "trace_plot",
]

KINDS = (".svg", ".png", ".pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#777777", "#cc79a7")
"""Told apart by the colour-blind, too."""
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "grid.color": "#e2e2e2",
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "moeflux",  # the same picture is the same file
}


def check_plot(path: Path) -> None:
    """Before anything is measured: whether there will be a picture."""
    if find_spec("matplotlib") is None:
        raise NotFoundError('--plot: expected matplotlib, which draws it, found none: pip install "moeflux[plot]"')
    if path.suffix not in KINDS:
        raise ArgumentError(f"--plot: expected a file that ends with {', '.join(KINDS)}, found {path}")
    if not files.is_folder(path.absolute().parent):
        raise IoError(f"{path}: expected a folder to write into, found none")


def draw(path: Path, picture: Callable[[Figure], None], size: tuple[float, float] = (7.6, 4.6)) -> None:
    """`picture` fills the figure, whose size is in inches."""
    check_plot(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE), io.BytesIO() as content:
        figure = Figure(figsize=size)
        picture(figure)
        no_time = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        figure.savefig(content, format=path.suffix[1:], dpi=150, metadata=no_time.get(path.suffix))
        files.write_atomically(path, [content.getvalue()])


# ---- Replays and traces -----------------------------------------------------------------------------------------


def replay_plot(replay: Replay) -> Callable[[Figure], None]:
    """The hit rate of each policy over the share of the experts that are in memory."""

    def picture(figure: Figure) -> None:
        axes: Axes = figure.subplots()
        for (policy, points), colour in zip(replay.curves.items(), COLOURS, strict=False):
            shares = [100 * replay.share(point.slots) for point in points]
            rates = [100 * point.hit_rate for point in points]
            best = policy == OPTIMUM
            axes.plot(shares, rates, "--o" if best else "-o", color=COLOURS[2] if best else colour, label=policy, ms=4)
        axes.set(xlim=(0, 101), ylim=(0, 101), xlabel="of all experts in memory, %", ylabel="hits, %")
        axes.set_title(_escaped(_routing(replay.trace)), fontsize="medium")
        axes.legend(frameon=False)

    return picture


def trace_plot(trace: Trace) -> Callable[[Figure], None]:
    """How much of a layer's picks its experts have, the most wanted first: a curve for each layer, and one for picks
    that are even."""
    picks = np.zeros((len(trace.layers), trace.num_experts))
    for layer in range(len(trace.layers)):
        picks[layer] = np.bincount(trace.experts[:, layer].ravel(), minlength=trace.num_experts)
    shares = 100 * np.cumsum(-np.sort(-picks, axis=1), axis=1) / max(picks[0].sum(), 1)

    def picture(figure: Figure) -> None:
        axes: Axes = figure.subplots()
        experts = 100 * np.arange(1, trace.num_experts + 1) / trace.num_experts
        for layer in shares:
            axes.plot(experts, layer, color=COLOURS[0], alpha=max(0.15, 1 / len(shares)), lw=1)
        axes.plot(experts, shares.mean(axis=0), color=COLOURS[1], lw=2, label="the mean of all layers")
        axes.plot([0, 100], [0, 100], "--", color=COLOURS[3], lw=1, label="if all were picked alike")
        axes.set(xlim=(0, 101), ylim=(0, 101), ylabel="of the picks, %")
        axes.set_xlabel("of a layer's experts, the most picked first, %")
        axes.set_title(_escaped(_routing(trace)), fontsize="medium")
        axes.legend(frameon=False)

    return picture


def _routing(trace: Trace) -> str:
    return f"{trace.model}: {trace.tokens} tokens, {trace.experts_per_token} of {trace.num_experts} experts a layer"


# ---- Speeds -----------------------------------------------------------------------------------------------------


def bench_plot(rows: Sequence[Row]) -> Callable[[Figure], None]:
    """Tokens a second of each phase, cold and warm: medians as bars, every repetition as a dot."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        groups.setdefault((row.phase, row.state), []).append(row.tokens_per_second)
    phases = sorted({phase for phase, _ in groups}, key=[phase for phase, _ in ORDER].index)

    def picture(figure: Figure) -> None:
        # A prefill is many times as fast as a decode.
        for axes, phase in zip(np.atleast_1d(figure.subplots(1, len(phases))), phases, strict=True):
            bars = [(state, groups[phase, state]) for each, state in ORDER if each == phase and (each, state) in groups]
            for place, (_, speeds) in enumerate(bars):
                axes.bar(place, statistics.median(speeds), 0.6, color=COLOURS[place])
                axes.plot([place] * len(speeds), speeds, "o", color="#222222", ms=4)
            axes.set_xticks(range(len(bars)), [state for state, _ in bars])
            axes.set_title(phase, fontsize="medium")
            axes.set_ylim(bottom=0)
            axes.grid(visible=False, axis="x")
        figure.supylabel("tokens a second")
        figure.suptitle(_escaped(_wrapped(rows[0].settings)), fontsize="small")

    return picture


def together_plot(rows: Sequence[Together]) -> Callable[[Figure], None]:
    """Tokens a second of all answers together, and the time between two tokens of one, over their number."""
    by_sessions = {
        sessions: list(group)
        for sessions, group in groupby(sorted(rows, key=lambda row: row.sessions), lambda row: row.sessions)
    }

    def picture(figure: Figure) -> None:
        speed, between = figure.subplots(1, 2)
        counts = list(by_sessions)

        def curve(axes: Axes, value: Callable[[Together], float], index: int, label: str | None = None) -> None:
            medians = [statistics.median(map(value, group)) for group in by_sessions.values()]
            axes.plot(counts, medians, "-o", color=COLOURS[index], ms=4, label=label)

        curve(speed, lambda row: row.tokens_per_second, 0)
        curve(between, lambda row: 1000 * row.step_p50, 0, "median")
        curve(between, lambda row: 1000 * row.step_p99, 1, "99th percentile")
        speed.set(ylabel="tokens a second of all")
        between.set(ylabel="ms between two tokens of one")
        between.legend(frameon=False)
        for axes in (speed, between):
            axes.set_xticks(counts)
            axes.set_xlabel("answers at a time")
            axes.set_ylim(bottom=0)
        figure.suptitle(_escaped(_wrapped(rows[0].settings)), fontsize="small")

    return picture


# ---- Evaluations ------------------------------------------------------------------------------------------------


def evaluation_plot(result: Evaluation) -> Callable[[Figure], None]:
    """The means with their standard errors: perplexity, and what it is to the reference."""
    perplexities = [("model", result.perplexity)]
    if result.reference_perplexity is not None:
        perplexities.append(("reference", result.reference_perplexity))

    def picture(figure: Figure) -> None:
        columns = 1 if result.divergence is None else 2
        every = np.atleast_1d(figure.subplots(1, columns))
        panels: list[tuple[str, list[tuple[str, Any]]]] = [("perplexity", perplexities)]
        if result.divergence is not None:
            panels.append(
                ("nats a token", [("divergence", result.divergence), ("loss above the reference's", result.difference)])
            )
        for axes, (label, means) in zip(every, panels, strict=True):
            for place, (_, mean) in enumerate(means):
                axes.errorbar(place, mean.value, mean.error, fmt="o", color=COLOURS[place], capsize=6)
            axes.set_xticks(range(len(means)), [name for name, _ in means])
            axes.set_xlim(-0.5, len(means) - 0.5)
            axes.set_ylabel(label)
            axes.grid(visible=False, axis="x")
        title = f"{result.model}: {result.tokens} tokens in {result.windows} windows; bars are standard errors"
        figure.suptitle(_escaped(title), fontsize="small")

    return picture


def _wrapped(text: str, width: int = 110) -> str:
    """Lines of words, at commas."""
    lines = [""]
    for part in text.split(", "):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += f"{', ' if lines[-1] else ''}{part}"
    return ",\n".join(lines)


def _escaped(text: str) -> str:
    """Between two of these signs, matplotlib reads formulas."""
    return text.replace("$", r"\$")
