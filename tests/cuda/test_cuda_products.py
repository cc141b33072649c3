"""Products of the CUDA kernels, held bit by bit to what cuda/products.h says they are, on purpose-made numbers too."""

from __future__ import annotations

import numpy as np
import pytest

from moeflux import QuantFormat
from moeflux.oracle.stored import pack_codes
from support.digit_products import PART, product, same_bits
from support.gpu_ops import GpuOps
from support.metal import needs_device
from support.ops import AFFINE, PLAIN, StoredMatrix, narrowed, numbers, random_matrix

pytestmark = needs_device

Array = np.ndarray
cuda = GpuOps("cuda")


def matrix_of(bits: int, group: int, codes: Array, scales: Array, biases: Array) -> StoredMatrix:
    """Its scales are float32, so that any number can be one."""
    format = QuantFormat.affine(bits, group, "F32")
    return StoredMatrix(format, np.ascontiguousarray(pack_codes(codes, bits)), scales, biases, codes, codes)


# Those with kernels of their own, unless scales are float32; others have the same kernels whatever these are.
KNOWN = ((4, 32), (4, 64), (8, 64))
DEFINED = [f for f in AFFINE if f.scale_type == "F32" or (f.bits, f.group_size) in KNOWN]


@pytest.mark.parametrize("columns", [3 * PART, 3 * PART - 64], ids=["whole parts", "half a part"])
@pytest.mark.parametrize("format", [f for f in DEFINED if f.group_size < PART], ids=str)
def test_products_are_what_their_definition_says(format: QuantFormat, columns: int) -> None:
    """By the kernel for one row, by the one for a few rows, and by that for many where there is one."""
    check_products(format, columns)


@pytest.mark.parametrize("format", [f for f in DEFINED if f.group_size == PART], ids=str)
def test_products_of_groups_that_are_parts(format: QuantFormat) -> None:
    check_products(format, 3 * PART)


