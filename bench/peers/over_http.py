"""What the server costs: python bench/peers/over_http.py

Eight clients stream answers, each from a session of its own. The same scheduler then makes the same answers for this
process alone. The two take turns; the ratio of their tokens a second is printed for each pair of turns, and as a
median: with the built-in model, and with a random one that has as many more layers as make its step take 10 ms or more.
Clients are another process on the same processors, so the machine should be otherwise idle. What a token costs in time
of a processor is printed, too, which others disturb less.

At last others come while eight clients stream, one after the other: how long until the first byte of their headers is
there? They would have to wait for a session, so no token is in that time, and they leave then.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turns import take_turns

import moeflux
from moeflux import builtin
from moeflux.model import Model
from moeflux.serve.desk import Desk
from moeflux.serve.scheduling import Scheduled
from moeflux.serve.server import Listen, listening, made
from moeflux.serving import Request, Scheduler

STORY = [{"role": "user", "content": "Tell a story."}]
LATE = 20  # clients, while others stream
DEEPER = 6  # times as many layers as the built-in model


@dataclasses.dataclass(frozen=True)
class Sample:
    tokens: int
    seconds: float
    processor: float  # seconds, of the process with the model

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def cost(self) -> float:
        """Microseconds of a processor for a token."""
        return 1e6 * self.processor / self.tokens


# ---- Clients ----------------------------------------------------------------------------------------------------


def asking(port: int, tokens: int) -> socket.socket:
    body = {"messages": STORY, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=120)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def stream(port: int, clients: int, tokens: int) -> int:
    """Reads all their answers. Returns the tokens that those have."""
    texts = {asking(port, tokens): b"" for _ in range(clients)}
    counted = 0
    with selectors.DefaultSelector() as waiting:
        for connection in texts:
            waiting.register(connection, selectors.EVENT_READ)
        while waiting.get_map():
            for key, _ in waiting.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                part = connection.recv(1 << 16)
                text = texts[connection] = texts[connection][-4096:] + part
                assert part, text
                if text.endswith(b"0\r\n\r\n"):
                    waiting.unregister(connection)
                    connection.close()
                    last = next(line for line in reversed(text.split(b"\n")) if b'"usage":{' in line)
                    counted += json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"]
    return counted


def come_late(port: int, clients: int) -> list[float]:
    """Milliseconds until the first byte, of those who come while others stream."""
    early, waits = [asking(port, 3000) for _ in range(clients)], []
    for connection in early:
        while b'"content":' not in connection.recv(1 << 16):
            pass
    for _ in range(LATE):
        began = time.perf_counter()
        with asking(port, 1) as late:
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


def in_another_process(*words: object) -> str:
    done = subprocess.run([sys.executable, __file__, *map(str, words)], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


# ---- The server -------------------------------------------------------------------------------------------------


@contextmanager
def serving(model: Model, scheduler: Scheduler) -> Iterator[int]:
    """Its port."""
    listen = Listen(port=0)
    desk = Desk(model, Scheduled(scheduler), "bench", model.plan.context)
    with listening(listen) as at:
        server = made(desk, listen)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [at]})
        thread.start()
        try:
            yield at.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def compare(name: str, model: Model, arguments: argparse.Namespace) -> None:
    clients, tokens = arguments.clients, arguments.tokens
    assert model.chat_format is not None
    prompt = model.chat_format.encode(STORY)
    with Scheduler(model) as scheduler, serving(model, scheduler) as port:

        def alone() -> Sample:
            began, busy = time.perf_counter(), time.process_time()
            request = Request(prompt, max_tokens=tokens, ignore_end=True, sampling=moeflux.Sampling(temperature=0))
            handles = [scheduler.submit(request) for _ in range(clients)]
            made = sum(len(handle.wait().tokens) for handle in handles)
            return Sample(made, time.perf_counter() - began, time.process_time() - busy)

        def over_http() -> Sample:
            busy = time.process_time()
            told = json.loads(in_another_process("stream", port, clients, tokens))
            return Sample(told["tokens"], told["seconds"], time.process_time() - busy)

        alone(), over_http()
        samples: dict[str, list[Sample]] = {"alone": [], "over HTTP": []}
        for which, sample in take_turns({"alone": alone, "over HTTP": over_http}, arguments.rounds):
            samples[which].append(sample)
        ratios = [over.rate / by.rate for by, over in zip(samples["alone"], samples["over HTTP"], strict=True)]
        rate = statistics.median(each.rate for each in samples["alone"])
        print(
            f"{name}: {rate:.0f} tokens a second alone, {1e3 * clients / rate:.1f} ms a step; over HTTP, ratios "
            f"{' '.join(f'{ratio:.3f}' for ratio in ratios)}; median {statistics.median(ratios):.3f}",
            flush=True,
        )
        cost = {which: statistics.median(each.cost for each in taken) for which, taken in samples.items()}
        words = ", ".join(f"{value:.0f} {which}" for which, value in cost.items())
        print(f"{name}: us of a processor for a token: {words}")
        waits = json.loads(in_another_process("late", port, clients))
        print(f"{name}: first byte of headers, ms: median {statistics.median(waits):.1f}, most {max(waits):.1f}")


def deeper(folder: Path) -> Path:
    """A random model with the text of the built-in one."""
    with moeflux.open_store(builtin.path()) as store:
        variant = store.variant
    moeflux.synth(folder, dataclasses.replace(variant, layers=variant.layers * DEEPER))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(builtin.path() / name, folder / name)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer; default: 256")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    options = {"sessions": arguments.clients, "threads": arguments.threads}
    with tempfile.TemporaryDirectory() as folder:
        for name, path in (("built-in", builtin.path()), ("deeper", deeper(Path(folder) / "deeper"))):
            with moeflux.load(path, **options) as model:
                compare(name, model, arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["stream"]:
        began = time.perf_counter()
        tokens = stream(*map(int, sys.argv[2:]))
        print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - began}))
    elif sys.argv[1:2] == ["late"]:
        print(json.dumps(come_late(*map(int, sys.argv[2:]))))
    else:
        main()
