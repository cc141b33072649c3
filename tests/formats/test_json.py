"""The strict JSON reader: what RFC 8259 allows and nothing else, and limits on what a text may cost."""

from __future__ import annotations

import json
import locale
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux import FormatError, IoError
from moeflux._core import parse_json, read_json

MAX_DEPTH = 64
MAX_VALUES = 4 << 20
MAX_BYTES = 128 << 20
MAX_NUMBER = 512

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def same(a: object, b: object) -> bool:
    """Equal, with types: 1 is not 1.0 and not True, -0.0 is not 0.0."""
    return repr(a) == repr(b)


@given(JSON_VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_reads_what_python_writes(value: object, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert same(parse_json(text), json.loads(text))


@given(JSON_VALUES, st.data())
def test_accepts_no_more_than_python(value: object, data: st.DataObject) -> None:
    """A damaged text is refused, or means to Python what it means to us."""
    text = bytearray(json.dumps(value, ensure_ascii=False).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text)))
        text[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        found = parse_json(bytes(text))
    except FormatError:
        return
    expected = json.loads(bytes(text).decode())
    if "-0" not in text.decode():  # Python has the integer 0 for it, and so do we, but 1E-0 and the like hide it
        assert same(found, expected) or oversized(expected)


def oversized(value: object) -> bool:
    """Whether a whole number is in there that int64 does not hold, which we read as a double."""
    if isinstance(value, list):
        return any(map(oversized, value))
    if isinstance(value, dict):
        return any(map(oversized, value.values()))
    return type(value) is int and not -(2**63) <= value < 2**63


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-0", 0),
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)),
        ("9223372036854775808", 2.0**63),
        ("1" + "0" * 300, 1e300),
        ("1.0", 1.0),
        ("1e2", 100.0),
        ("-1.5E-3", -0.0015),
        ("5e-324", 5e-324),
        ("1e-999", 0.0),
        ("0.1", 0.1),
        ("1.7976931348623157e308", 1.7976931348623157e308),
        (" \t\r\n[ ]\n", []),
        ('{"a":{"b":[null,true,false]}}', {"a": {"b": [None, True, False]}}),
        (r'"\"\\\/\b\f\n\r\t\u0041\u00e9\u20ac\ud83d\ude00\u0000"', '"\\/\b\f\n\r\tA\u00e9\u20ac\U0001f600\0'),
        ('"\u007f\u0080\u07ff\u0800\uffff\U00010000\U0010ffff"', "\u007f\u0080\u07ff\u0800\uffff\U00010000\U0010ffff"),
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)),
        ("0." + "1" * (MAX_NUMBER - 2), 1 / 9),
    ],
)
def test_accepts(text: str, value: object) -> None:
    assert same(parse_json(text), value)


REFUSED = [
    ("", r"line 1, column 1 \(byte 0\): expected a value, found the end of the text"),
    (" \n ", r"line 2, column 2 \(byte 3\): expected a value"),
    ("nul", "expected a value, found 'n'"),
    ("True", "expected a value, found 'T'"),
    ("NaN", "expected a value, found 'N'"),
    ("Infinity", "expected a value"),
    ("-Infinity", "expected a digit, found 'I'"),
    ("'a'", "expected a value"),
    ("// a\n1", "expected a value, found '/'"),
    ("\ufeff1", "expected a value, found '\ufeff'"),
    ("1 2", r"byte 2\): expected the end of the text, found '2'"),
    ("{}\0", r"expected the end of the text, found '\\x00'"),
    ("\0", r"expected a value, found '\\x00'"),
    ("[1,]", "expected a value, found '\\]'"),
    ("[1 2]", "expected ',' or ']' after an element, found '2'"),
    ("[1", "expected ',' or ']' after an element, found the end"),
    ("[", "expected a value, found the end"),
    ("{", "expected a key in quotes, found the end"),
    ("{a:1}", "expected a key in quotes, found 'a'"),
    ('{"a"}', "expected ':' after a key, found '}'"),
    ('{"a":1,}', "expected a key in quotes, found '}'"),
    ('{"a":1 "b":2}', "expected ',' or '}' after a member"),
    ('{"a":1,\n "b":2, "a":3}', r'line 2, column 9 \(byte 16\): expected each key once, found "a" again'),
    (r'{"a":1,"\u0061":2}', 'expected each key once, found "a" again'),
    ("01", "expected no digit after a leading zero"),
    ("-", "expected a digit, found the end"),
    ("+1", "expected a value"),
    (".5", "expected a value"),
    ("1.", "expected a digit"),
    ("1.e5", "expected a digit"),
    ("1e", "expected a digit"),
    ("1e+", "expected a digit"),
    ("0x10", "expected the end of the text, found 'x'"),
    ("1e999", "expected a number within the range of double, found 1e999"),
    ("-1e999", "expected a number within the range of double"),
    ("1" * (MAX_NUMBER + 1), f"expected a number of at most {MAX_NUMBER} characters, found {MAX_NUMBER + 1}"),
    ('"', "expected '\"' to end a string, found the end"),
    ('"a\nb"', r"expected no control character in a string, found '\\x0a'"),
    ('"\x1f"', "expected no control character"),
    (r'"\a"', r"expected an escape of JSON"),
    ('"\\', r"expected an escape of JSON after '\\', found the end"),
    ('"\\\0"', r"expected an escape of JSON"),
    (r'"\u12"', "expected four hexadecimal digits"),
    (r'"\u12g4"', "expected four hexadecimal digits, found 'g'"),
    (r'"\ud800"', "expected a low surrogate after a high one, found the high one alone"),
    (r'"\ud800\u0041"', "expected a low surrogate after a high one, found another escape"),
    (r'"\ud800\ud800"', "expected a low surrogate"),
    (r'"\ud800\ue000"', "expected a low surrogate after a high one, found another escape"),
    (r'"\udc00"', "expected a high surrogate before a low one"),
    (b'"\x80"', r"expected valid UTF-8, found '\\x80'"),
    (b'"\xc0\xaf"', r"expected valid UTF-8, found '\\xc0'"),  # overlong
    (b'"\xc1\xbf"', "expected valid UTF-8"),
    (b'"\xe0\x9f\xbf"', "expected valid UTF-8"),
    (b'"\xf0\x8f\xbf\xbf"', "expected valid UTF-8"),
    (b'"\xed\xa0\x80"', "expected valid UTF-8"),  # a surrogate
    (b'"\xf4\x90\x80\x80"', "expected valid UTF-8"),  # above U+10FFFF
    (b'"\xf5\x80\x80\x80"', "expected valid UTF-8"),
    (b'"\xe2\x82"', "expected valid UTF-8"),
    (b'"\xe2', "expected valid UTF-8"),
    (b'"\xf0\x9f\x98"', "expected valid UTF-8"),
    (b"\xff", r"expected a value, found '\\xff'"),
    ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), r"byte 64\): expected at most 64 levels of nesting"),
    ('{"a":' * (MAX_DEPTH + 1), "expected at most 64 levels"),
    ("[" * 1_000_000, "expected at most 64 levels"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[repr(text)[:24] for text, _ in REFUSED])
