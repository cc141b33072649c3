"""The long test of a scheduler in `make soak`, short: clients come and go, at the least budget there can be."""

from __future__ import annotations

import pytest

from support.at_rest import Rest, bytes_in_use, growth, is_flat
from support.serving_soak import soak


def test_a_short_soak() -> None:
    """Too short for memory at rest to say anything: that is `make soak`'s."""
    report = soak(60, clients=10, rests=2, compared=20)
    assert report.stats.ended == 60 and report.stats.failed == 0
    assert report.compared > 15 and report.differing == 0
    assert (report.sessions_left, report.bytes_left) == (0, 0)
    assert report.rests[0].held == report.rests[1].held
    assert report.stats.saved > 0 and report.stats.reused_tokens > 0


def test_a_kilobyte_lost_with_each_request_is_seen() -> None:
    if bytes_in_use() is None:
        pytest.skip("this C library does not say what malloc has given out")
    rests, lost = [], []
    for rest in range(1, 5):
        lost += [bytes(1024) for _ in range(500)]
        rests.append(Rest.now(500 * rest, held=0))
    grown = growth(rests)
    assert grown is not None and 1500 * 1024 <= grown < 1500 * 1200
    assert not is_flat(rests)
    lost.clear()
    assert is_flat([rests[0], Rest.now(2000, held=0)])
