"""How often the routers have picked each expert, for whoever looks.

The engine is a little slower while it counts, because the host has to see what was picked in each layer of a step. So
counting begins with the first look, and ends some seconds after the last one.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

from moeflux.errors import StateError
from moeflux.serve.protocols import ServedModel

__all__ = ["Watch"]

PATIENCE = 10.0


class Watch:
    def __init__(self, model: ServedModel, patience: float = PATIENCE) -> None:
        self._counting = model.count_experts()
        self._patience = patience
        self._lock = threading.Lock()
        self._under_way = ExitStack()
        self._end: float | None = None  # when it ends; None: nothing is counted now
        self._closed = False

    @property
    def counts_now(self) -> bool:
        return self._end is not None

    def look(self) -> dict[str, Any]:
        """What was counted in all, in any look's time: a difference of two tells what was picked between them. It may
        wait for the step under way."""
        with self._lock:
            if self._end is None and not self._closed:
                self._begin()
            if self._end is not None:
                self._end = time.monotonic() + self._patience
        return {"layers": self._counting.layers, "counts": self._counting.counts().tolist()}

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._stop()

    def _begin(self) -> None:
        try:
            self._under_way.enter_context(self._counting)
        except StateError:
            return  # somebody records the routing, and a model tells one at a time
        self._end = time.monotonic() + self._patience
        self._wait(self._patience)

    def _wait(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._end_or_wait)
        timer.daemon = True
        timer.start()

    def _end_or_wait(self) -> None:
        with self._lock:
            if self._end is None:
                return
            left = self._end - time.monotonic()
            if left > 0:
                self._wait(left)
            else:
                self._stop()

    def _stop(self) -> None:
        if self._end is not None:
            self._under_way.close()
            self._end = None
