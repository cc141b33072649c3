"""The parts that a model's layers are made of: small frozen values, each with its own sizes and flavours.

A layer has a mixer, in which tokens take from those before them, and a feed-forward part, which each token goes through
by itself. When a `Variant` is made of the parts, their twins in csrc/models check the values of the fields.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "ClampedSwiglu",
    "DenseMlp",
    "FeedForward",
    "GatedDelta",
    "GroupedAttention",
    "Index",
    "LatentAttention",
    "Layer",
    "Mixer",
    "NgramEmbedding",
    "ResidualStreams",
    "Rope",
    "RoutedExperts",
    "Router",
    "SharedExpert",
    "Yarn",
    "yarn_mscale",
]


# ---- Positions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """How frequencies are stretched beyond the context that a model was first trained with. A mscale of 0 is absent."""

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True  # the pairs between which frequencies are mixed are whole ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    dim: int  # channels that turn, in pairs
    theta: float
    yarn: Yarn | None = None
    turning: int = 0  # pairs: all after the first so many stand still; 0: all turn


def yarn_mscale(factor: float, coefficient: float) -> float:
    return 0.1 * coefficient * math.log(factor) + 1.0 if factor > 1.0 else 1.0


# ---- Rows that attention sees -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """Selects the rows that a row attends to, by units of rows that share a key."""

    heads: int
    dim: int  # of its keys
    count: int  # how many units a row selects
    unit: int = 1  # rows
    interleaved: bool = False  # channels that turn together are neighbours; of latent attention alone


# ---- Mixers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedAttention:
    """Groups of query heads share a key and a value head."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    gate: bool = False  # q_proj yields [query | gate] a head; the output is multiplied by the gate's sigmoid
    qk_norm: bool = True  # each q and k head by itself
    joint_norm: bool = False  # not so: all q heads as one row, and all k heads as another
    bias: bool = False  # q_proj, k_proj and v_proj add one to what they yield
    out_bias: bool = False  # o_proj does
    sinks: bool = False  # each head has a score besides, which takes its part of the weight and has no value
    window: int = 0  # rows that a row attends to at most, its own among them; 0: all
    scale: float = 0.0  # of the scores; 0: 1 / sqrt(head_dim)
    keys_as_values: bool = False  # a value is its key before norm and rope; there is no v_proj
    value_norm: bool = False  # each value head by itself, without a weight
    out_norm: bool = False  # what o_proj yields is normed before it is added
    index: Index | None = None  # selects the rows that a row attends to; none: it attends to all

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """One latent row and one rotated row a position, which all heads share."""

    heads: int
    q_rank: int = 0  # 0: queries come from one q_proj
    kv_rank: int
    nope_dim: int  # channels of a head's query and key that do not turn
    v_dim: int
    rope: Rope  # turns all other channels of them
    index: Index | None = None  # selects the rows that a row attends to; none: it attends to all

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope.dim


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDelta:
    """Gated delta-net: a short convolution and a recurrent state in place of attention."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # of the convolution
    sigmoid: bool = False  # what is read is multiplied by sigmoid(z), in place of silu(z)
    tiled: bool = False  # value heads take turns at the key heads, in place of neighbours sharing one

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v."""
        return 2 * self.key_width + self.value_width


Mixer = GroupedAttention | LatentAttention | GatedDelta


# ---- Feed-forward parts -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    scoring: str  # "softmax", or "noaux_tc": sigmoid scores, a bias for choosing only, groups
    normalize: bool = True  # the weights of the chosen add up to 1, before scaling
    scaling: float = 1.0  # of the weights
    groups: int = 0  # how many groups the experts form; softmax: 0 is none
    groups_kept: int = 0  # how many of these groups a token keeps
    bias: bool = False  # added to the logits
    factors: bool = False  # of the experts, by which their weights are multiplied at last; softmax only


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpert:
    intermediate: int
    gated: bool = False  # multiplied by sigmoid(gate . x); otherwise added as it is


@dataclass(frozen=True, kw_only=True, slots=True)
class ClampedSwiglu:
    """How gate and up of an expert meet where it is not silu(gate) * up: with gate at most `limit`, and up between
    -limit and limit, it is gate * sigmoid(alpha * gate) * (up + 1)."""

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedExperts:
    """A router, the experts it chooses from, and an expert that every token goes through."""

    count: int
    per_token: int
    intermediate: int
    router: Router
    shared: SharedExpert | None = None
    bias: bool = False  # gate, up and down of every expert add one
    clamped: ClampedSwiglu | None = None
    geglu: bool = False  # in place of swiglu, in the shared expert too
    # Router, experts and shared expert each norm by themselves what they read. What the experts yield, what the shared
    # one yields, and their sum are normed. At last, the stream is multiplied by a number of the layer.
    framed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseMlp:
    """One feed-forward part for all tokens."""

    intermediate: int


FeedForward = RoutedExperts | DenseMlp


# ---- What a layer may have besides ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramEmbedding:
    """Rows of a table that a token and those before it choose by a hash. They enter the residual streams before the
    mixer reads them. The table is far larger than memory, so its rows are read as they are needed."""

    index: int  # among the layers that have one: each hashes in a way of its own
    width: int  # of a token's rows side by side
    length: int  # of the longest n-gram; the shortest has 2 tokens
    heads: int  # rows for each length
    min_rows: int  # each head has a part of the table, whose rows are a prime from this number on
    divisor: int = 1  # of the rows of the whole table, some of which are never used
    seed: int = 0  # of the hash
    end_id: int  # n-grams do not reach over this token, and see it before the first one
    parts: int = 1  # tensors that the table is cut into
    taps: int  # of the convolution that follows, which takes every `length`-th row

    @property
    def rows_per_token(self) -> int:
        return (self.length - 1) * self.heads

    @property
    def row_width(self) -> int:
        return self.width // self.rows_per_token


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualStreams:
    """Residual streams side by side. Each half of a layer reads a gated mean of them, and what it yields goes to each
    of them by a gate of its own."""

    count: int
    rank: int  # through which the gates of the mean are made


@dataclass(frozen=True, slots=True)
class Layer:
    mixer: Mixer
    feed_forward: FeedForward
    ngram: NgramEmbedding | None = None
