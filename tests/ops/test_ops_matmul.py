"""matmul, embed and expert_ffn against the oracle, in every format and on every instruction set of this machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moeflux import ArgumentError, QuantFormat
from moeflux.ops import Ops
from moeflux.oracle import ops as oracle
from moeflux.oracle.stored import float_numbers, mxfp4_numbers, pack_codes
from support.op_checks import check_experts, rounding_of_int16
from support.ops import (
    AFFINE,
    E4M3_CODES,
    FLOATS,
    MXFP4,
    NVFP4,
    PLAIN,
    QUANTISED,
    WITH_INT16,
    StoredMatrix,
    isa,
    numbers,
    ops_of,
    random_matrix,
    run,
)
from support.tolerances import INT16_ERROR, assert_close

__all__ = ["isa", "run"]

ROWS = (1, 2, 3, 5, 17, 64, 65)


def check_product(run: Ops, rng: np.random.Generator, matrix: StoredMatrix, n: int) -> None:
    check_product_of(run, numbers(rng, n, matrix.exact.shape[1]), matrix)


def check_product_of(run: Ops, x: np.ndarray, matrix: StoredMatrix) -> None:
    expected = oracle.matmul(x.astype(np.float64), matrix.exact)
    sizes = np.abs(x.astype(np.float64))
    rounding = rounding_of_int16(sizes, matrix) if run.isa in WITH_INT16 else 0.0
    assert_close("matmul", run.matmul(x, matrix), expected, sizes @ matrix.size.T, rounding)


def check_transposed(run: Ops, rng: np.random.Generator, matrix: StoredMatrix, n: int) -> None:
    x = numbers(rng, n, matrix.exact.shape[0])
    found = run.matmul(x, matrix, transposed=True)
    assert_close("matmul", found, x.astype(np.float64) @ matrix.exact, np.abs(x) @ matrix.size)


@pytest.mark.parametrize("format", QUANTISED, ids=str)
def test_quantised_products(run: Ops, format: QuantFormat) -> None:
    rng = np.random.default_rng(1)
    for rows, groups, n in [(1, 1, 1), (31, 1, 3), (33, 3, 1), (6, 5, 2), (7, 9, 64), (40, 2, 17)]:
        matrix = random_matrix(rng, format, rows, groups * format.whole_columns)
        check_product(run, rng, matrix, n)
        check_transposed(run, rng, matrix, n)


@pytest.mark.parametrize("format", PLAIN, ids=str)
@pytest.mark.parametrize("columns", [1, 7, 31, 32, 33, 63, 96, 100, 513, 1055])
def test_plain_products(run: Ops, format: QuantFormat, columns: int) -> None:
    rng = np.random.default_rng(2)
    for rows, n in [(1, 1), (4, 2), (5, 1), (33, 5), (6, 65)]:
        matrix = random_matrix(rng, format, rows, columns)
        check_product(run, rng, matrix, n)
        check_transposed(run, rng, matrix, n)


@pytest.mark.parametrize("n", ROWS)
def test_wide_rows(run: Ops, n: int) -> None:
    """More groups than have their scales widened at once, more columns than a panel, more rows than a unit of work."""
    rng = np.random.default_rng(3)
    wide = [(QuantFormat.affine(4, 32), 131, 2240), (QuantFormat.affine(8, 64, "F16"), 65, 4224), (MXFP4, 131, 2880)]
    wide += [(format, 131, 2816) for format in FLOATS if format != MXFP4]
    for format, rows, columns in wide:
        matrix = random_matrix(rng, format, rows, columns)
        check_product(run, rng, matrix, n)
        check_transposed(run, rng, matrix, n)


def test_subnormal_and_infinite_f16_scales(isa: str) -> None:
    format = QuantFormat.affine(4, 32, "F16")
    rng = np.random.default_rng(4)
    matrix = random_matrix(rng, format, 4, 96)
    matrix.scales[:] = np.array([2**-24, -(2**-15), 65504], np.float16)
    matrix.biases[:] = np.array([0, 2**-20, -0.0], np.float16)
    codes = ((matrix.weight[:, :, None] >> np.arange(0, 32, 4)) & 15).reshape(4, 96)
    widened = np.repeat(matrix.scales.astype(np.float64), 32, axis=1) * codes
    exact = widened + np.repeat(matrix.biases.astype(np.float64), 32, axis=1)
    found = ops_of(isa, 1).embed(matrix, np.arange(4, dtype=np.int32))
    assert_close("embed", found, exact, np.abs(widened) + 1e-6)
    matrix.scales[:, 0] = np.inf
    assert not np.isfinite(ops_of(isa, 1).embed(matrix, np.arange(4, dtype=np.int32))[:, :32]).any()


def test_every_number_and_power_of_mxfp4(isa: str) -> None:
    """Exactly, the least powers too, of which float32 has subnormal numbers alone; 255 is none."""
    powers = np.array([0, 1, 2, 127, 200], np.uint8)
    words = np.tile(np.array([0x76543210, 0xFEDCBA98], np.uint32), (len(powers), 2))
    matrix = StoredMatrix(MXFP4, words, powers[:, None], None, mxfp4_numbers(words, powers[:, None]), np.ones(1))
    found = ops_of(isa, 1).embed(matrix, np.arange(len(powers), dtype=np.int32))
    assert np.array_equal(found.astype(np.float64), matrix.exact)
    for n in (1, 20):
        x = np.ones((n, 32), np.float32)
        x[:, 8:] = 0
        product = ops_of(isa, 1).matmul(x, matrix)[:, 3:]
        assert np.allclose(product, matrix.exact[3:, :8].sum(axis=1), rtol=1e-4, atol=0)
    matrix.scales[:] = 255
    assert not np.isfinite(ops_of(isa, 1).matmul(x, matrix)).any()


def every_number(format: QuantFormat) -> StoredMatrix:
    """A row for each scale that stands for a number, or for a part of them, with every code."""
    codes = np.tile(np.arange(1 << format.bits, dtype=np.uint8), 16 if format.bits == 4 else 1)
    if format in NVFP4:
        scales = np.arange(256, dtype=np.uint8)[:, None].repeat(16, axis=1)
        scales[scales & 127 == 127] = 0
        scales[:, 1::2] = scales[::-1, 1::2]  # the two of a stretch differ
    elif format.scale_type == "U8":
        scales = np.arange(255, dtype=np.uint8)[:, None].repeat(8, axis=1)
    else:
        scales = np.geomspace(1e-30, 1e30, 200, dtype=np.float32)[:, None].repeat(2, axis=1)
        if format.scale_type == "BF16":
            scales = (scales.view(np.uint32) >> 16).astype(np.uint16)
    rows = len(scales)
    if str(format) == "NVFP4":
        of_rows = np.geomspace(1e-30, 1e30, rows, dtype=np.float32)[:, None]
        scales = np.ascontiguousarray(np.hstack([of_rows.view(np.uint8), scales]))
    weight = codes[None].repeat(rows, axis=0)
    if not str(format).startswith("FP8"):
        weight = np.ascontiguousarray(pack_codes(weight, format.bits))
    exact = float_numbers(weight, scales, format)
    return StoredMatrix(format, weight, scales, None, exact, np.abs(exact))


@pytest.mark.parametrize("format", FLOATS, ids=str)
def test_every_number_of_codes_that_are_floats(isa: str, format: QuantFormat) -> None:
    """To the last bit, with every scale that stands for a number, or many of them. Zeros may lose their sign."""
    matrix = every_number(format)
    found = ops_of(isa, 1).embed(matrix, np.arange(len(matrix.weight), dtype=np.int32))
    with np.errstate(over="ignore"):
        expected = matrix.exact.astype(np.float32)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("format", NVFP4, ids=str)
def test_products_with_every_scale_of_e4m3(run: Ops, format: QuantFormat) -> None:
    """With a sign, and subnormal ones, each in rows of its own, so that no larger ones hide it."""
    rng = np.random.default_rng(22)
    matrix = random_matrix(rng, format, 254, 288)
    scales = matrix.scales
    assert scales is not None
    scales[:, -18:] = np.delete(np.arange(256), [127, 255]).astype(np.uint8)[:, None]
    exact = float_numbers(matrix.weight, scales, format)
    sixes = np.abs(float_numbers(np.full_like(matrix.weight, 0x77777777), scales, format))
    for n in (1, 3, 20):
        check_product(run, rng, replace(matrix, exact=exact, size=np.abs(exact) + 2 * sixes), n)


@pytest.mark.parametrize("format", E4M3_CODES, ids=str)
def test_codes_of_e4m3_meet_rows_of_f32(run: Ops, format: QuantFormat) -> None:
    """On every instruction set: whole numbers of a byte have too few digits for them."""
    rng = np.random.default_rng(21)
    matrix = random_matrix(rng, format, 40, 256)
    for n in (1, 20):
        x = numbers(rng, n, 256)
        expected = oracle.matmul(x.astype(np.float64), matrix.exact)
        assert_close("matmul", run.matmul(x, matrix), expected, np.abs(x) @ matrix.size.T)


@pytest.mark.parametrize("format", [*QUANTISED, *PLAIN], ids=str)
def test_embed(run: Ops, format: QuantFormat) -> None:
    rng = np.random.default_rng(5)
    for columns in (128, 384) if format.is_quantised else (1, 33, 128):
        table = random_matrix(rng, format, 9, columns)
        ids = np.array([8, 0, 3, 3, 1], np.int32)
        assert_close("embed", run.embed(table, ids), oracle.embed(table.exact, list(ids)), table.size[ids])


# ---- Numbers that are hard to write in few digits -------------------------------------------------------------------


@pytest.mark.parametrize("format", [*(f for f in AFFINE if f.scale_type == "BF16"), *FLOATS], ids=str)
def test_two_digits_are_a_hundred_times_finer_than_bf16(run: Ops, format: QuantFormat) -> None:
    """And products of float32 numbers as fine as those."""
    rng = np.random.default_rng(17)
    matrix = random_matrix(rng, format, 64, 12 * format.whole_columns)
    for n in (1, 24):
        x = numbers(rng, n, 12 * format.whole_columns)
        exact = oracle.matmul(x.astype(np.float64), matrix.exact)
        error = np.sqrt(np.mean((run.matmul(x, matrix) - exact) ** 2) / np.mean(exact**2))
        assert error < (INT16_ERROR if run.isa in WITH_INT16 and format not in E4M3_CODES else 1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_an_outlier_in_a_group(run: Ops, bits: int, group: int) -> None:
    """A number a million times the others of its group leaves them few digits."""
    rng = np.random.default_rng(11)
    matrix = random_matrix(rng, QuantFormat.affine(bits, group), 37, 3 * group)
    for n in (1, 5, 33):
        x = numbers(rng, n, 3 * group)
        x[np.arange(n), rng.integers(0, 3 * group, n)] *= 1e6
        check_product_of(run, x, matrix)


@pytest.mark.parametrize(
    "format", [QuantFormat.affine(4, 64), QuantFormat.affine(3, 32), QuantFormat.affine(2, 128), *FLOATS]
)
@pytest.mark.parametrize("n", [1, 4, 20])
def test_extreme_rows(run: Ops, format: QuantFormat, n: int) -> None:
    rng = np.random.default_rng(12)
    matrix = random_matrix(rng, format, 35, 256)
    normal = numbers(rng, n, 256)
    for scale in (1e25, 1e-20):
        check_product_of(run, normal * np.float32(scale), matrix)
    # Signed zeros, subnormal numbers: nothing but 0, or too small to see.
    x = np.zeros_like(normal)
    x[:, ::2] = -0.0
    assert not run.matmul(x, matrix).any()
    assert np.abs(run.matmul(normal * np.float32(1e-40), matrix)).max() < 1e-30


@pytest.mark.parametrize(
    "format", [QuantFormat.affine(4, 64), QuantFormat.affine(2, 32), *FLOATS, QuantFormat.plain("BF16")]
)
@pytest.mark.parametrize("n", [1, 2, 18, 70])
def test_a_row_that_is_not_finite_spoils_itself_alone(run: Ops, format: QuantFormat, n: int) -> None:
    rng = np.random.default_rng(13)
    matrix = random_matrix(rng, format, 50, 256)
    x = numbers(rng, n, 256)
    before = run.matmul(x, matrix)
    for value in (np.nan, np.inf, -np.inf):
        for row in {0, n // 2, n - 1}:
            spoilt = x.copy()
            spoilt[row, 100] = value
            found = run.matmul(spoilt, matrix)
            assert not np.isfinite(found[row]).any()
            assert np.array_equal(np.delete(found, row, axis=0), np.delete(before, row, axis=0))


# ---- The same thing twice -------------------------------------------------------------------------------------------

MIXED = [*(f for f in AFFINE if f.group_size == 64 and f.scale_type == "BF16"), *FLOATS, *PLAIN]


@pytest.mark.parametrize("format", MIXED, ids=str)
def test_threads_and_neighbours_change_no_bit(isa: str, format: QuantFormat) -> None:
    """However many threads, and whether a row of x comes alone or with others."""
    rng = np.random.default_rng(6)
    matrix = random_matrix(
        rng, format, 203, 1152 if format.group_size == 128 else 1088 if format.is_quantised else 1085
    )
    x = numbers(rng, 67, matrix.exact.shape[1])
    y = numbers(rng, 67, matrix.exact.shape[0])
    whole = ops_of(isa, 1).matmul(x, matrix)
    turned = ops_of(isa, 1).matmul(y, matrix, transposed=True)
    for threads in (1, 2, 3):
        run = ops_of(isa, threads)
        for part in (slice(0, 67), slice(0, 1), slice(66, 67), slice(3, 5), slice(8, 15)):
            assert np.array_equal(run.matmul(x[part], matrix), whole[part])
            assert np.array_equal(run.matmul(y[part], matrix, transposed=True), turned[part])
    for count in range(2, 11):  # each has instructions of its own somewhere
        assert np.array_equal(ops_of(isa, 1).matmul(x[:count], matrix), whole[:count])


def test_products_side_by_side_are_the_products_alone(run: Ops) -> None:
    rng = np.random.default_rng(7)
    products = []
    for format, rows, columns, transposed in [
        (QuantFormat.affine(4, 64), 70, 128, False),
        (QuantFormat.plain("BF16"), 1, 40, False),
        (QuantFormat.affine(3, 32), 35, 64, True),
        (MXFP4, 75, 96, False),
        (MXFP4, 35, 64, True),
        (QuantFormat.affine(8, 128), 260, 256, False),
    ]:
        matrix = random_matrix(rng, format, rows, columns)
        products.append((numbers(rng, 6, rows if transposed else columns), matrix, transposed))
    for found, (x, matrix, transposed) in zip(run.matmuls(products), products, strict=True):
        assert np.array_equal(found, run.matmul(x, matrix, transposed=transposed))


def test_products_of_the_same_rows(run: Ops) -> None:
    """Formats and groups of their own, taking turns over one x and part of it."""
    rng = np.random.default_rng(14)
    x = numbers(rng, 9, 256)
    formats = [QuantFormat.affine(b, g) for b, g in [(4, 64), (4, 32), (8, 64), (3, 64), (4, 128), (2, 32), (4, 64)]]
    matrices = [random_matrix(rng, format, 20 + 7 * i, 256) for i, format in enumerate([*formats, *PLAIN])]
    for found, matrix in zip(run.matmuls([(x, matrix, False) for matrix in matrices]), matrices, strict=True):
        assert np.array_equal(found, run.matmul(x, matrix))


# ---- Experts --------------------------------------------------------------------------------------------------------


def random_experts(rng: np.random.Generator, count: int, hidden: int, intermediate: int) -> list[tuple]:
    """Each with formats of its own."""
    formats = [QuantFormat.affine(b, 32) for b in (4, 2, 8, 3)] + [QuantFormat.plain("BF16")]
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    return [
        tuple(random_matrix(rng, formats[(i + j) % len(formats)], *shape) for j, shape in enumerate(shapes))
        for i in range(count)
    ]


@pytest.mark.parametrize(("n", "k", "count"), [(1, 1, 1), (1, 8, 8), (3, 2, 4), (70, 3, 5), (130, 1, 1)])
def test_expert_ffn(isa: str, n: int, k: int, count: int) -> None:
    rng = np.random.default_rng(8)
    hidden, intermediate = 96, 160
    experts = random_experts(rng, count, hidden, intermediate)
    x = numbers(rng, n, hidden) / 8
    chosen = np.array([rng.permutation(count)[:k] for _ in range(n)])
    jobs = [(e, np.flatnonzero(chosen.reshape(-1) == e).tolist()) for e in rng.permutation(count)]
    found = ops_of(isa, 1).expert_ffn(x, experts, jobs, k)
    check_experts(found, x, experts, chosen, int16=isa in WITH_INT16)
    for threads in (2, 3):
        again = ops_of(isa, threads).expert_ffn(x, experts, jobs[::-1], k)
        assert np.array_equal(again, found)


def test_experts_with_groups_of_their_own(isa: str) -> None:
    rng = np.random.default_rng(15)
    formats = [QuantFormat.affine(b, g) for b, g in [(4, 64), (4, 32), (2, 128), (8, 64), (3, 64)]]
    shapes = ((256, 128), (256, 128), (128, 256))
    experts = [
        tuple(random_matrix(rng, formats[(i + 2 * j) % len(formats)], *shape) for j, shape in enumerate(shapes))
        for i in range(5)
    ]
    x = numbers(rng, 6, 128) / 8
    chosen = np.array([rng.permutation(5)[:3] for _ in range(6)])
    jobs = [(e, np.flatnonzero(chosen.reshape(-1) == e).tolist()) for e in range(5)]
    together = ops_of(isa, 2).expert_ffn(x, experts, jobs, 3)
    for row in range(6):
        jobs_of_row = [(e, [k]) for k, e in enumerate(chosen[row])]
        alone = ops_of(isa, 1).expert_ffn(x[row : row + 1], experts, jobs_of_row, 3)
        assert np.array_equal(alone, together[3 * row : 3 * row + 3])


def random_biases(rng: np.random.Generator, count: int, hidden: int, intermediate: int) -> tuple[np.ndarray, ...]:
    return numbers(rng, count, intermediate), numbers(rng, count, intermediate), numbers(rng, count, hidden)


@pytest.mark.parametrize("with_biases", [False, True])
@pytest.mark.parametrize("clamped", [None, (1.702, 7.0), (1.25, 0.5)])
@pytest.mark.parametrize("format", [MXFP4, QuantFormat.affine(4, 32), QuantFormat.plain("BF16")], ids=str)
def test_biases_and_clamped_swiglu(
    isa: str, format: QuantFormat, clamped: tuple[float, float] | None, with_biases: bool
) -> None:
    """Limits that a few numbers reach, and nearly all; the rows of a prefill, and of a step."""
    rng = np.random.default_rng(17)
    count, hidden, intermediate, k = 5, 96, 160, 2
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    experts = [tuple(random_matrix(rng, format, *shape) for shape in shapes) for _ in range(count)]
    biases = random_biases(rng, count, hidden, intermediate) if with_biases else None
    x = numbers(rng, 70, hidden) / 8
    chosen = np.array([rng.permutation(count)[:k] for _ in range(70)])
    jobs = [(e, np.flatnonzero(chosen.reshape(-1) == e).tolist()) for e in range(count)]
    found = ops_of(isa, 1).expert_ffn(x, experts, jobs, k, biases, clamped)
    check_experts(found, x, experts, chosen, isa in WITH_INT16, biases, clamped)
    assert np.array_equal(ops_of(isa, 3).expert_ffn(x, experts, jobs[::-1], k, biases, clamped), found)
    ids = chosen[:1].astype(np.int32)
    assert np.array_equal(ops_of(isa, 2).chosen_expert_ffn(x[:1], experts, ids, biases, clamped), found[:k])


@pytest.mark.parametrize("format", [MXFP4, QuantFormat.affine(4, 32), QuantFormat.plain("BF16")], ids=str)
def test_geglu(isa: str, format: QuantFormat) -> None:
    rng = np.random.default_rng(19)
    shapes = ((160, 96), (160, 96), (96, 160))
    experts = [tuple(random_matrix(rng, format, *shape) for shape in shapes) for _ in range(3)]
    x = numbers(rng, 20, 96) / 8
    chosen = np.array([rng.permutation(3)[:2] for _ in range(20)])
    jobs = [(e, np.flatnonzero(chosen.reshape(-1) == e).tolist()) for e in range(3)]
    found = ops_of(isa, 1).expert_ffn(x, experts, jobs, 2, geglu=True)
    check_experts(found, x, experts, chosen, isa in WITH_INT16, geglu=True)
    ids = chosen[:1].astype(np.int32)
    assert np.array_equal(ops_of(isa, 2).chosen_expert_ffn(x[:1], experts, ids, geglu=True), found[:2])


def test_clamped_swiglu_at_its_edges(isa: str) -> None:
    """A NaN stays one, and what is far beyond the limit is at the limit."""
    eye = np.eye(32, dtype=np.float32)
    matrix = StoredMatrix(QuantFormat.plain("F32"), eye, None, None, eye.astype(np.float64), eye)
    x = np.full((1, 32), -1e30, np.float32)
    x[0, :4] = [np.nan, 1e30, np.inf, 0]
    [found] = ops_of(isa, 1).expert_ffn(x, [(matrix,) * 3], [(0, [0])], 1, None, (1.702, 7.0))
    assert np.isnan(found).all()  # the identity adds 0 * NaN to all
    x[0, 0], x[0, 2] = 1e4, 1e4
    [found] = ops_of(isa, 1).expert_ffn(x, [(matrix,) * 3], [(0, [0])], 1, None, (1.702, 7.0))
    highest = 7 / (1 + np.exp(-7 * 1.702)) * 8
    assert np.allclose(found, [highest] * 3 + [0] * 29, atol=1e-5)


def test_biases_and_limits_are_checked(run: Ops) -> None:
    rng = np.random.default_rng(18)
    experts = [tuple(random_matrix(rng, MXFP4, 32, 32) for _ in range(3))]
    x, jobs = numbers(rng, 1, 32), [(0, [0])]
    gate, up, down = random_biases(rng, 1, 32, 32)
    with pytest.raises(ArgumentError, match=r"\[expert_ffn\] down bias: expected float32 \(1, 32\)"):
        run.expert_ffn(x, experts, jobs, 1, (gate, up, down[:, :31].copy()))
    with pytest.raises(ArgumentError, match=r"\[expert_ffn\] gate bias: expected float32 \(1, 32\)"):
        run.expert_ffn(x, experts, jobs, 1, (gate.repeat(2, 0), up, down))
    with pytest.raises(ArgumentError, match=r"\[expert_ffn\] clamped: expected a limit above 0, found 0"):
        run.expert_ffn(x, experts, jobs, 1, None, (1.0, 0.0))


@pytest.mark.parametrize(("n", "k"), [(1, 3), (4, 2)])
def test_experts_chosen_by_ids(isa: str, n: int, k: int) -> None:
    """The bits of expert_ffn, which is told of jobs."""
    rng = np.random.default_rng(16)
    formats = (QuantFormat.affine(4, 32), QuantFormat.affine(3, 32), QuantFormat.plain("BF16"))
    shapes = ((64, 96), (64, 96), (96, 64))
    experts = [tuple(random_matrix(rng, f, *s) for f, s in zip(formats, shapes, strict=True)) for _ in range(5)]
    x = numbers(rng, n, 96) / 8
    ids = np.array([rng.permutation(5)[:k] for _ in range(n)], np.int32)
    jobs = [(e, np.flatnonzero(ids.reshape(-1) == e).tolist()) for e in range(5)]
    found = ops_of(isa, 2).chosen_expert_ffn(x, experts, ids)
    assert np.array_equal(found, ops_of(isa, 2).expert_ffn(x, experts, jobs, k))
    with pytest.raises(ArgumentError, match=r"\[chosen_expert_ffn\] ids: expected 0 to 4, found 5"):
        ops_of(isa, 1).chosen_expert_ffn(x, experts, np.full_like(ids, 5))


def test_pairs_of_no_job_are_left_alone(run: Ops) -> None:
    rng = np.random.default_rng(9)
    experts = random_experts(rng, 2, 32, 32)
    found = run.expert_ffn(numbers(rng, 2, 32), experts, [(0, [3]), (1, [])], 2)
    assert found[3].any() and not found[:3].any()


# ---- At the edge ----------------------------------------------------------------------------------------------------


def test_refusals_name_the_argument(run: Ops) -> None:
    rng = np.random.default_rng(10)
    matrix = random_matrix(rng, QuantFormat.affine(4, 64), 3, 128)
    x = numbers(rng, 2, 128)
    with pytest.raises(ArgumentError, match=r"\[matmul\] x: expected float32 \(\*, 128\).*found float32 \(2, 64\)"):
        run.matmul(np.ascontiguousarray(x[:, :64]), matrix)
    with pytest.raises(ArgumentError, match=r"\[matmul\] x: expected float32 .*found float64"):
        run.matmul(x.astype(np.float64), matrix)
    with pytest.raises(ArgumentError, match=r"\[matmul\] x: .*contiguous"):
        run.matmul(numbers(rng, 2, 256)[:, ::2], matrix)
    for part, wrong in [
        ("weight", matrix.weight.astype(np.int64)),
        ("weight", matrix.weight[:, :-1].copy()),
        ("scales", matrix.scales[:, :1].copy()),
        ("biases", matrix.biases.astype(np.float32)),
    ]:
        broken = StoredMatrix(**{**vars(matrix), part: wrong})
        with pytest.raises(ArgumentError, match=r"\[matmul\] matrix"):
            run.matmul(x, broken)
    with pytest.raises(ArgumentError, match=r"\[matmul\] x"):
        run.matmuls([(x, matrix, False), (x[:1], matrix, False)])
    with pytest.raises(ArgumentError, match=r"\[embed\] ids: expected 0 to 2, found 3"):
        run.embed(matrix, np.array([0, 3], np.int32))
    with pytest.raises(ArgumentError, match=r"\[expert_ffn\] jobs: expected pairs 0 to 3, found 4"):
        run.expert_ffn(x[:, :32].copy(), random_experts(rng, 1, 32, 32), [(0, [4])], 2)


@pytest.mark.parametrize("jobs", [[(0, [1, 2]), (1, [2])], [(0, [3, 0, 3])], [(1, [0]), (1, [0])]])
def test_a_pair_is_in_one_job_once(run: Ops, jobs: list[tuple[int, list[int]]]) -> None:
    rng = np.random.default_rng(11)
    twice = max(pair for _, pairs in jobs for pair in pairs if sum(each.count(pair) for _, each in jobs) == 2)
    with pytest.raises(
        ArgumentError, match=rf"\[expert_ffn\] jobs: expected every pair in one job, once, found {twice}$"
    ):
        run.expert_ffn(numbers(rng, 2, 32), random_experts(rng, 2, 32, 32), jobs, 2)
