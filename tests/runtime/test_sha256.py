"""The sums that states have in files, beside those of hashlib."""

from __future__ import annotations

import hashlib
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux import ArgumentError
from moeflux._core import Sha256

DATA = bytes(number * number % 251 for number in range(5000))

pieces = st.tuples(st.integers(0, 300), st.one_of(st.integers(0, 70), st.integers(0, 4000))).map(
    lambda piece: DATA[piece[0] : piece[0] + piece[1]]
)


@given(st.lists(pieces, max_size=5))
def test_it_is_that_of_hashlib(parts: list[bytes]) -> None:
    """Also between two parts."""
    ours, theirs = Sha256(), hashlib.sha256()
    assert ours.hexdigest() == theirs.hexdigest()
    for part in parts:
        ours.update(part)
        theirs.update(part)
        assert ours.hexdigest() == theirs.hexdigest()


@given(st.lists(st.tuples(pieces, pieces), max_size=5))
def test_two_side_by_side_are_what_each_is_alone(parts: list[tuple[bytes, bytes]]) -> None:
    """Of any lengths, from any place of a block on."""
    ours, theirs = (Sha256(), Sha256()), (hashlib.sha256(), hashlib.sha256())
    for one, other in parts:
        Sha256.update_both(ours[0], one, ours[1], other)
        theirs[0].update(one)
        theirs[1].update(other)
    assert [each.hexdigest() for each in ours] == [each.hexdigest() for each in theirs]


def test_one_is_not_two() -> None:
    one = Sha256()
    with pytest.raises(ArgumentError, match="update_both: expected two sums, found one twice"):
        Sha256.update_both(one, b"1", one, b"2")
    assert one.hexdigest() == hashlib.sha256().hexdigest()


def test_threads_may_share_them() -> None:
    """Whoever comes first: all add the same. Two that take them in either order do not wait for each other."""
    one, other = Sha256(), Sha256()

    def add(first: Sha256, second: Sha256) -> None:
        for _ in range(200):
            Sha256.update_both(first, DATA, second, DATA)

    threads = [threading.Thread(target=add, args=pair) for pair in ((one, other), (other, one))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert one.hexdigest() == other.hexdigest() == hashlib.sha256(DATA * 400).hexdigest()
