"""Pictures: the figures are those that were measured, the same twice is the same file, refusals come first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from moeflux import ArgumentError, IoError, NotFoundError
from moeflux.cli import main
from moeflux.measure import plots
from moeflux.measure.bench import Row
from moeflux.measure.evaluate import Evaluation, Mean
from moeflux.measure.together import Together
from moeflux.routing.replay import OPTIMUM, replay
from moeflux.routing.trace import Trace
from support.pictures import texts_of

Output = pytest.CaptureFixture[str]
Picture = Callable[[Figure], None]
IDS = np.random.default_rng(3).geometric(0.3, size=(40, 3, 2)).clip(1, 8) - 1
TRACE = Trace("a model", "f00d", 8, 1_000_000, (1, 2, 4), IDS.astype(np.uint16), np.ones(40, np.int32))
ROW = Row("decode", "warm", 0, 24, 10, 2.0, 0.0, 0, None, 1, 1, 0.0, 0, 0, 0, 0, 1 << 30, None, "12 slots, lru")
SPEEDS = {("prefill", "cold"): [200.0, 300.0], ("decode", "cold"): [4.0, 8.0], ("decode", "warm"): [5.0, 7.0]}
ROWS = [
    changed(ROW, phase=phase, state=state, rep=rep, tokens=10, seconds=10 / speed)
    for (phase, state), speeds in SPEEDS.items()
    for rep, speed in enumerate(speeds)
]
TOGETHER = [Together(n, 0, 24, 10 * n, 1.0, 0.1 * n, 0.2 * n, 0, 1, 1, 0.0, 1 << 30, "12 slots") for n in (8, 1, 2)]
ALONE = Evaluation("a model", (), 100, 4, 26, 0, Mean(1.0, 0.1))
BESIDE = changed(
    ALONE,
    reference="another",
    reference_loss=Mean(0.9, 0.1),
    difference=Mean(0.1, 0.02),
    divergence=Mean(0.2, 0.03),
    agreement=Mean(0.8, 0.04),
    worst=2.0,
)


def drawn(picture: Picture) -> Figure:
    figure = Figure()
    picture(figure)
    return figure


def test_a_replay_is_its_points() -> None:
    result = replay(TRACE, ["25%", "50%", "100%"])
    (axes,) = drawn(plots.replay_plot(result)).axes
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    assert list(lines) == ["lru", "lfu", "none", OPTIMUM]
    for policy, points in result.curves.items():
        expected = [(100 * result.share(point.slots), 100 * point.hit_rate) for point in points]
        assert lines[policy].tolist() == [list(point) for point in expected]


def test_a_trace_is_how_evenly_experts_are_picked() -> None:
    (axes,) = drawn(plots.trace_plot(TRACE)).axes
    *layers, mean, even = [line.get_ydata() for line in axes.lines]
    assert len(layers) == 3
    for place, curve in enumerate(layers):
        counts = sorted((int((IDS[:, place] == expert).sum()) for expert in range(8)), reverse=True)
        assert curve == pytest.approx([100 * sum(counts[: n + 1]) / 80 for n in range(8)])
    assert mean == pytest.approx(np.mean(layers, axis=0))
    assert list(even) == [0, 100]


def test_a_bench_is_medians_and_every_repetition() -> None:
    figure = drawn(plots.bench_plot(ROWS))
    assert [axes.get_title() for axes in figure.axes] == ["prefill", "decode"]
    prefill, decode = ([bar.get_height() for bar in axes.patches] for axes in figure.axes)
    assert (prefill, decode) == ([250.0], [6.0, 6.0])
    dots = [speed for axes in figure.axes for line in axes.lines for speed in line.get_ydata()]
    assert dots == pytest.approx([200, 300, 4, 8, 5, 7])


def test_sessions_together_are_in_order() -> None:
    speed, between = drawn(plots.together_plot(TOGETHER)).axes
    assert speed.lines[0].get_xydata().tolist() == [[1, 10], [2, 20], [8, 80]]
    assert [line.get_ydata()[0] for line in between.lines] == [100, 200]


@pytest.mark.parametrize("result", [ALONE, BESIDE], ids=["alone", "beside"])
def test_an_evaluation_is_means_with_errors(result: Evaluation) -> None:
    figure = drawn(plots.evaluation_plot(result))
    found = [line.get_ydata()[0] for axes in figure.axes for line in axes.lines if line.get_marker() == "o"]
    expected = [np.exp(1.0)] if result is ALONE else [np.exp(1.0), np.exp(0.9), 0.2, 0.1]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("kind", [".svg", ".png", ".pdf"])
def test_the_same_picture_is_the_same_file(kind: str, tmp_path: Path) -> None:
    for name in "ab":
        plots.draw(tmp_path / f"{name}{kind}", plots.bench_plot(ROWS))
    first, second = ((tmp_path / f"{name}{kind}").read_bytes() for name in "ab")
    assert first == second
    assert first[:5] == {".svg": b"<?xml", ".png": b"\x89PNG\r", ".pdf": b"%PDF-"}[kind]


def test_names_are_letters_whatever_they_are(tmp_path: Path) -> None:
    strange = Trace("<a & $b$> _x^2", "", 8, 1, TRACE.layers, TRACE.experts, TRACE.passes)
    plots.draw(tmp_path / "x.svg", plots.trace_plot(strange))
    assert any("<a & $b$> _x^2: 40 tokens" in text for text in texts_of(tmp_path / "x.svg"))


def test_what_cannot_be_drawn_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"expected a file that ends with .svg, .png, .pdf, found .*x.gif"):
        plots.check_plot(tmp_path / "x.gif")
    with pytest.raises(IoError, match="expected a folder to write into, found none"):
        plots.check_plot(tmp_path / "none" / "x.svg")
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(NotFoundError, match=r'found none: pip install "moeflux\[plot\]"'):
        plots.check_plot(tmp_path / "x.svg")


@pytest.mark.parametrize("line", ["trace -o run.trace", "bench", "bench --sessions 1,2", "eval --text x", "replay x"])
def test_every_command_that_draws_says_so_before_any_work(
    line: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that it names are not there."""
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert main([*line.split(), "--plot", "x.svg"]) == 2
    assert 'pip install "moeflux[plot]"' in capsys.readouterr().err


def test_commands_draw(tmp_path: Path, capsys: Output) -> None:
    trace, text = tmp_path / "run.trace", tmp_path / "text"
    text.write_text("Once upon a time, there was a little fox who lived in a forest. " * 8)
    for line in (
        f"trace -o {trace} --tokens 8 --plot {tmp_path}/trace.svg",
        f"replay {trace} --slots 50%,100% --plot {tmp_path}/replay.svg",
        f"bench --prefill 4 --decode 2 --plot {tmp_path}/bench.svg",
        f"bench --sessions 1,2 --prefill 4 --decode 2 --plot {tmp_path}/together.svg",
        f"eval --text {text} --window 32 --tokens 64 --plot {tmp_path}/eval.svg",
    ):
        assert main(line.split()) == 0, capsys.readouterr().err
    words = {
        "trace": "the mean of all layers",
        "replay": OPTIMUM,
        "bench": "tokens a second",
        "together": "answers at a time",
        "eval": "perplexity",
    }
    assert {name for name, word in words.items() if word not in texts_of(tmp_path / f"{name}.svg")} == set()
