"""Requests with parts changed, sent to a live server: python tests/fuzz/over_socket.py --seconds 600 --seed 1

The real scheduler and the built-in model answer. A status of 500 or more, an answer that takes long, and memory that
grows in the second half are findings; the exit status is then 1. What is only read is fuzzed without a socket, and a
hundred times as fast, by the target serve_requests of run.py.
"""

from __future__ import annotations

import argparse
import copy
import http.client
import json
import logging
import random
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "python_targets")]

from serve_requests import BODIES  # noqa: E402

import moeflux  # noqa: E402
from moeflux.serve.scheduling import Scheduled  # noqa: E402
from moeflux.serving import Scheduler  # noqa: E402
from support.live_server import live  # noqa: E402

CHAT, TEXT, RESPONSE, MESSAGE = BODIES
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**{name: CHAT[name] for name in CHAT if name != "response_format"}, "max_tokens": 6}),
    ("/v1/chat/completions", {**{name: CHAT[name] for name in CHAT if "tool" not in name}, "max_tokens": 6}),
    ("/v1/completions", TEXT),
    ("/v1/responses", {**RESPONSE, "max_output_tokens": 6}),
    ("/v1/messages", MESSAGE),
    ("/v1/messages/count_tokens", {name: MESSAGE[name] for name in MESSAGE if name != "max_tokens"}),
    ("/tokenize", {"content": "abc <|im_end|>"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
NAMES = "type id name content n tools response_format text tool_choice stop previous_response_id output_config".split()
HUGE = {"type": "string", "pattern": "((a{0,9999}){0,9999}){0,9999}"}
VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 1 << 70, 1e308, "", "x", "\ud800", "<|im_end|>", "a" * 5000, "required", "json_object",
    [], {}, [{}], [None], ["a"] * 50, {"type": "x"}, {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}}, {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": HUGE}},
]  # fmt: skip
BYTES = [b"null", b"[]", b'"', b"\\ud800", b"\xff", b"1e999", b",", b"[" * 6, b"9" * 30, b'"\\u0000"', b":"]
LONG = 30.0  # seconds for an answer of a few tokens, with others
TURNS = 6
GROWTH = 32 << 20  # bytes, in the second half of them


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(what holds it, its key) of all parts."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from places(part)


def changed(rng: random.Random, body: dict[str, Any]) -> bytes:
    body = copy.deepcopy(body)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        holder, key = rng.choice(list(places(body)) or [(body, "x")])
        if isinstance(holder, dict) and rng.random() < 0.2:
            key = rng.choice(NAMES)
        holder[key] = copy.deepcopy(rng.choice(VALUES))
    data = json.dumps(body).encode()
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        begin = rng.randrange(len(data) + 1)
        data = data[:begin] + rng.choice(BYTES) + data[begin + rng.randrange(6) :]
    return data


class Client(threading.Thread):
    def __init__(self, netloc: str, seed: int, end: float) -> None:
        super().__init__()
        self.counts = Counter[str]()
        self.findings = list[str]()
        self._netloc, self._rng, self._end = netloc, random.Random(seed), end

    def run(self) -> None:
        while time.monotonic() < self._end:
            path, body = self._rng.choice(SEEDS)
            data, began = changed(self._rng, body), time.monotonic()
            connection = http.client.HTTPConnection(self._netloc, timeout=2 * LONG)
            try:
                connection.request("POST", path, data)
                answer = connection.getresponse()
                said = answer.read().decode()
                self.counts[f"{path} {answer.status}"] += 1
                wrong = answer.status >= 500 or "the server failed" in said or time.monotonic() - began > LONG
            except (OSError, http.client.HTTPException) as error:
                said, wrong = repr(error), True
            connection.close()
            if wrong:
                self.findings.append(f"{path} {data!r}: {said[-300:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    counts, findings, peaks = Counter[str](), list[str](), list[int]()
    with (
        moeflux.load(threads=1, sessions=2) as model,
        Scheduler(model) as scheduler,
        live(model, scheduled=Scheduled(scheduler)) as server,
    ):
        for turn in range(TURNS):
            end = time.monotonic() + arguments.seconds / TURNS
            seeds = (1000 * arguments.seed + 2 * turn + each for each in range(2))
            clients = [Client(urlsplit(server.url).netloc, seed, end) for seed in seeds]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
                counts += client.counts
                findings += client.findings
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
            print(f"{counts.total()} requests, {len(findings)} findings, {peaks[-1] / 1e6:.0f} MB", flush=True)
    if peaks[-1] - peaks[TURNS // 2 - 1] > GROWTH:
        findings.append(f"memory: expected no growth, found {(peaks[-1] - peaks[TURNS // 2 - 1]) / 1e6:.0f} MB")
    print("\n".join([*(f"{count:>8} {what}" for what, count in sorted(counts.items())), *findings[:20]]))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
