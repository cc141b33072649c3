"""Grouped-query and latent attention of every instruction set, against the oracle and against themselves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moeflux import ArgumentError, oracle
from moeflux.ops import Ops, isas
from moeflux.stores.floats import bf16_bits
from support.op_checks import as_codes, cached, check_attention, check_latent_attention
from support.tolerances import CODE_ERROR

Array = np.ndarray
CACHES = ("f32", "bf16", "q8")


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Ops:
    """Of every instruction set: conftest.py has the parameters."""
    return Ops(isa=request.param)


# ---- Against the oracle -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("n", [1, 2, 3, 17, 64])
@pytest.mark.parametrize("dim", [4, 32, 36, 40, 64])
def test_short_contexts(kernels: Ops, n: int, dim: int, dtype: str) -> None:
    for first in (0, 1, 62, 63, 64, 130):
        check_attention(kernels, n, first, heads=6, kv_heads=2, dim=dim, dtype=dtype)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (5, 5), (7, 1), (12, 2), (14, 2), (16, 2), (40, 1), (70, 1)])
def test_groups_of_heads(kernels: Ops, heads: int, kv_heads: int, dtype: str) -> None:
    """Groups that are and are not whole tiles, and one that is more than a unit takes."""
    for n in (1, 3, 17):
        check_attention(kernels, n, 9, heads, kv_heads, 32, dtype)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("dim", [96, 128, 192, 256, 512])
def test_wide_heads(kernels: Ops, dim: int, dtype: str) -> None:
    check_attention(kernels, 3, 70, heads=8, kv_heads=2, dim=dim, dtype=dtype)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("n", [1, 2, 3, 17, 49])
def test_long_contexts(kernels: Ops, n: int, dtype: str) -> None:
    """Long enough to be cut into spans that are merged, of more than one length. The most rows have no room for that at
    the longer context."""
    for first in (5000, 9200):
        check_attention(kernels, n, first, heads=8, kv_heads=2, dim=40, dtype=dtype)


def test_spans_that_early_rows_do_not_see(kernels: Ops) -> None:
    check_attention(kernels, 600, 0, heads=1, kv_heads=1, dim=32, dtype="f32")
    check_attention(kernels, 70, 480, heads=2, kv_heads=1, dim=36, dtype="bf16")
    check_attention(kernels, 70, 480, heads=2, kv_heads=1, dim=36, dtype="q8")
    for n, first in ((70, 480), (17, 8184)):  # each row is a block of queries
        check_attention(kernels, n, first, heads=33, kv_heads=1, dim=4, dtype="bf16")


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize(("rank", "rope"), [(64, 16), (40, 12), (512, 64), (36, 4)])
@pytest.mark.parametrize("n", [1, 3, 17])
def test_latent_attention(kernels: Ops, n: int, rank: int, rope: int, dtype: str) -> None:
    for first, heads in ((0, 1), (5, 5), (63, 16), (130, 70)):
        check_latent_attention(kernels, n, first, heads if rank < 512 else min(heads, 5), rank, rope, dtype)


@pytest.mark.parametrize("dtype", CACHES)
def test_latent_attention_over_a_long_context(kernels: Ops, dtype: str) -> None:
    check_latent_attention(kernels, 2, 5000, 6, 40, 8, dtype)


# ---- Sinks and windows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("window", [1, 5, 64, 128, 600])
@pytest.mark.parametrize("n", [1, 3, 17, 70])
def test_windows(kernels: Ops, n: int, window: int, dtype: str) -> None:
    """That begin within a block, at its border, a span before their row, or before all rows."""
    for first in (0, 4, 130, 511, 1100):
        check_attention(kernels, n, first, heads=6, kv_heads=2, dim=40, dtype=dtype, window=window)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("window", [128, 5000])
def test_windows_far_out(kernels: Ops, window: int, dtype: str) -> None:
    """Where spans are long, and a window is cut into some that are merged."""
    for n in (1, 20):
        check_attention(kernels, n, 9200, heads=8, kv_heads=2, dim=36, dtype=dtype, window=window, sinks=0.0)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("sinks", [-1000.0, 0.0, 3.0, 40.0])
def test_sinks(kernels: Ops, sinks: float, dtype: str) -> None:
    """Far below all scores, among them, above, and far above: then nothing is left of the values."""
    for n, first, heads, dim in ((1, 0, 8, 32), (17, 130, 16, 64), (3, 5000, 8, 40), (8, 600, 70, 32)):
        kv_heads = 1 if heads == 70 else 2
        check_attention(kernels, n, first, heads, kv_heads, dim, dtype, sinks=sinks)
        check_attention(kernels, n, first, heads, kv_heads, dim, dtype, sinks=sinks, window=100)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("first", [0, 300, 5000])
def test_nothing_comes_from_rows_before_a_window(kernels: Ops, first: int, dtype: str) -> None:
    """NaN in a row reaches the rows that see it and no others."""
    rng = np.random.default_rng(first)
    q = rng.standard_normal((40, 6, 32), dtype=np.float32)
    k, v = (cached(rng, (first + 40, 2, 32), dtype)[0] for _ in range(2))
    whole = kernels.attention(q, k, v, 0.2, None, 9)
    nan = np.full((2, 32), np.nan, np.float32)
    k[first + 7] = v[first + 7] = {"f32": lambda row: row, "bf16": bf16_bits, "q8": as_codes}[dtype](nan)
    spoilt = kernels.attention(q, k, v, 0.2, None, 9)
    seen = np.zeros(40, bool)
    seen[7:16] = True
    assert np.array_equal(spoilt[~seen], whole[~seen])
    assert np.isnan(spoilt[seen]).all()


@pytest.mark.parametrize("dtype", ["f32", "q8"])
def test_a_window_that_hides_nothing_changes_nothing(kernels: Ops, dtype: str) -> None:
    rng = np.random.default_rng(8)
    q = rng.standard_normal((20, 6, 32), dtype=np.float32)
    k, v = (cached(rng, (620, 2, 32), dtype)[0] for _ in range(2))
    whole = kernels.attention(q, k, v, 0.2)
    assert np.array_equal(kernels.attention(q, k, v, 0.2, None, 620), whole)
    assert np.array_equal(kernels.attention(q, k, v, 0.2, np.full(6, -np.inf, np.float32), 1 << 40), whole)
    assert not np.array_equal(kernels.attention(q, k, v, 0.2, None, 619), whole)


# ---- Numbers at the edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [3, 900])
def test_scores_of_any_size(kernels: Ops, first: int) -> None:
    """Thousands apart: the softmax takes one row, and nothing overflows."""
    check_attention(kernels, 5, first, heads=4, kv_heads=2, dim=32, dtype="bf16", scale=300.0)
    # Here two rows share the weight, and each rounding of a score shows in it.
    rng = np.random.default_rng(first)
    q = rng.standard_normal((5, 4, 32), dtype=np.float32)
    (k, wide_k), (v, wide_v) = (cached(rng, (first + 5, 2, 32), "q8") for _ in range(2))
    expected = oracle.attention(q.astype(np.float64), wide_k, wide_v, 300.0)
    assert np.abs(kernels.attention(q, k, v, 300.0) - expected).max() < 1e-3


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("first", [0, 3, 900])
def test_nothing_comes_from_rows_behind(kernels: Ops, first: int, dtype: str) -> None:
    """NaN in a row of the call reaches that row and later ones only."""
    rng = np.random.default_rng(first)
    q = rng.standard_normal((20, 6, 32), dtype=np.float32)
    k, v = (cached(rng, (first + 20, 2, 32), dtype)[0] for _ in range(2))
    whole = kernels.attention(q, k, v, 0.2)
    nan = np.full((2, 32), np.nan, np.float32)
    row = {"f32": lambda row: row, "bf16": bf16_bits, "q8": as_codes}[dtype](nan)
    for rows in (k, v):  # alone
        kept, rows[first + 7] = rows[first + 7].copy(), row
        spoilt = kernels.attention(q, k, v, 0.2)
        assert np.array_equal(spoilt[:7], whole[:7])
        assert np.isnan(spoilt[7:]).all()
        rows[first + 7] = kept


@pytest.mark.parametrize("dtype", ["bf16", "q8"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_nothing_sees_may_hold_anything(kernels: Ops, value: float, dtype: str) -> None:
    """As memory of a cache does that was never written: rows of another call, taken as this one's."""
    rng = np.random.default_rng(5)
    q = rng.standard_normal((40, 16, 64), dtype=np.float32)
    k, v = (cached(rng, (340, 2, 64), dtype)[0] for _ in range(2))
    bits = bf16_bits(np.float32([value]))
    whole = kernels.attention(q, k, v, 0.2)
    for seen in (1, 31, 32, 33):
        spoilt_k, spoilt_v = k.copy(), v.copy()
        if dtype == "bf16":
            spoilt_k[300 + seen :], spoilt_v[300 + seen :] = bits[0], bits[0]
        else:  # codes may be any bytes, scales are what they are
            for rows in (spoilt_k[300 + seen :], spoilt_v[300 + seen :]):
                rows[..., :64], rows[..., 64:] = -128, bits.view(np.int8)
        spoilt = kernels.attention(q, spoilt_k, spoilt_v, 0.2)
        assert np.array_equal(spoilt[:seen], whole[:seen])


