"""A program of its own with a Ray of its own: what it finds, it prints as JSON.

Usage: cluster_child.py local FOLDER, or cluster_child.py nodes FOLDER KILLS

Ray leaves threads, handlers and warnings behind in a process, so no test has it in its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import moeflux
from moeflux import Sampling
from moeflux.cluster.machines import Machine, Machines
from moeflux.errors import Error
from moeflux.serving import Request, Scheduler
from support.engine import tokens
from support.served_cluster import two_nodes

OPTIONS: dict[str, Any] = {"memory": None, "context": 96, "threads": 1, "readers": 1, "chunk": 16}
REQUESTS = 8


def asks() -> list[Request]:
    return [
        Request(tokens(9 + 5 * seed, seed + 1), max_tokens=24, sampling=Sampling(1.0, seed=seed))
        for seed in range(REQUESTS)
    ]


def answers(scheduler: Scheduler, during: Callable[[], object] = lambda: None) -> list[Any]:
    """Tokens, or what the error says. Every answer ends, and once."""
    handles = [scheduler.submit(request) for request in asks()]
    during()
    found: list[Any] = []
    for handle in handles:
        try:
            found.append([piece.token for piece in handle if piece.token is not None])
        except Error as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def listening() -> list[str]:
    """The addresses at which this process, or one that it has started, listens: what came since the program began."""
    found = []
    for name, size in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.append(fields[1][:size] + ":" + fields[9])
    return found


def alone(folder: Path) -> list[list[int]]:
    found = []
    with moeflux.load(folder, **OPTIONS) as model:
        for request in asks():
            with model.session() as session:
                prompt = np.asarray(request.prompt).tolist()
                done = session.complete(prompt, max_tokens=request.max_tokens, sampling=request.sampling)
                found.append(list(done.tokens))
    return found


def killed(pids: list[int], seconds: float) -> None:
    time.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def case_local(folder: Path) -> dict[str, Any]:
    """Two processes of this machine: the bits, and what listens."""
    before = {*listening()}
    expected = alone(folder)
    with moeflux.load(folder, machines=2, **OPTIONS) as model:
        listens = sorted({each.partition(":")[0] for each in {*listening()} - before})
        with Scheduler(model, running=4) as scheduler:
            return {"listening": listens, "same": answers(scheduler) == expected}


def case_nodes(folder: Path, kills: int) -> dict[str, Any]:
    """Two nodes of a cluster: the bits, also after kill -9 of each process under load. Then a node is gone for good,
    which is an error and no hanging."""
    import ray

    expected = alone(folder)
    with two_nodes() as (cluster, nodes):
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        found = over(cluster, nodes, folder, expected, kills)
        ray.shutdown()
    return found


def over(cluster: Any, nodes: list[Any], folder: Path, expected: list[Any], kills: int) -> dict[str, Any]:
    machines = Machines(tuple(Machine(name, node.node_id) for name, node in zip("ab", nodes, strict=True)))
    moments = np.random.default_rng(1).uniform(0, 0.1, kills)
    found: dict[str, Any] = {"kills": []}
    with moeflux.load(folder, machines=machines, **OPTIONS) as model, Scheduler(model, running=4) as scheduler:
        held: Any = model
        pids = [hand.call("about", None, seconds=60)["pid"] for hand in held._cluster.hands]
        found["processes"] = len({*pids, os.getpid()})
        found["same"] = answers(scheduler) == expected
        for index, moment in enumerate(moments):
            pid = held._cluster.hands[index % 2].call("about", None, seconds=60)["pid"]
            thread = threading.Thread(target=killed, args=([pid], moment))
            found["kills"].append(answers(scheduler, thread.start) == expected)
            thread.join()
        found["again"] = {"failed": scheduler.stats.failed, "ended": scheduler.stats.ended}
        held._engine.again, held._cluster._patience.restart = False, 3.0
        thread = threading.Thread(target=cluster.remove_node, args=(nodes[1], False))
        thread.start()
        told: list[Any] = []
        while not any(isinstance(each, str) for each in told):
            told += answers(scheduler)
        thread.join()
        found["errors"] = [each for each in told if isinstance(each, str)]
        found["wrong"] = [each for each in told if not isinstance(each, str) and each not in expected]
    return found


if __name__ == "__main__":
    case, store = sys.argv[1], Path(sys.argv[2])
    print("\n" + json.dumps(case_local(store) if case == "local" else case_nodes(store, int(sys.argv[3]))))
