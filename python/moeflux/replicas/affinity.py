"""Which replica a request goes to: where least must be read, and where not too many answers are made already."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from moeflux.serve.places import Place

__all__ = ["Affinity"]

MOST = 1 << 16
"""Places that are remembered."""
WEIGHT = 4096
"""Characters to read that weigh as much as one answer more beside one's own."""
EARLY = 256


class Affinity:
    """What one router remembers. Of one thread."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._where: OrderedDict[str, set[str]] = OrderedDict()  # the replicas that have been at a place
        self._at: dict[str, str] = {}  # requests under way, and where
        self._early: deque[str] = deque(maxlen=EARLY)  # that were over before it was known that they began
        self._turns: dict[str, int] = {}  # when a replica was last chosen
        self._count = 0

    def order(self, replicas: Sequence[str], places: Sequence[Place]) -> list[str]:
        """The best first. Among equals, that which was not chosen for longest."""
        known = dict.fromkeys(replicas, 0)
        for digest, count in places:
            for replica in self._where.get(digest, ()):
                if replica in known:
                    known[replica] = count
        load = dict.fromkeys(replicas, 0)
        for replica in self._at.values():
            if replica in load:
                load[replica] += 1
        whole = places[-1][1] if places else 0

        def cost(replica: str) -> tuple[int, int]:
            return whole - known[replica] + WEIGHT * load[replica], self._turns.get(replica, 0)

        return sorted(replicas, key=cost)

    def begun(self, request: str, replica: str, leaves: Sequence[Place]) -> None:
        self._count += 1
        self._turns[replica] = self._count
        if request in self._early:
            self._early.remove(request)
        else:
            self._at[request] = replica
        for digest, _ in leaves:
            self._where.setdefault(digest, set()).add(replica)
            self._where.move_to_end(digest)
        while len(self._where) > self._most:
            self._where.popitem(last=False)

    def ended(self, request: str) -> None:
        if self._at.pop(request, None) is None:
            self._early.append(request)

    def lost(self, replica: str) -> None:
        """It is gone, with all that it knew."""
        self._turns.pop(replica, None)
        for digest in [digest for digest, replicas in self._where.items() if replica in replicas]:
            self._where[digest].discard(replica)
            if not self._where[digest]:
                del self._where[digest]