@pytest.mark.parametrize("dtype", CACHES)
def test_exact_attention_is_that_of_f32(dtype: str) -> None:
    rng = np.random.default_rng(6)
    q = rng.standard_normal((3, 16, 64), dtype=np.float32)
    k, v = (cached(rng, (600, 2, 64), dtype)[0] for _ in range(2))
    if "amx" not in isas():
        pytest.skip("this machine has no tiles")
    exact = Ops(isa="amx", exact=True).attention(q, k, v, 0.2)
    assert np.array_equal(exact, Ops(isa="avx512").attention(q, k, v, 0.2))
    assert np.array_equal(exact, Ops(isa="amx").attention(q, k, v, 0.2)) == (dtype == "f32")


@pytest.mark.parametrize(("rows", "dim"), [(300, 64), (1500, 256)])
def test_whole_numbers_lose_little(kernels: Ops, rows: int, dim: int) -> None:
    rng = np.random.default_rng(rows)
    q = rng.standard_normal((4, 16, dim), dtype=np.float32)
    (k, wide_k), (v, wide_v) = (cached(rng, (rows, 2, dim), "q8") for _ in range(2))
    expected = oracle.attention(q.astype(np.float64), wide_k, wide_v, dim**-0.5)
    error = kernels.attention(q, k, v, dim**-0.5) - expected
    assert np.linalg.norm(error) < CODE_ERROR * np.linalg.norm(expected)


