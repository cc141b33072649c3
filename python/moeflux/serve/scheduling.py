"""The scheduler that there is, in the words of the server."""

from __future__ import annotations

from typing import Any

from moeflux.serving import Handle, Request, Scheduler

__all__ = ["Scheduled"]


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
