"""Kernels of Metal that the backend does not take by itself, dispatched on the emulated device from here.

Everything is done in several orders of threads, without the checker and under it; all must leave the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from emulator.build import METAL, library
from emulator.device import Library, runs
from emulator.params import params, sizes

Array = np.ndarray
LANES = 32


# ---- Kernels by themselves ------------------------------------------------------------------------------------------


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
    for checked, order in runs():
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
    number = sizes()[f"number_{(format.scale_type if format.is_quantised else format.element).lower()}"]
    return {"number": number, "group_shift": int(math.log2(format.group_size)) if format.is_quantised else 0}


def shape_of(matrix) -> tuple[int, int]:
    rows = len(matrix.weight)
    words = matrix.weight.shape[1]
    return rows, words * 32 // matrix.format.bits if matrix.format.is_quantised else words


def rms_norm_in_place(x: Array, weight: Array, eps: float) -> Array:
    arguments = params("NormParams", width=x.shape[1], eps=eps)
    return dispatch("elementwise", "rms_norm_in_place", [arguments, x, weight], [1], (len(x),), (row_threads(),))[0]


def row_threads() -> int:
    return sizes()["row_threads"]


def product(kernel: str, x: Array, matrix) -> Array:
    """x [batch, n, ...]: each with as many rows of the matrix as its share, by one of the kernels for products."""
    rows, columns = shape_of(matrix)
    batch, n, wide = x.shape
    rows //= batch
    turned = kernel == "matmul_transposed"
    outputs = columns if turned else rows
    out = np.empty((batch, n, outputs), np.float32)
    arguments = params(
        "ProductParams",
        x_batch=n * wide,
        out_batch=n * outputs,
        batch_rows=rows,
        rows=rows,
        columns=columns,
        n=n,
        x_stride=wide,
        out_stride=outputs,
        **storage(matrix),
    )
    buffers = [arguments, *matrix_buffers(matrix), x, out]
    name = f"{kernel}_{sizes()['e2m1'] if matrix.format.is_mxfp4 else matrix.format.bits}"
    if turned:
        return flat("matmul", name, buffers, [5], divide_up(columns, sizes()["pack"]), n, batch)[0]
    block = 1 if kernel == "matvec" else sizes()["product_rows"]
    outputs_of_group = sizes()["outputs_of_simdgroup"] * sizes()["product_simdgroups"]
    groups = (divide_up(rows, outputs_of_group), divide_up(n, block), batch)
    return dispatch("matmul", name, buffers, [5], groups, (LANES * sizes()["product_simdgroups"],))[0]


def in_a_row(*kinds: Array) -> tuple[Array, Array]:
    """Cached rows as blocks that follow each other in one buffer, and the table of them."""
    block, length = sizes()["cached_block"], len(kinds[0])
    count = divide_up(length, block)
    rows = np.zeros((count, len(kinds), block, kinds[0][0].size), np.float32)
    for i, kind in enumerate(kinds):
        for row in range(length):
            rows[row // block, i, row % block] = kind[row].ravel()
    table = np.zeros(count, [("begin", np.uint64), ("buffer", np.uint32), ("padding", np.uint32)])
    table["begin"] = np.arange(count) * rows[0].nbytes
    return table, rows


def attention_both_ways(
    q: Array, k: Array, v: Array, scale: float, sinks: Array | None = None, window: int = 0
) -> tuple[Array, Array]:
    """One simdgroup through all spans, and spans side by side."""
    n, heads, dim = q.shape
    kv_heads, length = k.shape[1], len(k)
    spans = divide_up(length, sizes()["attention_span"])
    table, rows = in_a_row(k, v)
    arguments = params(
        "AttentionParams",
        first_position=length - n,
        k_begin=0,
        v_begin=rows[0, 0].nbytes,
        pe_begin=0,
        n=n,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        pe_dim=0,
        q_row_stride=heads * dim,
        q_head_stride=dim,
        q_pe_row_stride=0,
        q_pe_head_stride=0,
        first_span=0,
        spans=spans,
        is_first=1,
        is_last=1,
        window=window,
        has_sinks=int(sinks is not None),
        scale=scale,
    )
    chunks = next(c for c in (4, 8, 16) if dim <= c * LANES)
    tiles = divide_up(n * heads // kv_heads, sizes()["attention_queries"])
    inputs = [arguments, q, nothing(), table, rows, nothing(), nothing(), nothing()]
    out, ends = np.empty((n, heads, dim), np.float32), nothing() if sinks is None else sinks
    grid: tuple[int, ...] = (tiles, kv_heads)
    (whole,) = dispatch("attention", f"attention_{chunks}_f32", [*inputs, ends, out], [9], grid, (LANES,))
    parts = np.empty((n * heads, spans, dim + 2), np.float32)
    grid = (tiles, kv_heads, spans)
    (parts,) = dispatch("attention", f"attention_spans_{chunks}_f32", [*inputs, parts], [8], grid, (LANES,))
    (merged,) = flat("attention", "attention_merge", [arguments, parts, nothing(), ends, out], [4], dim, heads, n)
    return whole, merged