def check_products(format: QuantFormat, columns: int) -> None:
    rng = np.random.default_rng([format.bits, format.group_size, columns])
    codes = rng.integers(0, 1 << format.bits, (19, columns))
    of_groups = [narrowed(numbers(rng, 19, columns // format.group_size), format.scale_type) for _ in range(2)]
    (scales, exact_scales), (biases, exact_biases) = of_groups
    x = numbers(rng, 35, columns)
    wide = (exact_scales.astype(np.float32), exact_biases.astype(np.float32))
    expected = product(x, codes, *wide, format.group_size)
    packed = np.ascontiguousarray(pack_codes(codes, format.bits))
    matrix = StoredMatrix(format, packed, scales, biases, codes, codes)
    for n in (1, 5, 35):
        assert same_bits(cuda.matmul(x[:n], matrix), expected[:n])


def test_mxfp4_is_affine() -> None:
    """A code is a byte, 12 more than twice its number. Every code, every kind of scale, and half a part at the end."""
    rng = np.random.default_rng(4)
    columns = 3 * PART - 64
    sizes = np.array([0, 1, 2, 3, 4, 6, 8, 12])
    codes = rng.integers(0, 16, (19, columns))
    scales = rng.integers(100, 140, (19, columns // 32)).astype(np.uint8)
    scales[0] = 0
    half = np.maximum(scales.astype(np.uint32) << 23, 0x00400000).view(np.float32) * np.float32(0.5)
    x = numbers(rng, 35, columns)
    expected = product(x, np.concatenate([12 + sizes, 12 - sizes])[codes], half, half * np.float32(-12), 32)
    packed = np.ascontiguousarray(pack_codes(codes, 4))
    matrix = StoredMatrix(QuantFormat.mxfp4(), packed, scales, None, codes, codes)
    for n in (1, 5, 35):
        assert same_bits(cuda.matmul(x[:n], matrix), expected[:n])


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 128), (8, 64), (6, 32)])
def test_sums_at_the_edge_of_the_integers(bits: int, group: int) -> None:
    """All codes are the largest, and every digit of x is as large as it can be, of one sign or the other."""
    columns = 256
    codes = np.full((3, columns), (1 << bits) - 1)
    scales = np.full((3, columns // group), np.float32(0.5))
    biases = np.float32([[0.0], [-1e30], [3.0]]) * np.ones((3, columns // group), np.float32)
    extremes = [0x3F7F7F, 0x3F7F80, 0x3F8080, -0x3F7F80, -0x400000, 0x3FFFFF, 128, -128]
    x = np.array([np.full(columns, whole) for whole in extremes], np.float32)
    x[:, ::group] = 0x3FFFFF  # so that the unit is 1
    matrix = matrix_of(bits, group, codes, scales, biases)
    for n in (1, len(x)):
        assert same_bits(cuda.matmul(x[:n], matrix), product(x, codes, scales, biases, group)[:n])


@pytest.mark.parametrize("n", [1, 4])
def test_scales_and_rows_of_any_size(n: int) -> None:
    """Groups of zeros, subnormal and infinite scales; rows of the smallest and of the largest numbers; NaN."""
    rng = np.random.default_rng(7)
    group, columns = 64, 512
    codes = rng.integers(0, 16, (9, columns))
    codes[8] = 0
    scales, biases = numbers(rng, 9, columns // group), numbers(rng, 9, columns // group)
    scales[1], scales[2, 3], scales[3, 5], scales[4] = 1e-40, np.inf, np.nan, 1e38
    biases[5], biases[6, 0] = -1e-45, np.inf
    x = numbers(rng, n, columns)
    rows = [x, x * np.float32(1e-38), x * np.float32(1e-44), x * np.float32(3e37), np.zeros_like(x)]
    for place, value in ((70, np.inf), (0, -np.inf), (511, np.nan)):
        rows.append(x.copy())
        rows[-1][0, place] = value
    rows.append(x.copy())
    rows[-1][:, 64:192] = 0
    matrix = matrix_of(4, group, codes, scales, biases)
    for row in rows:
        assert same_bits(cuda.matmul(row, matrix), product(row, codes, scales, biases, group))


@pytest.mark.parametrize("columns", [8192, 8320])
def test_rows_that_do_not_fit_in_shared_memory(columns: int) -> None:
    rng = np.random.default_rng(columns)
    matrix = random_matrix(rng, QuantFormat.affine(4, 64), 3, columns)
    x = numbers(rng, 3, columns)
    assert same_bits(cuda.matmul(x[:1], matrix), cuda.once.matmul(x, matrix)[:1])


# More than a block's warps have together; the last slab is as long as the others, or shorter.
WIDE = [(4, 7168), (4, 5632), (8, 4608)]


@pytest.mark.parametrize(("bits", "columns"), WIDE)
def test_rows_in_slabs(bits: int, columns: int) -> None:
    """Blocks go through several tiles, of which the last has a few rows; and through one."""
    rng = np.random.default_rng(columns)
    for rows in (150, 9):
        matrix = random_matrix(rng, QuantFormat.affine(bits, 64), rows, columns)
        x = numbers(rng, 2, columns)
        assert same_bits(cuda.matmul(x[:1], matrix), cuda.once.matmul(x, matrix)[:1])


@pytest.mark.parametrize(("bits", "columns"), WIDE)
def test_experts_of_a_row_in_slabs(bits: int, columns: int) -> None:
    rng = np.random.default_rng(columns)
    experts = experts_of(rng, QuantFormat.affine(bits, 64), 3, columns, 128)
    ids = np.array([[2, 0], [1, 2]], np.int32)
    x = numbers(rng, 2, columns) / 8
    found = cuda.chosen_expert_ffn(x, experts, ids)
    assert found.any(axis=1).all()
    assert np.array_equal(cuda.chosen_expert_ffn(x[:1], experts, ids[:1]), found[:2])
    one_by_one = [(int(expert), [pair]) for pair, expert in enumerate(ids.reshape(-1))]
    assert np.array_equal(cuda.once.expert_ffn(x, experts, one_by_one, 2), found)


@pytest.mark.parametrize(
    "format",
    [QuantFormat.affine(4, 32), QuantFormat.affine(4, 64), QuantFormat.affine(8, 64), QuantFormat.mxfp4()],
    ids=str,
)
def test_rows_of_blocks_of_any_size(format: QuantFormat) -> None:
    """Blocks of 8, 32 and 64 rows, the last of which may have a few, give a row the bits that it has by itself."""
    rng = np.random.default_rng(3)
    columns = 384 + (0 if format.is_affine else 64)
    matrix = random_matrix(rng, format, 403, columns)
    x = numbers(rng, 87, columns)
    whole = cuda.matmul(x, matrix)
    for rows in (slice(0, 1), slice(86, 87), slice(60, 68), slice(50, 71), slice(20, 87), slice(0, 64)):
        assert same_bits(cuda.matmul(x[rows], matrix), whole[rows])


def experts_of(
    rng: np.random.Generator, format: QuantFormat, count: int, hidden: int, intermediate: int
) -> list[tuple[StoredMatrix, ...]]:
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    return [tuple(random_matrix(rng, format, *shape) for shape in shapes) for _ in range(count)]


@pytest.mark.parametrize("rows", [41, 79])
@pytest.mark.parametrize("format", [QuantFormat.affine(4, 64), QuantFormat.affine(5, 32), *PLAIN[:1]], ids=str)
def test_experts_of_many_rows(format: QuantFormat, rows: int) -> None:
    """More pairs of an expert than a block takes, and the same bits as one by one."""
    rng = np.random.default_rng(8)
    experts = experts_of(rng, format, 2, 256, 128)
    x = numbers(rng, rows, 256) / 8
    jobs = [(1, list(range(1, rows - 5))), (0, [0, *range(rows - 5, rows)])]
    found = cuda.expert_ffn(x, experts, jobs, 1)
    one_by_one = [(e, [pair]) for e, pairs in jobs for pair in pairs]
    assert np.array_equal(cuda.once.expert_ffn(x, experts, one_by_one, 1), found)
    assert found.any(axis=1).all()


@pytest.mark.parametrize(
    ("format", "hidden"),
    [
        (QuantFormat.affine(4, 32), 256),
        (QuantFormat.affine(4, 64), 2048 + 128),
        (QuantFormat.affine(8, 64), 256),
        (QuantFormat.mxfp4(), 256 + 64),
    ],
    ids=str,
)
def test_experts_of_a_few_rows(format: QuantFormat, hidden: int) -> None:
    """By pairs of rows, the last of which may have one, and over more columns than are in shared memory together."""
    rng = np.random.default_rng(hidden)
    experts = experts_of(rng, format, 3, hidden, 128)
    x = numbers(rng, 13, hidden) / 8
    jobs = [(1, [3, 0, 9, 12, 7]), (0, [1, 2, 4, 5, 6, 8, 10]), (2, [11])]
    found = cuda.expert_ffn(x, experts, jobs, 1)
    one_by_one = [(e, [pair]) for e, pairs in jobs for pair in pairs]
    assert np.array_equal(cuda.once.expert_ffn(x, experts, one_by_one, 1), found)
    assert found.any(axis=1).all()


@pytest.mark.parametrize("hidden", [640, 1152, 2048])
@pytest.mark.parametrize("bits", [4, 8])
def test_experts_of_a_pair_or_two(bits: int, hidden: int) -> None:
    """By warps that go through tiles of one expert and of the next: whose rows are whole stages or not, with scales
    that come by sixteen bytes or by four. The same bits as by codes in registers."""
    rng = np.random.default_rng(hidden + bits)
    experts = experts_of(rng, QuantFormat.affine(bits, 64), 14, hidden, 128)
    x = numbers(rng, 2, hidden) / 8
    ids = np.array([[9, 3, 0], [13, 9, 4]], np.int32)
    found = cuda.chosen_expert_ffn(x, experts, ids)
    one_by_one = [(int(expert), [pair]) for pair, expert in enumerate(ids.reshape(-1))]
    assert np.array_equal(cuda.once.expert_ffn(x, experts, one_by_one, 3), found)
    assert found.any(axis=1).all()


def test_experts_of_more_rows_than_a_block_has_room_for() -> None:
    """A block's share has tiles of so many experts that it makes digits again."""
    rng = np.random.default_rng(6)
    experts = experts_of(rng, QuantFormat.affine(4, 64), 3, 128, 128)
    many = [experts[expert % 3] for expert in range(64)]
    ids = rng.permutation(64)[:40].reshape(-1, 2).astype(np.int32)
    x = numbers(rng, len(ids), 128) / 8
    found = cuda.chosen_expert_ffn(x, many, ids)
    one_by_one = [(int(expert), [pair]) for pair, expert in enumerate(ids.reshape(-1))]
    assert np.array_equal(cuda.once.expert_ffn(x, many, one_by_one, 2), found)
    assert found.any(axis=1).all()


def test_experts_that_up_to_five_rows_chose() -> None:
    """By tiles that take two rows at a time, of more experts than a block has threads."""
    rng = np.random.default_rng(5)
    experts = experts_of(rng, QuantFormat.affine(4, 64), 3, 128, 128)
    many = [experts[expert % 3] for expert in range(300)]
    ids = np.array([[299, 7], [7, 256], [3, 299], [299, 0], [0, 255], [255, 299], [298, 255], [299, 1]], np.int32)
    x = numbers(rng, len(ids), 128) / 8
    found = cuda.chosen_expert_ffn(x, many, ids)
    one_by_one = [(int(expert), [pair]) for pair, expert in enumerate(ids.reshape(-1))]
    assert np.array_equal(cuda.once.expert_ffn(x, many, one_by_one, 2), found)
    assert found.any(axis=1).all()


@pytest.mark.parametrize("rows", [2, 9, 70, 90])
@pytest.mark.parametrize("format", [QuantFormat.affine(4, 64), QuantFormat.affine(5, 32), *PLAIN[:1]], ids=str)
def test_experts_that_routers_of_several_rows_chose(format: QuantFormat, rows: int) -> None:
    """Few or many pairs of each expert, one that everybody chose, and some that nobody did."""
    rng = np.random.default_rng(rows)
    experts = experts_of(rng, format, 7, 256, 128)
    ids = np.array([[3, *rng.choice([0, 1, 4, 6], 2, replace=False)] for _ in range(rows)], np.int32)
    x = numbers(rng, rows, 256) / 8
    found = cuda.chosen_expert_ffn(x, experts, ids)
    one_by_one = [(int(expert), [pair]) for pair, expert in enumerate(ids.reshape(-1))]
    assert np.array_equal(cuda.once.expert_ffn(x, experts, one_by_one, 3), found)
    assert found.any(axis=1).all()
