"""The scheduler that there is, in the words of the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moeflux.errors import BudgetError
from moeflux.model import Model
from moeflux.serving import Handle, Request, Scheduler

__all__ = ["Scheduled", "with_room"]

SESSIONS = (4, 2)
"""The first of them that there is memory for, else one."""


def with_room(load: Callable[[int | None], Model], asked: int | None) -> Model:
    """A model that is loaded for as many sessions as asked, or for several as far as there is memory."""
    for sessions in SESSIONS if asked is None else ():
        try:
            return load(sessions)
        except BudgetError:
            continue
    return load(asked)


class Scheduled:
    """What protocols.py calls a Scheduler. The scheduler stays with whoever made it, who closes it too."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._closing = False

    def submit(self, **fields: Any) -> Handle:
        return self._scheduler.submit(Request(**fields))

    @property
    def numbers(self) -> dict[str, Any]:
        return self._scheduler.stats.to_dict()

    @property
    def closed(self) -> bool:
        return self._closing or self._scheduler.closed

    def close(self, drain: bool = True) -> None:
        self._closing = True
        self._scheduler.close(drain)
