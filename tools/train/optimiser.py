"""Muon for the matrices, AdamW for the rest, under one learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tools.train.config import Course

MATRICES = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj"),
    *("in_proj_qkv", "in_proj_z", "out_proj"),
}
"""Matrices between hidden states. Embedding, routers and gates have outputs of their own meaning: AdamW."""

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a quintic that brings singular values to about one in five steps
STEPS = 5


def orthogonalised(gradient: Tensor) -> Tensor:
    """The nearest matrix with singular values near one, of each matrix in a stack [..., rows, columns]."""
    a, b, c = NEWTON_SCHULZ
    x = gradient.bfloat16() if gradient.is_cuda else gradient.float()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if is_tall else x).to(gradient.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised. An update is scaled to the size that AdamW's have, so both take the same rate."""

    def __init__(self, weights: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalised(weight.grad.lerp(momentum, group["momentum"]))
                update *= 0.2 * max(weight.shape[-2:]) ** 0.5
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


class Optimiser:
    """Both, as one."""

    def __init__(self, model: nn.Module, course: Course) -> None:
        matrices, decayed, plain = [], [], []
        for name, weight in model.named_parameters():
            owner = name.removesuffix(".weight").rpartition(".")[2]
            if owner in MATRICES:
                matrices.append(weight)
            else:
                (decayed if weight.dim() == 2 else plain).append(weight)  # conv1d has three dimensions
        groups = [{"params": decayed, "weight_decay": course.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        fused = next(model.parameters()).is_cuda
        self.parts = [
            torch.optim.AdamW(groups, lr=course.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=fused),
            Muon(matrices, course.learning_rate, course.weight_decay),
        ]

    def step(self, rate: float) -> None:
        """One update at that learning rate; the gradients are gone afterwards."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
