"""The training itself: steps, checkpoints, a log of JSON lines, progress, a clean stop.

Everything that changes with time is a function of the step or in the checkpoint. On a CPU a resumed run gives the very
weights of an uninterrupted one; on a GPU as far as its own kernels repeat themselves.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.train import checkpoint, config, schedule
from tools.train.config import Config
from tools.train.errors import TrainingError
from tools.train.evaluate import autocast, held_out_loss
from tools.train.model import Model, Routed, prediction_loss
from tools.train.optimiser import Optimiser
from tools.train.windows import Batches, Data

LOG = "log.jsonl"
CONFIG = "config.json"
DATA = "data.json"


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class Training:
    """One run, in a folder of its own, made anew or taken up where its checkpoint left it."""

    def __init__(self, data: Data, asked: Config, folder: Path, device: str, compile: bool = False) -> None:
        self.data, self.config, self.folder, self.device = data, asked, folder, device
        config.check(asked)
        torch.manual_seed(asked.course.seed)
        if device == "cuda":
            torch.set_float32_matmul_precision("high")
        self.model = Model(asked.shape, data.vocab_size).to(device)
        if compile:
            for layer in self.model.model.layers:
                layer.compile()
        self.optimiser = Optimiser(self.model, asked.course)
        self.batches = Batches(data, asked.course.context, asked.course.seed)
        self.step = 0
        self._bind()
        saved = checkpoint.load(folder, device)
        if saved:
            self._restore(saved)
        self.log = _Log(folder / LOG, self.step)

    def run(self, stop_at: int | None = None) -> bool:
        """Trains to the end, or to a step or a Ctrl-C before it. -> whether it came to the end"""
        course = self.config.course
        last = course.steps if stop_at is None else min(stop_at, course.steps)
        progress = _Progress(course.steps, self.step, course.batch * course.context)
        recent: list[Tensor] = []
        with _interrupts() as interrupted:
            while self.step < last and not interrupted:
                losses, norm, routed = self._one_step()
                recent.append(losses)
                if self.step % course.log_every == 0 or self.step == last:
                    entry = self._entry(torch.stack(recent).mean(0), norm, routed)
                    recent = []
                    self.log.write(entry | {"tokens_s": progress.lap(self.step)})
                    progress.say(f"loss {entry['loss']:.3f}")
                    if not math.isfinite(entry["loss"]):
                        raise TrainingError(f"step {self.step}: the loss is {entry['loss']}; try a lower learning_rate")
                if self.step % course.evaluate_every == 0 or self.step == course.steps:
                    self.log.write({"step": self.step, "held_out": self.evaluate()})
                    progress.restart(self.step)
                if self.step % course.save_every == 0:
                    self.save()
                    progress.restart(self.step)
        self.save()
        progress.end()
        return self.step == course.steps

    def evaluate(self) -> dict[str, float]:
        course = self.config.course
        windows = {
            kind: self.data.held_out(kind, course.context, course.evaluate_windows) for kind in ("prose", "chat")
        }
        return {kind: round(held_out_loss(self.model, each).mean, 4) for kind, each in windows.items() if len(each)}

    # ---- A step -------------------------------------------------------------------------------------------------

    def _one_step(self) -> tuple[Tensor, Tensor, list[Routed]]:
        """-> the losses [prediction, balance], the gradient's norm, what the routers did"""
        course = self.config.course
        quantised = schedule.is_quantised(course, self.step)
        self.model.quantise((course.bits, course.group) if quantised else None)
        share = schedule.chat_share(course, self.step, self.batches.natural_share)
        windows = torch.from_numpy(self.batches.next(course.batch, share)).to(self.device)
        with autocast(self.device):
            logits, routed = self.model(windows[:, :-1])
        loss = prediction_loss(logits, windows[:, 1:])
        balance = torch.stack([layer.balance for layer in routed]).mean()
        router_z = torch.stack([layer.router_z for layer in routed]).mean()
        (loss + course.balance * balance + course.router_z * router_z).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), course.clip)
        self.optimiser.step(schedule.rate(course, self.step))
        self.step += 1
        return torch.stack((loss.detach(), balance.detach())), norm, routed

    def _entry(self, losses: Tensor, norm: Tensor, routed: list[Routed]) -> dict[str, Any]:
        """A line of the log: means since the last one; gradient and routing of this step."""
        course, done = self.config.course, self.step - 1
        loss, balance = losses.tolist()
        busiest = max((layer.counts / layer.counts.sum()).max().item() for layer in routed)
        return {
            "step": self.step,
            "loss": round(loss, 4),
            "balance": round(balance, 4),
            "busiest_expert": round(busiest, 4),  # its share of all choices of its layer
            "gradient": round(norm.item(), 4),
            "learning_rate": schedule.rate(course, done),
            "quantised": schedule.is_quantised(course, done),
        }

    # ---- What is kept -------------------------------------------------------------------------------------------

    def save(self) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "batches": self.batches.state_dict(),
        }
        checkpoint.save(self.folder, state)

    def _restore(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimiser.load_state_dict(saved["optimiser"])
        self.batches.load_state_dict(saved["batches"])
        self.step = saved["step"]

    def _bind(self) -> None:
        """The folder is this run's: its config, what it trains on, and the tokenizer, which the export needs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / CONFIG
        if path.exists() and config.load(path) != self.config:
            raise TrainingError(f"{path}: expected the settings of this run, found others; give another folder")
        bound = self.folder / DATA
        if bound.exists() and json.loads(bound.read_text()) != self.data.description:
            raise TrainingError(f"{bound}: expected the data of this run, found other data; give another folder")
        shutil.copytree(self.data.folder / "tokenizer", self.folder / "tokenizer", dirs_exist_ok=True)
        bound.write_text(json.dumps(self.data.description, indent=1) + "\n")
        config.save(self.config, path)


class _Log:
    """JSON lines. Those behind the step that a run is taken up at are of steps that will be made again."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.last: dict[str, Any] = {}
        kept = []
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        path.write_text("".join(kept))

    def write(self, entry: dict[str, Any]) -> None:
        self.last = entry
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


class _Progress:
    """A line on stderr: rewritten in a terminal, else one after the other. Rates are those since the last lap, for the
    first steps may take long: a GPU's kernels are made then."""

    def __init__(self, steps: int, step: int, tokens_a_step: int) -> None:
        self.steps, self.tokens_a_step = steps, tokens_a_step
        self.is_terminal = sys.stderr.isatty()
        self.rate = 0
        self.restart(step)

    def restart(self, step: int) -> None:
        """After work that is no training."""
        self.step, self.time = step, time.monotonic()

    def lap(self, step: int) -> int:
        """Tokens a second since the last lap."""
        now = time.monotonic()
        self.rate = round((step - self.step) * self.tokens_a_step / max(1e-9, now - self.time))
        self.step, self.time = step, now
        return self.rate

    def say(self, what: str) -> None:
        left = (self.steps - self.step) * self.tokens_a_step / max(1, self.rate)
        minutes, seconds = divmod(round(left), 60)
        line = f"step {self.step} of {self.steps}  {what}  {self.rate} tokens/s  {minutes} min {seconds:02d} s left"
        if self.is_terminal:
            print(f"\r{line:<110}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.is_terminal:
            print(file=sys.stderr)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that is empty until the first Ctrl-C (or SIGTERM), which only fills it; a second interrupts as usual."""
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        seen.append(number)
        print("\nstopping after this step; once more: at once", file=sys.stderr, flush=True)
        for each, before in handlers.items():
            signal.signal(each, before)

    try:
        handlers = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs us takes care of signals
        yield seen
        return
    try:
        yield seen
    finally:
        for number, before in handlers.items():
            signal.signal(number, before)
