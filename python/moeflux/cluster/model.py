"""A model whose layers are on several machines. What `moeflux.Model` offers, it offers, but for recording routers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from moeflux import _core
from moeflux.cluster.cards import Cards, machines_of_cards
from moeflux.cluster.cluster import Cluster
from moeflux.cluster.decoder import FarDecoder
from moeflux.cluster.engine import FarEngine
from moeflux.cluster.machines import machines_of
from moeflux.cluster.protocols import Crew
from moeflux.cluster.ray_crew import RayCrew
from moeflux.errors import ArgumentError, StateError
from moeflux.log import LOG
from moeflux.model import Model
from moeflux.models.hub import find_model
from moeflux.progress import Logged
from moeflux.runtime.options import LoadOptions, resolved
from moeflux.runtime.plan_table import Plan
from moeflux.runtime.recording import Counting, Recording
from moeflux.stores.store import Store, open_store

__all__ = ["ClusterModel", "load_over", "load_over_cards"]


class ClusterModel(Model):
    def __init__(self, store: Store, cluster: Cluster | Cards, precision: str, again: bool) -> None:
        engine = FarEngine(cluster, store.variant, cluster.layers, cluster.chunk, cluster.described, again)
        if isinstance(cluster, Cards):
            engine.of = "GPUs"
        super().__init__(store, cast("_core.Engine", engine), cast(Plan, cluster.plan), precision)
        self._cluster = cluster

    @property
    def ready(self) -> bool:
        return self._cluster.ready

    def make_decoder(self, rows: int = 0) -> Any:
        return FarDecoder(cast(FarEngine, self._engine), rows)

    def close(self) -> None:
        """As that of a Model; and ends the processes."""
        super().close()
        self._cluster.close()

    def trace(self) -> Recording:
        raise StateError("trace: expected a model on one machine, found one on several")

    def count_experts(self) -> Counting:
        """Of no layers: what the routers pick on other machines is not counted."""
        return cast("Counting", NothingCounted())


class NothingCounted:
    layers: tuple[int, ...] = ()

    def counts(self) -> np.ndarray:
        return np.empty((0, 0), np.int64)

    def __enter__(self) -> NothingCounted:
        return self

    def __exit__(self, *exception: object) -> None:
        """There is nothing to end."""


def load_over(
    name: str | Path | None,
    machines: object,
    options: LoadOptions,
    *,
    on_loss: str = "again",
    crew: Crew | None = None,
) -> ClusterModel:
    """Does what `moeflux.load` says of machines. `crew` starts the processes; for tests."""
    given, asked = machines_of(machines), _asked("machines", options)
    if on_loss not in ("again", "fail"):
        raise ArgumentError(f'on_loss: expected "again" or "fail", found {on_loss!r:.40}')
    crew = crew or RayCrew(given)
    folder = find_model(name, Logged())
    try:
        with open_store(folder, experts_per_token=asked["experts_per_token"]) as store:
            cluster = Cluster(crew, given, store, asked)
            LOG.info("%s: loaded over %d machines:\n%s", folder, len(given.machines), cluster.plan)
            return ClusterModel(store, cluster, asked["precision"], on_loss == "again")
    except BaseException:
        crew.close()
        raise


def load_over_cards(
    name: str | Path | None,
    devices: object,
    options: LoadOptions,
    on_progress: Callable[[int, int], object] | None = None,
) -> ClusterModel:
    """Does what `moeflux.load` says of devices."""
    given, asked = machines_of_cards(devices), _asked("devices", options)
    folder = find_model(name, Logged())
    with open_store(folder, experts_per_token=asked["experts_per_token"]) as store:
        cards = Cards(given, store, asked, on_progress)
        LOG.info("%s: loaded on %d GPUs:\n%s", folder, len(given.machines), cards.plan)
        return ClusterModel(store, cards, asked["precision"], again=False)


def _asked(where: str, options: LoadOptions) -> LoadOptions:
    """All options, of which some are not for a model in parts."""
    asked = resolved(options)
    if asked["speculate"] != "off":
        raise ArgumentError(f'speculate: expected "off" over several {where}, found {asked["speculate"]!r}')
    if asked["layers"] is not None:
        raise ArgumentError(f"layers: expected none with {where}, found {asked['layers']}: {where} have them")
    return asked
