"""Commands that write text: `run`, `chat`."""

from __future__ import annotations

import argparse
import io
import sys

from moeflux.cli.arguments import (
    COUNT,
    MODEL_HELP,
    PROMPT_HINT,
    Commands,
    Parser,
    add_devices,
    add_loading,
    add_sampling,
    command,
    load_model,
    sampling_options,
    whole_number,
)

__all__ = ["add"]

RUN_HELP = "answer one prompt, with the built-in model if none is given"
RUN = """\
Gives a prompt to a model and prints what it writes, as it comes. A model with a chat template gets the prompt as a
user's message, in the form of the template. With --raw, or without a template, the model continues the text where it
stops. Only the answer goes to stdout; thoughts, progress and figures go to stderr.

examples:
  moeflux run -p "What is the capital of France?"
  moeflux run --raw -p "Once upon a time, there was a little fox who" --stats
  moeflux run /ssd/a3b -f question.txt --temperature 0 > answer.txt
  git diff | moeflux run /ssd/a3b --system "Write a commit message for this change."
  moeflux run mlx-community/Qwen3.6-35B-A3B-4bit -p "Why is the sky blue?" --thinking off
  moeflux run -p "Name two colors." --json
"""

CHAT_HELP = "talk with a model, the built-in one if none is given"
CHAT = """\
Holds a conversation in the terminal. What was said stays evaluated, so a question costs only its own tokens, not those
of the whole conversation. Ctrl-C stops an answer, Ctrl-D ends the program, and /help lists what else you can type.
/save keeps the conversation with the state of the model, and /load continues it at once, even on another day. Without a
terminal, each line of the input is a question.

examples:
  moeflux chat
  moeflux chat /ssd/a3b --system "Answer in one sentence."
  moeflux chat /ssd/a3b --load talk.moeflux
  moeflux chat mlx-community/Qwen3.6-35B-A3B-4bit --thinking off
"""


def add(commands: Commands) -> None:
    _add_run(command(commands, "run", _run, RUN_HELP, RUN))
    _add_chat(command(commands, "chat", _chat, CHAT_HELP, CHAT))


# ---- What both share --------------------------------------------------------------------------------------------


def _add_writing(parser: Parser, default_tokens: str) -> None:
    parser.add_argument("--system", metavar="TEXT", help="instructions that precede the conversation")
    parser.add_argument(
        "--thinking", choices=("on", "off"), help="think before the answer, where the template lets one choose"
    )
    parser.add_argument(
        "--reasoning-effort", choices=("low", "medium", "high"), help="how long to think, where the template has it"
    )
    parser.add_argument(
        "-n", "--max-tokens", type=whole_number(), metavar="N", help=f"tokens of an answer; default: {default_tokens}"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="text that ends an answer; may be repeated"
    )
    parser.add_argument("--stats", action="store_true", help="print to stderr what an answer cost")
    add_sampling(parser, "those of the model's generation_config.json, and a new seed each time")
    add_devices(parser)
    add_loading(parser)


def _thinking(arguments: argparse.Namespace) -> bool | None:
    return None if arguments.thinking is None else arguments.thinking == "on"


def _utf8() -> None:
    """Text in pipes is UTF-8, whatever the locale. What a terminal cannot show becomes a question mark there."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


# ---- run --------------------------------------------------------------------------------------------------------


def _add_run(command: Parser) -> None:
    command.surplus = PROMPT_HINT
    command.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    prompt = command.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; without -p and -f it comes from stdin")
    prompt.add_argument("-f", "--file", metavar="FILE", help="file with the prompt; - is stdin")
    command.add_argument("--raw", action="store_true", help="continue the text as it is, without a chat template")
    command.add_argument(
        "--json", action="store_true", help="one line of JSON per token, and one with everything at the end"
    )
    command.add_argument(
        "--logprobs",
        type=COUNT,
        metavar="N",
        help="with --json: log-probabilities of each token and of the N likeliest",
    )
    _add_writing(command, "512")


def _run(arguments: argparse.Namespace) -> int:
    from moeflux.cli.run import Options, read_prompt, run

    _utf8()
    _check_run(arguments)
    # What is typed or piped comes last: nobody writes a prompt for a model that cannot be loaded.
    comes_later = arguments.prompt is None and arguments.file in (None, "-")
    prompt = None if comes_later else read_prompt(arguments.prompt, arguments.file)
    model = load_model(arguments.model, arguments)
    if prompt is None:
        prompt = read_prompt(None, arguments.file)
    options = Options(
        raw=arguments.raw,
        system=arguments.system,
        thinking=_thinking(arguments),
        reasoning_effort=arguments.reasoning_effort,
        as_json=arguments.json,
        stats=arguments.stats,
    )
    generation = {
        "max_tokens": arguments.max_tokens or 512,
        "stop": arguments.stop,
        "logprobs": arguments.logprobs,
        **sampling_options(arguments),
    }
    return run(model, prompt, options, generation)


def _check_run(arguments: argparse.Namespace) -> None:
    """Refuses what can be known to be wrong before anything is read."""
    from moeflux.errors import ArgumentError, IoError
    from moeflux.models.hub import check_name

    try:
        check_name(arguments.model)
    except IoError as error:
        if arguments.prompt is not None or arguments.file is not None:
            raise
        raise IoError(f"{error}{PROMPT_HINT}") from error
    if arguments.logprobs is not None and not arguments.json:
        raise ArgumentError("--logprobs: expected --json with it, which prints them")


# ---- chat -------------------------------------------------------------------------------------------------------


def _add_chat(command: Parser) -> None:
    command.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    command.add_argument("--load", metavar="FILE", help="continue a conversation that /save kept")
    _add_writing(command, "until it ends by itself")


def _chat(arguments: argparse.Namespace) -> int:
    from moeflux.cli.terminal_chat import TerminalChat

    _utf8()
    model = load_model(arguments.model, arguments)
    talk = model.chat(system=arguments.system, thinking=_thinking(arguments))
    if arguments.reasoning_effort is not None:
        talk.reasoning_effort = arguments.reasoning_effort
    settings = {"max_tokens": arguments.max_tokens, "stop": arguments.stop, **sampling_options(arguments)}
    given = {name: value for name, value in settings.items() if value not in (None, [])}
    chat = TerminalChat(talk, given, arguments.stats)
    if arguments.load is not None:
        chat.load(arguments.load)
    return chat.run()
