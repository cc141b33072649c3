"""How good a model is on text it has not seen, and what its routers do there."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tools.train.model import Model

BATCH = 8  # windows at a time


def autocast(device: str) -> AbstractContextManager:
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()


@dataclass(frozen=True)
class Loss:
    """Nats a token, with the standard error over windows."""

    mean: float
    error: float
    windows: int


@torch.no_grad()
def held_out_loss(model: Model, windows: np.ndarray, counts: RoutingCounts | None = None) -> Loss:
    """windows [n, context + 1], n > 0"""
    device = next(model.parameters()).device
    losses = []
    for start in range(0, len(windows), BATCH):
        batch = torch.from_numpy(windows[start : start + BATCH]).to(device)
        with torch.compiler.set_stance("force_eager"), autocast(device.type):
            logits, routed = model(batch[:, :-1])
        each = F.cross_entropy(logits.float().transpose(1, 2), batch[:, 1:], reduction="none")
        losses += each.mean(1).tolist()
        if counts:
            for layer, of_layer in enumerate(routed):
                counts.add(layer, of_layer.chosen.unflatten(0, (len(batch), -1)))
    spread = np.std(losses, ddof=1) / math.sqrt(len(losses)) if len(losses) > 1 else float("nan")
    return Loss(float(np.mean(losses)), float(spread), len(losses))


class RoutingCounts:
    """How often each expert is chosen, and chosen again by the next token."""

    def __init__(self, layers: int, experts: int) -> None:
        self.chosen = np.zeros((layers, experts), np.int64)
        self.again, self.could = np.zeros(layers, np.int64), np.zeros(layers, np.int64)

    def add(self, layer: int, chosen: Tensor) -> None:
        """chosen [windows, tokens, k]"""
        self.chosen[layer] += torch.bincount(chosen.flatten(), minlength=self.chosen.shape[1]).cpu().numpy()
        same = chosen[:, :-1, :, None] == chosen[:, 1:, None, :]
        self.again[layer] += int(same.sum())
        self.could[layer] += chosen[:, 1:].numel()

    def summary(self) -> list[dict[str, float]]:
        """A layer each. Entropy: 1 when all experts are used equally; busiest: a share of all choices."""
        share = self.chosen / self.chosen.sum(1, keepdims=True)
        logs = np.log(share, where=share > 0, out=np.zeros_like(share))
        entropy = -(share * logs).sum(1) / math.log(share.shape[1])
        again = self.again / np.maximum(1, self.could)
        return [
            {"entropy": round(float(e), 4), "busiest": round(float(b), 4), "used_again": round(float(a), 4)}
            for e, b, a in zip(entropy, share.max(1), again, strict=True)
        ]


def evaluation(model: Model, windows: dict[str, np.ndarray], grid: tuple[int, int]) -> dict[str, Any]:
    """By kind of text: the loss with experts on the grid and as they are, and the routing of the former."""
    report: dict[str, Any] = {}
    for kind, of_kind in windows.items():
        if not len(of_kind):
            continue
        counts = RoutingCounts(model.shape.num_hidden_layers, model.shape.num_experts)
        model.quantise(grid)
        quantised = held_out_loss(model, of_kind, counts)
        model.quantise(None)
        plain = held_out_loss(model, of_kind)
        report[kind] = {
            "windows": quantised.windows,
            "loss": round(quantised.mean, 4),
            "error": round(quantised.error, 4),
            "perplexity": round(math.exp(quantised.mean), 3),
            "loss_unquantised": round(plain.mean, 4),
            "routing": counts.summary(),
        }
    return report


def table(report: dict[str, Any], grid: tuple[int, int]) -> str:
    lines = [f"experts in {grid[0]} bits, groups of {grid[1]}"]
    for kind, found in report.items():
        lines.append(
            f"{kind}: {found['loss']:.4f} +- {found['error']:.4f} nats a token (perplexity {found['perplexity']:.2f}) "
            f"on {found['windows']} windows; {found['loss_unquantised']:.4f} with experts as they are"
        )
    for kind, found in report.items():
        lines.append(f"\nrouting, {kind}: layer, entropy (1: uniform), busiest expert, used again by the next token")
        for layer, row in enumerate(found["routing"]):
            lines.append(f"{layer:5d}  {row['entropy']:.3f}  {row['busiest']:6.1%}  {row['used_again']:6.1%}")
    return "\n".join(lines)
