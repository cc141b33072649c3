"""What the command groups share: how a command is added, how a model is loaded, how a value is printed."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Iterable
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

from moeflux.runtime.options import LoadOptions, words_of

if TYPE_CHECKING:
    from moeflux.model import Model

__all__ = [
    "COUNT",
    "MODEL_HELP",
    "PROMPT_HINT",
    "SHAPE_HELP",
    "Commands",
    "Parser",
    "add_devices",
    "add_loading",
    "add_machines",
    "add_plot",
    "add_sampling",
    "check_plot",
    "command",
    "load_model",
    "load_options",
    "print_value",
    "sampling_options",
    "whole_number",
]

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


# ---- Command lines ----------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """The parser of the program, or of one command. It reports a wrong call in one line, without the whole usage."""

    surplus = ""  # what to add to the error about a word too many
    passes_on = False  # words after -- are for another program, as `passed`

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False, **options)
        self.commands: dict[str, Parser] = {}
        self._positionals.title = "arguments"
        self.add_argument("-h", "--help", action="help", help="print this and stop")

    def format_help(self) -> str:
        self.usage = self._synopsis()
        return super().format_help()

    def _synopsis(self) -> str:
        """What must be given, and in which order: the flags that may be given follow anyway, and there are dozens."""
        words = ["%(prog)s"]
        for group in self._mutually_exclusive_groups:
            if group.required:
                words.append(f"({' | '.join(map(_as_typed, group._group_actions))})")
        words += [_as_typed(action) for action in self._actions if action.option_strings and action.required]
        words.append("[options]")
        for action in self._actions:
            if not action.option_strings:
                name = str(action.metavar or action.dest)
                shapes = {"?": f"[{name}]", "*": f"[{name} ...]", argparse.PARSER: f"{name} ..."}
                words.append(shapes.get(str(action.nargs), name))
        return " ".join([*words, *(["[-- WORD ...]"] if self.passes_on else [])])

    def parse_args(self, args: Any = None, *given: Any, **named: Any) -> Any:
        arguments, rest = self.parse_known_args(args, *given, **named)
        if rest:
            command = self.commands[arguments.command]
            command.error(f"expected no more words, found {rest[0]!r:.60}{command.surplus}")
        return arguments

    def parse_known_args(self, args: Any = None, *given: Any, **named: Any) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        passed: list[str] = []
        if self.passes_on and "--" in words:
            words, passed = words[: words.index("--")], words[words.index("--") + 1 :]
        # The program's own flags stand before the command. argparse would complain of a missing word before it names a
        # wrong flag.
        own = takewhile(lambda word: word.startswith("-"), words) if self.commands else words
        for word in takewhile(lambda word: word != "--", own):
            flag, known = word.partition("=")[0], self._option_string_actions
            if flag.startswith("--") and " " not in flag and not any(name.startswith(flag) for name in known):
                self.error(f"expected a flag that --help lists, found {flag}{_nearest(flag, known)}")
        parsed, rest = super().parse_known_args(words, *given, **named)
        if self.passes_on:
            parsed.passed = passed
        return parsed, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            words = [str(choice) for choice in action.choices]
            is_command = isinstance(action, argparse._SubParsersAction)
            near = _nearest(str(value), [*words, *(self._option_string_actions if is_command else ())])
            expected = f"expected {', '.join(words)}, found {value!r:.60}{near}"
            if is_command:
                self.error(f"COMMAND: {expected}")
            raise argparse.ArgumentError(action, expected)

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # if that fails, so does the command

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")


def _as_typed(action: argparse.Action) -> str:
    return f"{action.option_strings[0]} {action.metavar}"


def _nearest(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    text: str,
) -> Parser:
    """Adds a command. `text` is paragraphs, and after a blank line the examples."""
    paragraphs, head, examples = text.partition("\n\nexamples:\n")
    parser: Parser = commands.add_parser(
        name, help=summary, description=paragraphs, epilog=f"{head.strip()}\n{examples}"
    )
    parser.set_defaults(run=run)
    return parser


MAX_SEED = (1 << 63) - 1


def whole_number(minimum: int = 1, maximum: int = (1 << 31) - 1) -> Callable[[str], int]:
    """The argument type of whole numbers from `minimum` to `maximum`."""

    def kind(text: str) -> int:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()):
            raise argparse.ArgumentTypeError(f"expected a whole number, found {text!r:.40}")
        if (text.startswith("-") and digits.strip("0")) or (len(digits) <= 20 and int(text) < minimum):
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {minimum}, found {text:.40}")
        if len(digits) > 20 or int(text) > maximum:
            raise argparse.ArgumentTypeError(f"expected a whole number of at most {maximum}, found {text:.40}")
        return int(text)

    return kind


def whole_numbers(text: str) -> list[int]:
    """The argument type of several, as 1,2,4."""
    return [whole_number()(word.strip()) for word in text.split(",")]


# ---- How tokens are chosen --------------------------------------------------------------------------------------


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, found {text!r:.40}") from None


def _bias(text: str) -> tuple[int, float]:
    id, _, value = text.partition("=")
    if not value:
        raise argparse.ArgumentTypeError(f"expected TOKEN=NUMBER, found {text!r:.40}")
    return COUNT(id), _number(value)


COUNT, SEED = whole_number(0), whole_number(0, (1 << 64) - 1)
SAMPLING: dict[str, tuple[Any, str, str]] = {
    "temperature": (_number, "T", "0: always the likeliest token; 1: as likely as the model says; above 1: wilder"),
    "top-k": (COUNT, "K", "only the K likeliest tokens; 0: all"),
    "top-p": (_number, "P", "only the likeliest tokens that together have this probability"),
    "min-p": (_number, "P", "only tokens with at least this share of the likeliest one's probability"),
    "repetition-penalty": (_number, "X", "above 1: tokens of prompt and answer become less likely; 1: no change"),
    "presence-penalty": (_number, "X", "subtracted from the logits of tokens that the answer already has"),
    "frequency-penalty": (_number, "X", "subtracted from their logits once for each time that the answer has them"),
    "seed": (SEED, "N", "the same seed and settings give the same text"),
}


def add_sampling(parser: argparse.ArgumentParser, defaults: str) -> None:
    """The fields of `Sampling`. `defaults` says what the defaults are."""
    group = parser.add_argument_group("how tokens are chosen", f"Defaults are {defaults}.")
    for name, (kind, letter, meaning) in SAMPLING.items():
        group.add_argument(f"--{name}", type=kind, metavar=letter, help=meaning)
    group.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="TOKEN=X",
        help="add X to the logit of a token id",
    )


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of `Sampling` that were given."""
    names = [name.replace("-", "_") for name in SAMPLING]
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return given | ({"logit_bias": dict(arguments.logit_bias)} if arguments.logit_bias else {})


