"""Commands that let other programs ask: `serve`, `launch`."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from moeflux import files
from moeflux.cli.arguments import (
    COUNT,
    MODEL_HELP,
    Commands,
    Parser,
    add_loading,
    add_machines,
    command,
    load_model,
    load_options,
    whole_number,
)
from moeflux.errors import ArgumentError, NotFoundError

if TYPE_CHECKING:
    from moeflux.model import Model
    from moeflux.serve.server import Listen

__all__ = ["add"]

SERVE_HELP = "answer the clients of OpenAI's and Anthropic's interfaces over HTTP"
SERVE = """\
Loads a model and answers on an address of this machine, in the interfaces of OpenAI (chat completions, completions,
responses) and Anthropic (messages), so that their clients and agents need nothing but the address. It prints the plan
of its memory, and three lines to try. Requests are answered side by side, and what prompts have in common is read once;
states that nobody used for a while go to a folder on the disk, and are found there after a restart. Only this machine
is served, unless there is a key. Ctrl-C or SIGTERM: what was accepted is finished, and nothing more is taken. It needs
pip install "moeflux[serve]". docs/serve.md has every path and field.

examples:
  moeflux serve                                              the built-in model, at http://127.0.0.1:8080
  moeflux serve /ssd/a3b --memory 12GB --context 65536 --sessions 2
  moeflux serve /ssd/a3b --port 9000 --disk /ssd/states --disk-quota 50GB
  moeflux serve /ssd/a3b --host 0.0.0.0 --allow-host box.example --api-key-file keys
  moeflux serve /ssd/a3b --allow-origin https://chat.example
  moeflux serve /ssd/kimi --machines machines.json           its layers on several machines
  moeflux serve /ssd/a3b --replicas 2 --ray 10.0.0.1:6379 --memory 56GB      the whole model on each of two
"""

LAUNCH_HELP = "start an agent (claude, codex, opencode) that asks a model of this machine"
LAUNCH = """\
Starts an agent, with what it must be told to ask a model here: its address, its name, a key. A server that listens
already is used; otherwise one is started for as long as the agent runs. Files of the agent are not touched. The agent
must be installed. Words after -- are given to it. Agents begin with about ten thousand tokens of instructions, so the
model should have a context of 32768 or more; the built-in model is too small for them.

examples:
  moeflux launch claude /ssd/a3b --memory 12GB --context 65536
  moeflux launch codex mlx-community/Qwen3.6-35B-A3B-4bit
  moeflux launch opencode                                    asks the server at port 8080
  moeflux launch claude /ssd/a3b -- -p "Explain this folder."
