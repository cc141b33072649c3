"""The directory of a safetensors file: every rule of the format, broken once."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from moeflux import FormatError
from moeflux._core import SafetensorsFile

MAX_HEADER = 100_000_000


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def good() -> dict[str, Any]:
    """24 bytes of data: a [2, 3] BF16 at 0, an empty F32, an I64 scalar at 12, U8 [4] at 20; not in this order."""
    return {
        "c": entry("U8", [4], 20, 24),
        "__metadata__": {"format": "pt", "note": ""},
        "a": entry("BF16", [2, 3], 0, 12),
        "empty": entry("F32", [0, 5], 12, 12),
        "b": entry("I64", [], 12, 20),
    }


def write(path: Path, header: Any, data_bytes: int = 24, pad: bytes = b"") -> Path:
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + pad
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data_bytes))
    return path


def test_reads_a_good_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", good(), pad=b" " * 5)
    file = SafetensorsFile(path)
    assert file.path == str(path)
    assert file.metadata == {"format": "pt", "note": ""}
    assert file.header_bytes == path.stat().st_size - 24
    assert list(file.tensors) == ["c", "a", "empty", "b"]
    a, b = file.tensors["a"], file.tensors["b"]
    assert (a.dtype, a.shape, a.offset, a.bytes) == ("BF16", (2, 3), file.header_bytes, 12)
    assert (b.dtype, b.shape, b.offset, b.bytes) == ("I64", (), file.header_bytes + 12, 8)
    assert file.tensors["empty"].bytes == 0


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("U8", 1), ("U32", 4), ("BF16", 2), ("F16", 2), ("F32", 4), ("F8_E4M3", 1), ("I32", 4), ("I64", 8), ("I8", 1)],
)
def test_dtypes(tmp_path: Path, dtype: str, size: int) -> None:
    path = write(tmp_path / "a.safetensors", {"x": entry(dtype, [3], 0, 3 * size)}, 3 * size)
    assert SafetensorsFile(path).tensors["x"].dtype == dtype


def test_no_tensors_at_all(tmp_path: Path) -> None:
    assert SafetensorsFile(write(tmp_path / "a.safetensors", {}, 0)).tensors == {}


def changed(**changes: Any) -> dict[str, Any]:
    return good() | changes


def without(name: str) -> dict[str, Any]:
    header = good()
    del header[name]
    return header


HUGE = 2**62
BAD_HEADERS: list[tuple[str, Any, str]] = [
    ("an array", b"[]", r"header: expected '\{' first, found \"\[\""),
    ("a space first", b" {}", r"expected '\{' first, found \" \""),
    ("no JSON", b"{,}", r"header: line 1, column 2 \(byte 1\): expected a key"),
    ("more JSON", b"{} {}", "header: line 1, column 4 .*expected the end of the text"),
    ("a key twice", b'{"a":{},"a":{}}', 'each key once, found "a" again'),
    ("a NUL pad", b"{}\0", "expected the end of the text"),
    ("metadata no object", changed(__metadata__=[]), "__metadata__: expected an object, found an array"),
    ("metadata no string", changed(__metadata__={"n": 1}), '__metadata__: "n": expected a string, found the number 1'),
    ("entry no object", changed(a=1), 'tensor "a": expected an object, found the number 1'),
    ("entry empty", changed(a={}), 'tensor "a": dtype: expected one of U8, .*found nothing'),
    ("entry with more", changed(a=good()["a"] | {"x": 1}), 'expected only dtype, shape and data_offsets, found "x"'),
    ("unknown dtype", changed(a=entry("F64", [2, 3], 0, 48)), 'dtype: expected one of U8, U32, BF16.*string "F64"'),
    ("dtype a number", changed(a=entry(1, [2, 3], 0, 12)), "dtype: expected one of .*found the number 1"),
    ("lower case dtype", changed(a=entry("bf16", [2, 3], 0, 12)), "dtype: expected one of"),
    ("no shape", changed(a={"dtype": "BF16", "data_offsets": [0, 12]}), "shape: expected an array, found nothing"),
    ("shape no array", changed(a=entry("BF16", 6, 0, 12)), "shape: expected an array, found the number 6"),
    ("negative size", changed(a=entry("BF16", [-2, -3], 0, 12)), "shape: expected whole numbers .*found the number -2"),
    ("size 2.0", changed(a=entry("BF16", [2.0, 3], 0, 12)), "shape: expected whole numbers"),
    ("size true", changed(a=entry("BF16", [True, 6], 0, 12)), "shape: expected whole numbers .*found true"),
    ("size beyond int64", changed(a=entry("BF16", [2**64], 0, 12)), "shape: expected whole numbers"),
    ("rank 9", changed(a=entry("U8", [1] * 9, 0, 1)), "shape: expected at most 8 dimensions, found 9"),
    ("overflow", changed(a=entry("BF16", [HUGE, 4], 0, 12)), "shape: expected a size within 63 bits, found BF16"),
    ("overflow by dtype", changed(a=entry("BF16", [HUGE], 0, 12)), "expected a size within 63 bits"),
    ("overflow to 0", changed(a=entry("U8", [2**32, 2**32], 0, 0)), "expected a size within 63 bits"),
    (
        "no offsets",
        changed(a={"dtype": "BF16", "shape": [2, 3]}),
        "data_offsets: expected two whole numbers, found noth",
    ),
    ("one offset", changed(a={"dtype": "U8", "shape": [], "data_offsets": [0]}), "data_offsets: expected two whole"),
    ("offset a string", changed(a=entry("BF16", [2, 3], "0", 12)), "data_offsets: expected two whole numbers"),
    ("offset 0.0", changed(a=entry("BF16", [2, 3], 0.0, 12)), "data_offsets: expected two whole numbers"),
    ("negative begin", changed(a=entry("BF16", [2, 3], -12, 0)), r"expected 0 <= begin <= end, found \[-12, 0\]"),
    ("begin after end", changed(a=entry("BF16", [2, 3], 12, 0)), r"expected 0 <= begin <= end, found \[12, 0\]"),
    ("past the end", changed(c=entry("U8", [5], 20, 25)), "ends at byte 25 of the data, but the file has 24 bytes"),
    ("far past the end", changed(c=entry("U8", [1], 2**63 - 2, 2**63 - 1)), "ends at byte 9223372036854775807"),
    ("too long for shape", changed(a=entry("BF16", [2, 2], 0, 12)), r"expected 8 bytes for BF16 \[2, 2\], found 12"),
    ("too short for shape", changed(a=entry("BF16", [2, 4], 0, 12)), r"expected 16 bytes for BF16 \[2, 4\], found 12"),
    ("overlap", changed(c=entry("U8", [5], 19, 24)), 'tensor "c": expected bytes of its own, found .* overlapping "b"'),
    ("the same bytes", changed(d=entry("U8", [4], 20, 24)), 'tensor "d": expected bytes of its own.*overlapping "c"'),
    ("empty one inside", changed(d=entry("U8", [0], 4, 4)), 'tensor "d": expected bytes of its own.*overlapping "a"'),
    ("hole", without("b"), 'tensor "c": expected it to start at byte .*where the data before it ends'),
    ("hole first", without("a"), 'tensor "(b|empty)": expected it to start at byte'),
    ("hole last", without("c"), "expected the last tensor to end with the file at byte"),
]


@pytest.mark.parametrize(("header", "message"), [c[1:] for c in BAD_HEADERS], ids=[c[0] for c in BAD_HEADERS])
def test_refuses(tmp_path: Path, header: Any, message: str) -> None:
    path = write(tmp_path / "bad.safetensors", header)
    with pytest.raises(FormatError, match=r"/bad\.safetensors: .*" + message):
        SafetensorsFile(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected the 8 bytes of a header length, found a file of 0 bytes"),
        (b"\x02\0\0\0\0\0\0", "found a file of 7 bytes"),
        (struct.pack("<Q", 0), "header: expected '{' first, found nothing"),
        (struct.pack("<Q", 3) + b"{}", "header: expected 3 bytes, found 2 before the end of the file"),
        (struct.pack("<Q", MAX_HEADER + 1) + b"{}", f"expected at most {MAX_HEADER}, found {MAX_HEADER + 1}"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "header length: expected at most .*found 18446744073709551615"),
        (struct.pack("<Q", 2**63) + b"{}", "header length: expected at most"),
        (b"version https://git-lfs.github.com/spec/v1\n", "header length: expected .*: this is no safetensors file"),
    ],
)
def test_damaged_start(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"/bad\.safetensors: .*" + message):
        SafetensorsFile(path)


def test_largest_header_is_read_and_one_more_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:  # spaces would take long to write: a sparse file of NULs shows that it was read
        file.write(struct.pack("<Q", MAX_HEADER) + b"{}")
    os.truncate(path, 8 + MAX_HEADER)
    with pytest.raises(FormatError, match=r"byte 2\): expected the end of the text, found '\\x00'"):
        SafetensorsFile(path)


def test_truncated_data(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", good(), data_bytes=23)
    with pytest.raises(FormatError, match='tensor "c" ends at byte 24 of the data, but the file has 23'):
        SafetensorsFile(path)


def test_trailing_data(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", good(), data_bytes=25)
    with pytest.raises(FormatError, match=r"expected the last tensor to end with the file"):
        SafetensorsFile(path)


def test_directory_in_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"expected a regular file, found a directory"):
        SafetensorsFile(tmp_path)
