"""What the command groups share: how a command is added, how a value is printed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

__all__ = ["Commands", "command", "print_value"]

Commands = argparse._SubParsersAction  # of ArgumentParser


def command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    text: str,
) -> argparse.ArgumentParser:
    """Adds a command. `text` is a paragraph, and after a blank line the examples."""
    paragraph, _, examples = text.partition("\n\n")
    parser = commands.add_parser(
        name,
        help=summary,
        description=paragraph,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def print_value(value: object, as_json: bool) -> None:
    print(json.dumps(value.to_dict(), indent=2) if as_json else value)
