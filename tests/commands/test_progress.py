"""Progress of a long task: a bar on a terminal, lines in a log, nothing for short work."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys

import pytest

from moeflux.progress import Bars, Counting, Lines, for_terminal, time_text
from moeflux.sizes import size_text

BAR = """
from moeflux.progress import Counting, for_terminal
with Counting(for_terminal(passing=True), "reading the prompt", "tokens", after=0) as counting:
    for done in (10, 500, 1000):
        counting(done, 1000)
"""


def test_lines_have_share_rate_and_time_left() -> None:
    stream = io.StringIO()
    with Counting(Lines(stream, seconds=0), "reading", "tokens", after=0) as counting:
        for done in (10, 500, 1000):
            counting(done, 1000)
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 3
    for line in lines:
        assert re.fullmatch(r"reading: \d+% of 1000 tokens, \d+ tokens/s, \d+ s left", line), line
    assert lines[0].startswith("reading: 1% of") and lines[-1].startswith("reading: 100% of")


def test_short_work_is_silent() -> None:
    stream = io.StringIO()
    with Counting(Lines(stream, seconds=0), "reading", after=60) as counting:
        for done in (1, 2, 3):
            counting(done, 3)
    with Counting(Lines(stream, seconds=0), "reading", after=0) as counting:
        counting(3, 3)
    assert stream.getvalue() == ""


def test_a_terminal_has_a_bar() -> None:
    own, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-c", BAR]
    with subprocess.Popen(command, stdin=child, stdout=subprocess.PIPE, stderr=child, env=environment) as program:
        os.close(child)
        seen = ""
        while program.poll() is None or select.select([own], [], [], 0)[0]:
            if select.select([own], [], [], 0.1)[0]:
                try:
                    seen += os.read(own, 65536).decode()
                except OSError:  # Linux says so when the program has ended
                    break
        assert program.stdout is not None and program.stdout.read() == b""
    os.close(own)
    assert program.returncode == 0
    assert "reading the prompt" in seen and "of 1000 tokens" in seen and re.search(r"\d:\d\d:\d\d|-:--", seen)


def test_a_log_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(for_terminal(), Lines) and not isinstance(for_terminal(), Bars)


def test_words() -> None:
    sizes = {999: "999 B", 1000: "1.00 kB", 123e6: "123.00 MB", 17.4e9: "17.40 GB", 1.5e12: "1.50 TB"}
    assert {size: size_text(size) for size in sizes} == sizes
    assert [time_text(seconds) for seconds in (9, 61, 3661)] == ["9 s", "1 min 01 s", "1 h 01 min"]
