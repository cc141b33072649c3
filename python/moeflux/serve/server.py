"""Listening: the address, the keys, and what is printed when the server is ready."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from moeflux import files
from moeflux.errors import ArgumentError, FormatError, IoError
from moeflux.serve.guard import LOOPBACK, Rules, check_address, is_loopback
from moeflux.serve.wire import Http

__all__ = ["Closing", "Listen", "keys_in", "listening", "made", "ready_lines", "run"]

LONGEST_KEY = 512
DRAIN_SECONDS = 600
TURN_SECONDS = 0.0005
"""How long a thread may keep Python's lock while another asks for it. With Python's own 5 ms, the end of a step would
wait as long as two steps of a small model take whenever a request is read."""
MOST_CONNECTIONS = 1024


@dataclass(frozen=True)
class Listen:
    host: str = "127.0.0.1"
    port: int = 8080  # 0: one that is free
    keys: Sequence[str] = ()
    insecure: bool = False  # another address than the loopback without a key
    allow_hosts: Sequence[str] = ()
    allow_origins: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_address(self.host, self.keys, self.insecure)
        if isinstance(self.port, bool) or not 0 <= self.port < 1 << 16:
            raise ArgumentError(f"port: expected 0 to 65535, found {self.port}")

    @property
    def rules(self) -> Rules:
        own = () if is_loopback(self.host) else (self.host.lower(),)
        hosts = frozenset({*LOOPBACK, *own, *(each.lower() for each in self.allow_hosts)})
        return Rules(hosts, tuple(self.allow_origins), tuple(self.keys))


def keys_in(path: str | Path) -> tuple[str, ...]:
    """One key a line. Lines that are empty or begin with # are none."""
    lines = [line.strip() for line in files.read_text(path).splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise FormatError(f"{path}: expected a key in it, found none")
    for number, key in enumerate(keys, 1):
        if not (8 <= len(key) <= LONGEST_KEY and key.isascii() and key.isprintable()):
            raise FormatError(
                f"{path}: expected keys of 8 to {LONGEST_KEY} printable ASCII characters, found another: key {number}"
            )
    return keys


def ready_lines(url: str, name: str, with_key: bool = False) -> list[str]:
    """How to ask: with curl, from Python, as an agent. A key is taken from the variable KEY of the shell."""
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    header, key, token = (
        (' -H "Authorization: Bearer $KEY"', 'import os; key = os.environ["KEY"]', '"$KEY"')
        if with_key
        else ("", 'key = "x"', "x")
    )
    return [
        f"curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' -d '{body}'",
        f"python -c 'from openai import OpenAI; {key}; "
        f'print(OpenAI(base_url="{url}/v1", api_key=key).responses.create(model="{name}", input="Hello")'
        ".output_text)'",
        f"ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={token} ANTHROPIC_MODEL={name} claude",
    ]


def listening(listen: Listen) -> socket.socket:
    """From now on clients may come; they wait until `run` answers. IoError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    try:
        return socket.create_server((listen.host, listen.port), family=family)
    except (OSError, UnicodeError) as error:
        raise IoError(
            f"{listen.host}:{listen.port}: expected an address to listen at, found: {getattr(error, 'strerror', error)}"
        ) from error


class Closing(Protocol):
    """What takes requests, and is closed before the doors are."""

    def close(self, drain: bool = True) -> None: ...


class _Server(uvicorn.Server):
    """Told to end, it finishes what it has, and tells so whoever asks meanwhile. Only then are its doors closed: who
    finds them closed cannot know whether the server is gone or never was there."""

    def __init__(self, config: uvicorn.Config, closing: Closing) -> None:
        super().__init__(config)
        self._closing = closing

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, TURN_SECONDS))
        gc.collect()
        gc.freeze()  # or each full collection goes through what was imported: 20 ms in which nobody has Python
        try:
            await super().serve(sockets)
        finally:
            gc.unfreeze()
            sys.setswitchinterval(before)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.ensure_future(asyncio.to_thread(self._closing.close))
        end = time.monotonic() + DRAIN_SECONDS
        while not (draining.done() or self.force_exit or time.monotonic() > end):
            await asyncio.wait((draining,), timeout=0.1)
        if not draining.done():
            await asyncio.to_thread(self._closing.close, False)
        await draining
        await super().shutdown(sockets)


def made(app: ASGIApp, closing: Closing) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # its lines would have paths and addresses of clients
        server_header=False,
        http=Http,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=DRAIN_SECONDS,
        limit_concurrency=MOST_CONNECTIONS,
    )
    return _Server(config, closing)


def run(app: ASGIApp, closing: Closing, name: str, listen: Listen, at: socket.socket) -> int:
    """Serves until SIGTERM or Ctrl-C; then what was accepted is finished. Returns the exit status."""
    url = _url(*at.getsockname()[:2])
    for line in (f"ready: {url}", *ready_lines(url, name, bool(listen.keys))):
        print(line, file=sys.stderr, flush=True)
    with at:
        made(app, closing).run(sockets=[at])
    return 0


def _url(host: str, port: int) -> str:
    """Where this machine finds the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
