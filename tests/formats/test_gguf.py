"""The directory of a GGUF file: every rule of the format, broken once, and files in several parts."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from moeflux import FormatError, NotFoundError
from moeflux._core import GgufFile
from support.gguf_bytes import ARRAY, KINDS, STRING, array, file, scalar, string, tensor, value, words

NUMBERS = {
    "B": 255, "b": -128, "H": 65535, "h": -32768, "I": 2**32 - 1, "i": -(2**31), "Q": 2**64 - 1, "q": -(2**63),
    "f": 0.5, "d": 0.1, "?": True,
}  # fmt: skip
GOOD_VALUES = [value("general.architecture", words("test")), value("n", scalar("I", 7))]
GOOD_TENSORS = [tensor("a", (4, 2), 0, 0), tensor("b", (32, 3), 8, 32)]
DATA = 32 + 3 * 34


def read(path: Path, content: bytes) -> GgufFile:
    path.write_bytes(content)
    return GgufFile(path)


@pytest.mark.parametrize("version", [2, 3])
def test_reads_a_good_file(version: int, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    found = read(path, file(GOOD_VALUES, GOOD_TENSORS, DATA, version=version))
    assert found.files == [str(path)] and found.keys == ["general.architecture", "n"]
    assert (found.value("general.architecture"), found.value("n"), found.value("m")) == ("test", 7, None)
    a, b = found.tensors["a"], found.tensors["b"]
    assert (a.type, a.shape, a.offset, a.bytes, a.file) == ("F32", (2, 4), found.header_bytes, 32, 0)
    assert (b.type, b.shape, b.offset, b.bytes) == ("Q8_0", (3, 32), found.header_bytes + 32, 102)
    assert found.header_bytes == path.stat().st_size - DATA


def test_every_kind_of_value(tmp_path: Path) -> None:
    values = [value(letter, scalar(letter, number)) for letter, number in NUMBERS.items()]
    for letter, number in NUMBERS.items():
        content = 2 * struct.pack(f"<{letter}", number)
        values.append(value(f"{letter} list", array(KINDS[letter], content, 2)))
    values.append(value("strings", array(STRING, string("") + string("grün"), 2)))
    inner = [struct.pack("<IQ", KINDS["B"], count) + bytes(count) for count in (0, 3)]
    values.append(value("arrays", array(ARRAY, b"".join(inner), 2)))
    values.append(value("none", array(KINDS["d"], b"", 0)))
    found = read(tmp_path / "a.gguf", file(values, [], 0))
    for letter, number in NUMBERS.items():
        assert found.value(letter) == number and type(found.value(letter)) is type(number)
        assert found.value(f"{letter} list") == [number, number]
    assert found.value("strings") == ["", "grün"]
    assert found.value("arrays") == [[], [0, 0, 0]] and found.value("none") == []


def test_what_the_package_gguf_writes(tmp_path: Path) -> None:
    """Also of blocks, of every type that it can write, and at another alignment."""
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "test")
    writer.add_custom_alignment(64)
    writer.add_array("floats", [0.5, 1.5])
    rng = np.random.default_rng(0)
    types = [gguf.GGMLQuantizationType[name] for name in ("F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "MXFP4")]
    wanted = {}
    for kind in types:
        raw = gguf.quants.quantize(rng.standard_normal((2, 3, 256), np.float32), kind)
        writer.add_tensor(kind.name, raw, raw_dtype=kind)
        wanted[kind.name] = raw
    for close in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        close()
    writer.close()
    found, content = GgufFile(path), path.read_bytes()
    for name, raw in wanted.items():
        place = found.tensors[name]
        assert place.type.removeprefix("GGUF_") == name and place.shape == (2, 3, 256) and place.offset % 64 == 0
        assert content[place.offset : place.offset + place.bytes] == raw.tobytes()


def test_every_type_of_tensor_has_the_size_that_the_package_gguf_says(tmp_path: Path) -> None:
    for number, (columns, size) in gguf.GGML_QUANT_SIZES.items():
        if number.name in ("Q8_1", "Q8_K"):  # never in a file
            continue
        found = read(tmp_path / "a.gguf", file([], [tensor("x", (2 * columns, 3), number, 0)], 6 * size))
        assert found.tensors["x"].bytes == 6 * size and found.tensors["x"].type.removeprefix("GGUF_") == number.name


# ---- Every rule, broken once ------------------------------------------------------------------------------------

HUGE = 2**63 + 5
DEEP = array(ARRAY, struct.pack("<IQ", ARRAY, 1) * 4 + struct.pack("<IQ", 0, 0), 1)


def with_values(*values: bytes, **changes: Any) -> bytes:
    return file([*GOOD_VALUES, *values], GOOD_TENSORS, DATA, **changes)


def with_tensors(*tensors: bytes, data: int = DATA, **changes: Any) -> bytes:
    return file(GOOD_VALUES, tensors, data, **changes)


BAD: list[tuple[str, bytes, str]] = [
    ("empty", b"", r"header: expected 4 bytes at byte 0, found 0 before the end of the file"),
    ("other bytes first", with_values(magic=b"GGML"), r'expected "GGUF" first, found "GGML": this is no GGUF file'),
    ("version 1", with_values(version=1), r"version: expected 2 or 3, found 1"),
    ("the other byte order", with_values(version=3 << 24), r"found 50331648: a file for machines of the other byte"),
    ("more keys than there are", with_values(counts=(0, 9)), r"key 3: expected at most 65535 bytes, found 5629"),
    ("a huge number of keys", with_values(counts=(0, HUGE)), r"keys: expected at most 4194304 .*found 922337203685477"),
    ("a huge number of tensors", with_values(counts=(HUGE, 2)), r"tensors: expected at most 4194304"),
    ("more tensors than there are", with_tensors(*GOOD_TENSORS, data=0, counts=(3, 2)), r"tensor 2: expected a name"),
    ("a key twice", with_values(GOOD_VALUES[1]), r'key "n": expected it once, found it twice'),
    ("a long key", with_values(value("k" * 65536, scalar("B", 1))), r"key 2: expected at most 65535 bytes, found 6553"),
    ("a key without an end", with_values(string(b"", HUGE)), r"key 2: expected at most 65535 bytes, found 9223372036"),
    ("a key of other bytes", with_values(value(b"\xc3(", scalar("B", 1))), r"key 2: expected UTF-8, found byte 0"),
    ("an empty key", with_values(value("", scalar("B", 1))), r"key 2: expected a name, found none"),
    ("an unknown kind", with_values(value("k", struct.pack("<I", 13))), r'key "k": kind: expected 0 to 12, found 13'),
    ("a text of other bytes", with_values(value("k", words(b"a\xff"))), r'key "k": expected UTF-8, found byte 1 of'),
    ("a text without an end", with_values(value("k", words("a", 1000))), r'key "k": expected 1000 bytes at byte'),
    ("a text beyond any size", with_values(value("k", words("a", HUGE))), r'key "k": expected at most 134217728 bytes'),
    ("a bool of 2", with_values(value("k", struct.pack("<IB", 7, 2))), r'key "k": expected 0 or 1 for a bool, found 2'),
    ("an array of an unknown kind", with_values(value("k", array(99, b"", 0))), r'key "k": kind: expected 0 to 12'),
    ("an array without an end", with_values(value("k", array(10, b"", HUGE))), r'key "k": expected \d+ bytes at byte'),
    ("an array that is too long", with_values(value("k", array(10, b"", 99))), r'key "k": expected 792 bytes at byte'),
    ("strings without an end", with_values(value("k", array(STRING, string("a"), 200))), r'key "k": expected at most'),
    ("arrays in arrays in arrays", with_values(value("k", DEEP)), r'key "k": expected arrays at most 4 deep'),
    ("an alignment of 0", with_values(value("general.alignment", scalar("I", 0))), r"general.alignment: .*found 0"),
    ("an alignment of 24", with_values(value("general.alignment", scalar("I", 24))), r"a power of two of 8 .*found 24"),
    ("an alignment of 2^31", with_values(value("general.alignment", scalar("I", 2**31))), r"general.alignment: expect"),
    ("an alignment in words", with_values(value("general.alignment", words("32"))), r"expected a u32 .*found string"),
    ("an alignment of 64 bits", with_values(value("general.alignment", scalar("Q", 32))), r"expected a u32 .*found u6"),
    ("a long name", with_tensors(tensor("n" * 65, (1,), 0, 0)), r"tensor 0: name: expected at most 64 bytes, found 65"),
    ("a name of other bytes", with_tensors(tensor(b"\x80", (1,), 0, 0)), r"tensor 0: name: expected UTF-8"),
    ("a name twice", with_tensors(GOOD_TENSORS[0], GOOD_TENSORS[0]), r'tensor "a": expected it once, found it twice'),
    ("five dimensions", with_tensors(tensor("a", (1,) * 5, 0, 0)), r'"a": expected at most 4 dimensions, found 5'),
    ("dimensions without an end", with_tensors(tensor("a", (), 0, 0, 2**32 - 1)), r"at most 4 dimensions, found 42949"),
    ("a size of 0", with_tensors(tensor("a", (4, 0), 0, 0)), r'tensor "a": size 1: expected 1 to .*found 0'),
    ("a size of 2^63", with_tensors(tensor("a", (2**63,), 0, 0)), r'size 0: expected 1 to .*found 9223372036854775808'),
    ("sizes beyond 63 bits", with_tensors(tensor("a", (2**32, 2**32), 0, 0)), r"expected a size within 63 bits, found"),
    ("an unknown type", with_tensors(tensor("a", (4,), 4, 0)), r'tensor "a": type: expected a number that .*found 4'),
    ("half a block", with_tensors(tensor("a", (16, 2), 8, 0)), r"rows of whole blocks of 32 numbers in Q8_0, found \["),
    ("no row of a block", with_tensors(tensor("a", (), 8, 0)), r"rows of whole blocks of 32 numbers in Q8_0"),
    ("an offset of 16", with_tensors(tensor("a", (4,), 0, 16)), r'tensor "a": offset: expected a multiple of 32, foun'),
    ("an offset of 2^63", with_tensors(tensor("a", (4,), 0, 2**63)), r"offset: expected at most 922337203685477580"),
    ("an offset that overflows", with_tensors(tensor("a", (4,), 0, 2**63 - 32)), r"to lie within the file of"),
    ("past the end", with_tensors(tensor("a", (4,), 0, 0), data=15), r'"a": expected its 16 bytes to lie within the f'),
    ("over another", with_tensors(tensor("a", (16,), 0, 0), tensor("b", (4,), 0, 32)), r'"b": expected bytes of its o'),
    ("in the place of another", with_tensors(*(tensor(n, (4,), 0, 0) for n in "ab")), r"expected bytes of its own"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), [each[1:] for each in BAD], ids=[each[0] for each in BAD])
def test_every_rule(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=rf"^{tmp_path}/a.gguf: .*{message}"):
        read(tmp_path / "a.gguf", content)


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    whole = with_values()
    for length in range(len(whole)):
        with pytest.raises(FormatError, match=r"before the end of the file|to lie within the file"):
            read(tmp_path / "a.gguf", whole[:length])


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"a.gguf: cannot be opened"):
        GgufFile(tmp_path / "a.gguf")
    with pytest.raises(FormatError, match="expected a regular file, found a directory"):
        GgufFile(tmp_path)


def test_a_header_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    """A file of terabytes, which takes no room on the disk, cannot make the reader take as much."""
    path = tmp_path / "a.gguf"
    path.write_bytes(with_values(value("k", array(KINDS["B"], b"", 1 << 40))))
    with path.open("r+b") as sparse:
        sparse.truncate(1 << 41)
    with pytest.raises(
        FormatError, match=r'key "k": expected 1099511627776 bytes .*before the end of the longest header'
    ):
        GgufFile(path)


# ---- Parts ------------------------------------------------------------------------------------------------------


def part(number: int, count: int, total: int, names: str) -> bytes:
    values = [value("split.no", scalar("H", number)), value("split.count", scalar("H", count))]
    values.append(value("split.tensors.count", scalar("i", total)))
    if number == 0:
        values.append(value("n", scalar("I", 7)))
    tensors = [tensor(name, (4,), 0, 32 * place) for place, name in enumerate(names)]
    return file(values, tensors, 32 * len(names))


def parts(folder: Path) -> list[Path]:
    paths = [folder / f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for number, (path, names) in enumerate(zip(paths, ("", "ab", "c"), strict=True)):
        path.write_bytes(part(number, 3, 3, names))
    return paths


@pytest.mark.parametrize("given", [0, 2])
def test_a_model_in_parts(given: int, tmp_path: Path) -> None:
    paths = parts(tmp_path)
    found = GgufFile(paths[given])
    assert found.files == [str(path) for path in paths] and found.value("n") == 7
    assert {name: each.file for name, each in found.tensors.items()} == {"a": 1, "b": 1, "c": 2}


def test_parts_of_the_package_gguf(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "test", split_max_tensors=2)
    for name in "abc":
        writer.add_tensor(name, np.ones(8, np.float32))
    for close in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        close()
    writer.close()
    found = GgufFile(tmp_path / "m-00001-of-00002.gguf")
    assert sorted(found.tensors) == ["a", "b", "c"] and found.value("general.architecture") == "test"


DISAGREEING: list[tuple[str, Callable[[list[Path]], object], str]] = [
    ("one is missing", lambda p: p[1].unlink(), r"m-00002-of-00003.gguf: cannot be opened"),
    ("another count", lambda p: p[1].write_bytes(part(1, 4, 3, "ab")), r"00002-of.*: split.count: expected 3, found 4"),
    ("no count", lambda p: p[1].write_bytes(file([], [], 0)), r"00002-of.*: split.count: expected 3, found 0"),
    ("another place", lambda p: p[1].write_bytes(part(2, 3, 3, "ab")), r"00002-of.*: split.no: expected 1, found 2"),
    ("another total", lambda p: p[1].write_bytes(part(1, 3, 4, "ab")), r"00002.*tensors.count: expected 3, found 4"),
    ("fewer tensors", lambda p: p[1].write_bytes(part(1, 3, 3, "a")), r"00001.*tensors.count: expected 2, found 3"),
    ("a name twice", lambda p: p[2].write_bytes(part(2, 3, 3, "a")), r'00003.*"a": expected it once, found it in .*00'),
    ("another name", lambda p: p[0].rename(p[0].with_name("m.gguf")), r"m.gguf: split.count is 3: expected a file tha"),
    ("a count in words", lambda p: p[0].write_bytes(file([value("split.count", words("3"))], [], 0)), r"a whole numbe"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"), [each[1:] for each in DISAGREEING], ids=[each[0] for each in DISAGREEING]
)
def test_parts_that_disagree(change: Callable[[list[Path]], object], message: str, tmp_path: Path) -> None:
    paths = parts(tmp_path)
    change(paths)
    given = paths[0] if paths[0].exists() else tmp_path / "m.gguf"
    with pytest.raises((FormatError, NotFoundError), match=message):
        GgufFile(given)
