"""The long test of `make soak`, short: sessions in threads, stopped, restored, at the least budget there can be."""

from __future__ import annotations

from support.soak import soak


def test_a_short_soak() -> None:
    """Too short for memory at rest to say anything: that is `make soak`'s."""
    report = soak(200, rests=2)
    assert report.tokens >= 200
    assert report.compared > 5 and report.differing == 0
    assert [rest.held for rest in report.rests] == [report.held_before] * 2
    assert report.max_resident > 0
    assert all(report.done[what] >= 3 for what in ("prefills stopped", "snapshots", "restores", "runs of steps"))
