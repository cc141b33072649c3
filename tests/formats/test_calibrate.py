"""Conversion with a calibration text: weighted scales, the same bytes every time, refusals, and what it is good for."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

import moeflux
from golden import checkpoints
from moeflux import ArgumentError, ConvertFormat, StateError, _core
from moeflux.cli import main
from moeflux.conversion.convert import convert
from moeflux.conversion.importance import ROWS, Calibration, Importance
from moeflux.measure.calibrate import calibration_of, importance_of
from moeflux.oracle.stored import widen
from moeflux.progress import Silent, Task
from moeflux.stores.store import open_store
from support.checkpoint_folder import edit_config
from support.mlx_folder import write_mlx_folder

Output = pytest.CaptureFixture[str]
TEXT = "the quick brown fox jumps over the lazy dog and runs away from the hill " * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("calibrate")
    for name in ("qwen3_moe", "deepseek_v3"):
        checkpoints.write(name, root / name)
        edit_config(root / name, max_position_embeddings=1024)
    (root / "text").write_text(TEXT)
    return root


@pytest.fixture(scope="module")
def importance(folder: Path) -> Importance:
    return importance_of(TEXT, folder / "qwen3_moe", threads=1)


# ---- What it does -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [3, "q4_0"])
def test_every_matrix_is_rounded_by_its_own_columns(
    bits: int | str, folder: Path, importance: Importance, tmp_path: Path
) -> None:
    """The store has what quantising the published numbers with these weights gives."""
    asked = ConvertFormat.asked(bits, 32)
    source = folder / "qwen3_moe"
    convert(source, tmp_path / "store", format=asked, calibration=Calibration("here", lambda: importance), check="full")
    convert(source, tmp_path / "plain", format=ConvertFormat.asked("bf16"), check="none")
    with open_store(tmp_path / "store") as store, open_store(tmp_path / "plain") as plain:
        compared = [
            (name, store.tensor(name), plain.tensor(name), importance.of(name)) for name in store.directory.formats
        ]
        layer = store.variant.moe_layers[1]
        parts = zip(store.expert(layer, 2), plain.expert(layer, 2), importance.of_expert(layer, 2), strict=True)
        compared += [(f"expert {place}", *each) for place, each in enumerate(parts)]
        assert store.description is not None and store.description.source["calibrated"] == "here"
    weighed = 0
    for name, found, published, weights in compared:
        if not found.format.is_quantised:
            continue
        rows = np.ascontiguousarray(published.weight.reshape(-1, published.weight.shape[-1]))
        expected = _core.quantize(rows, found.format, 1, weights)
        stored = [part for part in (found.weight, found.scales, found.biases) if part is not None]
        for mine, theirs in zip(stored, expected, strict=True):
            assert mine.tobytes() == theirs.tobytes(), name
        weighed += weights is not None
    assert weighed > 20


def test_expert_weights_are_their_own_drawn_to_those_of_the_layer() -> None:
    rng = np.random.default_rng(1)
    inner = rng.random((3, 8)) * np.array([[1000.0], [10.0], [0.0]])
    rows = np.array([4000, 40, 0])
    hidden = rng.random(4)
    found = Importance({}, {5: [100, hidden * 100, rows, inner]})
    gate, up, down = found.of_expert(5, 0)
    assert gate is not None and down is not None and np.array_equal(gate, up)
    np.testing.assert_allclose(gate, hidden / hidden.mean() + 0.01, rtol=1e-6)
    mean = inner.sum() / rows.sum() / 8
    own = (inner[0] + ROWS * mean) / (4000 + ROWS)
    np.testing.assert_allclose(down, own / own.mean() + 0.01, rtol=1e-6)
    *_, never = found.of_expert(5, 2)
    assert never is not None and np.ptp(never) == 0
    assert found.of_expert(6, 0) == (None, None, None) and found.of("lm_head") is None
    with pytest.raises(StateError, match="expected it to be prepared"):
        _ = Calibration("x", lambda: found).importance


def test_the_same_text_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    """Whatever the threads and slots with which it is gathered."""
    finger = []
    for options in ({"threads": 1}, {"threads": 2, "expert_slots": 9, "chunk": 16}):
        calibration = calibration_of(folder / "text", folder / "qwen3_moe", **options)
        report = convert(
            folder / "qwen3_moe",
            tmp_path / str(len(finger)),
            format=ConvertFormat.asked(3, 32),
            calibration=calibration,
        )
        finger.append(report.fingerprint)
        assert calibration.label in str(report)
    assert finger[0] == finger[1]


def test_calibrated_weights_are_nearer_where_it_matters(folder: Path, importance: Importance, tmp_path: Path) -> None:
    asked = ConvertFormat.asked(2, 32)
    for name, calibration in (("plain", None), ("weighed", Calibration("here", lambda: importance))):
        convert(folder / "qwen3_moe", tmp_path / name, format=asked, calibration=calibration, check="none")
    convert(folder / "qwen3_moe", tmp_path / "bf16", format=ConvertFormat.asked("bf16"), check="none")
    errors = dict.fromkeys(("plain", "weighed"), 0.0)
    with open_store(tmp_path / "bf16") as published:
        for name in errors:
            with open_store(tmp_path / name) as store:
                for matrix in store.directory.formats:
                    weights = importance.of(matrix)
                    if weights is not None:
                        off = widen(store.tensor(matrix)) - widen(published.tensor(matrix))
                        errors[name] += float((off**2 * weights).sum())
    assert errors["weighed"] < 0.75 * errors["plain"]


# ---- The command ------------------------------------------------------------------------------------------------


def test_the_command(folder: Path, tmp_path: Path, capsys: Output) -> None:
    flags = ["--bits", "q4_0", "--calibrate", str(folder / "text")]
    assert main(["convert", str(folder / "qwen3_moe"), str(tmp_path / "store"), *flags]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^rounded   by the activations of \w{16} in text \w{16}$", out, re.MULTILINE) and "Q4_0" in out
    description = json.loads((tmp_path / "store" / "moeflux.json").read_text())
    assert description["source"]["calibrated"].startswith("by the activations of ")
    with moeflux.load(tmp_path / "store") as model:
        assert np.isfinite(model.session().prefill([1, 2, 3]).numpy()).all()


def test_a_model_that_does_not_run_as_it_is_needs_another_to_read(folder: Path, tmp_path: Path, capsys: Output) -> None:
    source, text = str(folder / "deepseek_v3"), ["--calibrate", str(folder / "text")]
    assert main(["convert", source, str(tmp_path / "store"), "--bits", "3", *text]) == 2
    assert "Convert it without calibration first" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
    assert main(["convert", source, str(tmp_path / "first"), "--bits", "8", "--group-size", "32"]) == 0
    flags = ["--bits", "3", "--group-size", "32", *text, "--calibrate-with", str(tmp_path / "first")]
    assert main(["convert", source, str(tmp_path / "store"), *flags]) == 0
    assert "rounded   by the activations" in capsys.readouterr().out


def test_a_stopped_run_goes_on_with_the_same_text_only(folder: Path, tmp_path: Path) -> None:
    source, store = folder / "qwen3_moe", tmp_path / "store"
    asked = ConvertFormat.asked(3, 32)
    (tmp_path / "other").write_text("another text altogether")
    calibrations = [calibration_of(text, source) for text in (folder / "text", tmp_path / "other")]

    class Stopping:
        """Stops when the checks begin: all pieces are written then, and the journal names them."""

        def task(self, label: str, total: int, unit: str = "bytes") -> AbstractContextManager[Task]:
            if label == "check":
                raise KeyboardInterrupt
            return Silent().task(label, total, unit)

        def note(self, sentence: str) -> None:
            pass

    with pytest.raises(KeyboardInterrupt):
        convert(source, store, format=asked, calibration=calibrations[0], progress=Stopping())
    for other in (calibrations[1], None):
        with pytest.raises(StateError, match="holds an unfinished conversion"):
            convert(source, store, format=asked, calibration=other)
    assert convert(source, store, format=asked, calibration=calibrations[0]).written == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--calibrate-with", "x"], "--calibrate-with: expected --calibrate with it"),
        (["--bits", "bf16", "--calibrate", "TEXT"], "calibrate: expected a format that rounds by scales"),
        (["--bits", "q8_0", "--calibrate", "TEXT"], "calibrate: expected a format that rounds by scales"),
        (["--calibrate", "/nowhere/text"], "/nowhere/text: cannot be opened: No such file"),
    ],
)
def test_what_cannot_be_calibrated_is_said(
    flags: list[str], words: str, folder: Path, tmp_path: Path, capsys: Output
) -> None:
    flags = [str(folder / "text") if flag == "TEXT" else flag for flag in flags]
    assert main(["convert", str(folder / "qwen3_moe"), str(tmp_path / "store"), *flags]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_repacked_takes_no_calibration(folder: Path, importance: Importance, tmp_path: Path) -> None:
    convert(folder / "qwen3_moe", tmp_path / "packed", check="none")
    write_mlx_folder(tmp_path / "packed", tmp_path / "mlx")
    with pytest.raises(ArgumentError, match=r"found an MLX folder, .* expected no calibration"):
        convert(tmp_path / "mlx", tmp_path / "store", calibration=Calibration("here", lambda: importance))


# ---- Blocks -----------------------------------------------------------------------------------------------------


def test_matrices_that_blocks_do_not_fit_have_others(tmp_path: Path) -> None:
    """Of 256, of 32, or none; the small ones that decide much have 8 bits."""
    shape = moeflux.PRESETS["Qwen3.6-35B-A3B"].with_layers(4)
    shape = shape.with_parts(moeflux.layers.RoutedExperts, count=4, per_token=2, intermediate=96)
    moeflux.synth(tmp_path / "store", dataclasses.replace(shape, vocab_size=256), format=ConvertFormat.asked("q4_k"))
    with open_store(tmp_path / "store") as store:
        formats = {name.rpartition("layers.0.")[2]: str(each) for name, each in store.directory.formats.items()}
        experts = store.directory.experts_of(0).formats
    assert (str(experts.gate), str(experts.up), str(experts.down)) == ("Q4_K", "Q4_K", "Q8_0")
    assert formats["linear_attn.out_proj"] == formats["lm_head"] == "Q4_K"
    assert formats["mlp.gate"] == formats["mlp.shared_expert_gate"] == "Q8_0"
    asked = ConvertFormat.asked("q6_k", dense_bits="q4_0", element="F16")
    assert str(asked.of_matrix("x", 48, shape)) == "F16" and str(asked.of_matrix("x", 96, shape)) == "Q4_0"
    with moeflux.load(tmp_path / "store", memory=None, context=1024) as model:
        with model.trace() as trace:
            assert np.isfinite(model.session().prefill(list(range(64))).numpy()).all()
        picked = np.bincount(trace.trace().experts.reshape(-1), minlength=4)
    assert picked.min() > 0 and picked.max() < 0.6 * picked.sum()
