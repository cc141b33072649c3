"""The sums against damage that files have, beside those of others."""

from __future__ import annotations

import hashlib
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux import _core
from moeflux._core import Xxh64

DATA = bytes(number * number % 251 for number in range(5000))
PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
WORD = (1 << 64) - 1

pieces = st.tuples(st.integers(0, 300), st.one_of(st.integers(0, 70), st.integers(0, 4000))).map(
    lambda piece: DATA[piece[0] : piece[0] + piece[1]]
)


def rotated(word: int, by: int) -> int:
    word &= WORD
    return (word << by | word >> (64 - by)) & WORD


def xxh64(data: bytes) -> str:
    """With whole numbers, after the description of the algorithm."""
    one, two, three, four, five = PRIMES
    blocks, rest = data[: len(data) // 32 * 32], data[len(data) // 32 * 32 :]

    def words(of: bytes, size: int) -> list[int]:
        """As many as there are whole."""
        return [int.from_bytes(of[i : i + size], "little") for i in range(0, len(of) - size + 1, size)]

    def step(total: int, word: int) -> int:
        return rotated(total + word * two, 31) * one & WORD

    total = five
    if blocks:
        lanes = [one + two, two, 0, -one]
        for i, word in enumerate(words(blocks, 8)):
            lanes[i % 4] = step(lanes[i % 4], word)
        total = sum(rotated(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            total = (total ^ step(0, lane)) * one + four
    total += len(data)
    for word in words(rest, 8):
        total = rotated(total ^ step(0, word), 27) * one + four
    rest = rest[len(rest) // 8 * 8 :]
    for word in words(rest, 4):
        total = rotated(total ^ word * one, 23) * two + three
    for byte in rest[len(rest) // 4 * 4 :]:
        total = rotated(total ^ byte * five, 11) * one
    for shift, prime in ((33, two), (29, three), (32, 1)):
        total &= WORD
        total = (total ^ total >> shift) * prime
    return f"{total & WORD:016x}"


@pytest.mark.parametrize(
    ("data", "expected"), [(b"", "ef46db3751d8e999"), (b"a", "d24ec4f1a98c6e5b"), (b"abc", "44bc2cf5ad770999")]
)
def test_xxh64_is_the_published_one(data: bytes, expected: str) -> None:
    made = Xxh64()
    made.update(data)
    assert made.hexdigest() == xxh64(data) == expected


@given(st.lists(pieces, max_size=5))
def test_xxh64_of_parts(parts: list[bytes]) -> None:
    """Of any lengths; also between two parts."""
    made = Xxh64()
    for end, part in enumerate(parts, 1):
        made.update(part)
        assert made.hexdigest() == xxh64(b"".join(parts[:end]))


@given(st.lists(pieces, max_size=5))
def test_sha256_is_that_of_hashlib(parts: list[bytes]) -> None:
    assert _core.testing.sha256(parts) == hashlib.sha256(b"".join(parts)).hexdigest()


def test_threads_may_share_one() -> None:
    """Whoever comes first: all add the same."""
    made = Xxh64()

    def add() -> None:
        for _ in range(200):
            made.update(DATA)

    threads = [threading.Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.hexdigest() == xxh64(DATA * 400)
