"""qwen3_5_moe in torch, for training: whole sequences, no cache. Parameters have the names that transformers gives,
so a state_dict loads there unchanged.

Weights are f32. On CUDA, under autocast, products are in bf16; norms, decays, routing and the loss stay in f32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.train.config import Shape
from tools.train.gated_delta import gated_delta
from tools.train.grid import fake_quantise

ExpertWeights = tuple[Tensor, Tensor]  # gate and up [experts, 2 * inner, width], down [experts, width, inner]


class Routed(NamedTuple):
    """What a layer's router did: its two losses, how often each expert was chosen, and which ones."""

    balance: Tensor  # 1 where all experts are used equally
    router_z: Tensor
    counts: Tensor  # [experts] i32
    chosen: Tensor  # [tokens, experts a token]


class RmsNorm(nn.Module):
    """The weight is stored less one, so that decay pulls it to one."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (_normed(x, self.eps) * (1 + self.weight.float())).to(x.dtype)


class GatedRmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return (self.weight.float() * _normed(x, self.eps) * F.silu(gate.float())).to(gate.dtype)


def _normed(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


# ---- Token mixers -----------------------------------------------------------------------------------------------


class GatedDeltaNet(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        heads = shape.linear_num_value_heads
        keys = shape.linear_num_key_heads * shape.linear_key_head_dim
        values = heads * shape.linear_value_head_dim
        channels = 2 * keys + values
        self.shape, self.sizes = shape, (keys, keys, values)
        self.in_proj_qkv = linear(shape.hidden_size, channels)
        self.in_proj_z = linear(shape.hidden_size, values)
        self.in_proj_b = linear(shape.hidden_size, heads)
        self.in_proj_a = linear(shape.hidden_size, heads)
        self.conv1d = nn.Conv1d(channels, channels, shape.linear_conv_kernel_dim, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.norm = GatedRmsNorm(shape.linear_value_head_dim, shape.rms_norm_eps)
        self.out_proj = linear(values, shape.hidden_size)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        shape = self.shape
        q, k, v = F.silu(self._convolved(self.in_proj_qkv(x))).split(self.sizes, -1)
        q, k = (part.unflatten(-1, (-1, shape.linear_key_head_dim)) for part in (q, k))
        v, z = (part.unflatten(-1, (-1, shape.linear_value_head_dim)) for part in (v, self.in_proj_z(x)))
        step = self.in_proj_a(x).float() + self.dt_bias.float()
        # softplus; F.softplus trips the compiler's strides on the CPU
        log_decay = -self.A_log.float().exp() * torch.logaddexp(step, torch.zeros_like(step))
        out = gated_delta(q, k, v, log_decay, self.in_proj_b(x).sigmoid())
        return self.out_proj(self.norm(out, z).flatten(-2))

    def _convolved(self, x: Tensor) -> Tensor:
        """The causal convolution of each channel, as a sum over taps."""
        taps = self.conv1d.weight[:, 0].to(x.dtype)  # [channels, taps]
        tokens, count = x.shape[1], taps.shape[1]
        padded = F.pad(x, (0, 0, count - 1, 0))
        return sum(padded[:, i : i + tokens] * taps[:, i] for i in range(count))


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.head_dim = shape.hidden_size, shape.head_dim
        self.q_proj = linear(width, shape.num_attention_heads * shape.head_dim * 2)  # a query and a gate a head
        self.k_proj = linear(width, shape.num_key_value_heads * shape.head_dim)
        self.v_proj = linear(width, shape.num_key_value_heads * shape.head_dim)
        self.o_proj = linear(shape.num_attention_heads * shape.head_dim, width)
        self.q_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj))
        q, k = (_rotated(norm(part).transpose(1, 2), rotation) for norm, part in ((self.q_norm, q), (self.k_norm, k)))
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2) * gate.flatten(-2).sigmoid())


def rotation_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, rotary dim], both halves the same angles."""
    inverse = 1.0 / shape.rope_theta ** (torch.arange(0, shape.rotary_dim, 2).double() / shape.rotary_dim)
    angles = torch.outer(torch.arange(shape.max_position_embeddings).double(), inverse)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().float(), angles.sin().float()


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x [batch, heads, tokens, d]: its first dimensions turned by position, the rest as they are."""
    cos, sin = (table[: x.shape[-2]].to(x.dtype) for table in rotation)
    turned, still = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, still), -1)


# ---- Experts ----------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """All routed experts of a layer; `grid` is (bits, group) while they are trained quantised, else None."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        count, width, inner = shape.num_experts, shape.hidden_size, shape.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))
        self.grid: tuple[int, int] | None = None

    def seen(self) -> ExpertWeights:
        """The weights as the forward pass sees them: on their grid or not, in the type of the products."""
        matrices = (self.gate_up_proj, self.down_proj)
        if self.grid:
            matrices = tuple(fake_quantise(matrix, *self.grid) for matrix in matrices)
        gate_up, down = (matrix.bfloat16() if matrix.is_cuda else matrix for matrix in matrices)
        return gate_up, down

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
        """x [tokens, width], chosen and shares [tokens, k] -> the weighted sum, and each expert's count."""
        gate_up, down = weights
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(len(gate_up), dtype=torch.int32, device=x.device)
        counts = counts.scatter_add(0, flat, torch.ones_like(flat, dtype=torch.int32))
        ends = counts.cumsum(0).to(torch.int32)
        rows = x[order // chosen.shape[1]].to(gate_up.dtype)
        gate, up = F.grouped_mm(rows, gate_up.mT, offs=ends).chunk(2, -1)
        rows = F.grouped_mm((F.silu(gate) * up).contiguous(), down.mT, offs=ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        out = rows[back].unflatten(0, chosen.shape) * shares.to(rows.dtype)[..., None]
        return out.sum(1).to(x.dtype), counts


class Swiglu(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(width, inner), linear(width, inner), linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return x.float() @ self.weight.float().t()


class MoE(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.each, self.of = shape.num_experts_per_tok, shape.num_experts
        self.gate = Router(shape)
        self.experts = Experts(shape)
        self.shared_expert = Swiglu(shape.hidden_size, shape.shared_expert_intermediate_size)
        self.shared_expert_gate = linear(shape.hidden_size, 1)

    def forward(self, x: Tensor, weights: ExpertWeights) -> tuple[Tensor, Routed]:
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens)
        probabilities = logits.softmax(-1)
        best, chosen = probabilities.topk(self.each, -1)
        out, counts = self.experts(tokens, chosen, best / best.sum(-1, keepdim=True), weights)
        out = out + self.shared_expert_gate(tokens).sigmoid() * self.shared_expert(tokens)
        used = counts.float() / len(tokens)  # sums to the experts a token
        balance = self.of / self.each * (used * probabilities.mean(0)).sum()
        return out.view_as(x), Routed(balance, logits.logsumexp(-1).pow(2).mean(), counts, chosen)


# ---- The whole --------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.is_linear = kind == "linear_attention"
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(shape)
        else:
            self.self_attn = Attention(shape)
        self.mlp = MoE(shape)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], weights: ExpertWeights) -> tuple[Tensor, Routed]:
        mix = self.linear_attn if self.is_linear else self.self_attn
        x = x + mix(self.input_layernorm(x), rotation)
        out, routed = self.mlp(self.post_attention_layernorm(x), weights)
        return x + out, routed


class Body(nn.Module):
    def __init__(self, shape: Shape, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, kind) for kind in shape.layer_types)
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)


