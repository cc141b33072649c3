"""What the command groups share: how a command is added, how a model is loaded, how a value is printed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeflux.model import Model

__all__ = ["MODEL_HELP", "Commands", "add_loading", "command", "load_model", "load_options", "print_value", "whole"]

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


def whole(text: str) -> int:
    if text.isascii() and text.isdigit() and 1 <= int(text) < 1 << 31:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r:.40}")


# ---- Loading a model --------------------------------------------------------------------------------------------


LOADING = """\
They decide how much memory is taken and how fast it goes. None but those marked changes an answer.
"""
MEMORY = {
    "memory": ("SIZE", "of the whole process: 8GB, 8GiB, bytes, or auto: what is free, less a reserve; usually auto"),
    "context": ("N", "tokens that a session has room for; usually the model's limit, at most 32768"),
    "sessions": ("N", "that there is to be room for; usually 1"),
}
NUMBERS = {
    "threads": "that compute; usually one a core",
    "expert-slots": "experts held in memory; usually as many as fit",
    "readers": "threads that read experts",
    "chunk": "most tokens of a prefill step; usually 512, more or less as memory allows",
}
WORDS = {
    "precision": (("auto", "exact"), "of activations; usually auto: 16 bits where that is faster. exact is float32"),
    "kv-dtype": (("f32", "bf16"), "of keys and values; usually f32. LOSSY: bf16 is half the memory"),
    "reads": (("auto", "direct", "buffered"), "experts past the page cache, or through it; usually auto"),
    "cache": (("lru", "lfu", "none"), "which expert goes when another needs its place; usually lru"),
    "look-ahead": (("auto", "on", "off"), "read what the next layer may need; usually auto: while it pays"),
}


def add_loading(parser: argparse.ArgumentParser) -> None:
    """The options of `moeflux.load` that people touch. What is not given is left to `load`."""
    group = parser.add_argument_group("how the model is loaded", LOADING)
    for name, (metavar, meaning) in MEMORY.items():
        group.add_argument(f"--{name}", type=str if name == "memory" else whole, metavar=metavar, help=meaning)
    for name, meaning in NUMBERS.items():
        group.add_argument(f"--{name}", type=whole, metavar="N", help=meaning)
    for name, (words, meaning) in WORDS.items():
        group.add_argument(f"--{name}", choices=words, help=meaning)
    group.add_argument("--verify-reads", action="store_true", help="every expert read against its checksum")
    group.add_argument(
        "--experts-per-token", type=whole, metavar="N", help="LOSSY: another number of experts than the model's own"
    )


def load_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given of them, for `moeflux.load(store, **load_options(arguments))`."""
    names = [name.replace("-", "_") for name in (*MEMORY, *NUMBERS, *WORDS, "verify-reads", "experts-per-token")]
    return {name: value for name in names if (value := getattr(arguments, name))}


MODEL_HELP = "a folder (packed store or MLX), a repository as owner/name, or nothing: the built-in model"


def load_model(name: str | None, arguments: argparse.Namespace) -> Model:
    """Of what MODEL_HELP says, with the options that were given, and progress where that takes time."""
    import moeflux
    from moeflux.models.hub import find_model
    from moeflux.progress import Counting, for_terminal

    progress = for_terminal(passing=True)
    folder = find_model(name, progress)
    with Counting(progress, "loading") as counting:
        return moeflux.load(folder, **load_options(arguments), on_progress=counting)


# ---- Printing ---------------------------------------------------------------------------------------------------


def print_value(value: object, as_json: bool) -> None:
    print(json.dumps(value.to_dict(), indent=2) if as_json else value)
