"""The `moeflux` command. Each group of sub-commands has a module, and imports everything heavy inside its functions."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from moeflux._core import __commit__, __version__, isas
from moeflux.cli import completion, look, make, measure, routing, serve, write
from moeflux.cli.arguments import Parser
from moeflux.cli.defaults import apply_defaults, defaults_file
from moeflux.errors import Error

__all__ = ["main"]

DESCRIPTION = """\
moeflux runs Mixture-of-Experts language models that are far larger than memory. What every token needs stays in memory.
The experts stay on the SSD and are read as the router picks them. A small model comes with moeflux, so `moeflux chat`
works at once, and so does `moeflux serve`, which other programs ask. Stock MLX folders and most checkpoints in bf16
run as they are, and any Hugging Face checkpoint can be converted. There are commands to inspect, check and measure
models too.
"""

EXAMPLES = """\
examples:
  moeflux chat                                  talk with the built-in model
  moeflux run /ssd/a3b -p "Why is the sky blue?" --stats
  moeflux serve /ssd/a3b                        let clients of OpenAI's and Anthropic's interfaces ask
  moeflux launch claude /ssd/a3b                an agent that asks it
  moeflux models                                what is downloaded, what is known, and whether it runs here
  moeflux info                                  this machine
  moeflux info Qwen3.6-35B-A3B                  what a known model costs, before any download
  moeflux info ~/models/Qwen3.6-35B-A3B-4bit    what a folder holds
  moeflux plan /ssd/a3b --memory 8GB            where every byte would go, and how fast it would run
  moeflux synth /tmp/tiny --variant a3b --layers 4 --experts 16 --vocab 1024
  moeflux verify /tmp/tiny
  moeflux convert ~/models/Qwen3.6-35B-A3B /ssd/a3b --bits 4
  moeflux doctor /ssd                           what this disk can do, and the settings that follow
  moeflux bench /ssd/a3b --expert-slots 2560    how fast a model runs here
  moeflux trace /ssd/a3b -o run.trace
  moeflux replay run.trace

defaults of flags: ~/.config/moeflux/config.ini, if it is there, or the file that MOEFLUX_CONFIG names.
units: kB, MB and GB are powers of 1000, as on the label of a disk. --json prints exact bytes.
exit status: 0 done, 1 verify found a fault, 2 a wrong call or a bad file (one sentence on stderr), 130 Ctrl-C.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status. User errors are a sentence on stderr, never a traceback."""
    command = ""
    try:
        parser = _parser()
        words = sys.argv[1:] if argv is None else argv
        if not words:
            parser.print_help(sys.stderr)
            return 2
        if words[0] in parser.commands and (defaults := defaults_file()) is not None:
            apply_defaults(parser.commands, defaults)
        try:
            arguments = parser.parse_args(argv)
            command = arguments.command
            status: int = arguments.run(arguments)
        except SystemExit as stop:  # argparse has printed the help, the version or the error
            status = int(stop.code or 0)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _fail(command, "interrupted", 130)
    except BrokenPipeError:
        # The reader of the pipe has closed it, as `head` does.
        _write_no_more()
        return 141
    except Error as error:
        _stdout_failure()
        return _fail(command, str(error), 2)
    except OSError as error:
        lost = _stdout_failure()
        nameless = lost or error.strerror or str(error)
        return _fail(command, nameless if error.filename is None else str(error), 2)


def _stdout_failure() -> str:
    """Why printed text cannot be written: a full disk, a closed descriptor. After that, nothing more is written."""
    try:
        sys.stdout.flush()
        return ""
    except OSError as error:
        _write_no_more()
        return f"stdout: {error.strerror}"


def _write_no_more() -> None:
    """Without this, Python would try again at exit to write what it could not."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(command: str, sentence: str, status: int) -> int:
    name = f"moeflux {command}".rstrip()
    print(f"{name}: {' '.join(line.strip() for line in sentence.splitlines())}", file=sys.stderr)
    return status


def _version() -> str:
    return f"moeflux {__version__}, commit {__commit__}, CPU kernels for {', '.join(isas())}"


def _parser() -> Parser:
    parser = Parser(prog="moeflux", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument(
        "--version", action="version", version=_version(), help="print version, commit and CPU kernels, and stop"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for group in (write, serve, look, make, measure, routing, completion):
        group.add(commands)
    parser.commands = commands.choices
    return parser
