"""Defaults of flags from the user's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeflux.cli import _parser, main
from moeflux.cli.defaults import apply_defaults, defaults_file
from moeflux.errors import ArgumentError

Output = pytest.CaptureFixture[str]


def parsed(tmp_path: Path, text: str, *words: str) -> Any:
    path = tmp_path / "config.ini"
    path.write_text(text)
    parser = _parser()
    apply_defaults(parser.commands, path)
    return parser.parse_args(words)


def test_a_default_holds_where_the_flag_is_not_given(tmp_path: Path) -> None:
    text = "[defaults]\nmemory = 8GB\nthreads = 3\n\n[serve]\nthreads = 5\nport = 8123\nallow-host = box.local\n"
    run = parsed(tmp_path, text, "run", "-p", "x")
    assert (run.memory, run.threads) == ("8GB", 3)
    assert parsed(tmp_path, text, "run", "-p", "x", "--memory", "4GB").memory == "4GB"
    serve = parsed(tmp_path, text, "serve")
    assert (serve.threads, serve.port, serve.allow_host) == (5, 8123, ["box.local"])
    assert parsed(tmp_path, text, "serve", "--allow-host", "b").allow_host == ["box.local", "b"]


def test_the_section_of_a_command_wins_wherever_it_stands(tmp_path: Path) -> None:
    assert parsed(tmp_path, "[run]\nthreads = 5\n[defaults]\nthreads = 3\n", "run").threads == 5


def test_flags_without_a_value_are_yes_or_no(tmp_path: Path) -> None:
    assert parsed(tmp_path, "[run]\nstats = yes\n", "run").stats is True
    assert parsed(tmp_path, "[run]\nstats = no\n", "run").stats is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("threads = 3\n", "contains no section headers"),
        ("[defaults\n", "contains no section headers"),
        ("[defaults]\nthreads\n", "parsing errors"),
        ("[run]\nthreads = 3\nthreads = 4\n", "already exists"),
        ("[walk]\nthreads = 3\n", r"expected the sections defaults and run, .*, found \[walk\]"),
        ("[defaults]\nthread = 3\n", r"\[defaults\] thread: expected a flag that a command has, without its dashes"),
        ("[run]\nport = 3\n", r"\[run\] port: expected a flag that moeflux run has"),
        ("[run]\nhelp = yes\n", r"\[run\] help: expected a flag"),
        ("[run]\nthreads = many\n", r"\[run\] threads: expected a whole number, found 'many'"),
        ("[plan]\nreads = fast\n", r"\[plan\] reads: expected auto, direct, buffered, found 'fast'"),
        ("[run]\nstats = maybe\n", r"\[run\] stats: expected yes or no, found 'maybe'"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message) as error:
        parsed(tmp_path, text, "info")
    assert str(tmp_path / "config.ini") in str(error.value)


def test_which_file(tmp_path: Path) -> None:
    (tmp_path / "moeflux").mkdir()
    file = tmp_path / "moeflux" / "config.ini"
    assert defaults_file({"XDG_CONFIG_HOME": str(tmp_path)}) is None
    file.write_text("")
    assert defaults_file({"XDG_CONFIG_HOME": str(tmp_path)}) == file
    assert defaults_file({"XDG_CONFIG_HOME": str(tmp_path), "MOEFLUX_CONFIG": ""}) is None
    assert defaults_file({"MOEFLUX_CONFIG": "/nowhere"}) == Path("/nowhere")


def test_a_command_goes_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    path = tmp_path / "mine.ini"
    assert main(["plan", "--context", "4096", "--json"]) == 0
    wider = json.loads(capsys.readouterr().out)
    path.write_text("[plan]\ncontext = 4096\njson = yes\nkv-dtype = bf16\n")
    monkeypatch.setenv("MOEFLUX_CONFIG", str(path))
    assert main(["plan"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"]["keys_and_values"] == wider["parts"]["keys_and_values"] // 2
    path.unlink()
    assert main(["plan"]) == 2
    assert str(path) in capsys.readouterr().err
    assert main(["--help"]) == 0
