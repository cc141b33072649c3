"""Defaults of flags from the user's own file, as docs/settings.md describes it."""

from __future__ import annotations

import argparse
import configparser
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moeflux import files
from moeflux.cli.arguments import Parser
from moeflux.errors import ArgumentError

__all__ = ["apply_defaults", "defaults_file"]

EVERY = "defaults"
"""The section for all commands that have the flag."""
YES_NO = {"yes": True, "no": False}


def defaults_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file, where there is one. A file that MOEFLUX_CONFIG names must be there."""
    named = environment.get("MOEFLUX_CONFIG")
    if named is not None:
        return files.expanded(named) if named else None
    base = environment.get("XDG_CONFIG_HOME", "")
    try:
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".config"
    except RuntimeError:  # there is no home folder
        return None
    path = folder / "moeflux" / "config.ini"
    return path if files.exists(path) else None


def apply_defaults(commands: Mapping[str, Parser], path: Path) -> None:
    """Every value is checked as on the command line, also those for commands that are not called."""
    for section, flag, text in _read(path):
        where = f"{path}: [{section}] {flag}"
        if section != EVERY and section not in commands:
            raise ArgumentError(f"{path}: expected the sections {EVERY} and {', '.join(commands)}, found [{section}]")
        parsers = [commands[section]] if section in commands else list(commands.values())
        found = [(parser, action) for parser in parsers if (action := _action(parser, flag)) is not None]
        if not found:
            having = "a command has" if section == EVERY else f"moeflux {section} has"
            raise ArgumentError(f"{where}: expected a flag that {having}, without its dashes")
        for parser, action in found:
            parser.set_defaults(**{action.dest: _value(parser, action, text, where)})


def _read(path: Path) -> Iterator[tuple[str, str, str]]:
    """(section, flag, value)"""
    reader = configparser.ConfigParser(default_section="", interpolation=None, delimiters=("=",))
    try:
        reader.read_string(files.read_text(path), str(path))
    except configparser.Error as error:
        raise ArgumentError(f"{path}: {' '.join(error.message.split())}") from error
    for section in sorted(reader.sections(), key=lambda name: name != EVERY):  # the section of a command wins
        for flag, text in reader.items(section):
            yield section, flag, text


def _action(parser: Parser, flag: str) -> argparse.Action | None:
    action = parser._option_string_actions.get(f"--{flag}")
    return None if action is None or action.dest == "help" else action


def _value(parser: Parser, action: argparse.Action, text: str, where: str) -> Any:
    if action.nargs == 0:
        if text not in YES_NO:
            raise ArgumentError(f"{where}: expected yes or no, found {text!r:.60}")
        return YES_NO[text]
    try:
        value = parser._get_value(action, text)
        parser._check_value(action, value)
    except argparse.ArgumentError as error:
        raise ArgumentError(f"{where}: {error.message}") from error
    return [value] if isinstance(action, argparse._AppendAction) else value
