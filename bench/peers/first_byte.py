"""What a client waits for when replicas answer: python bench/peers/first_byte.py [--rounds 5]

Two servers with the built-in model stand side by side: `moeflux serve`, and `moeflux serve --replicas 1`, which passes
each request on to another process by Ray Serve. They are asked in turns, A-B-B-A, and whoever is not asked rests. All
requests stream. For one client alone, the rows have the milliseconds until the first byte of the answer's head and
until its first text, and tokens a second of a stream; then the tokens a second of eight clients together. Each has the
median of both servers, and the median of the ratios of the second to the first.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.served_cluster import Server

CLIENTS = 8
TOKENS = 60
ASKED = 20  # one after the other, in a turn
NUMBERS = itertools.count(1)


def stream(server: Server) -> tuple[float, float, float]:
    """Seconds until the first byte, until the first text, and from there to the end."""
    body = {"model": "builtin", "prompt": f"Once upon a time, {next(NUMBERS)} friends", "max_tokens": TOKENS}
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection.connect()
    began = time.perf_counter()
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps({**body, "temperature": 0, "stream": True, "ignore_eos": True}),
        {"Content-Type": "application/json"},
    )
    answer = connection.getresponse()
    head, text, count = time.perf_counter(), 0.0, 0
    for line in answer:
        if line.startswith(b"data: {"):
            text = text or time.perf_counter()
            count += 1
    assert answer.status == 200 and count >= 2, f"expected a stream of texts, found status {answer.status}"
    connection.close()
    return head - began, text - began, time.perf_counter() - text


def alone(server: Server) -> tuple[float, ...]:
    told = [stream(server) for _ in range(ASKED)]
    head, text, rest = (statistics.median(each) for each in zip(*told, strict=True))
    return 1000 * head, 1000 * text, (TOKENS - 1) / rest


def together(server: Server) -> tuple[float, ...]:
    threads = [threading.Thread(target=stream, args=(server,)) for _ in range(CLIENTS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (CLIENTS * TOKENS / (time.perf_counter() - began),)


def show(names: Iterable[str], firsts: list[tuple[float, ...]], seconds: list[tuple[float, ...]]) -> None:
    for place, name in enumerate(names):
        one, other = [each[place] for each in firsts], [each[place] for each in seconds]
        ratios = [(b + c) / (a + d) for a, d, b, c in zip(one[::2], one[1::2], other[::2], other[1::2], strict=True)]
        row = {"row": name, "server": statistics.median(one), "replicas": statistics.median(other)}
        print(json.dumps({**row, "ratio": statistics.median(ratios)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    words = ("--memory", "600MB")
    plain, replicas = Server(*words), Server("--replicas", 1, *words)
    try:
        for measured, names in (
            (alone, ("first byte, ms", "first text, ms", "tokens/s, one client")),
            (together, (f"tokens/s, {CLIENTS} clients",)),
        ):
            firsts, seconds = [], []
            for _ in range(rounds):
                for server, found in ((plain, firsts), (replicas, seconds), (replicas, seconds), (plain, firsts)):
                    found.append(measured(server))
            show(names, firsts, seconds)
    finally:
        for server in (plain, replicas):
            server.process.terminate()
            server.process.wait()


if __name__ == "__main__":
    main()
