"""The long test of `make soak`, short: sessions in threads, stopped, restored, at the least budget there can be."""

from __future__ import annotations

from support.soak import soak


def test_a_short_soak() -> None:
    """Too short for resident memory to say anything: that is `make soak`'s."""
    report = soak(200)
    assert report.tokens >= 200
    assert report.compared > 5 and report.differing == 0
    assert report.held_before == report.held_after
    assert all(report.done[what] >= 3 for what in ("prefills stopped", "snapshots", "restores", "runs of steps"))
