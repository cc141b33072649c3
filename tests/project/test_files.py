"""Files as a reader sees them: short, and a section has a banner of one line, which no formatter has cut in two."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bench", "csrc", "cuda", "gpu", "metal", "python", "tests", "tools")
SUFFIXES = {".cpp", ".cuh", ".h", ".inl", ".metal", ".mm", ".py"}
LONGEST = 500  # lines: a longer file usually answers two questions
ALONE = re.compile(r"^[ \t]*(?://|#) -{20,}", re.MULTILINE)


def cut_banners(text: str) -> list[str]:
    """The lines that are the rest of a banner."""
    return [text[match.start() :].split("\n", 1)[0] for match in ALONE.finditer(text)]


def sources() -> list[Path]:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    assert len(files) > 300 or not (ROOT / "bench").is_dir()
    return files


def test_no_file_is_long() -> None:
    lines = {str(file): file.read_bytes().count(b"\n") for file in sources()}
    assert {file: count for file, count in lines.items() if count > LONGEST} == {}


def test_banners_are_one_line() -> None:
    files = sources()
    assert {str(file): found for file in files if (found := cut_banners(file.read_text()))} == {}


def test_a_cut_banner_is_found() -> None:
    dashes = "-" * 90
    assert cut_banners(f"// ---- Recording\n// {dashes}\n") == [f"// {dashes}"]
    assert cut_banners(f"    // ---- Combine\n    // {dashes} One query's\n") == [f"    // {dashes} One query's"]
    assert cut_banners(f"// ---- Recording {dashes}\n# ---- Text {dashes}\n") == []
