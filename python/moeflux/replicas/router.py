"""The router of Ray Serve that sends a conversation to the replica that knows it.

Ray Serve imports `PrefixRouter` of this file. It is made when it is asked for, because its base is of Ray, which nobody
else needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moeflux.replicas.affinity import Affinity
from moeflux.serve.passing import Asked

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

__all__ = ["PATH", "PrefixRouting"]

PATH = f"{__name__}:PrefixRouter"


class PrefixRouting:
    """What a request router of Ray Serve is asked for. Its own part is added when Ray is there."""

    def initialize_state(self, **settings: Any) -> None:
        self._affinity = Affinity()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One after the other, the best first."""
        asked = _asked(pending_request)
        named = {each.replica_id.unique_id: each for each in candidate_replicas}
        order = self._affinity.order(list(named), () if asked is None else asked.places)
        return [[named[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        asked = _asked(pending_request)
        if asked is not None:
            request = pending_request.metadata.internal_request_id
            self._affinity.begun(request, replica_id.unique_id, asked.leaves)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._affinity.ended(internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)  # type: ignore[misc]
        self._affinity.lost(replica_id.unique_id)


def __getattr__(name: str) -> type[RequestRouter]:
    if name != "PrefixRouter":
        raise AttributeError(name)
    from ray.serve.request_router import RequestRouter

    made: type[RequestRouter] = type(name, (PrefixRouting, RequestRouter), {"__module__": __name__})
    globals()[name] = made
    return made


def _asked(request: PendingRequest | None) -> Asked | None:
    given = request.args[0] if request is not None and request.args else None
    return given if isinstance(given, Asked) else None
