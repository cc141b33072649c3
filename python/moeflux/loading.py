"""`moeflux.load`: on this machine, or over several."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moeflux.errors import ArgumentError, Error

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from moeflux.model import Model
    from moeflux.runtime.options import LoadOptions

__all__ = ["load"]


def load(
    name: str | Path | None = None,
    *,
    machines: Any = None,
    devices: Sequence[int] | None = None,
    on_loss: Literal["again", "fail"] = "again",
    on_progress: Callable[[int, int], object] | None = None,
    **options: Unpack[LoadOptions],
) -> Model:
    """What `moeflux.model.load` says, with the same options, and over several machines if `machines` says which
    (docs/cluster.md): how many processes of this machine, a file that lists machines, or a list of
    `moeflux.cluster.machines.Machine`. Then `memory` is the budget of the process on each machine.

    devices   numbers of GPUs of this machine, which then have the layers one behind the other, in this process. Each
              has a plan of its own; `device_memory` is the budget on each, `memory` that of the process
    on_loss   what becomes of answers of a scheduler when a machine is lost: "again", they are made again from where
              their state is kept, to the same bits; "fail", they end with the error. Other calls end with PeerError
    """
    if machines is None and devices is None:
        with _opening(options.get("backend"), options.get("device", 0)):
            from moeflux import model

            return model.load(name, on_progress=on_progress, **options)
    from moeflux.cluster.model import load_over, load_over_cards

    if machines is not None and devices is not None:
        raise ArgumentError("devices: expected none with machines, found some")
    if devices is not None:
        return load_over_cards(name, devices, options, on_progress)
    if on_progress is not None:
        raise ArgumentError("on_progress: expected none with machines, found one: each loads by itself")
    return load_over(name, machines, options, on_loss=on_loss)


@contextmanager
def _opening(backend: object, device: object) -> Generator[None, None, None]:
    """Has a thread open a GPU, which takes some tenths of a second, while everything that loads is imported. What is
    wrong with the GPU, or with the options, is found again by whoever loads."""
    if backend == "cpu":
        yield
        return
    from moeflux import _core

    held = []

    def open_device() -> None:
        with suppress(Error, TypeError):
            held.append(_core.held_device(backend or "auto", device))  # type: ignore[arg-type]

    thread = threading.Thread(target=open_device, daemon=True)
    with suppress(RuntimeError):  # no thread
        thread.start()
    yield
    # The model has it too, by now.
    held.clear()
