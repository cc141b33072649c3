"""Each part of the model and the optimiser against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moeflux import QuantFormat, _core
from tools.train.gated_delta import gated_delta
from tools.train.grid import fake_quantise, on_grid
from tools.train.model import Experts
from tools.train.optimiser import Muon, orthogonalised
from tools.train.tests.tiny import SHAPE

# ---- The grid ---------------------------------------------------------------------------------------------------


def awkward(columns: int) -> Tensor:
    """Rows of every size, of one sign, constant, zero, and with ties between the ends of the range."""
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(64, columns, generator=random) * 10 ** torch.linspace(-8, 4, 64)[:, None]
    rows[0], rows[1], rows[2] = 0.0, 0.25, -3.0
    rows[3], rows[4] = rows[3].abs(), -rows[4].abs()
    rows[5] = torch.where(torch.arange(columns) % 2 == 0, 1.5, -1.5)
    rows[6, 1:] = 0.0
    return rows


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_the_grid_is_that_of_convert(bits: int, group: int) -> None:
    weights = awkward(256)
    format = QuantFormat.affine(bits, group)
    stored = weights.bfloat16().view(torch.uint16).numpy()
    wanted = _core.dequantize(*_core.quantize(stored, format), format, 256)
    found = on_grid(weights, bits, group).numpy()
    assert np.array_equal(found, wanted)  # but for the sign of a zero, equal is equal to the bit


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that CUDA can use")
def test_a_gpu_puts_weights_on_the_same_grid() -> None:
    weights = awkward(256)
    assert torch.equal(on_grid(weights.cuda(), 4, 64).cpu(), on_grid(weights, 4, 64))


def test_gradients_pass_the_grid_unchanged() -> None:
    weights = awkward(64).requires_grad_()
    quantised = fake_quantise(weights, 4, 64)
    assert torch.equal(quantised, on_grid(weights.detach(), 4, 64))
    up = torch.randn(64, 64)
    quantised.backward(up)
    assert torch.equal(weights.grad, up)


# ---- The gated delta rule ---------------------------------------------------------------------------------------


def by_the_token(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The definition, a token at a time, in f64."""
    heads = v.shape[2]
    unit = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)  # noqa: E731
    q, k = (unit(x).repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    state = q.new_zeros(q.shape[0], heads, q.shape[-1], v.shape[-1])
    out = []
    for t in range(q.shape[1]):
        state = state * log_decay[:, t].exp()[..., None, None]
        told = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], (v[:, t] - told) * beta[:, t, :, None])
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 150])
def test_chunks_give_what_single_tokens_give(tokens: int) -> None:
    """Values and gradients, in f32 against f64."""
    random = torch.Generator().manual_seed(tokens)
    draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)  # noqa: E731
    inputs = [draw(2, tokens, 2, 16), draw(2, tokens, 2, 16), draw(2, tokens, 4, 8)]
    inputs += [-draw(2, tokens, 4).exp(), draw(2, tokens, 4).sigmoid()]
    up = draw(2, tokens, 4, 8)
    results = []
    for rule, dtype in ((by_the_token, torch.float64), (gated_delta, torch.float32)):
        given = [each.to(dtype, copy=True).requires_grad_() for each in inputs]
        out = rule(*given)
        out.backward(up.to(dtype))
        results.append([out.detach(), *(each.grad for each in given)])
    for wanted, found in zip(*results, strict=True):
        assert (found.double() - wanted).norm() <= 2e-5 * wanted.norm()


# ---- Experts ----------------------------------------------------------------------------------------------------


def test_experts_give_what_a_loop_over_them_gives() -> None:
    """With one expert that nobody chooses; values and gradients."""
    random = torch.Generator().manual_seed(3)
    experts = Experts(SHAPE)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.1, generator=random)
    x = torch.randn(101, SHAPE.hidden_size, generator=random)
    scores = torch.rand(101, SHAPE.num_experts, generator=random)
    scores[:, 3] = 0
    shares, chosen = scores.topk(SHAPE.num_experts_per_tok)
    up = torch.randn(x.shape, generator=random)

    def looped() -> Tensor:
        rows = []
        for row, ids, of_row in zip(x, chosen, shares, strict=True):
            each = []
            for expert, share in zip(ids.tolist(), of_row, strict=True):
                gate, value = (experts.gate_up_proj[expert] @ row).chunk(2)
                each.append(share * (experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * value)))
            rows.append(torch.stack(each).sum(0))
        return torch.stack(rows)

    results = []
    for compute in (lambda: experts(x, chosen, shares, experts.seen())[0], looped):
        experts.zero_grad()
        out = compute()
        (out * up).sum().backward()
        results.append([out.detach(), *(weight.grad.clone() for weight in experts.parameters())])
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()
    counts = experts(x, chosen, shares, experts.seen())[1]
    assert torch.equal(counts, torch.bincount(chosen.flatten(), minlength=SHAPE.num_experts).int())


# ---- The optimiser ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (3, 32, 64)])
def test_orthogonalised_matrices_keep_their_directions(shape: tuple[int, ...]) -> None:
    """Singular values near one, singular vectors as they were."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    found = orthogonalised(gradient)
    values = (left.mT @ found @ right.mT).diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.4 and values.max() < 1.4
    assert (found - left * values[..., None, :] @ right).norm() < 1e-3 * found.norm()


def test_muon_moves_by_the_rate_and_decays() -> None:
    weight = torch.nn.Parameter(torch.ones(32, 64))
    optimiser = Muon([weight], lr=0.1, weight_decay=0.5)
    weight.grad = torch.zeros_like(weight)
    optimiser.step()
    assert torch.allclose(weight.detach(), torch.full((32, 64), 0.95))
    weight.grad = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    before = weight.detach().clone()
    optimiser.step()
    moved = weight.detach() - before * 0.95
    assert moved.pow(2).mean().sqrt() == pytest.approx(0.1 * 0.2, rel=0.3)  # as AdamW's would
