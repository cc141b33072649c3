"""The ops of moeflux.ops on the emulated device: which kernel, which grid, which arguments.

Every dispatch is made in four orders of threads without the checker and in some under it; all must leave the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from emulator.build import METAL, library
from emulator.device import ORDERS, Library
from emulator.params import blocks, params, sizes

Array = np.ndarray
LANES = 32


@functools.cache
def _library(file: str, checked: bool) -> Library:
    return Library(library(METAL / f"{file}.metal", checked), checked)


def divide_up(value: int, by: int) -> int:
    return -(-value // by)


def dispatch(
    file: str,
    kernel: str,
    buffers: Sequence[Array | None],
    written: Sequence[int],
    threadgroups: Sequence[int],
    threads: Sequence[int],
) -> list[Array]:
    """The buffers numbered in `written`, after the kernel. The arguments stay as they are."""
    results: list[list[Array]] = []
    for checked in (False, True):
        for order in ORDERS:
            own = [array.copy() if i in written and array is not None else array for i, array in enumerate(buffers)]
            _library(file, checked).dispatch(kernel, own, threadgroups, threads, order=order)
            results.append([own[i] for i in written])
    for other in results[1:]:
        for first, again in zip(results[0], other, strict=True):
            assert first.tobytes() == again.tobytes(), f"{kernel}: the order of threads changes the result"
    return results[0]


def flat(file: str, kernel: str, buffers: Sequence[Array | None], written: Sequence[int], *extent: int) -> list[Array]:
    """A thread for each of `extent`, along the first axis in whole threadgroups."""
    threads = min(sizes()["flat_threads"], LANES * divide_up(extent[0], LANES))
    groups = (divide_up(extent[0], threads), *extent[1:])
    return dispatch(file, kernel, buffers, written, groups, (threads,))


def nothing() -> Array:
    """Bound where a kernel has an argument that is not given."""
    return np.zeros(4, np.float32)


def matrix_buffers(matrix) -> list[Array]:
    """Codes, scales, biases."""
    scales = nothing() if matrix.scales is None else matrix.scales
    biases = nothing() if matrix.biases is None else matrix.biases
    return [np.ascontiguousarray(matrix.weight), scales, biases]


def storage(matrix) -> dict[str, int]:
    """The members of a struct that say how the matrix is stored."""
    format = matrix.format
    number = sizes()[f"number_{(format.scale_type if format.is_affine else format.element).lower()}"]
    return {"number": number, "group_shift": int(math.log2(format.group_size)) if format.is_affine else 0}


def shape_of(matrix) -> tuple[int, int]:
    rows = len(matrix.weight)
    words = matrix.weight.shape[1]
    return rows, words * 32 // matrix.format.bits if matrix.format.is_affine else words


class MetalOps:
    """Methods and shapes as in moeflux.ops.Ops."""

    # ---- Vectors ------------------------------------------------------------------------------------------------

    def embed(self, table, ids: Array) -> Array:
        columns = shape_of(table)[1]
        out = np.empty((len(ids), columns), np.float32)
        arguments = params("EmbedParams", columns=columns, **storage(table))
        buffers = [arguments, *matrix_buffers(table), ids, out]
        packs = divide_up(columns, sizes()["pack"])
        return flat("matmul", f"embed_{table.format.bits}", buffers, [5], packs, len(ids))[0]

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        arguments = params("NormParams", width=x.shape[1], eps=eps)
        grid = (len(x),), (sizes()["row_threads"],)
        (out,) = dispatch("elementwise", "rms_norm", [arguments, x, weight, np.empty_like(x)], [3], *grid)
        (again,) = dispatch("elementwise", "rms_norm_in_place", [arguments, x, weight], [1], *grid)
        assert out.tobytes() == again.tobytes()
        return out

    def _heads(self, x: Array, gate: Array) -> dict[str, int]:
        """Strides of whole arrays."""
        return {
            "row_stride": x.shape[1] * x.shape[2],
            "head_stride": x.shape[2],
            "gate_row_stride": gate.shape[1] * gate.shape[2],
            "gate_head_stride": gate.shape[2],
            "dim": x.shape[2],
        }

    def rms_norm_heads(self, x: Array, weight: Array | None, eps: float, scale: float = 1.0) -> Array:
        has = weight is not None
        arguments = params("HeadNormParams", **self._heads(x, x), has_weight=has, eps=eps, scale=scale)
        buffers = [arguments, x, weight if has else nothing()]
        return dispatch("elementwise", "rms_norm_heads", buffers, [1], (x.shape[1], len(x)), (LANES,))[0]

    def gated_rms_norm(self, x: Array, z: Array, weight: Array, eps: float) -> Array:
        arguments = params("HeadNormParams", **self._heads(x, z), has_weight=1, eps=eps, scale=1.0)
        return dispatch(
            "elementwise", "gated_rms_norm", [arguments, x, weight, z], [1], (x.shape[1], len(x)), (LANES,)
        )[0]

    def swiglu(self, gate: Array, up: Array) -> Array:
        return flat("elementwise", "swiglu", [params("FlatParams", count=gate.size), gate, up], [1], gate.size)[0]

    def residual_add(self, x: Array, y: Array) -> Array:
        return flat("elementwise", "residual_add", [params("FlatParams", count=x.size), x, y], [1], x.size)[0]

    def sigmoid_gate(self, x: Array, gate: Array) -> Array:
        arguments = params("HeadGateParams", **self._heads(x, gate))
        return flat("elementwise", "sigmoid_gate", [arguments, x, gate], [1], x.shape[2], x.shape[1], len(x))[0]

    def rope(self, x: Array, angles: Array, *, interleaved: bool) -> Array:
        n, heads, dim = x.shape
        half = angles.shape[1]
        arguments = params(
            "RopeParams", row_stride=heads * dim, head_stride=dim, half_dim=half, interleaved=interleaved
        )
        return flat("elementwise", "rope", [arguments, x, angles], [1], half, heads, n)[0]

    def append(self, x: Array, cache: Array, first: int) -> Array:
        width = x.shape[1]
        arguments = params("AppendParams", first=first, x_stride=width, width=width)
        kernel = "append_bf16" if cache.dtype == np.uint16 else "append_f32"
        return flat("elementwise", kernel, [arguments, x, cache], [2], width, len(x))[0]

    def combine(
        self,
        residual: Array,
        outputs: Array,
        weights: Array,
        shared: Array | None = None,
        shared_gate: Array | None = None,
    ) -> Array:
        n, hidden = residual.shape
        has = {"has_shared": shared is not None, "has_gate": shared_gate is not None}
        arguments = params("CombineParams", hidden=hidden, k=weights.shape[1], **has, eps=1e-6)
        optional = [nothing() if given is None else given for given in (shared, shared_gate)]
        buffers = [arguments, residual, outputs, weights, *optional]
        (out,) = flat("elementwise", "combine", buffers, [1], hidden, n)
        # And with the norm that follows: the same numbers, normed as rms_norm does.
        norm = np.linspace(-1, 2, hidden, dtype=np.float32)
        grid = (n,), (sizes()["row_threads"],)
        fused, normed = dispatch(
            "elementwise", "combine_rms_norm", [*buffers, norm, np.empty_like(residual)], [1, 7], *grid
        )
        assert fused.tobytes() == out.tobytes()
        assert normed.tobytes() == self.rms_norm(out, norm, 1e-6).tobytes()
        return out

    # ---- Products -----------------------------------------------------------------------------------------------

    def matmul(self, x: Array, matrix, *, transposed: bool = False, kernel: str = "") -> Array:
        return self.matmul_batch(x[None], matrix, transposed=transposed, kernel=kernel)[0]

    def matmul_batch(self, x: Array, matrix, *, transposed: bool = False, kernel: str = "") -> Array:
        """x [batch, n, ...]: each with as many rows of the matrix as its share."""
        rows, columns = shape_of(matrix)
        batch, n, wide = x.shape
        rows //= batch
        outputs = columns if transposed else rows
        out = np.empty((batch, n, outputs), np.float32)
        arguments = params(
            "ProductParams",
            x_batch=n * wide,
            out_batch=n * outputs,
            rows=rows,
            columns=columns,
            n=n,
            x_stride=wide,
            out_stride=outputs,
            **storage(matrix),
        )
        buffers = [arguments, *matrix_buffers(matrix), x, out]
        if transposed:
            packs = divide_up(columns, sizes()["pack"])
            return flat("matmul", f"matmul_transposed_{matrix.format.bits}", buffers, [5], packs, n, batch)[0]
        if kernel == "matmul_tiles":
            assert batch == 1
            groups = (divide_up(rows, sizes()["tile"]), divide_up(n, sizes()["tile"]))
            threads = (LANES * sizes()["tile_simdgroups"],)
            return dispatch("matmul_tiles", f"matmul_tiles_{matrix.format.bits}", buffers, [5], groups, threads)[0]
        kernel = kernel or ("matvec" if n == 1 else "matmul")
        block = 1 if kernel == "matvec" else sizes()["product_rows"]
        outputs_of_group = sizes()["outputs_of_simdgroup"] * sizes()["product_simdgroups"]
        groups = (divide_up(rows, outputs_of_group), divide_up(n, block), batch)
        threads = (LANES * sizes()["product_simdgroups"],)
        return dispatch("matmul", f"{kernel}_{matrix.format.bits}", buffers, [5], groups, threads)[0]

    def expert_ffn(
        self, x: Array, experts: Sequence[tuple], jobs: Sequence[tuple[int, Sequence[int]]], k: int, block: int = 0
    ) -> Array:
        """`block` pairs of an expert at a time: 1, or product_rows; by default 1 for a single token."""
        n, hidden = x.shape
        intermediate = len(experts[0][0].weight)
        slots, places, slot_bytes = expert_slots(experts)
        block = block or (1 if n == 1 else sizes()["product_rows"])
        pairs: list[int] = []
        rows = []
        for expert, chosen in jobs:
            for first in range(0, len(chosen), block):
                part = chosen[first : first + block]
                rows.append({"slot": expert * slot_bytes, "first": len(pairs), "count": len(part)})
                pairs.extend(part)
        total = n * k
        lists = [blocks("ExpertBlock", rows), np.array(pairs, np.uint32), slots]

        def product(kernel: str, matrices: Sequence, shape: tuple[int, int], x: Array, k: int) -> Array:
            first, second = matrices[0], matrices[-1]
            arguments = params(
                "ExpertParams",
                **dict(zip(("weight", "scales", "biases"), places[first], strict=True)),
                **dict(zip(("up_weight", "up_scales", "up_biases"), places[second], strict=True)),
                rows=shape[0],
                columns=shape[1],
                k=k,
                **storage(experts[0][first]),
            )
            out = np.zeros((total, shape[0]), np.float32)  # what no pair writes stays as it was
            name = f"{kernel}_1" if block == 1 else kernel
            outputs = sizes()["outputs_of_simdgroup"] * sizes()["product_simdgroups"]
            groups = (divide_up(shape[0], outputs), len(rows))
            threads = (LANES * sizes()["product_simdgroups"],)
            buffers = [arguments, *lists, x, out]
            return dispatch("experts", f"{name}_{experts[0][first].format.bits}", buffers, [5], groups, threads)[0]

        inner = product("expert_gate_up", (0, 1), (intermediate, hidden), x, k)
        return product("expert_down", (2,), (hidden, intermediate), inner, 1)

    # ---- Attention and delta net --------------------------------------------------------------------------------

    def attention(self, q: Array, k: Array, v: Array, scale: float) -> Array:
        return self._attention(q, nothing().reshape(1, 1, -1), k, v, nothing(), 0, scale)

    def mla_attention(self, q_latent: Array, q_pe: Array, latent: Array, k_pe: Array, scale: float) -> Array:
        cached = latent[:, None]
        return self._attention(q_latent, q_pe, cached, cached, k_pe, q_pe.shape[2], scale)

    def _attention(self, q: Array, q_pe: Array, k: Array, v: Array, k_pe: Array, pe_dim: int, scale: float) -> Array:
        n, heads, dim = q.shape
        kv_heads, length = k.shape[1], len(k)
        spans = divide_up(length, sizes()["attention_span"])
        arguments = params(
            "AttentionParams",
            first_position=length - n,
            n=n,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            pe_dim=pe_dim,
            q_row_stride=heads * dim,
            q_head_stride=dim,
            q_pe_row_stride=q_pe.shape[1] * q_pe.shape[2] if pe_dim else 0,
            q_pe_head_stride=q_pe.shape[2] if pe_dim else 0,
            spans=spans,
            scale=scale,
        )
        chunks = next(c for c in (4, 8, 16) if dim <= c * LANES)
        kind = f"{chunks}_{'bf16' if k.dtype == np.uint16 else 'f32'}"
        tiles = divide_up(n * heads // kv_heads, sizes()["attention_queries"])
        inputs = [arguments, q, q_pe, k, v, k_pe]
        out = np.empty((n, heads, dim), np.float32)
        (whole,) = dispatch("attention", f"attention_{kind}", [*inputs, out], [6], (tiles, kv_heads), (LANES,))
        parts = np.empty((n * heads, spans, dim + 2), np.float32)
        grid = (tiles, kv_heads, spans), (LANES,)
        (parts,) = dispatch("attention", f"attention_spans_{kind}", [*inputs, parts], [6], *grid)
        (merged,) = flat("attention", "attention_merge", [arguments, parts, out], [2], dim, heads, n)
        assert whole.tobytes() == merged.tobytes(), "attention: spans side by side are not the spans one by one"
        return whole

    def attention_step_by_step(self, q: Array, k: Array, v: Array, scale: float) -> Array:
        """One query [heads, dim] by three kernels, the scores in memory between them."""
        heads, dim = q.shape
        length, kv_heads, _ = k.shape
        stride = length + 3
        shape = {"dim": dim, "kv_dim": kv_heads * dim, "length": length, "stride": stride}
        arguments = params("ScoresParams", **shape, heads_per_kv=heads // kv_heads, scale=scale)
        scores = np.zeros((heads, stride), np.float32)
        grid = (length, heads), (LANES,)
        (scores,) = dispatch("attention", "attention_scores", [arguments, q, k, scores], [3], *grid)
        grid = (heads,), (sizes()["row_threads"],)
        (scores,) = dispatch("attention", "attention_softmax", [arguments, scores], [1], *grid)
        buffers = [arguments, scores, v, np.empty_like(q)]
        return flat("attention", "attention_values", buffers, [3], dim, heads)[0]

    def conv1d(self, x: Array, state: Array, weight: Array) -> tuple[Array, Array]:
        n, channels = x.shape
        arguments = params("ConvParams", n=n, channels=channels, taps=weight.shape[1])
        state = state if state.size else nothing()
        (out,) = flat("delta", "conv1d", [arguments, x, state, weight, np.empty_like(x)], [4], channels, n)
        (state,) = flat("delta", "conv1d_state", [arguments, x, state], [2], channels)
        return out, state

    def delta_gates(self, alpha: Array, b: Array, a_log: Array, dt_bias: Array) -> tuple[Array, Array]:
        arguments = params("DeltaGatesParams", heads=alpha.shape[1], count=alpha.size)
        buffers = [arguments, alpha, b, a_log, dt_bias, np.empty_like(alpha), np.empty_like(b)]
        decay, beta = flat("delta", "delta_gates", buffers, [5, 6], alpha.size)
        return decay, beta

    def gated_delta(self, q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array) -> tuple[Array, Array]:
        n, key_heads, key_dim = q.shape
        _, value_heads, value_dim = v.shape
        arguments = params(
            "DeltaParams",
            n=n,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            values_per_key=value_heads // key_heads,
            q_row_stride=key_heads * key_dim,
            q_head_stride=key_dim,
            k_row_stride=key_heads * key_dim,
            k_head_stride=key_dim,
            v_row_stride=value_heads * value_dim,
            v_head_stride=value_dim,
        )
        buffers = [arguments, q, k, v, decay, beta, state, np.empty_like(v)]
        rows = sizes()["delta_values"]
        groups = (divide_up(value_dim, rows), value_heads)
        state, out = dispatch("delta", "gated_delta", buffers, [6, 7], groups, (LANES * rows,))
        return out, state

    # ---- Choosing -----------------------------------------------------------------------------------------------

    def _route(self, kernel: str, logits: Array, bias: list[Array], k: int, **values: float) -> tuple[Array, Array]:
        n, experts = logits.shape
        arguments = params("RouteParams", experts=experts, k=k, **values)
        results = [np.empty((n, k), np.int32), np.empty((n, k), np.float32)]
        buffers = [arguments, logits, *bias, *results]
        written = [len(buffers) - 2, len(buffers) - 1]
        ids, weights = dispatch("route", kernel, buffers, written, (n,), (LANES,))
        return ids, weights

    def route_softmax(self, logits: Array, k: int, *, normalize: bool) -> tuple[Array, Array]:
        values = {"normalize": normalize, "groups": 1, "groups_kept": 1, "scaling": 1.0}
        return self._route("route_softmax", logits, [], k, **values)

    def route_grouped(
        self, logits: Array, bias: Array, k: int, *, groups: int, groups_kept: int, normalize: bool, scaling: float
    ) -> tuple[Array, Array]:
        values = {"normalize": normalize, "groups": groups, "groups_kept": groups_kept, "scaling": scaling}
        return self._route("route_grouped", logits, [bias], k, **values)

    def top_k(self, logits: Array, k: int) -> tuple[Array, Array]:
        block = sizes()["top_k_block"]
        values, ids = logits, np.zeros(len(logits), np.int32)
        for has_ids in range(9):
            groups = divide_up(len(values), block)
            # Every block but the last leaves k.
            left = (groups - 1) * k + min(k, len(values) - (groups - 1) * block)
            arguments = params("TopKParams", count=len(values), k=k, has_ids=min(has_ids, 1))
            buffers = [arguments, values, ids, np.empty(left, np.float32), np.empty(left, np.int32)]
            values, ids = dispatch("route", "top_k", buffers, [3, 4], (groups,), (sizes()["row_threads"],))
            if groups == 1:
                return ids, values
        raise AssertionError("top_k: the rounds do not end")


def expert_slots(experts: Sequence[tuple]) -> tuple[Array, list[tuple[int, int, int]], int]:
    """Every expert's matrices behind each other in a slot of its own, as they lie in a file: the bytes, where each
    matrix's weight, scales and biases begin in a slot, and the bytes of a slot."""
    slots, places = [], []
    for expert in experts:
        parts, places, at = [], [], 0
        for matrix in expert:
            begins = []
            for part in (matrix.weight, matrix.scales, matrix.biases):
                begins.append(at)
                if part is not None:
                    raw = np.frombuffer(np.ascontiguousarray(part).tobytes(), np.uint8)
                    parts.append(np.pad(raw, (0, -len(raw) % 16)))
                    at += len(parts[-1])
            places.append(tuple(begins))
        slots.append(np.concatenate(parts))
    return np.concatenate(slots), places, len(slots[0])