# ---- At the edge ------------------------------------------------------------------------------------------------


GROUPED = {"q": (2, 4, 8), "k": (3, 2, 8), "v": (3, 2, 8)}
LATENT = {"q_latent": (2, 4, 8), "q_pe": (2, 4, 6), "latent": (3, 8), "k_pe": (3, 6)}
SOME, GROUPS = r"at least 1 in every dimension", r"heads that divide 4"


@pytest.mark.parametrize(
    ("op", "shapes", "message"),
    [
        ("attention", {"q": (0, 4, 8)}, rf"q: expected {SOME}, found \(0, 4, 8\)"),
        ("attention", {"q": (2, 0, 8)}, rf"q: expected {SOME}, found \(2, 0, 8\)"),
        ("attention", {"q": (2, 4, 0), "k": (3, 2, 0), "v": (3, 2, 0)}, rf"q: expected {SOME}, found \(2, 4, 0\)"),
        ("attention", {"k": (0, 2, 8), "v": (0, 2, 8)}, r"k: expected at least 2 rows, found 0"),
        ("attention", {"k": (1, 2, 8), "v": (1, 2, 8)}, r"k: expected at least 2 rows, found 1"),
        ("attention", {"k": (3, 0, 8), "v": (3, 0, 8)}, rf"k: expected {GROUPS}, found 0"),
        ("attention", {"k": (3, 3, 8), "v": (3, 3, 8)}, rf"k: expected {GROUPS}, found 3"),
        ("attention", {"k": (3, 8, 8), "v": (3, 8, 8)}, rf"k: expected {GROUPS}, found 8"),
        ("attention", {"k": (3, 2, 7)}, r"k: expected .*\(\*, \*, 8\) contiguous, found float32 \(3, 2, 7\)"),
        ("attention", {"v": (3, 1, 8)}, r"v: expected .*\(3, 2, 8\) contiguous, found float32 \(3, 1, 8\)"),
        ("attention", {"v": (4, 2, 8)}, r"v: expected .*\(3, 2, 8\) contiguous, found float32 \(4, 2, 8\)"),
        ("mla_attention", {"q_latent": (0, 4, 8), "q_pe": (0, 4, 6)}, rf"q_latent: expected {SOME}"),
        ("mla_attention", {"q_latent": (2, 0, 8), "q_pe": (2, 0, 6)}, rf"q_latent: expected {SOME}"),
        ("mla_attention", {"q_latent": (2, 4, 0), "latent": (3, 0)}, rf"q_latent: expected {SOME}"),
        ("mla_attention", {"q_pe": (2, 4, 0), "k_pe": (3, 0)}, rf"q_pe: expected {SOME}"),
        ("mla_attention", {"latent": (0, 8), "k_pe": (0, 6)}, r"latent: expected at least 2 rows, found 0"),
        ("mla_attention", {"q_pe": (2, 3, 6)}, r"q_pe: expected float32 \(2, 4, \*\) contiguous"),
        ("mla_attention", {"k_pe": (2, 6)}, r"k_pe: expected .*\(3, 6\) contiguous"),
    ],
)
def test_empty_and_inconsistent_shapes_are_refused(op: str, shapes: dict[str, tuple[int, ...]], message: str) -> None:
    valid = GROUPED if op == "attention" else LATENT
    arrays = [np.ones(shape, np.float32) for shape in (valid | shapes).values()]
    with pytest.raises(ArgumentError, match=rf"^\[{op}\] {message}"):
        getattr(Ops("cpu"), op)(*arrays, 0.5)


