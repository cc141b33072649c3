"""The process of a replica: a model of its own, with its scheduler, which answers as the server would."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

from moeflux.cluster.host import version
from moeflux.errors import Error, StateError
from moeflux.model import Model, load
from moeflux.runtime.options import LoadOptions
from moeflux.serve.app import answering
from moeflux.serve.desk import Desk
from moeflux.serve.passing import Asked, Item, answered
from moeflux.serve.scheduling import Scheduled, with_room
from moeflux.serve.server import TURN_SECONDS
from moeflux.serving import Scheduler

__all__ = ["Given", "Replica"]


@dataclass(frozen=True)
class Given:
    """What all replicas are made with."""

    path: str  # of the model, the same everywhere
    options: LoadOptions
    fingerprint: str
    version: str
    name: str  # of the model, for clients
    waiting: int
    disk: str | None
    disk_quota: int | str
    idle_seconds: float


class Replica:
    """Ray Serve makes it, asks it, and ends it."""

    def __init__(self, given: Given) -> None:
        where = f"replica on {socket.gethostname()}"
        if version() != given.version:
            raise StateError(f"{where}: version: expected {given.version}, found {version()}")
        sys.setswitchinterval(min(sys.getswitchinterval(), TURN_SECONDS))

        def loaded(sessions: int | None) -> Model:
            options: LoadOptions = given.options if sessions is None else {**given.options, "sessions": sessions}
            return load(given.path, **options)

        try:
            self._model = with_room(loaded, given.options.get("sessions"))
        except Error as error:
            error.args = (f"{where}: {error}",)
            raise
        if self._model.fingerprint != given.fingerprint:
            found = self._model.fingerprint
            self._model.close()
            raise StateError(f"{where}: model: expected {given.fingerprint}, found {found}")
        self._scheduler = Scheduler(
            self._model,
            waiting=given.waiting,
            disk=None if given.disk is None else Path(given.disk),
            disk_quota=given.disk_quota,
            idle_seconds=given.idle_seconds,
        )
        desk = Desk(self._model, Scheduled(self._scheduler), given.name, self._model.plan.context)
        self._app = answering(desk)
        _bind_to_loopback()
        gc.collect()
        gc.freeze()

    async def answer(self, asked: Asked) -> AsyncGenerator[Item | None, None]:
        """Says that it has begun, and at last that nothing is missing, each by None: for Ray, what a process has said
        that ends is sometimes an answer that ends."""
        yield None
        async for item in answered(self._app, asked):
            yield item
        yield None

    async def say(self, path: str) -> tuple[str, bytes]:
        """Its name, and what it answers at a path that takes nothing."""
        parts = [item async for item in answered(self._app, Asked("GET", path, b"", b"", b"", "", ""))]
        return _rank(), b"".join(part for part in parts if isinstance(part, bytes))

    def plan(self) -> str:
        return str(self._model.plan)

    def check_health(self) -> None:
        """Ray Serve starts another one in place of one that raises."""
        if self._scheduler.closed:
            raise StateError("replica: expected a scheduler that takes requests, found it closed")

    async def __del__(self) -> None:
        """When Ray Serve ends it in peace: what is accepted is finished, and states go to the disk."""
        if hasattr(self, "_scheduler"):
            await asyncio.to_thread(self._scheduler.close)
            self._model.close()


def _rank() -> str:
    from ray import serve

    return str(serve.get_replica_context().rank.rank)


def _bind_to_loopback() -> None:
    """Ray Serve's replicas listen at all addresses for each other, without asking who calls. Calls of ours come as
    those of actors, so it is enough that this machine gets there. This process listens as soon as it is made."""
    from ray.serve._private import replica

    listen = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: listen(server, "127.0.0.1:0")
