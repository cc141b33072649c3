"""What the server costs: python bench/peers/over_http.py

Eight clients stream answers, each from a session of its own. The same scheduler then makes the same answers for this
process alone. The two take turns; the ratio of their tokens a second is printed for each pair of turns, and as a
median: with the built-in model, and with a random one that has as many more layers as make its step take 10 ms or more.
Each client asks for another text and draws from random numbers of its own. Texts that are the same need the same
experts while they are at the same place, and only for the scheduler alone would all of them always be there.

Clients are another process on the same processors, so the machine should be otherwise idle. They are a small program
(clients.cpp), for they are not what is measured. What a token costs in time of a processor is printed, too, which
others disturb less: of the engine's threads, of the server's own thread, of what else this process does, and of the
clients. Then, how long the scheduler waits for a step and what it does between two, in the median. Steps are made ahead
meanwhile, so a step takes as long as both together, or longer.

At last others come while eight clients stream, one after the other: how long until the first byte of their headers is
there? They would have to wait for a session, so no token is in that time, and they leave then.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

from turns import take_turns

import moeflux
from moeflux import _core, builtin
from moeflux.model import Model
from moeflux.serve.app import application
from moeflux.serve.desk import Desk
from moeflux.serve.scheduling import Scheduled
from moeflux.serve.server import Listen, listening, made
from moeflux.serving import Request, Scheduler

LATE = 20  # clients, while others stream


def story(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell a story of {number + 2} friends."}]


@dataclasses.dataclass(frozen=True)
class Sample:
    tokens: int
    seconds: float
    costs: dict[str, float]  # of the processors, in seconds
    step: float  # seconds that one is waited for, in the median
    between: float  # seconds from one to the next, in the median

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Timed:
    """A decoder that knows when its steps were waited for."""

    def __init__(self, engine: _core.Engine, rows: int) -> None:
        self._decoder = _core.Decoder(engine, rows)
        self.times = list[tuple[float, float]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    @property
    def prompt_rows(self) -> int:
        return self._decoder.prompt_rows

    @prompt_rows.setter
    def prompt_rows(self, rows: int) -> None:
        self._decoder.prompt_rows = rows

    def step(self, cancel: _core.Cancel | None = None) -> Any:
        began = time.perf_counter()
        events = self._decoder.step(cancel)
        self.times.append((began, time.perf_counter()))
        return events


def seconds_of_threads() -> dict[int, float]:
    """Of a processor, by the numbers of this process's threads. Linux tells; elsewhere there are none."""
    found = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # it has ended
            found[int(path.parent.name)] = int(path.read_text().split()[0]) / 1e9
    return found


# ---- Clients ----------------------------------------------------------------------------------------------------


def request(number: int, tokens: int) -> bytes:
    body = {"messages": story(number), "max_tokens": tokens, "ignore_eos": True, "seed": number,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def asking(port: int, number: int, tokens: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=120)
    connection.sendall(request(number, tokens))
    return connection


def come_late(port: int, clients: int) -> list[float]:
    """Milliseconds until the first byte, of those who come while others stream."""
    early, waits = [asking(port, number, 3000) for number in range(clients)], []
    for connection in early:
        while b'"content":' not in connection.recv(1 << 16):
            pass
    for _ in range(LATE):
        began = time.perf_counter()
        with asking(port, 0, 1) as late:
            late.recv(1)
            waits.append(1e3 * (time.perf_counter() - began))
        for connection in early:  # or the server waits for them
            connection.setblocking(False)
            try:
                while connection.recv(1 << 16):
                    pass
            except BlockingIOError:
                pass
    for connection in early:
        connection.close()
    return waits


def printed(*words: object) -> str:
    """By another program."""
    return subprocess.run([*map(str, words)], stdout=subprocess.PIPE, text=True, check=True).stdout


def built(folder: Path) -> Path:
    """The clients, which read and count."""
    program, source = folder / "clients", Path(__file__).with_name("clients.cpp")
    subprocess.run([os.environ.get("CXX", "c++"), "-std=c++20", "-O2", source, "-o", program], check=True)
    return program


# ---- The server -------------------------------------------------------------------------------------------------


@contextmanager
def serving(model: Model, scheduler: Scheduler) -> Iterator[tuple[int, int]]:
    """Its port, and the number of its thread."""
    listen = Listen(port=0)
    desk = Desk(model, Scheduled(scheduler), "bench", model.plan.context)
    with listening(listen) as at:
        server = made(application(desk, listen.rules), desk.scheduler)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [at]})
        thread.start()
        try:
            assert thread.native_id is not None
            yield at.getsockname()[1], thread.native_id
        finally:
            server.should_exit = True
            thread.join()


