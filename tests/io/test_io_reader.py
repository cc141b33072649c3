"""Reading a file: the right bytes wherever they lie and land, and a clear error when they cannot be had."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from moeflux import IoError, StateError
from moeflux._core import FaultPlan, FileReader, supports_direct

BLOCK = 4096
BYTES = 5 * BLOCK + 1234
CONTENT = np.random.default_rng(5).bytes(BYTES)
RANGES = [
    (0, 0),
    (0, 1),
    (0, BLOCK),
    (BLOCK, 2 * BLOCK),
    (1, BLOCK),
    (BLOCK - 1, 2),
    (BLOCK - 1, BLOCK + 2),
    (123, 3 * BLOCK + 45),
    (0, BYTES),
    (BYTES - 1, 1),
    (5 * BLOCK, 1234),
    (4 * BLOCK + 4000, 1330),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "layer_07.bin"
    file.write_bytes(CONTENT)
    return file


@pytest.fixture(params=["buffered", "direct"])
def mode(request: pytest.FixtureRequest, path: Path) -> str:
    if request.param == "direct" and not supports_direct(path):
        pytest.skip("this file system has no direct reads")
    return request.param


@pytest.mark.parametrize("misalign", [0, 1, 64, BLOCK - 1])
def test_any_range_to_any_place(path: Path, mode: str, misalign: int) -> None:
    reader = FileReader(path, mode)
    assert reader.bytes == BYTES
    for offset, size in RANGES:
        for bounce in (BLOCK, 3 * BLOCK, 1 << 20):
            assert reader.read(offset, size, misalign, bounce) == CONTENT[offset : offset + size], (
                offset,
                size,
                bounce,
            )


def test_whole_blocks_need_no_bounce(path: Path) -> None:
    if not supports_direct(path):
        pytest.skip("this file system has no direct reads")
    reader = FileReader(path, "direct")
    assert reader.read(BLOCK, 2 * BLOCK, bounce=0) == CONTENT[BLOCK : 3 * BLOCK]
    assert reader.counts == (1, 2 * BLOCK)
    with pytest.raises(StateError, match=r"layer_07\.bin.*bounce"):
        reader.read(BLOCK + 1, BLOCK, bounce=0)


@pytest.mark.parametrize(
    ("offset", "size", "found"), [(0, BYTES + 1, BYTES), (5 * BLOCK, BLOCK, 1234), (BYTES, 1, 0), (BYTES + BLOCK, 5, 0)]
)
def test_the_end_of_the_file(path: Path, mode: str, offset: int, size: int, found: int) -> None:
    with pytest.raises(IoError, match=rf"layer_07\.bin: expected {size} bytes at byte {offset}, found {found} before"):
        FileReader(path, mode).read(offset, size)


@pytest.mark.parametrize("kind", ["interrupt", "short_read", "delay"])
@pytest.mark.parametrize("misalign", [0, 3])
def test_what_the_reader_must_bear(path: Path, mode: str, kind: str, misalign: int) -> None:
    """A signal, a short read or a slow disk at any call changes nothing."""
    for at in range(1, 8):
        plan = FaultPlan(kind, at)
        reader = FileReader(path, mode, plan)
        assert reader.read(0, 4 * BLOCK, misalign, BLOCK) == CONTENT[: 4 * BLOCK]
        assert reader.read(77, BLOCK, misalign) == CONTENT[77 : 77 + BLOCK]
        if plan.calls < at:
            break
    else:
        pytest.fail("expected to run out of calls")


def test_every_read_short(path: Path, mode: str) -> None:
    """Half of what was asked for, always: it still ends, right or with a word about it."""
    reader = FileReader(path, mode, FaultPlan("short_read", 1, lasting=True))
    if mode == "buffered":
        assert reader.read(0, BYTES) == CONTENT
    else:
        with pytest.raises(IoError, match=r"layer_07\.bin: expected"):
            reader.read(0, BYTES)


def test_what_it_must_report(path: Path, mode: str) -> None:
    with pytest.raises(IoError, match=r"layer_07\.bin: reading 4096 bytes at byte 4096 failed: Input/output error"):
        FileReader(path, mode, FaultPlan("error", 1)).read(BLOCK, BLOCK)
    with pytest.raises(IoError, match=r"layer_07\.bin: expected 4096 bytes at byte 4096, found 0 before the end"):
        FileReader(path, mode, FaultPlan("end_of_file", 1)).read(BLOCK, BLOCK)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(IoError, match="none: cannot be opened"):
        FileReader(tmp_path / "none")


def truncate(path: Path) -> None:
    os.truncate(path, 100)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, (1, 1))  # whatever the clock's grain


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(CONTENT)
    os.replace(other, path)


def delete(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (truncate, f"expected {BYTES} bytes, found 100"),
        (grow, f"expected {BYTES} bytes, found {BYTES + 1}"),
        (rewrite, "expected no write"),
        (replace, "found another"),
        (delete, "found none"),
    ],
)
def test_a_file_that_changes_under_us(path: Path, change, words: str) -> None:
    reader = FileReader(path)
    reader.check_unchanged()
    change(path)
    with pytest.raises(IoError, match=rf"layer_07\.bin: .*{words}"):
        reader.check_unchanged()


def test_a_truncated_file_is_told_from_a_short_one(path: Path, mode: str) -> None:
    reader = FileReader(path, mode)
    os.truncate(path, BLOCK + 1)
    with pytest.raises(
        IoError, match=rf"found 1 before .*it had {BYTES} bytes when it was opened and has {BLOCK + 1} now"
    ):
        reader.read(BLOCK, 100)
