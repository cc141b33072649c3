"""What several machines cost and bring, with processes of this one: python bench/peers/stages.py FOLDER [--rounds 3]

FOLDER is a store; without it, one in the shape of the built-in model is made. Everything is measured in turns, A-B-B-A.

rows: hop         the time of a frame with 8 KB through two stages and back, over three: beside ZeroMQ alone between
                  processes of the same kind, with the same encryption
      throughput  tokens a second of 1, 2, 4 and 8 sessions over 2 stages, over those over 1. Each stage has one thread,
                  so two stages have two cores
      delay       the same of 2 stages, with a link that takes so many milliseconds longer, over those without; and what
                  the model of docs/cluster.md says: sessions / (time of a token + 3 delays), at most as fast as without
"""

from __future__ import annotations

import argparse
import json
import socket
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
from moeflux.cluster.links import Keys, Links, new_keys
from moeflux.cluster.machines import machines_of
from moeflux.cluster.model import ClusterModel, load_over
from moeflux.cluster.ray_crew import RayCrew
from moeflux.runtime.options import resolved
from moeflux.text.sampling import Sampler, Sampling

ROW = 2048  # float32 numbers: 8 KB
FRAMES = 300
SESSIONS = (1, 2, 4, 8)
DELAYS = (0.001, 0.005)
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


def forward(run: str, keys: str) -> None:
    """ZeroMQ alone: passes on what comes, to where stdin says."""
    mine, before, after = (json.loads(keys)[name] for name in ("mine", "before", "after"))
    links = Links(bytes.fromhex(run), 0, Keys(*map(str.encode, mine)), address="127.0.0.1", allowed=[before.encode()])
    print(links.port, flush=True)
    outlet = links.connect("127.0.0.1", int(input()), after.encode())
    taken, sent = links._inlet, outlet._socket
    while True:
        sent.send_multipart(taken.recv_multipart(copy=False), copy=False)


def delayed(port: int, seconds: float) -> None:
    """A link that takes longer: bytes that come are passed on after so long."""
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)

    def pass_on(one: socket.socket, other: socket.socket) -> None:
        waiting: list[tuple[float, bytes]] = []
        changed = threading.Condition()

        def send() -> None:
            while True:
                with changed:
                    while not waiting:
                        changed.wait()
                    due, data = waiting.pop(0)
                time.sleep(max(0.0, due - time.monotonic()))
                other.sendall(data)

        threading.Thread(target=send, daemon=True).start()
        while data := one.recv(1 << 20):
            with changed:
                waiting.append((time.monotonic() + seconds, data))
                changed.notify()

    while True:
        here, _ = listening.accept()
        there = socket.create_connection(("127.0.0.1", port))
        for each in (here, there):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pair in ((here, there), (there, here)):
            threading.Thread(target=pass_on, args=pair, daemon=True).start()


PROXIES: list[subprocess.Popen[str]] = []


class DelayedCrew(RayCrew):
    """Whatever goes from machine to machine takes longer."""

    seconds = 0.0

    def close(self) -> None:
        super().close()
        for process in PROXIES:
            process.kill()
            process.wait()
        PROXIES.clear()

    def hire(self, index: int) -> Any:
        hand = super().hire(index)
        plain, seconds = hand.call, self.seconds
        proxies: dict[int, int] = {}

        def behind(port: int) -> int:
            if seconds and port not in proxies:
                process, proxies[port] = child("--delayed", port, seconds)
                PROXIES.append(process)
            return proxies[port] if seconds else port

        def call(method: str, *values: Any, **rest: Any) -> Any:
            if method == "connect" and values[0] == values[1]:  # the last one, to who asks
                host, port, key = values[0]
                values = ((host, behind(port), key), values[1])
            found = plain(method, *values, **rest)
            return behind(found) if method == "listen" else found

        hand.call = call  # type: ignore[method-assign]
        return hand


def loaded(folder: Path, count: int, seconds: float = 0.0) -> ClusterModel:
    given = machines_of(count)
    crew = DelayedCrew(given)
    crew.seconds = seconds
    return load_over(folder, given, resolved({**OPTIONS}), crew=crew)


# ---- What is measured -------------------------------------------------------------------------------------------


def bare() -> tuple[Callable[[], float], Callable[[], None]]:
    """A frame through two processes and back, with ZeroMQ alone."""
    run, keys = b"b" * 16, [new_keys() for _ in range(3)]
    names = ("mine", "before", "after")

    def text(at: int) -> str:
        mine, before, after = keys[at], keys[at - 1].public, keys[(at + 1) % 3].public
        return json.dumps(
            dict(zip(names, ([each.decode() for each in mine], before.decode(), after.decode()), strict=True))
        )

    here = Links(run, 0, keys[2], address="127.0.0.1", allowed=[keys[1].public])
    children = [child("--forward", run.hex(), text(at)) for at in (0, 1)]
    for (process, _), port in zip(children, (children[1][1], here.port), strict=True):
        assert process.stdin is not None
        print(port, file=process.stdin, flush=True)
    outlet = here.connect("127.0.0.1", children[0][1], keys[0].public)
    rows = np.ones((1, ROW), np.float32)

    def turn() -> float:
        times = []
        for _ in range(FRAMES):
            began = time.perf_counter()
            outlet.send({}, [rows])
            while here.receive(10) is None:
                pass
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def close() -> None:
        for process, _ in children:
            process.kill()
            process.wait()
        here.close()

    return turn, close


def through(model: ClusterModel) -> float:
    chain, rows = model._cluster.chain(), np.ones((1, ROW), np.float32)
    times = []
    for _ in range(FRAMES):
        began = time.perf_counter()
        chain.send("hello", [rows]).told()
        times.append(time.perf_counter() - began)
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


def measure(folder: Path, rounds: int) -> None:
    import ray

    one, two = loaded(folder, 1), loaded(folder, 2)
    turn, close = bare()
    alone, stages, ratios = turns(rounds, turn, lambda: through(two))
    close()
    show("hop", zeromq_ms=1000 * alone / 3, stages_ms=1000 * stages / 3, ratio=statistics.median(ratios))
    rates = {}
    for sessions in SESSIONS:
        first, rates[sessions], ratios = turns(rounds, lambda n=sessions: rate(one, n), lambda n=sessions: rate(two, n))
        show("throughput", sessions=sessions, one=first, two=rates[sessions], ratio=statistics.median(ratios))
    token = 1 / rates[1]
    for delay in DELAYS:
        with loaded(folder, 2, delay) as slow:
            for sessions in SESSIONS:
                without, found, ratios = turns(
                    rounds, lambda n=sessions: rate(two, n), lambda n=sessions: rate(slow, n)
                )  # fmt: skip
                said = min(sessions / (token + 3 * delay), without)
                show("delay", seconds=delay, sessions=sessions, rate=found, model=said, ratio=statistics.median(ratios))
    two.close()
    one.close()
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=builtin.path())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forward", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--delayed", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.forward:
        forward(*arguments.forward)
    elif arguments.delayed:
        delayed(int(arguments.delayed[0]), float(arguments.delayed[1]))
    else:
        print(f"moeflux {moeflux.__version__}, {_core.__commit__}", file=sys.stderr)
        measure(arguments.folder, arguments.rounds)


if __name__ == "__main__":
    main()
