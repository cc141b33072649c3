"""A model whose layers are on several GPUs of this machine, in this process: stages as over machines, each with an
engine of its own, its own plan and its own budget. A frame goes from the thread of one stage to that of the next."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import numpy as np

from moeflux.cluster.flight import Flight, Stages
from moeflux.cluster.links import Frame
from moeflux.cluster.machines import Machine, Machines
from moeflux.cluster.plan import ClusterPlan, plan_over, width_of
from moeflux.cluster.protocols import StageEngine
from moeflux.cluster.stage import Stage
from moeflux.errors import ArgumentError, Error, PeerError, StateError, found, refusals
from moeflux.machine.memory import available, resident
from moeflux.model import Model, load
from moeflux.runtime.options import MAX_DEVICES, LoadOptions
from moeflux.sizes import parse_size
from moeflux.stores.store import Store

__all__ = ["Cards", "machines_of_cards"]

OnProgress = Callable[[int, int], object]


def machines_of_cards(devices: object) -> Machines:
    """Numbers of GPUs as stages, in their order. ArgumentError unless each is there once."""
    if isinstance(devices, str | bytes) or not isinstance(devices, Sequence):
        raise ArgumentError(f"devices: expected a list of numbers of GPUs, found {found(devices)}")
    for number in devices:
        if type(number) is not int or not 0 <= number < MAX_DEVICES:
            raise ArgumentError(f"devices: expected numbers of GPUs from 0 on, found {found(number)}")
    if len({*devices}) < len(devices):
        twice = next(number for number in devices if devices.count(number) > 1)
        raise ArgumentError(f"devices: expected each GPU once, found {twice} twice")
    return Machines(tuple(Machine(f"gpu {number}", options={"device": number}) for number in devices))


class Cards:
    """The stages of a model, as Cluster has those on machines."""

    ready = True

    def __init__(
        self, machines: Machines, store: Store, asked: LoadOptions, on_progress: OnProgress | None = None
    ) -> None:
        self.plan: ClusterPlan = plan_over(store, machines, asked)
        self.layers = [share.layers for share in self.plan.shares]
        whole = _budget(asked["memory"])
        self._models: list[Model] = []
        try:
            for place, machine in enumerate(machines.machines):
                # Budgets are the process's: each engine comes behind those before it, and has an equal share.
                memory = None if whole is None else whole * (place + 1) // len(machines.machines)
                told = on_progress and _part_of(on_progress, place, [share.total for share in self.plan.shares])
                self._models.append(_load(store, machine, self.layers[place], memory, self.plan.context, asked, told))
            kinds = {model.arithmetic for model in self._models}
            if len(kinds) > 1:
                raise StateError(f"devices: expected GPUs that compute alike, found {', '.join(sorted(kinds))}")
            self.described = self._models[0]._engine.describe()
            self.chunk = min(cast(Any, model.plan).chunk for model in self._models)
            self._chain = CardChain(
                [
                    _stage(machine, model, layers)
                    for machine, model, layers in zip(machines.machines, self._models, self.layers, strict=True)
                ]
            )
        except BaseException:
            self._unload()
            raise
        weakref.finalize(self, self._chain.close)

    def chain(self) -> Stages:
        return self._chain

    def close(self) -> None:
        self._chain.close()
        self._unload()

    def _unload(self) -> None:
        for model in self._models:
            model.close()


class CardChain:
    """Stages that are threads of this process."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.count = len(stages)
        self.error: PeerError | None = None
        self._lock = threading.Lock()
        # A put may come in the middle of another one, when Python drops a session.
        self._ways: list[SimpleQueue[tuple[Flight | None, Frame] | None]] = [SimpleQueue() for _ in stages]
        self._threads = [
            threading.Thread(target=self._work, args=(place, stage), name="moeflux-stage", daemon=True)
            for place, stage in enumerate(stages)
        ]
        with refusals("devices"):
            for thread in self._threads:
                thread.start()

    def send(self, op: str, arrays: Sequence[np.ndarray] = (), **fields: Any) -> Flight:
        """Arrays must stay as they are until the flight has landed."""
        flight = Flight()
        with self._lock:
            if self.error is not None:
                flight.land(None, self.error)
            else:
                self._ways[0].put((flight, Frame(0, 0, {"op": op, "told": [], **fields}, list(arrays))))
        return flight

    def ask(self, op: str, **fields: Any) -> list[Any]:
        return self.send(op, **fields).told()[0]

    def forget(self, session: int) -> None:
        self._ways[0].put((None, Frame(0, 0, {"op": "close", "told": [], "ids": [session]}, [])))

    def close(self) -> None:
        """What was sent before still lands."""
        with self._lock:
            if self.error is not None:
                return
            self.error = PeerError("devices: expected a model that is open, found it closed")
            self._ways[0].put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _work(self, place: int, stage: Stage) -> None:
        is_last = place + 1 == self.count
        while (item := self._ways[place].get()) is not None:
            flight, frame = item
            body, arrays = _handled(stage, frame)
            passed = Frame(0, 0, _as_sent(body), list(arrays))
            if not is_last:
                self._ways[place + 1].put((flight, passed))
            elif flight is not None:
                flight.land(passed, None)
        if not is_last:
            self._ways[place + 1].put(None)


def _handled(stage: Stage, frame: Frame) -> tuple[dict[str, Any], list[np.ndarray]]:
    try:
        return stage.handle(frame)
    except Exception as error:  # whoever waits for this frame must hear of it
        place = len(frame.body["told"])
        text = f"{type(error).__name__}: {error}"
        return {**frame.body, "error": {"stage": place, "kind": Error.__name__, "text": text, "missing": None}}, []


def _as_sent(value: Any) -> Any:
    """What comes out of a link, where values are those of JSON. None of it is shared with the stage that told of it."""
    if isinstance(value, dict):
        return {str(name): _as_sent(each) for name, each in value.items()}
    return [_as_sent(each) for each in value] if isinstance(value, (list, tuple)) else value


def _budget(memory: int | str | None) -> int | None:
    if memory is None:
        return None
    return resident().now + available().bytes * 9 // 10 if memory == "auto" else parse_size("memory", memory)


def _part_of(on_progress: OnProgress, place: int, sizes: Sequence[int]) -> OnProgress:
    """What one engine tells, as a part of what all of them will have read."""
    before, own, every = sum(sizes[:place]), sizes[place], sum(sizes)
    return lambda done, total: on_progress(before + own * done // max(total, 1), every)


def _load(
    store: Store,
    machine: Machine,
    layers: tuple[int, int],
    memory: int | None,
    context: int,
    asked: LoadOptions,
    on_progress: OnProgress | None,
) -> Model:
    options: dict[str, Any] = {
        **asked,
        **machine.options,
        "layers": layers,
        "memory": memory,
        "context": context,
    }
    return load(Path(store.path), on_progress=on_progress, **options)


def _stage(machine: Machine, model: Model, layers: tuple[int, int]) -> Stage:
    variant = model.variant
    return Stage(
        machine.name,
        cast(StageEngine, model._engine),
        first=layers[0] == 0,
        last=layers[1] == variant.num_layers,
        width=width_of(variant),
        vocab=variant.vocab_size,
    )
