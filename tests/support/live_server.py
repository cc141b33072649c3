"""A server that listens on the loopback, in a thread of the test's own process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from moeflux.model import Model
from moeflux.serve.app import application
from moeflux.serve.desk import Desk
from moeflux.serve.exchange import Pace
from moeflux.serve.fields import LIMITS, Limits
from moeflux.serve.guard import Rules
from moeflux.serve.protocols import Scheduler
from moeflux.serve.wire import Http
from support.stand_in_scheduler import StandIn

__all__ = ["Live", "live"]


class Live:
    def __init__(self, url: str, scheduler: StandIn, desk: Desk) -> None:
        self.url = url
        self.scheduler = scheduler
        self.desk = desk


@contextmanager
def live(
    model: Model,
    *,
    rules: Rules | None = None,
    pace: Pace | None = None,
    limits: Limits = LIMITS,
    waiting: int = 256,
    scheduled: Scheduler | None = None,
) -> Iterator[Live]:
    """With the scheduler that is given, or one that stands in for it."""
    scheduler: Any = StandIn(model, waiting=waiting) if scheduled is None else scheduled
    context = model.plan.context
    desk = Desk(model, scheduler, "builtin", context, limits)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(
            application(desk, rules, pace), log_level="critical", http=Http, ws="none", timeout_graceful_shutdown=5
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        try:
            yield Live(f"http://127.0.0.1:{listening.getsockname()[1]}", scheduler, desk)
        finally:
            if scheduled is None:
                scheduler.hold.set()
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
