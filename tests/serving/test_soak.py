"""The long test of a scheduler in `make soak`, short: clients come and go, at the least budget there can be."""

from __future__ import annotations

from support.serving_soak import soak


def test_a_short_soak() -> None:
    """Too short for resident memory to say anything: that is `make soak`'s."""
    report = soak(60, clients=10)
    assert report.stats.ended == 60 and report.stats.failed == 0
    assert report.compared > 30 and report.differing == 0
    assert (report.sessions_left, report.bytes_left) == (0, 0)
    assert report.stats.saved > 0 and report.stats.reused_tokens > 0
