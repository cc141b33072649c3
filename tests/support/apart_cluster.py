"""A program of its own in a network namespace, with a model over it and another (tests/support/namespaces.py).

It has the bits of one machine across a network that takes time, and what is said when a machine cannot be reached,
first and later. What it finds, it prints as JSON, and before that lines that ask whoever started it to change the
network. It ends without taking leave of a machine that nobody reaches.

Usage: apart_cluster.py FOLDER HEAD
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import moeflux
from moeflux.cluster.cluster import Patience
from moeflux.cluster.machines import Machine, Machines
from moeflux.errors import PeerError
from moeflux.serving import Scheduler
from support.cluster_child import OPTIONS, alone, answers
from support.namespaces import address


def change(line: str) -> None:
    """Of the network."""
    print(json.dumps({"change": line}), flush=True)
    input()


def main(folder: Path, head: str) -> None:
    import ray

    expected = alone(folder)
    found: dict[str, Any] = {}
    ray.init(address=head, logging_level="ERROR", log_to_driver=False)
    machines = Machines(
        tuple(Machine(name, address(number), address=address(number)) for number, name in enumerate("ab")),
        address=address(0),
    )
    wrong = replace(machines, machines=(machines.machines[0], replace(machines.machines[1], address=address(0))))
    try:
        moeflux.load(folder, machines=wrong, **OPTIONS)
    except PeerError as error:
        found["wrong address"] = str(error)
    Patience.signs, Patience.restart = 3.0, 6.0
    with moeflux.load(folder, machines=machines, **OPTIONS) as model, Scheduler(model, running=4) as scheduler:
        found["same"] = answers(scheduler) == expected
        change("delay 0.002")
        found["same with a delay"] = answers(scheduler) == expected
        model._engine.again = False  # type: ignore[attr-defined]
        cutting = threading.Thread(target=change, args=("cut 1",))
        cutting.start()
        told: list[Any] = []
        end = time.monotonic() + 120
        while not any(isinstance(each, str) for each in told) and time.monotonic() < end:
            told += answers(scheduler)
        cutting.join()
        found["errors"] = sorted({each for each in told if isinstance(each, str)})
        found["wrong"] = [each for each in told if not isinstance(each, str) and each not in expected]
        print("\n" + json.dumps(found), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