class Model(nn.Module):
    def __init__(self, shape: Shape, vocab_size: int) -> None:
        super().__init__()
        self.shape, self.vocab_size = shape, vocab_size
        self.model = Body(shape, vocab_size)
        if not shape.tie_word_embeddings:
            self.lm_head = linear(shape.hidden_size, vocab_size)
        for name, table in zip(("cos", "sin"), rotation_table(shape), strict=True):
            self.register_buffer(name, table, persistent=False)
        initialise(self)

    def quantise(self, grid: tuple[int, int] | None) -> None:
        """From now on the forward pass sees the routed experts on that grid of (bits, group); None: as they are."""
        for layer in self.model.layers:
            layer.mlp.experts.grid = grid

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Routed]]:
        """[batch, tokens] -> logits [batch, tokens, vocabulary], and what each layer's router did."""
        x = self.model.embed_tokens(tokens)
        if x.is_cuda:
            x = x.bfloat16()
        routed = []
        for layer in self.model.layers:
            # Out here, so that a compiled layer is the same one whether experts are quantised or not.
            x, of_layer = layer(x, (self.cos, self.sin), layer.mlp.experts.seen())
            routed.append(of_layer)
        head = self.model.embed_tokens if self.shape.tie_word_embeddings else self.lm_head
        return F.linear(self.model.norm(x), head.weight.to(x.dtype)), routed

    def sizes(self) -> dict[str, int]:
        """Parameters: all, those of routed experts, those that one token uses."""
        every = sum(weight.numel() for weight in self.parameters())
        experts = sum(weight.numel() for name, weight in self.named_parameters() if ".experts." in name)
        used = experts * self.shape.num_experts_per_tok // self.shape.num_experts
        return {"parameters": every, "experts": experts, "active": every - experts + used}


def prediction_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens, in nats."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def initialise(model: Model) -> None:
    narrow = 0.02 / math.sqrt(2 * model.shape.num_hidden_layers)  # of what is added to the residual stream
    for name, weight in model.named_parameters():
        owner = name.removesuffix(".weight").rpartition(".")[2]
        if owner == "A_log":
            weight.uniform_(1.0, 16.0).log_()
        elif owner == "dt_bias":
            step = weight.uniform_(math.log(0.001), math.log(0.1)).exp()
            weight.copy_(step + torch.log(-torch.expm1(-step)))  # softplus of it is the step
        elif owner == "conv1d":
            weight.uniform_(-0.5, 0.5)
        elif "norm" not in owner:
            weight.normal_(std=narrow if owner in ("out_proj", "o_proj", "down_proj") else 0.02)