def spent(samples: list[Sample]) -> str:
    def median(value: Callable[[Sample], float]) -> float:
        return statistics.median(map(value, samples))

    parts = [f"{median(lambda each: 1e6 * each.costs[part] / each.tokens):.1f} {part}" for part in samples[0].costs]  # noqa: B023
    step, between = (1e3 * median(attrgetter(which)) for which in ("step", "between"))
    return f"us of a processor for a token: {', '.join(parts)}; ms: {step:.2f} until a step, {between:.3f} between two"


def compare(name: str, model: Model, arguments: argparse.Namespace, program: Path) -> None:
    clients, tokens = arguments.clients, arguments.tokens
    assert model.chat_format is not None
    prompts = [model.chat_format.encode(story(number)) for number in range(clients)]
    files = [program.with_name(f"request{number}") for number in range(clients)]
    for number, file in enumerate(files):
        file.write_bytes(request(number, tokens))
    decoders = list[Timed]()

    def decoder(engine: _core.Engine, rows: int) -> Timed:
        decoders.append(Timed(engine, rows))
        return decoders[-1]

    computing = set(seconds_of_threads()) - {threading.get_native_id()}
    with Scheduler(model, decoder=decoder) as scheduler, serving(model, scheduler) as (port, server):
        computing |= {each.native_id for each in threading.enumerate() if each.name == "moeflux-scheduler"}

        def measured(run: Callable[[], tuple[int, float]]) -> Sample:
            decoders[0].times.clear()
            before, began = seconds_of_threads(), time.perf_counter()
            made, others = run()
            seconds = time.perf_counter() - began
            spent = {id: each - before.get(id, 0.0) for id, each in seconds_of_threads().items()}
            of_python = {each.native_id for each in threading.enumerate()}
            engine = sum(each for id, each in spent.items() if id in computing or id not in of_python)
            costs = {"engine": engine, "server": spent.get(server, 0.0), "clients": others}
            costs["the rest"] = sum(spent.values()) - engine - costs["server"]
            times = decoders[0].times
            step = statistics.median(end - begin for begin, end in times)
            between = statistics.median(after[0] - before[1] for before, after in pairwise(times))
            return Sample(made, seconds, costs, step, between)

        def alone() -> tuple[int, float]:
            how = {"max_tokens": tokens, "ignore_end": True}
            samplings = [dataclasses.replace(model.default_sampling, seed=number) for number in range(clients)]
            handles = [
                scheduler.submit(Request(prompt, sampling=sampling, **how))
                for prompt, sampling in zip(prompts, samplings, strict=True)
            ]
            return sum(len(handle.wait().tokens) for handle in handles), 0.0

        def over_http() -> tuple[int, float]:
            told = json.loads(printed(program, port, *files))
            return told["tokens"], told["processor"]

        runs = {"alone": alone, "over HTTP": over_http}
        for run in runs.values():
            run()
        samples: dict[str, list[Sample]] = {which: [] for which in runs}
        turns = {which: partial(measured, run) for which, run in runs.items()}
        for which, sample in take_turns(turns, arguments.rounds):
            samples[which].append(sample)
        ratios = [over.rate / by.rate for by, over in zip(samples["alone"], samples["over HTTP"], strict=True)]
        rate = statistics.median(each.rate for each in samples["alone"])
        print(
            f"{name}: {rate:.0f} tokens a second alone, {1e3 * clients / rate:.1f} ms a step; over HTTP, ratios "
            f"{' '.join(f'{ratio:.3f}' for ratio in ratios)}; median {statistics.median(ratios):.3f}",
            flush=True,
        )
        for which, taken in samples.items():
            print(f"{name}, {which}: {spent(taken)}")
        waits = json.loads(printed(sys.executable, __file__, "late", port, clients))
        print(f"{name}: first byte of headers, ms: median {statistics.median(waits):.1f}, most {max(waits):.1f}")


def deeper(folder: Path, times: int) -> Path:
    """A random model with so many times the layers of the built-in one, and its text."""
    with moeflux.open_store(builtin.path()) as store:
        variant = store.variant
    moeflux.synth(folder, dataclasses.replace(variant, layers=variant.layers * times))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(builtin.path() / name, folder / name)
    # Its embeddings are its output, too, so that it would say one token again and again.
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 100}))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of each answer; default: 512")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--deeper", type=int, default=6, help="times the layers of the built-in model; default: 6")
    arguments = parser.parse_args()
    options = {"sessions": arguments.clients, "threads": arguments.threads}
    with tempfile.TemporaryDirectory() as folder:
        program = built(Path(folder))
        for name, path in (("built-in", builtin.path()), ("deeper", deeper(Path(folder) / "deeper", arguments.deeper))):
            with moeflux.load(path, **options) as model:
                compare(name, model, arguments, program)


if __name__ == "__main__":
    if sys.argv[1:2] == ["late"]:
        print(json.dumps(come_late(*map(int, sys.argv[2:]))))
    else:
        main()
