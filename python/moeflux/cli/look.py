"""Commands that look at models: `models`, `info`, `plan`, `verify`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from moeflux.cli.arguments import (
    SHAPE_HELP,
    Commands,
    Parser,
    add_loading,
    add_machines,
    command,
    load_options,
    print_value,
)
from moeflux.errors import ArgumentError

__all__ = ["add"]

MODELS_HELP = "which models are here, which are known by name, and whether they run on this machine"
MODELS = """\
Lists the models that were downloaded from huggingface.co, by this program or another, and those that moeflux knows by
name. Beside each stand the bytes of its weights on the disk, the least memory with which it runs, the memory with which
all of its experts stay there, and whether it runs with what is free now.

examples:
  moeflux models
  moeflux models --json
"""

INFO_HELP = "what a model is and what it costs; without a target, this machine"
INFO = """\
Prints what a model is made of, how it is stored, how many bytes it holds, how many a token touches and what is missing
from its folder. The target is a folder with weights, a config.json, a repository as owner/name (only its config is
fetched), or the name of a preset or an unambiguous part of it. The weights are packed by moeflux, MLX safetensors, or a
Hugging Face checkpoint. Of a checkpoint, it prints what converting would make of it. Without a target, it prints this
machine and the names of the presets.

examples:
  moeflux info
  moeflux info a3b --json
  moeflux info ~/models/Qwen3.6-35B-A3B-4bit
"""

PLAN_HELP = "where every byte of memory would go if a model were loaded, and how fast it would run"
PLAN = """\
Prints what loading a model with these options would take: what stays in memory all the time, what each session takes,
how many experts have a place, how many bytes each token must read from the disk and how long that would take. Nothing
is loaded. A budget is for the whole process and is never exceeded. A budget below the floor is refused, and the message
says what the floor is. Every other command that loads a model takes the same options and goes by the same plan. The
model may also be a preset, a config.json, or a repository of which only the config is fetched. Then the plan is for a
store with every matrix in one format. After `moeflux replay` of a trace of this model, the plan knows how often an
expert is found in memory. After `moeflux doctor`, it knows how fast the disk is.

examples:
  moeflux plan /ssd/a3b                                       with what is free now
  moeflux plan a3b --memory 8GB                               before any download
  moeflux plan mlx-community/Qwen3.6-35B-A3B-4bit --memory 8GB
  moeflux plan /ssd/a3b --memory 8GB --context 16384
  moeflux plan /ssd/a3b --memory 8GB --kv-dtype bf16 --sessions 4
  moeflux plan /ssd/a3b --memory 8GB --trace run.trace        with the hit rate of a recorded run
  moeflux plan /ssd/a3b --memory 8GB --json
  moeflux plan Kimi-K2.5 --machines machines.json            the layers cut over several machines
"""

VERIFY_HELP = "read a whole store again and compare every checksum"
VERIFY = """\
Reads every byte of a packed store and compares it with the checksums in its moeflux.json. It names each part that is
not what was written: file, tensor, layer, expert. If a file is missing or has a wrong length, it says only that, and
reads nothing. The exit status is 0 if everything agrees and 1 if something does not. A folder without moeflux.json has
no checksums. Then the command checks names, shapes and sizes, and the report says so.

examples:
  moeflux verify /ssd/a3b
  moeflux verify /ssd/a3b --json
"""


def add(commands: Commands) -> None:
    _add_models(command(commands, "models", _models, MODELS_HELP, MODELS))
    _add_info(command(commands, "info", _info, INFO_HELP, INFO))
    _add_plan(command(commands, "plan", _plan, PLAN_HELP, PLAN))
    _add_verify(command(commands, "verify", _verify, VERIFY_HELP, VERIFY))


# ---- models -----------------------------------------------------------------------------------------------------


def _add_models(command: Parser) -> None:
    command.add_argument("--json", action="store_true", help="everything as JSON, sizes in exact bytes")


def _models(arguments: argparse.Namespace) -> int:
    from moeflux.measure.known import known_models

    print_value(known_models(), arguments.json)
    return 0


# ---- info -------------------------------------------------------------------------------------------------------


def _add_info(command: Parser) -> None:
    command.add_argument(
        "target",
        nargs="?",
        metavar="MODEL",
        help="a folder, a GGUF file, a config.json, a repository as owner/name or a preset; default: this machine",
    )
    command.add_argument("--json", action="store_true", help="everything as JSON, sizes in exact bytes")


def _info(arguments: argparse.Namespace) -> int:
    if arguments.target is None:
        from moeflux.machine.machine import this_machine

        print_value(this_machine(), arguments.json)
        return 0
    from moeflux.measure.info import describe

    print_value(describe(arguments.target), arguments.json)
    return 0


# ---- plan -------------------------------------------------------------------------------------------------------


def _add_plan(command: Parser) -> None:
    command.add_argument("model", nargs="?", metavar="MODEL", help=SHAPE_HELP)
    command.add_argument(
        "--trace", type=Path, metavar="FILE", help="a trace that `moeflux trace` wrote; the plan takes its hit rate"
    )
    command.add_argument("--json", action="store_true", help="everything as JSON, sizes in exact bytes")
    add_machines(command)
    add_loading(command)


def _plan(arguments: argparse.Namespace) -> int:
    from moeflux.routing.trace import Trace
    from moeflux.runtime.plan import plan

    if arguments.machines is not None or arguments.devices is not None:
        from moeflux.cluster.cards import machines_of_cards
        from moeflux.cluster.plan import cluster_plan

        machines = arguments.machines if arguments.devices is None else machines_of_cards(arguments.devices)
        if arguments.trace is not None:
            raise ArgumentError("--trace: expected none with --machines and --devices, found one: it is of one GPU")
        print_value(cluster_plan(arguments.model, machines, **load_options(arguments)), arguments.json)
        return 0
    trace = None if arguments.trace is None else Trace.load(arguments.trace)
    print_value(plan(arguments.model, trace=trace, **load_options(arguments)), arguments.json)
    return 0


# ---- verify -----------------------------------------------------------------------------------------------------


def _add_verify(command: Parser) -> None:
    command.add_argument("store", type=Path, metavar="STORE", help="folder of a packed store")
    command.add_argument(
        "--experts", type=Path, metavar="FOLDER", help="folder with the layer files, if it is not the default one"
    )
    command.add_argument("--json", action="store_true", help="everything as JSON, sizes in exact bytes")


def _verify(arguments: argparse.Namespace) -> int:
    from moeflux.conversion.verify import verify
    from moeflux.progress import for_terminal

    report = verify(arguments.store, experts=arguments.experts, progress=for_terminal())
    if arguments.json:
        print(json.dumps({"ok": report.ok, **dataclasses.asdict(report)}, indent=2, default=str))
    else:
        print(report)
    return 0 if report.ok else 1
