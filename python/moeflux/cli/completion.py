"""The command `completion`: what a shell needs to complete `moeflux`, made from the parsers of the commands."""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from moeflux.cli.arguments import Commands, Parser
from moeflux.cli.arguments import command as add_command

__all__ = ["add"]

HELP = "print what makes a shell complete commands, flags and their values"
TEXT = """\
Prints a script for bash, zsh or fish. With it, the Tab key completes the commands of moeflux, their flags, the values
of flags that take one of a few words, and otherwise the names of files.

examples:
  moeflux completion bash > ~/.local/share/bash-completion/completions/moeflux
  moeflux completion zsh >> ~/.zshrc
  moeflux completion fish > ~/.config/fish/completions/moeflux.fish
"""


def add(commands: Commands) -> None:
    parser = add_command(commands, "completion", functools.partial(_print, commands), HELP, TEXT)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def _print(commands: Commands, arguments: argparse.Namespace) -> int:
    summaries = {action.dest: action.help or "" for action in commands._choices_actions}
    found = [_words_of(name, summaries[name], parser) for name, parser in commands.choices.items()]
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[arguments.shell](found))
    return 0


@dataclass
class _Flag:
    names: tuple[str, ...]
    summary: str
    takes_value: bool
    values: tuple[str, ...]  # empty: any value


@dataclass
class _Command:
    name: str
    summary: str
    flags: list[_Flag] = field(default_factory=list)
    words: list[str] = field(default_factory=list)  # of positional arguments that are one of a few


def _words_of(name: str, summary: str, parser: Parser) -> _Command:
    found = _Command(name, summary)
    for action in parser._actions:
        values = tuple(str(value) for value in action.choices or ())
        if not action.option_strings:
            found.words += values
        elif action.help != argparse.SUPPRESS:
            names = tuple(action.option_strings)
            found.flags.append(_Flag(names, action.help or "", action.nargs != 0, values))
    return found


# ---- bash and zsh -----------------------------------------------------------------------------------------------

SCRIPT = """\
_moeflux() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
  COMPREPLY=()
  if [ "$COMP_CWORD" -le 1 ]; then
    words={commands}
  else
    case "${{COMP_WORDS[1]}} $before" in
{values}
    *)
      case "${{COMP_WORDS[1]}}" in
{flags}
      esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _moeflux moeflux"""


def _bash(commands: list[_Command]) -> str:
    """Where no word fits, bash itself completes the names of files."""
    return SCRIPT.format(
        commands=shlex.quote(" ".join([*(command.name for command in commands), "--help", "--version"])),
        values="\n".join(_cases_of_values(commands)),
        flags="\n".join(
            f"      {command.name}) words={shlex.quote(' '.join(_all_words(command)))} ;;" for command in commands
        ),
    )


def _cases_of_values(commands: list[_Command]) -> Iterator[str]:
    for command in commands:
        for flag in command.flags:
            if flag.takes_value:
                places = "|".join(f'"{command.name} {name}"' for name in flag.names)
                yield f"    {places}) words={shlex.quote(' '.join(flag.values))} ;;"


def _all_words(command: _Command) -> list[str]:
    return [*command.words, *(name for flag in command.flags for name in flag.names)]


def _zsh(commands: list[_Command]) -> str:
    """zsh can run what completes in bash."""
    return "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" + _bash(commands)


# ---- fish -------------------------------------------------------------------------------------------------------


def _fish(commands: list[_Command]) -> str:
    return "\n".join(line for command in commands for line in _lines(command))


def _lines(command: _Command) -> Iterator[str]:
    yield f"complete -c moeflux -n __fish_use_subcommand -f -a {command.name} -d {_quoted(command.summary)}"
    inside = f'complete -c moeflux -n "__fish_seen_subcommand_from {command.name}"'
    if command.words:
        yield f"{inside} -f -a {_quoted(' '.join(command.words))}"
    for flag in command.flags:
        names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
        values = f" -x -a {_quoted(' '.join(flag.values))}" if flag.values else " -r" if flag.takes_value else ""
        yield f"{inside} {names}{values} -d {_quoted(flag.summary)}"


def _quoted(text: str) -> str:
    """In fish, two characters have a meaning between single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("%%", "%") + "'"
