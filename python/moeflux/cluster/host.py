"""What a process on each machine is told, other than rows: to open its layers, where to take rows and where to send."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from moeflux import _core
from moeflux.cluster.links import Broken, Keys, Links, Unsent
from moeflux.cluster.plan import share_of_free, width_of
from moeflux.cluster.protocols import StageEngine
from moeflux.cluster.stage import Stage
from moeflux.errors import PeerError, StateError
from moeflux.log import LOG
from moeflux.machine.memory import available
from moeflux.model import load
from moeflux.models.hub import find_model
from moeflux.models.variants import Variant
from moeflux.progress import Silent
from moeflux.runtime.options import LoadOptions
from moeflux.runtime.plan import probe_of
from moeflux.stores.store import open_store

__all__ = ["BEAT_SECONDS", "Host", "Joining", "Run", "joined", "version"]

BEAT_SECONDS = 1.0
"""How often a process says that it is there."""


@dataclass(frozen=True)
class Joining:
    """What must be the same on all machines, or answers would depend on the cut."""

    version: str
    fingerprint: str  # of the model there
    arithmetic: str
    kv_dtype: str
    layers: tuple[int, int]


@dataclass(frozen=True)
class Run:
    """From a start of all stages, or from a loss of one, to the next."""

    number: bytes
    index: int  # of this stage
    keys: Keys
    address: str  # of this machine
    before: bytes  # the public key of who sends to it


class Host:
    """Lives in a process of its own. Each method is called from outside, in any thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._variant: Variant | None = None
        self._engine: StageEngine | None = None
        self._layers = (0, 0)
        self._links: Links | None = None
        self._run: Run | None = None
        self._stage: Stage | None = None
        self._threads: list[threading.Thread] = []
        self._ending = threading.Event()  # of the run
        self._broken = ""  # why it ended by itself
        self._side = 0  # whether it was for the machine before, -1, or after, 1
        self._over = threading.Event()

    # ---- What is here -------------------------------------------------------------------------------------------

    def about(self, path: str | None) -> dict[str, Any]:
        """This machine, and what doctor has found for the disk of that model."""
        probe = None
        if path is not None:
            with open_store(find_model(path, Silent())) as store:
                probe = probe_of(store)
        return {
            "version": version(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "available": available().bytes,
            "disk": probe.disk_bytes_per_second if probe else None,
            "memory_rate": probe.memory_bytes_per_second if probe else None,
        }

    def wait(self) -> None:
        """Until the process ends: who waits for this learns of that at once."""
        self._over.wait()

    def end(self) -> None:
        self.stop()
        self._over.set()

    # ---- The model ----------------------------------------------------------------------------------------------

    def open(self, path: str | None, layers: tuple[int, int], asked: LoadOptions, neighbours: int) -> dict[str, Any]:
        """Loads these layers within the budget of this process. So many processes here share what is free."""
        self.stop()
        self._engine = None
        if asked["memory"] == "auto" and neighbours > 1:
            asked = {**asked, "memory": max(1, share_of_free(available().bytes, neighbours))}
        options: LoadOptions = {**asked, "layers": layers}
        loaded = load(path, **options)
        self._variant, self._engine, self._layers = loaded.variant, cast(StageEngine, loaded._engine), layers
        joining = Joining(version(), loaded.fingerprint, loaded.arithmetic, asked["kv_dtype"], layers)
        return {"joining": joining, "plan": loaded.plan, "described": loaded._engine.describe()}

    # ---- A run --------------------------------------------------------------------------------------------------

    def listen(self, run: Run) -> int:
        """Ends the run before. Returns the port at which rows are taken."""
        self.stop()
        self._run = run
        self._links = Links(run.number, run.index, run.keys, address=run.address, allowed=[run.before])
        return self._links.port

    def connect(self, after: tuple[str, int, bytes], asker: tuple[str, int, bytes], beat: float = BEAT_SECONDS) -> None:
        """Begins the run: rows go to `after`, and signs of life to who asks, each an address, a port and a key."""
        if self._links is None or self._run is None or self._engine is None or self._variant is None:
            raise StateError(f"machine {self.name}: expected one that listens, found one that does not")
        variant = self._variant
        stage = self._stage = Stage(
            self.name,
            self._engine,
            first=self._layers[0] == 0,
            last=self._layers[1] == variant.num_layers,
            width=width_of(variant),
            vocab=variant.vocab_size,
        )
        self._ending, self._broken, self._side = threading.Event(), "", 0
        ending, links, index = self._ending, self._links, self._run.index
        outlet, pulse = links.connect(*after), links.connect(*asker, pulse=True)

        def work() -> None:
            try:
                stage.run(links, outlet, lambda: not ending.is_set())
            except Exception as error:
                if not ending.is_set():
                    LOG.warning("machine %s: the run ends: %s", self.name, error)
                self._side = -1 if isinstance(error, Broken) else 1 if isinstance(error, Unsent) else 0
                self._broken = str(error) if self._side else f"{type(error).__name__}: {error}"

        def live() -> None:
            with suppress(PeerError):  # who asks is gone, and Ray ends this process
                while not ending.is_set():
                    pulse.send({"beat": index, "broken": self._broken, "side": self._side})
                    ending.wait(beat)

        named = {"moeflux-stage": work, "moeflux-pulse": live}
        self._threads = [threading.Thread(target=each, name=name, daemon=True) for name, each in named.items()]
        for thread in self._threads:
            thread.start()

    def heard(self) -> bool:
        """Whether anything of this run has come."""
        return self._stage is not None and self._stage.heard

    def stop(self) -> None:
        """Ends the run, with all of its sessions."""
        self._ending.set()
        if self._stage is not None:
            self._stage.cancel()
        if self._links is not None:
            self._links.stop()
        for thread in self._threads:
            thread.join()
        self._threads, self._stage = [], None
        if self._links is not None:
            self._links.close()
            self._links = None


def version() -> str:
    return f"{_core.__version__}, commit {_core.__commit__}"


def joined(machines: Sequence[str], joinings: Sequence[Joining], fingerprint: str) -> None:
    """StateError that names the machine that does not have what the others have."""
    first = joinings[0]
    for name, each in zip(machines, joinings, strict=True):
        for what, expected, found in (
            ("version", version(), each.version),
            ("model", fingerprint, each.fingerprint),
            ("arithmetic", first.arithmetic, each.arithmetic),
            ("kv_dtype", first.kv_dtype, each.kv_dtype),
        ):
            if expected != found:
                hint = "; with isa= of load all have the same" if what == "arithmetic" else ""
                raise StateError(f"machine {name}: {what}: expected {expected}, found {found}{hint}")
