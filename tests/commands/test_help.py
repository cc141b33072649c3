"""What --help says, of every command: as a man page."""

from __future__ import annotations

import re
import shlex

import pytest

from moeflux import cli
from moeflux.cli import main
from support.command_line import commands

Output = pytest.CaptureFixture[str]


def test_help_teaches(capsys: Output) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("examples:", "powers of 1000", "exit status", *commands()))


def test_a_call_without_a_command_gets_the_help(capsys: Output) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "examples:" in err


@pytest.mark.parametrize("name", commands())
def test_help_of_a_command(name: str, capsys: Output) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    paragraph = " ".join(text.split("\n\n")[1].split())
    assert len(paragraph) > 150, "a paragraph says what the command does"
    assert f"  moeflux {name}" in text, "examples follow"


METAVARS = {
    *("MODEL", "AGENT", "SHELL", "SRC", "DEST", "STORE", "FILE", "FOLDER", "NAME", "ADDRESS", "URL", "TEXT"),
    *("N", "K", "P", "T", "X", "SIZE", "LIST", "N,N,...", "N|bf16", "N|TYPE", "FILE|N", "TOKEN=X"),
}


@pytest.mark.parametrize("name", commands())
def test_help_is_of_one_style(name: str, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a man page: what must be given, paragraphs, arguments, options, and examples at the end, which parse."""
    monkeypatch.setenv("COLUMNS", "100")
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    synopsis = text.partition("\n\n")[0]
    assert re.fullmatch(rf"usage: moeflux {name} [^\n]*\[options\][^\n]*", synopsis), synopsis
    assert all(len(line) <= 120 for line in text.splitlines())
    heads = [head for head in ("arguments:", "options:", "examples:") if f"\n\n{head}\n" in text]
    assert heads in (["arguments:", "options:", "examples:"], ["options:", "examples:"])
    prose = text.split(f"\n\n{heads[0]}\n")[0].split("\n\n")[1:]
    assert all(each[0].isupper() and each.rstrip().endswith(".") for each in prose)
    examples = text.split("\n\nexamples:\n")[1].splitlines()
    for line in examples:
        command = re.split(r" {2,}|[<|>]", line[line.index(f"moeflux {name}") :])[0]
        words = shlex.split(command)
        cli._parser().parse_args(words[1:])
    for action in commands()[name]._actions:
        assert action.help, action.dest
        first = action.help.removeprefix("LOSSY: ")[0]
        assert not action.help.endswith(".") and not first.isupper(), action.help
        assert action.metavar is None or action.metavar in METAVARS, action.metavar
