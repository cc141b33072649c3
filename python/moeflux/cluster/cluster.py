"""The stages of one model: started, watched, and started again when one is lost.

A run lasts from one start of all stages to the next. Sessions belong to a run: what a lost machine had of them is gone.
The machines that are left keep their weights and their experts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from moeflux.cluster.chain import Chain
from moeflux.cluster.host import Joining, Run, joined
from moeflux.cluster.links import RUN_BYTES, Unreached, new_keys
from moeflux.cluster.machines import Machine, Machines
from moeflux.cluster.plan import ClusterPlan, plan_over, share_of_free
from moeflux.cluster.protocols import Crew, Hand
from moeflux.errors import Error, PeerError, refusals
from moeflux.log import LOG
from moeflux.runtime.options import LoadOptions
from moeflux.stores.store import Store

__all__ = ["Cluster", "Patience"]

WATCH_SECONDS = 0.1
RETRY_SECONDS = 2.0


class Patience:
    """Seconds."""

    call = 60.0  # for what a process does at once
    load = 3600.0  # for loading its layers
    signs = 10.0  # between two signs of life
    hello = 20.0  # until a frame has been through all stages
    restart = 180.0  # until calls that wait for lost machines are given up


class Cluster:
    """All stages of a model. Its chain is what the engine sends over."""

    def __init__(
        self, crew: Crew, machines: Machines, store: Store, asked: LoadOptions, patience: Patience | None = None
    ) -> None:
        """Starts all processes and loads their layers. The error names the machine that cannot."""
        self._crew, self._patience = crew, patience or Patience()
        self._machines = [_with_defaults(each, str(store.path), asked["memory"]) for each in machines.machines]
        self._asked, self._fingerprint = asked, store.fingerprint
        self._address = machines.address
        self._hands: list[Hand | None] = [None] * len(self._machines)
        self._changed = threading.Condition()
        self._chain: Chain | None = None  # None: not now
        self._reason = ""  # why not
        self._down_since = 0.0
        self._closed = False
        self._joinings: list[Joining] = []
        try:
            self._each(self._hire)
            self.plan: ClusterPlan = plan_over(store, replace(machines, machines=self._known()), asked)
            self.layers = [share.layers for share in self.plan.shares]
            opened = self._each(self._open)
            self._joinings = [each["joining"] for each in opened]
            joined(self._names, self._joinings, self._fingerprint)
            self.described = str(opened[0]["described"])
            self.chunk = min(each["plan"].chunk for each in opened)
            self._begin()
        except BaseException:
            self.close()
            raise
        with refusals("machines"):
            self._watching = threading.Thread(target=self._watch, name="moeflux-machines", daemon=True)
            self._watching.start()

    @property
    def _names(self) -> list[str]:
        return [machine.name for machine in self._machines]

    # ---- For those who use it -----------------------------------------------------------------------------------

    def chain(self) -> Chain:
        """Waits while a machine is started again. PeerError when that takes too long, or when it is closed."""
        with self._changed:
            while True:
                if self._closed:
                    raise PeerError("machines: expected a model that is open, found it closed")
                if self._chain is not None and self._chain.error is None:
                    return self._chain
                left = self._patience.restart - (time.monotonic() - self._down_since) if self._down_since else 1.0
                if left <= 0:
                    raise PeerError(f"machines: expected all of them, found: {self._reason}")
                self._changed.wait(min(left, 1.0))

    @property
    def ready(self) -> bool:
        """Whether calls go through now, or are given up."""
        with self._changed:
            up = self._chain is not None and self._chain.error is None
            late = self._down_since and time.monotonic() - self._down_since > self._patience.restart
            return self._closed or up or bool(late)

    @property
    def hands(self) -> list[Hand]:
        return [hand for hand in self._hands if hand is not None]

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            chain, self._chain = self._chain, None
            self._changed.notify_all()
        if chain is not None:
            chain.close()
        if getattr(self, "_watching", None) is not None and self._watching is not threading.current_thread():
            self._watching.join()
        for hand in self.hands:
            hand.dismiss()
        self._crew.close()

    # ---- Starting -----------------------------------------------------------------------------------------------

    def _each(self, work: Any, only: Sequence[int] | None = None) -> list[Any]:
        """For all machines at the same time. The first error, by their order."""
        chosen = range(len(self._machines)) if only is None else only
        with ThreadPoolExecutor(max(len(chosen), 1), "moeflux-starting") as pool:
            futures = [pool.submit(work, index) for index in chosen]
        return [future.result() for future in futures]

    def _hire(self, index: int) -> None:
        self._hands[index] = self._crew.hire(index)

    def _hand(self, index: int) -> Hand:
        hand = self._hands[index]
        assert hand is not None
        return hand

    def _known(self) -> tuple[Machine, ...]:
        """The machines with what they say of themselves."""

        def ask(index: int) -> Machine:
            machine = self._machines[index]
            about = self._hand(index).call("about", machine.path, seconds=self._patience.call)
            memory = machine.memory
            if memory == "auto":
                memory = share_of_free(about["available"], self._neighbours(index))
            disk, rate = machine.disk or about["disk"], machine.memory_rate or about["memory_rate"]
            return replace(machine, memory=memory, disk=disk, memory_rate=rate)

        return tuple(self._each(ask))

    def _neighbours(self, index: int) -> int:
        """How many processes are on that machine."""
        return sum(machine.node == self._machines[index].node for machine in self._machines)

    def _open(self, index: int) -> dict[str, Any]:
        machine = self._machines[index]
        options: Any = {
            **self._asked,
            **machine.options,
            "memory": machine.memory,
            "context": self.plan.context,
            "speculate": "off",
        }
        opened: dict[str, Any] = self._hand(index).call(
            "open", machine.path, self.layers[index], options, self._neighbours(index), seconds=self._patience.load
        )
        return opened

    def _begin(self) -> None:
        """A run: new keys, new sockets, and a greeting through all stages."""
        names, number = self._names, os.urandom(RUN_BYTES)
        keys = [new_keys() for _ in range(len(names) + 1)]  # the last are those of who asks
        chain = Chain(
            number, keys[-1], self._address, [(name, each.public) for name, each in zip(names, keys, strict=False)],
            patience=self._patience.signs, lost=self._wake,
        )  # fmt: skip
        try:

            def listen(index: int) -> int:
                run = Run(number, index, keys[index], self._machines[index].address, keys[index - 1].public)
                port: int = self._hand(index).call("listen", run, seconds=self._patience.call)
                return port

            ports = self._each(listen)
            ways = [
                (each.address, port, key.public) for each, port, key in zip(self._machines, ports, keys, strict=False)
            ]
            asker = (self._address, chain.port, keys[-1].public)

            def connect(index: int) -> None:
                after = ways[index + 1] if index + 1 < len(ways) else asker
                try:
                    self._hand(index).call("connect", after, asker, seconds=self._patience.call)
                except Unreached as error:
                    is_asker = (error.host, error.port) == asker[:2]
                    raise _unreached(None if is_asker else names[index + 1], names[index], error) from error

            self._each(connect)
            try:
                chain.begin(*ways[0])
            except Unreached as error:
                raise _unreached(names[0], None, error) from error
            self._greet(chain)
        except BaseException:
            chain.close()
            raise
        with self._changed:
            if self._closed:
                chain.close()
                raise PeerError("machines: expected a model that is open, found it closed")
            self._chain, self._reason, self._down_since = chain, "", 0.0
            self._changed.notify_all()

    def _greet(self, chain: Chain) -> None:
        """PeerError that says between which two machines nothing goes through."""
        flight = chain.send("hello")
        end = time.monotonic() + self._patience.hello
        while not flight.landed and time.monotonic() < end:
            time.sleep(0.002)
        if flight.landed:
            flight.told()
            return
        before = "this machine"
        for index, machine in enumerate(self._machines):
            if not self._hand(index).call("heard", seconds=self._patience.call):
                raise PeerError(
                    f"machine {machine.name}: expected it to be reached at {machine.address} from {before}, found that "
                    f"nothing came within {self._patience.hello:g} s"
                )
            before = f"machine {machine.name}"
        raise PeerError(
            f"this machine: expected it to be reached at {self._address} from {before}, found that nothing came "
            f"within {self._patience.hello:g} s"
        )

    # ---- Watching -----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                self._changed.wait(WATCH_SECONDS)
                if self._closed:
                    return
                chain = self._chain
            gone = [self._names[index] for index, hand in enumerate(self._hands) if hand is None or not hand.alive]
            if chain is not None and gone and chain.error is None:
                chain.fail(PeerError(f"machine {', '.join(gone)}: expected it to be there, found its process gone"))
            if chain is not None and chain.error is not None:
                self._go_down(chain, str(chain.error))
            if self._chain is None:
                self._try_again()

    def _go_down(self, chain: Chain, reason: str) -> None:
        with self._changed:
            self._chain, self._reason, self._down_since = None, reason, time.monotonic()
        chain.close()

    def _try_again(self) -> None:
        """Starts what is gone, and a new run. What does not answer counts as gone."""
        try:
            gone = [index for index in range(len(self._hands)) if not self._answers(index)]
            for index in gone:
                self._dismiss(index)
            LOG.warning("starting again: %s", ", ".join(self._names[index] for index in gone) or "the links alone")
            self._each(self._hire, gone)
            for index, opened in zip(gone, self._each(self._open, gone), strict=True):
                self._joinings[index] = opened["joining"]
            joined(self._names, self._joinings, self._fingerprint)
            self._begin()
            LOG.warning("all machines are there again")
        except Error as error:
            LOG.warning("not all machines are there: %s", error)
            with self._changed:
                self._reason = str(error)
                if not self._closed:
                    self._changed.wait(RETRY_SECONDS)

    def _answers(self, index: int) -> bool:
        hand = self._hands[index]
        if hand is None or not hand.alive:
            return False
        try:
            hand.call("stop", seconds=self._patience.call)
        except PeerError:
            return False
        return True

    def _dismiss(self, index: int) -> None:
        hand, self._hands[index] = self._hands[index], None
        if hand is not None:
            hand.dismiss()


def _unreached(name: str | None, before: str | None, error: Unreached) -> PeerError:
    """Between which two machines there is no way; None is this one."""
    to, at = (f"machine {each}" if each is not None else "this machine" for each in (name, before))
    return PeerError(f"{to}: expected it to be reached at {error.host} from {at}, found: {error.reason}")


def _with_defaults(machine: Machine, path: str, memory: int | str | None) -> Machine:
    """With what the call says, where it says nothing of its own."""
    return replace(
        machine,
        path=path if machine.path is None else machine.path,
        memory=memory if machine.memory is None else machine.memory,
    )
