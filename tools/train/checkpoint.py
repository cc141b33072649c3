"""What a training is made of at one step, in one file, so that going on from it is as if it had never stopped."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from tools.train.errors import TrainingError

CHECKPOINT = "checkpoint.pt"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Whole or not at all: a kill in between leaves the one before."""
    partial = folder / f"{CHECKPOINT}.partial"
    with open(partial, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / CHECKPOINT)


def load(folder: Path, device: str) -> dict[str, Any] | None:
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise TrainingError(f"{path}: expected a checkpoint, found what is none: {error}") from None
