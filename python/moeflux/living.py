"""Objects that somebody still uses, each with a value."""

from __future__ import annotations

import threading
import weakref
from typing import Generic, TypeVar

__all__ = ["Living"]

Key = TypeVar("Key")
Value = TypeVar("Value")


class Living(Generic[Key, Value]):
    """Keeps no object alive. May be used by any number of threads, unlike the collections of `weakref`: before Python
    3.14, those raise RuntimeError where one thread adds while another goes through them."""

    def __init__(self) -> None:
        # The end of an object, which may come while the lock is held, may be the end of another's owner.
        self._lock = threading.RLock()
        self._all: dict[int, tuple[weakref.ref[Key], Value]] = {}

    def add(self, key: Key, value: Value) -> None:
        with self._lock:
            gone = [place for place, (each, _) in self._all.items() if each() is None]
            for place in gone:
                del self._all[place]
            self._all[id(key)] = weakref.ref(key), value

    def items(self) -> list[tuple[Key, Value]]:
        """Those that there are now, the first added first."""
        with self._lock:
            everything = list(self._all.values())
        return [(key, value) for each, value in everything if (key := each()) is not None]