# ---- Loading a model --------------------------------------------------------------------------------------------


LOADING = """\
These options decide how much memory the model takes and how fast it runs. Only --precision and those marked LOSSY may
change an answer.
"""
# The options of `moeflux.load` that people touch: what stands for a value, where that is no word of a few, and help.
HELP: dict[str, tuple[str | None, str]] = {
    "memory": ("SIZE", "budget of the whole process: 8GB, 8GiB, bytes; default: auto, what is free less a reserve"),
    "device_memory": ("SIZE", "budget in the memory of a GPU that has its own; default: auto, what is free there"),
    "context": ("N", "tokens that a session has room for; default: the model's limit, at most 32768"),
    "backend": (
        "NAME",
        "what computes: cpu, metal or cuda; default: auto, what MOEFLUX_BACKEND says, else a GPU that works",
    ),
    "device": ("N", "which of several GPUs, by the number that the driver gives it; default: 0"),
    "sessions": ("N", "sessions to plan room for; default: 1"),
    "threads": ("N", "threads that compute; default: one per core"),
    "expert_slots": ("N", "experts held in memory, a GPU's own if it has any; default: as many as fit"),
    "host_slots": ("N", "beside a GPU with memory of its own, experts held in the host's; default: as many as fit"),
    "readers": (
        "N",
        "threads that read experts; default: what `moeflux doctor` found best, else 4, beside a GPU up to 12",
    ),
    "chunk": ("N", "tokens in a chunk of prefill, at most; default: 512, more or less as memory allows"),
    "precision": (None, "bits of activations; auto, the default: 16 where that is faster; exact: float32"),
    "kv_dtype": (None, "type of keys and values; default: f32. LOSSY: bf16, at half the memory; q8, at a quarter"),
    "reads": (None, "how experts are read, past the page cache or through it; default: auto"),
    "cache": (None, "which expert goes when another needs its place; default: lru"),
    "look_ahead": (None, "read ahead what the next layer may need; auto, the default: while it pays"),
    "cpu_experts": (
        None,
        "compute experts in host slots on the CPU, with a GPU's bits: auto, where it is faster; default: off",
    ),
    "speculate": (
        None,
        "evaluate likely next tokens ahead: lookup, what followed before in the text; mtp, what the layer says that "
        "`convert --mtp` keeps; auto: either, as much as pays; default: off",
    ),
    "verify_reads": (None, "compare every expert that is read with its checksum"),
    "experts_per_token": ("N", "LOSSY: another number of experts than the model's own"),
}
MACHINES_HELP = "cut the layers over several machines: a file that lists them, or a number of processes here"

