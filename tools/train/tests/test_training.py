"""A whole training at toy size: it learns, resumes to the bit, stops when asked, and is judged by its export."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tools.train import checkpoint
from tools.train.errors import TrainingError
from tools.train.evaluate import RoutingCounts, evaluation
from tools.train.export import export, exported, read_folder
from tools.train.loop import Training
from tools.train.tests.tiny import COURSE, GRID, TINY
from tools.train.windows import Data

ROOT = Path(__file__).resolve().parents[3]


def entries(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_the_loss_falls(trained: Path) -> None:
    losses = [entry["loss"] for entry in entries(trained) if "loss" in entry]
    assert losses[0] > 5.5 and losses[-1] < losses[0] - 1
    held_out = [entry["held_out"] for entry in entries(trained) if "held_out" in entry]
    assert held_out[-1]["chat"] < held_out[0]["chat"] < losses[0]


def test_a_resumed_run_is_an_uninterrupted_one(trained: Path, data: Data, tmp_path: Path) -> None:
    """The same weights, moments and held-out losses to the bit."""
    Training(data, TINY, tmp_path, "cpu").run()
    one, other = (checkpoint.load(run, "cpu") for run in (trained, tmp_path))
    assert one["batches"] == other["batches"]
    for name, weight in one["model"].items():
        assert torch.equal(weight, other["model"][name]), name
    for mine, theirs in zip(one["optimiser"], other["optimiser"], strict=True):
        for index, state in mine["state"].items():
            assert all(torch.equal(value, theirs["state"][index][name]) for name, value in state.items())

    held_out = [[entry for entry in entries(run) if "held_out" in entry] for run in (trained, tmp_path)]
    assert held_out[0] == held_out[1] and len(held_out[0]) == 2


def test_the_log_of_steps_made_again_is_dropped(data: Data, tmp_path: Path) -> None:
    """As after a kill: the log is ahead of the checkpoint, its last line cut."""
    Training(data, TINY, tmp_path, "cpu").run(5)
    with open(tmp_path / "log.jsonl", "a") as log:
        log.write('{"step": 10, "loss": 1.0}\n{"step": 15, "lo')
    Training(data, TINY, tmp_path, "cpu")
    assert [entry["step"] for entry in entries(tmp_path)] == [5]


def test_a_folder_belongs_to_one_run(trained: Path, data: Data, work: Path, tmp_path: Path) -> None:
    other = replace(TINY, course=replace(COURSE, seed=2))
    with pytest.raises(TrainingError, match=r"config\.json: expected the settings of this run"):
        Training(data, other, trained, "cpu")
    with pytest.raises(TrainingError, match="expected a new or an empty folder"):
        export(trained, trained)
    with pytest.raises(TrainingError, match="expected the folder of a run"):
        export(tmp_path, tmp_path / "out")
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\3\4 cut")
    with pytest.raises(TrainingError, match=r"checkpoint\.pt: expected a checkpoint"):
        Training(data, TINY, tmp_path, "cpu")


def test_norms_survive_their_rounding(folder: Path, trained: Path) -> None:
    """1 + w is exact in bf16 for the exported w, so that folding the one in changes nothing."""
    for name, weight in checkpoint.load(trained, "cpu")["model"].items():
        if name.endswith("layernorm.weight"):
            stored = exported(name, weight)
            assert torch.equal(1 + stored.float(), (1 + stored.float()).bfloat16().float())
            assert torch.allclose(stored.float(), weight, atol=2**-8)


# ---- Evaluation -------------------------------------------------------------------------------------------------


def test_evaluation_says_what_the_training_said(trained: Path, folder: Path, data: Data) -> None:
    windows = {kind: data.held_out(kind, COURSE.context, COURSE.evaluate_windows) for kind in ("prose", "chat")}
    report = evaluation(read_folder(folder), windows, GRID)
    last = [entry["held_out"] for entry in entries(trained) if "held_out" in entry][-1]
    for kind, found in report.items():
        assert found["loss"] == pytest.approx(last[kind], abs=0.01)  # bf16 of all but experts is new
        assert len(found["routing"]) == 2 and all(0.3 < row["entropy"] <= 1 for row in found["routing"])


def test_routing_is_counted() -> None:
    counts = RoutingCounts(1, 4)
    counts.add(0, torch.tensor([[[0, 1], [1, 2], [1, 2]], [[3, 0], [1, 2], [0, 3]]]))
    [found] = counts.summary()
    assert counts.chosen.tolist() == [[3, 4, 3, 2]]
    assert found["busiest"] == pytest.approx(4 / 12, abs=1e-4)
    assert found["used_again"] == pytest.approx(3 / 8)


# ---- The command line -------------------------------------------------------------------------------------------


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tools.train", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_ctrl_c_saves_and_stops(work: Path, tmp_path: Path) -> None:
    """And the same command goes on from there."""
    settings = [f"--set={name}={value}" for name, value in (("batch", 2), ("context", 64), ("log_every", 1))]
    train = command("train", work / "data", "-o", tmp_path, "--device", "cpu", *settings)
    with subprocess.Popen(train, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        patience = threading.Timer(120, process.kill)
        patience.start()
        for line in process.stderr:
            if line.startswith("step 2 "):
                process.send_signal(signal.SIGINT)
                break
        said = process.stderr.read()
        patience.cancel()
    assert process.returncode == 130, said
    assert "the same command goes on from there" in said and "Traceback" not in said
    step = checkpoint.load(tmp_path, "cpu")["step"]
    assert step >= 2 and f"saved at step {step};" in said
    assert entries(tmp_path)[-1]["step"] == step


def test_evaluate_prints_a_table(folder: Path, work: Path) -> None:
    shown = subprocess.run(
        command("evaluate", folder, work / "data", "--context", 64, "--windows", 2),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert shown.returncode == 0, shown.stderr
    assert "experts in 4 bits, groups of 64" in shown.stdout and "routing, chat" in shown.stdout