def test_sinks_and_windows_are_checked() -> None:
    q, k, v = (np.ones(shape, np.float32) for shape in GROUPED.values())
    with pytest.raises(ArgumentError, match=r"^\[attention\] sinks: expected float32 \(4,\) contiguous, found"):
        Ops("cpu").attention(q, k, v, 0.5, np.ones(3, np.float32))
    with pytest.raises(ArgumentError, match=r"^\[attention\] window: expected 0 or a number of rows, found -1"):
        Ops("cpu").attention(q, k, v, 0.5, None, -1)


# ---- The same bits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "q8"])
@pytest.mark.parametrize(("dim", "rope"), [(40, 8), (64, 32)])
@pytest.mark.parametrize(("n", "first"), [(1, 5000), (17, 700), (64, 0)])
def test_any_number_of_threads_gives_the_same_bits(n: int, first: int, dim: int, rope: int, dtype: str) -> None:
    rng = np.random.default_rng(n)
    q = rng.standard_normal((n, 8, dim), dtype=np.float32)
    k, v = (cached(rng, (first + n, 2, dim), dtype)[0] for _ in range(2))
    k_pe, _ = cached(rng, (first + n, rope), dtype)
    sinks = rng.standard_normal(8, dtype=np.float32)
    q_pe = rng.standard_normal((n, 8, rope), dtype=np.float32)
    for isa in isas():
        results = set()
        for threads in (1, 2, 3, 2):
            kernels = Ops(isa=isa, threads=threads)
            plain = kernels.attention(q, k, v, 0.2)
            latent = kernels.mla_attention(q, q_pe, np.ascontiguousarray(k[:, 0]), k_pe, 0.2)
            windowed = kernels.attention(q, k, v, 0.2, sinks, 1000)
            results.add(plain.tobytes() + latent.tobytes() + windowed.tobytes())
        assert len(results) == 1, isa


PLAIN = [(8, 2, 40, 8), (3, 1, 64, 8), (70, 1, 36, 8)]
OF_WHOLE_STEPS = [(16, 2, 64, 32), (70, 1, 32, 32)]  # which some instruction sets take otherwise, but not those of f32


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rope", "dtype"),
    [(*each, dtype) for each in PLAIN for dtype in CACHES]
    + [(*each, dtype) for each in OF_WHOLE_STEPS for dtype in ("bf16", "q8")],
)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    kernels: Ops, heads: int, kv_heads: int, dim: int, rope: int, dtype: str
) -> None:
    """Contexts cut into calls anywhere: before, at and behind the borders of spans, a few rows or many."""
    rng = np.random.default_rng(heads)
    total = 8192 + 1100
    # Of 70 heads, each row is two blocks of queries. So fewer rows will do: those behind 512 are more blocks than the
    # 64 units take at once, and far out 9 rows are more than 16 blocks, below which spans have units of their own.
    near = (500, 501, 511, 512, 513, 530, 550 if heads == 70 else 640)
    far = (8188, 8190, 8192, 8193, 8197) if heads == 70 else (8180, 8181, 8192, 8193, 8212)
    groups = (near, far, (9214, 9217, 9223))
    most = max(group[-1] - group[0] for group in groups)
    q = rng.standard_normal((most, heads, dim), dtype=np.float32)
    k, _ = cached(rng, (total, kv_heads, dim), dtype)
    v, _ = cached(rng, (total, kv_heads, dim), dtype)
    q_pe = rng.standard_normal((most, heads, rope), dtype=np.float32)
    k_pe, _ = cached(rng, (total, rope), dtype)
    sinks = rng.standard_normal(heads, dtype=np.float32)

    def rows(origin: int, first: int, end: int) -> bytes:
        own = slice(first - origin, end - origin)
        plain = kernels.attention(q[own], k[:end], v[:end], 0.2)
        latent = kernels.mla_attention(q[own], q_pe[own], np.ascontiguousarray(k[:end, 0]), k_pe[:end], 0.2)
        windows = [kernels.attention(q[own], k[:end], v[:end], 0.2, sinks, window) for window in (21, 700)]
        found = (plain, latent, *windows)
        return b"".join(each[i].tobytes() for i in range(end - first) for each in found)

    for group in groups:
        whole = rows(group[0], group[0], group[-1])
        parts = b"".join(rows(group[0], first, end) for first, end in itertools.pairwise(group))
        assert parts == whole, group