DEVICES_HELP = "cut the layers over several GPUs of this machine, by the numbers that the driver gives them: 0,1"


def add_loading(parser: argparse.ArgumentParser, own: str = "") -> None:
    """Adds the options of `moeflux.load` that people touch. Those that are not given are left to `load`. The command
    has an option `own` with a meaning of its own."""
    group = parser.add_argument_group("how the model is loaded", LOADING)
    for name, (metavar, meaning) in HELP.items():
        if name == own:
            continue
        flag = f"--{name.replace('_', '-')}"
        if words := words_of(name):
            group.add_argument(flag, choices=words, help=meaning)
        elif name == "verify_reads":
            group.add_argument(flag, action="store_true", help=meaning)
        else:
            kind = str if metavar in ("SIZE", "NAME") else whole_number(0 if name == "device" else 1)
            group.add_argument(flag, type=kind, metavar=metavar, help=meaning)


def add_machines(parser: argparse.ArgumentParser) -> None:
    """For commands that run, or plan, a model over several machines."""
    parser.add_argument("--machines", metavar="FILE|N", help=MACHINES_HELP)
    add_devices(parser)


def add_devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=_numbers, metavar="N,N,...", help=DEVICES_HELP)


def _numbers(text: str) -> list[int]:
    return [whole_number(0)(word) for word in text.split(",")]


def load_options(arguments: argparse.Namespace) -> LoadOptions:
    """The options that were given, for `moeflux.load(store, **load_options(arguments))`."""
    return cast("LoadOptions", {name: value for name in HELP if (value := getattr(arguments, name, None))})


MODEL_HELP = (
    "a folder (store, MLX or checkpoint), a GGUF file, a repository as owner/name, or a GGUF file of one as "
    "owner/name:Q4_K_M or owner/name/FILE.gguf; default: the built-in one"
)
SHAPE_HELP = "a folder, a GGUF file, a repository as owner/name, a config.json or a preset; default: the built-in model"
PROMPT_HINT = "; give a prompt with -p"


def load_model(name: str | None, arguments: argparse.Namespace) -> Model:
    """Loads a model, named as MODEL_HELP says, with the options that were given. Shows progress if it takes time."""
    import moeflux
    from moeflux.models.hub import find_model
    from moeflux.progress import Counting, for_terminal

    progress = for_terminal(passing=True)
    folder = find_model(name, progress)
    machines, devices = (getattr(arguments, name, None) for name in ("machines", "devices"))
    if machines is not None:
        return moeflux.load(folder, machines=machines, devices=devices, **load_options(arguments))
    with Counting(progress, "loading") as counting:
        return moeflux.load(folder, devices=devices, **load_options(arguments), on_progress=counting)


# ---- Pictures -----------------------------------------------------------------------------------------------------


def add_plot(command: Parser, what: str) -> None:
    command.add_argument("--plot", type=Path, metavar="FILE", help=f"{what} (.svg, .png or .pdf; extra `plot`)")


def check_plot(arguments: argparse.Namespace) -> None:
    """Before the work, which may take long: whether its picture can be drawn."""
    if arguments.plot:
        from moeflux.measure import plots

        plots.check_plot(arguments.plot)


# ---- Printing ---------------------------------------------------------------------------------------------------


def print_value(value: Any, as_json: bool) -> None:
    print(json.dumps(value.to_dict(), indent=2) if as_json else value)
