"""The model in the package is there, whole, and small enough to travel with it."""

from __future__ import annotations

from moeflux import builtin, open_store
from moeflux.verify import verify

MOST_BYTES = 32_000_000


def test_it_is_whole() -> None:
    report = verify(builtin.path())
    assert report.ok and report.has_checksums, str(report)
    assert (report.tensors, report.experts) == (282, 8 * 32)


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in builtin.path().rglob("*") if file.is_file()) <= MOST_BYTES


def test_it_has_all_that_text_needs() -> None:
    with open_store(builtin.path()) as store:
        assert store.kind == "packed" and store.missing_extras() == []
