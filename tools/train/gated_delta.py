"""The gated delta rule over whole sequences, in chunks, so that almost all of it is matrix products.

For each head, with decay g_t = exp(log_decay_t) and keys and queries of length one:

    S_t = g_t S_{t-1} + k_t (beta_t (v_t - (g_t S_{t-1})^T k_t))^T        o_t = S_t^T q_t

Within a chunk of C tokens the corrections of all tokens solve one triangular system (I + L) U = beta V, L strictly
lower; only the state S goes from chunk to chunk. All in f32; on a GPU the large products in bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64
SMALL = 16  # rows of the blocks that are inverted by substitution


class _InverseOfUnitTriangular(torch.autograd.Function):
    """(I + L)^-1 for strictly lower triangular L [..., C, C], C = 16 * 2^n: small blocks on the diagonal by forward
    substitution, then pairs of blocks merged by matrix products. As stable as substitution over all rows."""

    @staticmethod
    def forward(context, lower: Tensor) -> Tensor:
        size, rows = lower.shape[-1], SMALL
        blocks = -_blocks(lower, rows)
        for row in range(2, rows):
            above = blocks[..., :row, :row].clone()
            blocks[..., row, :row] += (blocks[..., row, :row, None] * above).sum(-2)
        blocks = blocks + torch.eye(rows, dtype=lower.dtype, device=lower.device)
        while rows < size:
            first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
            between = _blocks(lower, 2 * rows)[..., rows:, :rows]
            upper = torch.cat((first, torch.zeros_like(first)), -1)
            blocks = torch.cat((upper, torch.cat((-(second @ between @ first), second), -1)), -2)
            rows *= 2
        inverse = blocks[..., 0, :, :].contiguous()
        context.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(context, gradient: Tensor) -> Tensor:
        (inverse,) = context.saved_tensors
        turned = inverse.mT.contiguous()
        return -(turned @ gradient.contiguous() @ turned).tril(-1)


def _blocks(matrix: Tensor, rows: int) -> Tensor:
    """The blocks of `rows` rows on the diagonal: [..., C, C] -> [..., C / rows, rows, rows]"""
    count = matrix.shape[-1] // rows
    parts = matrix.unflatten(-1, (count, rows)).unflatten(-3, (count, rows))
    return parts.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).contiguous()


def gated_delta(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """q, k [batch, tokens, key heads, d] of any length, v [batch, tokens, heads, dv], log_decay and beta
    [batch, tokens, heads] -> [batch, tokens, heads, dv] in the type of v."""
    with torch.autocast(v.device.type, enabled=False):
        return _gated_delta(q, k, v, log_decay, beta, torch.bfloat16 if v.is_cuda else torch.float32)


def _gated_delta(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, product: torch.dtype) -> Tensor:
    batch, tokens, key_heads, width = k.shape
    heads = v.shape[2]
    q, k = _unit(q.float()) * width**-0.5, _unit(k.float())
    q, k = (x.repeat_interleave(heads // key_heads, 2) for x in (q, k))
    q, k, values = (_chunked(x) for x in (q, k, v.float()))  # [batch * heads, chunks, C, width]
    beta = _chunked(beta.float()[..., None])
    log_decay = _chunked(log_decay.float()[..., None])[..., 0].cumsum(-1)  # from the chunk's start on
    last = log_decay[..., -1:]
    between = (log_decay[..., :, None] - log_decay[..., None, :]).tril().exp().tril()  # decay from token j to token i
    key = k.to(product)

    lower = (((k * beta).to(product) @ key.mT).float() * between).tril(-1)
    inverse = _InverseOfUnitTriangular.apply(lower)
    own = inverse @ (values * beta)
    of_state = (inverse @ (k * beta * log_decay.exp()[..., None])).to(product)
    to_end = (k * (last - log_decay).exp()[..., None]).to(product).mT
    decay = last.exp()[..., None]

    state = torch.zeros(batch * heads, width, v.shape[-1], device=v.device)
    states, corrections = [], []
    chunks = (x.unbind(1) for x in (own, of_state, to_end, decay))
    for own_n, of_state_n, to_end_n, decay_n in zip(*chunks, strict=True):
        before = state.to(product)
        correction = (own_n - (of_state_n @ before).float()).to(product)
        states.append(before)
        corrections.append(correction)
        state = state * decay_n + (to_end_n @ correction).float()

    scores = ((q.to(product) @ key.mT).float() * between).to(product)
    from_before = (q * log_decay.exp()[..., None]).to(product) @ torch.stack(states, 1)
    out = (from_before + scores @ torch.stack(corrections, 1)).float()
    return out.reshape(batch, heads, -1, v.shape[-1]).transpose(1, 2)[:, :tokens].to(v.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _chunked(x: Tensor) -> Tensor:
    """[batch, tokens, heads, width] -> [batch * heads, chunks, CHUNK, width], zeros behind the last token"""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4).flatten(0, 1)
