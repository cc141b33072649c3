"""Every op of a backend as a function of NumPy arrays: the pieces that the engine is made of, one at a time.

Activations are float32, cached rows float32 or uint16 (bf16 bits). Shapes are those of `moeflux.oracle.ops`; matrices
are what a store gives (`StoredTensor`), raw. A wrong shape or type is an ArgumentError that names the argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from moeflux import _core
from moeflux._core import QuantFormat

__all__ = ["Biases", "Expert", "Matrix", "Ops", "isas"]

Array = np.ndarray


class Matrix(Protocol):
    """Affine: `weight` uint32 [rows, columns * bits / 32], `scales` and `biases` [rows, columns / group_size] in the
    format's scale type, BF16 as uint16. MXFP4: the same with `scales` uint8 and no `biases`.
    Blocks: `weight` uint8 [rows, bytes of a row] alone.
    Plain: `weight` [rows, columns] alone."""

    @property
    def format(self) -> QuantFormat: ...
    @property
    def weight(self) -> Array: ...
    @property
    def scales(self) -> Array | None: ...
    @property
    def biases(self) -> Array | None: ...


Expert = tuple[Matrix, Matrix, Matrix]
"""gate [m, h], up [m, h], down [h, m]"""

Biases = tuple[Array, Array, Array]
"""Of all experts: gate [experts, m], up [experts, m], down [experts, h]"""


def _inner(experts: Sequence[Expert]) -> int:
    """Rows of gate and of up."""
    return len(experts[0][0].weight) if experts else 0


def _listed(
    experts: Sequence[Expert], jobs: Sequence[tuple[int, Sequence[int]]]
) -> tuple[list[Expert], list[tuple[int, list[int]]]]:
    return list(experts), [(e, list(pairs)) for e, pairs in jobs]


def isas() -> list[str]:
    """The instruction sets whose kernels run on this machine, the best first."""
    return _core.isas()


class Ops:
    """The ops of a backend, one method each. Arguments are never changed: what an op does in place comes back as a new
    array.

    isa     the instruction set whose kernels run; by default MOEFLUX_ISA, else the best
    timed   `take_times` tells how long the ops themselves took, without the copying of arguments
    exact   products and attention take float32 numbers where they would otherwise take 16 bits
    """

    def __init__(
        self,
        backend: str = "cpu",
        isa: str | None = None,
        threads: int | None = None,
        timed: bool = False,
        exact: bool = False,
    ) -> None:
        self._core = _core.Ops(backend, isa or "", threads or 0, timed=timed, exact=exact)

    def __repr__(self) -> str:
        return f"Ops({self._core.describe()})"

    @property
    def isa(self) -> str:
        """The instruction set whose kernels run; empty on a device other than the CPU."""
        return self._core.isa

    def take_times(self) -> list[_core.OpTime]:
        """The times of each kind of op since the last call; empty unless `timed`."""
        return self._core.take_times()

    # ---- Vectors ------------------------------------------------------------------------------------------------

    def embed(self, table: Matrix, ids: Array) -> Array:
        """ids int32 [n] -> [n, columns]"""
        return self._core.embed(table, ids)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x [n, width], weight [width]"""
        return self._core.rms_norm(x, weight, eps)

    def rms_norm_heads(self, x: Array, weight: Array | None, eps: float, scale: float = 1.0) -> Array:
        """x [n, heads, dim], weight [dim]; multiplied by `scale` at the end."""
        return self._core.rms_norm_heads(x, weight, eps, scale)

    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> Array:
        """x [n, width], weight and bias [width]"""
        return self._core.layer_norm(x, weight, bias, eps)

    def gated_rms_norm(self, x: Array, z: Array, weight: Array, eps: float) -> Array:
        """x and z [n, heads, dim], weight [dim]"""
        return self._core.gated_rms_norm(x, z, weight, eps)

    def rope(self, x: Array, angles: Array, *, interleaved: bool) -> Array:
        """x [n, heads, dim], angles [n, half, 2]: the cosine and the sine of each pair's angle."""
        return self._core.rope(x, angles, interleaved)

    def append(self, x: Array, cache: Array, first: int) -> Array:
        """The cache [rows, width] with x [n, width] in its rows first ... first + n - 1."""
        return self._core.append(x, cache, first)

    def swiglu(self, gate: Array, up: Array) -> Array:
        """Both arguments have the same shape, which may be any."""
        return self._core.swiglu(gate.reshape(-1), up.reshape(-1)).reshape(gate.shape)

    def geglu(self, gate: Array, up: Array) -> Array:
        """Both arguments have the same shape, which may be any."""
        return self._core.geglu(gate.reshape(-1), up.reshape(-1)).reshape(gate.shape)

    def residual_add(self, x: Array, y: Array) -> Array:
        """Both arguments have the same shape, which may be any."""
        return self._core.residual_add(x.reshape(-1), y.reshape(-1)).reshape(x.shape)

    def bias_add(self, x: Array, bias: Array) -> Array:
        """x [n, width], bias [width]"""
        return self._core.bias_add(x, bias)

    def scale(self, x: Array, factor: float) -> Array:
        """x of any shape, each number times the factor."""
        return self._core.scale(x.reshape(-1), factor).reshape(x.shape)

    def soft_cap(self, x: Array, cap: float) -> Array:
        """x of any shape"""
        return self._core.soft_cap(x.reshape(-1), cap).reshape(x.shape)

    def sigmoid_gate(self, x: Array, gate: Array) -> Array:
        """x and gate [n, heads, dim]"""
        return self._core.sigmoid_gate(x, gate)

    def combine(
        self,
        residual: Array | None,
        outputs: Array,
        weights: Array,
        shared: Array | None = None,
        shared_gate: Array | None = None,
    ) -> Array:
        """residual [n, h] or none, outputs [n, k, h], weights [n, k], shared [n, h] times the sigmoid of shared_gate
        [n]."""
        return self._core.combine(residual, outputs, weights, shared, shared_gate)

    # ---- Products -----------------------------------------------------------------------------------------------

    def matmul(self, x: Array, matrix: Matrix, *, transposed: bool = False) -> Array:
        """x [n, columns] -> [n, rows]; transposed: x [n, rows] -> [n, columns]"""
        return self.matmuls([(x, matrix, transposed)])[0]

    def matmuls(self, products: Sequence[tuple[Array, Matrix, bool]]) -> list[Array]:
        """Several products of n rows side by side: x, the matrix, and whether it is transposed."""
        return self._core.matmul(list(products))

    def expert_ffn(
        self,
        x: Array,
        experts: Sequence[Expert],
        jobs: Sequence[tuple[int, Sequence[int]]],
        k: int,
        biases: Biases | None = None,
        clamped: tuple[float, float] | None = None,
        geglu: bool = False,
    ) -> Array:
        """x [n, h]. A job is the index of an expert and the pairs (token * k + place) that go through it. With
        `clamped`, alpha and limit, gate and up meet in clamped_swiglu, with `geglu` in that.
        -> [n * k, h], zero for pairs that no job has"""
        return self._core.expert_ffn(x, *_listed(experts, jobs), k, _inner(experts), biases, clamped, geglu)

    def digit_expert_ffn(
        self,
        x: Array,
        experts: Sequence[Expert],
        jobs: Sequence[tuple[int, Sequence[int]]],
        k: int,
        biases: Biases | None = None,
        clamped: tuple[float, float] | None = None,
        geglu: bool = False,
    ) -> Array:
        """As `expert_ffn`, with the bits that the kernels of CUDA give. For the CPU, and affine formats and MXFP4."""
        return self._core.digit_expert_ffn(x, *_listed(experts, jobs), k, _inner(experts), biases, clamped, geglu)

    def digit_exp(self, x: Array) -> Array:
        """e^x as the kernels of CUDA have it in sigmoid. x [n]. For the CPU."""
        return self._core.digit_exp(x)

    def chosen_expert_ffn(
        self,
        x: Array,
        experts: Sequence[Expert],
        ids: Array,
        biases: Biases | None = None,
        clamped: tuple[float, float] | None = None,
        geglu: bool = False,
    ) -> Array:
        """x [n, h], ids int32 [n, k]: of experts of one shape and format -> [n * k, h]"""
        return self._core.chosen_expert_ffn(x, list(experts), ids, _inner(experts), biases, clamped, geglu)

    # ---- Attention and delta net --------------------------------------------------------------------------------

    def attention(
        self, q: Array, k: Array, v: Array, scale: float, sinks: Array | None = None, window: int = 0
    ) -> Array:
        """q [n, heads, dim]; k and v [t, kv_heads, dim], whose last n rows are those of q; sinks [heads]. A row sees no
        more than the last `window` rows, unless that is 0."""
        return self._core.attention(q, k, v, scale, sinks, window)

    def attention_scores(self, q: Array, k: Array, scale: float) -> Array:
        """One query in steps, on Metal alone: q [heads, dim], k [t, kv_heads, dim] -> [1, heads, t]"""
        return self._core.attention_scores(q, k, scale)

    def attention_softmax(self, scores: Array) -> Array:
        return self._core.attention_softmax(scores)

    def attention_values(self, scores: Array, v: Array) -> Array:
        """scores [1, heads, t], v [t, kv_heads, dim] -> [heads, dim]; the gate is `sigmoid_gate`."""
        return self._core.attention_values(scores, v)

    def mla_attention(self, q_latent: Array, q_pe: Array, latent: Array, k_pe: Array, scale: float) -> Array:
        """q_latent [n, heads, rank], q_pe [n, heads, rope], latent [t, rank], k_pe [t, rope] -> [n, heads, rank]"""
        return self._core.mla_attention(q_latent, q_pe, latent, k_pe, scale)

    def index_scores(
        self, q: Array, keys: Array, weights: Array | None, scale: float, *, first_position: int, unit: int = 1
    ) -> Array:
        """q [n, heads, dim], keys [u, dim], one for each `unit` rows, weights [n, heads] or 1 for each -> [n, u], minus
        infinity where a row does not see the unit"""
        return self._core.index_scores(q, keys, weights, scale, first_position, unit)

    def index_select(self, scores: Array, count: int, *, first_position: int, unit: int = 1) -> Array:
        """scores [n, u] -> ids int32 [n, count], ascending; -1 in rows that see no more than `count` units"""
        return self._core.index_select(scores, count, first_position, unit)

    def gather_rows(self, rows: Array, ids: Array, *, position: int, unit: int = 1) -> Array:
        """rows [t, ...] of a cache; ids int32: units that the row at `position` selected -> the rows that it sees"""
        return self._core.gather_rows(rows, ids, position, unit)

    def conv1d(self, x: Array, state: Array, weight: Array, dilation: int = 1) -> tuple[Array, Array]:
        """x [n, channels], state [(taps - 1) * dilation, channels], weight [channels, taps] -> rows after SiLU, and the
        new state"""
        return self._core.conv1d(x, state, weight, dilation)

    def delta_gates(self, alpha: Array, b: Array, a_log: Array, dt_bias: Array) -> tuple[Array, Array]:
        """alpha and b [n, heads], a_log and dt_bias [heads] -> decay and beta [n, heads]"""
        return self._core.delta_gates(alpha, b, a_log, dt_bias)

    def gated_delta(
        self, q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array, *, tiled: bool = False
    ) -> tuple[Array, Array]:
        """q and k [n, key heads, dk], v [n, value heads, dv], decay and beta [n, value heads]
        state [value heads, dv, dk] -> [n, value heads, dv] and the new state"""
        return self._core.gated_delta(q, k, v, decay, beta, state, tiled)

    # ---- Residual streams ---------------------------------------------------------------------------------------

    def silu(self, x: Array, factor: float = 1.0) -> Array:
        """silu(x * factor), x of any shape"""
        return self._core.silu(x.reshape(-1), factor).reshape(x.shape)

    def hyper_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x [n, streams, width], weight [streams, width]: each stream by its own norm"""
        return self._core.hyper_norm(x, weight, eps)

    def hyper_mix(self, normed: Array, gates: Array) -> Array:
        """Both [n, streams, width] -> [n, width]"""
        return self._core.hyper_mix(normed, gates)

    def hyper_add(self, x: Array, y: Array, gates: Array) -> Array:
        """x [n, streams, width], y [n, width], gates [n, streams] -> [n, streams, width]"""
        return self._core.hyper_add(x, y, gates)

    def ngram_gate(self, key: Array, query: Array, value: Array) -> Array:
        """key and query [n, streams, width], value [n, width] -> [n, streams, width]"""
        return self._core.ngram_gate(key, query, value)

    # ---- Choosing -----------------------------------------------------------------------------------------------

    def route_softmax(
        self,
        logits: Array,
        k: int,
        *,
        normalize: bool,
        groups: int = 0,
        groups_kept: int = 0,
        scaling: float = 1.0,
        factors: Array | None = None,
    ) -> tuple[Array, Array]:
        """logits [n, experts] -> ids and weights [n, k]; no groups: 0; factors [experts]"""
        return self._core.route_softmax(logits, k, groups, groups_kept, normalize, scaling, factors)

    def route_grouped(
        self, logits: Array, bias: Array, k: int, *, groups: int, groups_kept: int, normalize: bool, scaling: float
    ) -> tuple[Array, Array]:
        """logits [n, experts], bias [experts] -> ids and weights [n, k]"""
        return self._core.route_grouped(logits, bias, k, groups, groups_kept, normalize, scaling)

    def top_k(self, logits: Array, k: int) -> tuple[Array, Array]:
        """logits [count] -> ids and values [k], best first, the lower id on ties"""
        return self._core.top_k(logits, k)

    def shortlist(self, logits: Array, factor: float) -> list[tuple[int, int, Array, Array, Array, Array]]:
        """logits [n, count] -> of each row: the likeliest, the first that is not finite or -1, what each block weighs
        by this factor, with its greatest logit, and the tokens that are listed, with their logits"""
        return self._core.shortlist(logits, factor)
