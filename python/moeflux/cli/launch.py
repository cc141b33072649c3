"""Starting an agent beside a server: what each of them must be told, and a server if there is none."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeflux import files
from moeflux.errors import ArgumentError, FormatError, IoError, NotFoundError

__all__ = ["AGENTS", "Agent", "Served", "launch"]

USUAL_BEGINNING = 16384
"""Tokens. What agents send before the user has said anything, and a little."""
PATIENCE = 10.0
"""Seconds for an answer of a server that has nothing to do for it."""


@dataclass(frozen=True)
class Served:
    """A server, as an agent is told of it."""

    url: str
    name: str
    context: int
    key: str


@dataclass(frozen=True)
class Agent:
    program: str
    package: str  # of npm
    words: Callable[[Served], list[str]]  # before those of the user
    environment: Callable[[Served], dict[str, str | None]]  # None: taken out


def _claude_environment(served: Served) -> dict[str, str | None]:
    return {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        "ANTHROPIC_API_KEY": None,
        "ANTHROPIC_MODEL": served.name,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _codex_words(served: Served) -> list[str]:
    provider = {
        "name": "moeflux",
        "base_url": f"{served.url}/v1",
        "wire_api": "responses",
        "env_key": "MOEFLUX_API_KEY",
    }
    values = {"model": served.name, "model_provider": "moeflux", "model_context_window": served.context}
    values |= {f"model_providers.moeflux.{name}": value for name, value in provider.items()}
    return [word for name, value in values.items() for word in ("-c", f"{name}={json.dumps(value)}")]


def _opencode_environment(served: Served) -> dict[str, str | None]:
    limit = {"context": served.context, "output": min(served.context // 4, 32768)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "moeflux",
        "options": {"baseURL": f"{served.url}/v1", "apiKey": served.key},
        "models": {served.name: {"name": served.name, "limit": limit}},
    }
    config = {"provider": {"moeflux": provider}, "model": f"moeflux/{served.name}"}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


AGENTS = {
    "claude": Agent("claude", "@anthropic-ai/claude-code", lambda served: [], _claude_environment),
    "codex": Agent("codex", "@openai/codex", _codex_words, lambda served: {"MOEFLUX_API_KEY": served.key}),
    "opencode": Agent("opencode", "opencode-ai", lambda served: [], _opencode_environment),
}


def launch(
    agent: Agent, port: int, key_file: str | None, wanted: str | None, server: Sequence[str], words: Sequence[str]
) -> int:
    """Returns the agent's status. `wanted` is the name of the model that a server should have; `server` are the words
    of moeflux that start one."""
    program = shutil.which(agent.program)
    if program is None:
        raise NotFoundError(f"{agent.program}: expected it to be installed, found none: npm install -g {agent.package}")
    if port == 0:
        raise ArgumentError("--port: expected the port of a server, found 0")
    url, key = f"http://127.0.0.1:{port}", _first_key(key_file)
    served = find(url, key)
    if served is not None:
        if wanted not in (None, served.name):
            raise ArgumentError(
                f"{url}: expected a server of {wanted}, found one of {served.name}; --port names another"
            )
        return _run(agent, program, served, words)
    more = ["--port", str(port), *([] if key_file is None else ["--api-key-file", key_file])]
    with _server([*server, *more], url, key) as served:
        return _run(agent, program, served, words)


def _first_key(path: str | None) -> str:
    if path is None:
        return "x"
    from moeflux.serve.server import keys_in

    return keys_in(path)[0]


def find(url: str, key: str) -> Served | None:
    """The server at an address; None when nothing listens there. IoError for one that is not ours, or takes no such
    key."""
    ask = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(ask, timeout=PATIENCE) as answer:
            body = files.parse_json(answer.read(1 << 20), url)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 401:
                raise IoError(f"{url}: expected a key of this server; --api-key-file has them") from error
        raise _another(url) from error
    except (http.client.HTTPException, FormatError) as error:
        raise _another(url) from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            return None
        raise IoError(f"{url}: expected an answer, found: {error.reason}") from error
    except OSError as error:
        raise IoError(f"{url}: expected an answer, found: {error}") from error
    return _served(body, url, key)


def _served(body: Any, url: str, key: str) -> Served:
    try:
        (model,) = body["data"]
        if model["owned_by"] == "moeflux":
            return Served(url, str(model["id"]), int(model["context_window"]), key)
    except (KeyError, TypeError, ValueError):
        pass
    raise _another(url)


def _another(url: str) -> IoError:
    return IoError(f"{url}: expected a server of moeflux, found another program; --port names another")


@contextmanager
def _server(words: Sequence[str], url: str, key: str) -> Generator[Served, None, None]:
    """One of our own, until the `with` ends. What it prints goes to a file: the terminal is the agent's."""
    from moeflux.machine.remembered import cache_folder

    log = cache_folder() / "launch.log"
    files.make_folder(log.parent)
    files.remove(log)
    descriptor = files.open_to_write(log)
    print(f"starting moeflux {' '.join(words)} (it writes to {log})", file=sys.stderr, flush=True)
    try:  # in a session of its own, so that a Ctrl-C in the agent is the agent's alone
        server = subprocess.Popen(
            [sys.executable, "-m", "moeflux", *words],
            stdin=subprocess.DEVNULL, stdout=descriptor, stderr=descriptor, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(descriptor)
    with server:
        try:
            yield _ready(server, log, url, key)
        finally:
            server.terminate()


def _ready(server: subprocess.Popen[bytes], log: Path, url: str, key: str) -> Served:
    """Waits as long as loading takes. It listens before that, and answers after it."""
    while server.poll() is None:
        if "\nready: " in files.read_text(log):
            served = find(url, key)
            if served is not None:
                return served
        time.sleep(0.05)
    said = files.read_text(log).splitlines()
    raise IoError(f"the server: expected it to start, found: {said[-1] if said else 'no word of it'}")


def _past_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """No proxy can reach this machine's own address. Some programs read the name in capitals, some the other."""
    own = {name: environment.get(name, "") for name in ("NO_PROXY", "no_proxy")}
    known = own["NO_PROXY"] or own["no_proxy"]
    return {name: ",".join(filter(None, (value or known, "127.0.0.1"))) for name, value in own.items()}


def _run(agent: Agent, program: str, served: Served, words: Sequence[str]) -> int:
    if served.context < USUAL_BEGINNING:
        print(
            f"the context of {served.name} has {served.context} tokens, and agents begin with about 10000: "
            "expect it to refuse them",
            file=sys.stderr,
            flush=True,
        )
    environment: Mapping[str, str | None] = {**os.environ, **_past_proxies(os.environ), **agent.environment(served)}
    given = {name: value for name, value in environment.items() if value is not None}
    before = signal.signal(signal.SIGINT, lambda number, frame: None)  # of the agent, which gets it too
    try:
        status = subprocess.run([program, *agent.words(served), *words], env=given, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)
    return status if status >= 0 else 128 - status
