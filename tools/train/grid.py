"""The grid that `moeflux convert` puts weights on, in torch: what a forward pass sees of quantised weights.

MLX's affine algorithm, as python/moeflux/oracle/stored.py defines it, with scales and biases in bf16. It starts from
the weights rounded to bf16, for those are what the export stores: so converting the export gives these very numbers.
Not to be compiled: compiled divisions are not the correctly rounded ones that this needs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def on_grid(weight: Tensor, bits: int, group: int) -> Tensor:
    """f32 [..., columns] -> the f32 numbers that its codes stand for."""
    values = weight.bfloat16().float().unflatten(-1, (-1, group))
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    # A tensor: by a plain number CUDA divides as by a product with its reciprocal, which rounds otherwise.
    largest_code = torch.full((), 2.0**bits - 1, device=weight.device)
    scale = ((high - low) / largest_code).clamp_min(1e-7)
    # The end of the range that is larger in size is met exactly, and so is zero.
    from_low = low.abs() > high.abs()
    edge = torch.where(from_low, low, high)
    scale = torch.where(from_low, scale, -scale)
    edge_code = (edge / scale).round()
    moved = edge_code != 0
    scale = torch.where(moved, edge / torch.where(moved, edge_code, 1.0), scale)
    bias = torch.where(moved, edge, 0.0)
    codes = ((values - bias) / scale).round().clamp(0, 2**bits - 1)
    # A code times a bf16 is exact in f32, so the sum is rounded once, with or without a fused multiply-add.
    return (codes * scale.bfloat16().float() + bias.bfloat16().float()).flatten(-2)


class _StraightThrough(torch.autograd.Function):
    """Forward the grid, backward as if it were not there. Not `w + (grid - w).detach()`: that rounds."""

    @staticmethod
    def forward(context, weight: Tensor, bits: int, group: int) -> Tensor:
        return on_grid(weight, bits, group)

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def fake_quantise(weight: Tensor, bits: int, group: int) -> Tensor:
    return _StraightThrough.apply(weight, bits, group)