"""

AGENT_NAMES = ("claude", "codex", "opencode")
MODULES = ("starlette", "uvicorn", "llguidance", "prometheus_client")
UNUSUAL = re.compile(r"[^A-Za-z0-9._/:@-]+")


def add(commands: Commands) -> None:
    _add_serve(command(commands, "serve", _serve, SERVE_HELP, SERVE))
    _add_launch(command(commands, "launch", _launch, LAUNCH_HELP, LAUNCH))


def _add_address(command: Parser) -> None:
    command.add_argument("--port", type=whole_number(0, 65535), default=8080, metavar="N", help="default: 8080")
    command.add_argument(
        "--api-key-file", metavar="FILE", help="keys, one a line; then only requests with one of them are answered"
    )


def served_name(model: str | None) -> str:
    """What a server calls its model: a repository as it is, a folder without what it lies in."""
    from moeflux.models.hub import is_repository

    if model is None:
        return "builtin"
    name = model if is_repository(model) else files.resolved(files.expanded(model)).name
    return UNUSUAL.sub("-", name) or "model"


# ---- serve ------------------------------------------------------------------------------------------------------


def _add_serve(command: Parser) -> None:
    command.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    command.add_argument("--name", metavar="NAME", help="what clients see; default: the model's")
    listening = command.add_argument_group("who may ask")
    listening.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, this machine")
    _add_address(command)
    listening.add_argument("--insecure", action="store_true", help="another address than this machine's, without a key")
    listening.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a name of this server, as clients call it"
    )
    listening.add_argument(
        "--allow-origin", action="append", default=[], metavar="URL", help="a page elsewhere that may ask"
    )
    command.add_argument(
        "--waiting", type=COUNT, default=64, metavar="N", help="requests that wait, at most; default: 64"
    )
    disk = command.add_argument_group("what is kept of conversations")
    disk.add_argument("--disk", metavar="FOLDER", help="for states; default: one of your own cache")
    disk.add_argument("--no-disk", action="store_true", help="keep them in memory alone")
    disk.add_argument("--disk-quota", default="20GB", metavar="SIZE", help="bytes of that folder; default: 20GB")
    disk.add_argument(
        "--idle-seconds", type=COUNT, default=300, metavar="N", help="until a state moves there; default: 300"
    )
    add_machines(command)
    command.add_argument(
        "--replicas",
        type=whole_number(),
        metavar="N",
        help="load the model so many times, each in a process of its own",
    )
    command.add_argument(
        "--ray", metavar="ADDRESS", help="of a Ray cluster that runs, for --replicas; default: this machine alone"
    )
    add_loading(command)


def _serve(arguments: argparse.Namespace) -> int:
    _expect_extra()
    from moeflux.serve.app import application
    from moeflux.serve.desk import Desk
    from moeflux.serve.scheduling import Scheduled, with_room
    from moeflux.serve.server import Listen, keys_in, listening, run
    from moeflux.serving import Scheduler

    if arguments.no_disk and arguments.disk is not None:
        raise ArgumentError(f"--no-disk: expected no folder with it, found --disk {arguments.disk}")
    name = served_name(arguments.model) if arguments.name is None else arguments.name
    if not name or UNUSUAL.search(name):
        raise ArgumentError(f"--name: expected letters, digits and ._/:@-, found {name!r:.60}")
    listen = Listen(
        arguments.host,
        arguments.port,
        () if arguments.api_key_file is None else keys_in(arguments.api_key_file),
        arguments.insecure,
        arguments.allow_host,
        arguments.allow_origin,
    )
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    if arguments.replicas is not None or arguments.ray is not None:
        return _serve_replicas(arguments, name, listen)

    def loaded(sessions: int | None) -> Model:
        return load_model(arguments.model, argparse.Namespace(**{**vars(arguments), "sessions": sessions}))

    with listening(listen) as at, with_room(loaded, arguments.sessions) as model:
        scheduler = Scheduler(
            model,
            waiting=arguments.waiting,
            disk=_disk(arguments),
            disk_quota=arguments.disk_quota,
            idle_seconds=arguments.idle_seconds,
        )
        with scheduler:
            print(model.plan, file=sys.stderr)
            scheduled = Scheduled(scheduler)
            app = application(Desk(model, scheduled, name, model.plan.context), listen.rules)
            return run(app, scheduled, name, listen, at)


def _serve_replicas(arguments: argparse.Namespace, name: str, listen: Listen) -> int:
    from moeflux.progress import for_terminal
    from moeflux.replicas.replicas import Replicas, given_for
    from moeflux.serve.front import Door, front
    from moeflux.serve.server import listening, run

    if arguments.replicas is None:
        raise ArgumentError(f"--ray: expected --replicas with it, found {arguments.ray} alone")
    if arguments.machines is not None:
        raise ArgumentError("--replicas: expected no --machines with it: a replica has the whole model on one machine")
    from moeflux.models.hub import find_model

    disk = _disk(arguments)
    given = given_for(
        find_model(arguments.model, for_terminal(passing=True)),
        load_options(arguments),
        arguments.replicas,
        arguments.ray,
        name=name,
        waiting=arguments.waiting,
        disk=None if disk is None else str(files.resolved(disk)),
        disk_quota=arguments.disk_quota,
        idle_seconds=arguments.idle_seconds,
    )
    with listening(listen) as at, Replicas(given, arguments.replicas, arguments.ray) as replicas:
        print(replicas.described, file=sys.stderr)
        door = Door(replicas.close)
        return run(front(replicas, door, listen.rules), door, name, listen, at)


def _expect_extra() -> None:
    missing = [name for name in MODULES if find_spec(name) is None]
    if missing:
        raise NotFoundError(
            f'expected the packages of a server, found no {", ".join(missing)}: pip install "moeflux[serve]"'
        )


def _disk(arguments: argparse.Namespace) -> str | Path | None:
    from moeflux.machine.remembered import cache_folder

    if arguments.no_disk or arguments.disk is not None:
        return None if arguments.no_disk else Path(arguments.disk)
    try:
        return cache_folder() / "states"
    except RuntimeError as error:  # there is no home
        raise NotFoundError(f"--disk: expected a folder for states, or --no-disk, found: {error}") from error


# ---- launch -----------------------------------------------------------------------------------------------------


def _add_launch(command: Parser) -> None:
    command.passes_on, command.surplus = True, "; MODEL stands beside AGENT, and what is for the agent after --"
    command.add_argument("agent", metavar="AGENT", choices=AGENT_NAMES, help=", ".join(AGENT_NAMES))
    command.add_argument("model", nargs="?", metavar="MODEL", help=f"{MODEL_HELP}, or that of the server")
    _add_address(command)
    add_loading(command)


def _launch(arguments: argparse.Namespace) -> int:
    _expect_extra()
    from moeflux.cli.launch import AGENTS, launch

    options: list[str] = []
    for name, value in load_options(arguments).items():
        options += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    wanted = None if arguments.model is None else served_name(arguments.model)
    model = [] if arguments.model is None else [arguments.model]
    return launch(
        AGENTS[arguments.agent],
        arguments.port,
        arguments.api_key_file,
        wanted,
        ["serve", *model, *options],
        arguments.passed,
    )