def test_refuses(text: str | bytes, message: str) -> None:
    with pytest.raises(FormatError, match=r"^here: (?=line)(.*)" + message):
        parse_json(text, "here")


def test_number_of_values_is_limited() -> None:
    inside = MAX_VALUES - 1  # the array counts too
    assert len(parse_json("[" + "0," * (inside - 1) + "0]")) == inside
    with pytest.raises(FormatError, match=f"expected at most {MAX_VALUES} values"):
        parse_json("[" + "0," * inside + "0]")


def test_member_names_count_as_values() -> None:
    text = "{" + ",".join(f'"{i}":0' for i in range(MAX_VALUES // 2)) + "}"
    with pytest.raises(FormatError, match=f"expected at most {MAX_VALUES} values"):
        parse_json(text)


def test_size_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    path.touch()
    os.truncate(path, MAX_BYTES + 1)  # sparse: nothing is written
    with pytest.raises(FormatError, match=f"big.json: expected at most {MAX_BYTES} bytes, found {MAX_BYTES + 1}"):
        read_json(path)


@pytest.fixture
def decimal_comma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A locale that writes 1,5: one of the machine's, or one made for the test where glibc's tools are."""
    before = locale.setlocale(locale.LC_ALL)
    if tool := shutil.which("localedef"):
        subprocess.run([tool, "-i", "de_DE", "-f", "UTF-8", tmp_path / "de_DE.UTF-8"], check=False, capture_output=True)
        if (tmp_path / "de_DE.UTF-8").is_dir():
            monkeypatch.setenv("LOCPATH", str(tmp_path))
    for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "de_DE", "fr_FR"):
        try:
            locale.setlocale(locale.LC_ALL, name)
        except locale.Error:
            continue
        yield
        locale.setlocale(locale.LC_ALL, before)
        return
    pytest.skip("no locale with a decimal comma on this machine")


@pytest.mark.usefixtures("decimal_comma")
def test_decimal_point_does_not_follow_the_locale() -> None:
    assert locale.localeconv()["decimal_point"] == ","
    assert parse_json("[1.5, 2.5e3]") == [1.5, 2500.0]


def test_reads_files(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, 2.5, "\u20ac"]}')
    assert read_json(path) == read_json(str(path)) == {"a": [1, 2.5, "\u20ac"]}
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert read_json(link) == read_json(path)
    path.write_text("{,}")
    with pytest.raises(FormatError, match=r"a\.json: line 1, column 2"):
        read_json(path)
    path.write_bytes(b"")
    with pytest.raises(FormatError, match=r"a\.json: line 1, column 1 .* found the end of the text"):
        read_json(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(IoError, match=r"none.json: cannot be opened: No such file"):
        read_json(tmp_path / "none.json")
    with pytest.raises(FormatError, match=r"expected a regular file, found a directory"):
        read_json(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match=r"expected a regular file, found a pipe"):
        read_json(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(IoError, match=r"loop: cannot be opened"):
        read_json(tmp_path / "loop")


def test_messages_stay_short_and_printable(tmp_path: Path) -> None:
    key = "k" * 100_000
    with pytest.raises(FormatError) as error:
        parse_json(f'{{"{key}":1,"{key}":2}}')
    assert len(str(error.value)) < 1000
    path = os.fsencode(tmp_path) + b"/\xff\n.json"
    Path(os.fsdecode(path)).write_text("[")
    with pytest.raises(FormatError, match=r"/\\xff\\x0a\.json: line 1"):
        read_json(os.fsdecode(path))


def test_integers_stay_exact() -> None:
    assert parse_json(str(2**53 + 1)) == 2**53 + 1
    assert math.copysign(1, parse_json("-0.0")) == -1
