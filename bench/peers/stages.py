"""What several machines cost and bring, with processes of this one: python bench/peers/stages.py FOLDER [--rounds 3]

FOLDER is a store; without it, one in the shape of the built-in model is made. Everything is measured in turns, A-B-B-A.

rows: hop         the time of a frame with 8 KB through two stages and back, over three: beside ZeroMQ alone between
                  processes of the same kind, with encryption of its own
      throughput  tokens a second of 1, 2, 4 and 8 sessions over 2 stages, over those over 1. Each stage has one thread,
                  so two stages have two cores

delayed.py has links that take longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import moeflux
from moeflux import _core, builtin
from moeflux.cluster.machines import machines_of
from moeflux.cluster.model import ClusterModel, load_over
from moeflux.runtime.options import resolved
from moeflux.text.sampling import Sampler, Sampling

ROW = 2048  # float32 numbers: 8 KB
FRAMES = 300
SESSIONS = (1, 2, 4, 8)
TOKENS = 24
OPTIONS: dict[str, Any] = {"memory": None, "context": 256, "sessions": 8, "threads": 1, "chunk": 64}


# ---- Processes of this program ----------------------------------------------------------------------------------


def child(*words: object) -> tuple[subprocess.Popen[str], int]:
    """Starts one, which says at which port it is."""
    process = subprocess.Popen(
        [sys.executable, __file__, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def sockets(keys: dict[str, Any]) -> tuple[Any, Any, int]:
    """Of ZeroMQ: where this process takes frames, and by which it sends them when it is connected."""
    import zmq

    context = zmq.Context()
    taken, sent = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    taken.curve_server = True
    sent.curve_serverkey = keys["after"].encode()
    for each in (taken, sent):
        each.curve_publickey, each.curve_secretkey = (key.encode() for key in keys["mine"])
    return taken, sent, taken.bind_to_random_port("tcp://127.0.0.1")


def forward(keys: str) -> None:
    """ZeroMQ alone: passes on what comes, to where stdin says."""
    taken, sent, port = sockets(json.loads(keys))
    print(port, flush=True)
    sent.connect(f"tcp://127.0.0.1:{int(input())}")
    while True:
        sent.send_multipart(taken.recv_multipart())


def loaded(folder: Path, count: int) -> ClusterModel:
    return load_over(folder, machines_of(count), resolved({**OPTIONS}))


# ---- What is measured -------------------------------------------------------------------------------------------


def bare() -> tuple[Callable[[], float], Callable[[], None]]:
    """A frame through two processes and back, with ZeroMQ alone."""
    import zmq

    pairs = [[key.decode() for key in zmq.curve_keypair()] for _ in range(3)]
    keys = [{"mine": pair, "after": pairs[(at + 1) % 3][0]} for at, pair in enumerate(pairs)]
    taken, sent, own = sockets(keys[2])
    children = [child("--forward", json.dumps(keys[at])) for at in (0, 1)]
    for (process, _), port in zip(children, (children[1][1], own), strict=True):
        assert process.stdin is not None
        print(port, file=process.stdin, flush=True)
    sent.connect(f"tcp://127.0.0.1:{children[0][1]}")
    frame = [b"h" * 38, b"j" * 60, np.ones((1, ROW), np.float32).tobytes()]

    def turn() -> float:
        times = []
        for _ in range(FRAMES):
            began = time.perf_counter()
            sent.send_multipart(frame)
            taken.recv_multipart()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def close() -> None:
        for process, _ in children:
            process.kill()
            process.wait()
        taken.close(0)
        sent.close(0)

    return turn, close


def through(model: ClusterModel) -> float:
    """Asked by a thread that is not the main one, as the scheduler of a server is."""
    chain, rows = model._cluster.chain(), np.ones((1, ROW), np.float32)
    times = []

    def ask() -> None:
        for _ in range(FRAMES):
            began = time.perf_counter()
            chain.send("hello", [rows]).told()
            times.append(time.perf_counter() - began)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return statistics.median(times)


def rate(model: ClusterModel, sessions: int) -> float:
    """Tokens a second of so many sessions, when all of them answer."""
    decoder = model.make_decoder()
    held = [model.session() for _ in range(sessions)]
    samplers = [Sampler(Sampling(temperature=1.0, seed=at), model.variant.vocab_size, []) for at in range(sessions)]
    for at, (session, sampler) in enumerate(zip(held, samplers, strict=True)):
        decoder.add(session._core, np.array([at + 1], np.int32), sampler._core, [], TOKENS + 8)
    done, began = 0, 0.0
    alive = sessions
    while alive == sessions:  # until the first one ends
        events = decoder.step()
        done += sum(event.token is not None for event in events)
        alive -= sum(bool(event.finish) for event in events)
        if not began and done >= 4 * sessions:
            began, done = time.perf_counter(), 0
    return done / (time.perf_counter() - began)


def turns(rounds: int, one: Callable[[], float], other: Callable[[], float]) -> tuple[float, float, list[float]]:
    """Medians of both, and the ratios of the second to the first."""
    firsts, seconds, ratios = [], [], []
    for _ in range(rounds):
        a, b, c, d = one(), other(), other(), one()
        firsts += [a, d]
        seconds += [b, c]
        ratios.append((b + c) / (a + d))
    return statistics.median(firsts), statistics.median(seconds), ratios


def show(row: str, **values: Any) -> None:
    print(json.dumps({"row": row, **values}), flush=True)


def measure(folder: Path, rounds: int, hop_alone: bool) -> None:
    import ray

    two = loaded(folder, 2)
    turn, close = bare()
    alone, stages, ratios = turns(rounds, turn, lambda: through(two))
    close()
    show("hop", zeromq_ms=1000 * alone / 3, stages_ms=1000 * stages / 3, ratio=statistics.median(ratios))
    if hop_alone:
        two.close()
        ray.shutdown()
        return
    one = loaded(folder, 1)
    for sessions in SESSIONS:
        first, second, ratios = turns(rounds, lambda n=sessions: rate(one, n), lambda n=sessions: rate(two, n))
        show("throughput", sessions=sessions, one=first, two=second, ratio=statistics.median(ratios))
    one.close()
    two.close()  # it has started Ray
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=builtin.path())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hop", action="store_true", help="measure that row alone")
    parser.add_argument("--forward", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.forward:
        forward(arguments.forward)
    else:
        print(f"moeflux {moeflux.__version__}, {_core.__commit__}", file=sys.stderr)
        measure(arguments.folder, arguments.rounds, arguments.hop)


if __name__ == "__main__":
    main()
