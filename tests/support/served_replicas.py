"""A program of its own that asks `moeflux serve --replicas 2`: conversations, clients that leave, replicas that are
killed with -9 while answers are on their way, and the end. What it finds, it prints as JSON.

Usage: served_replicas.py FOLDER
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.cluster_child import listening
from support.served_cluster import DEADLINE, LENGTH, QUESTIONS, Server, alive, children, expected, gone, soon

REPLICA = "ray::ServeReplica:moeflux-builtin"
TALKS = ("What is the capital of France?", "Name two colors.", "What is 3 plus 4?", "Who are you?")


def replicas(server: Server) -> list[int]:
    """Of a Ray of its own. Others may run the same on this machine."""
    return [pid for raylet in children(server.process.pid, "/raylet/raylet") for pid in children(raylet, REPLICA)]


def number(server: Server, name: str) -> dict[str, float]:
    """Of /metrics, by replica, all its other labels together."""
    with urllib.request.urlopen(server.request("/metrics"), timeout=DEADLINE) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith(f"{name}{{"):
            replica = re.search(r'replica="(\d+)"', line)
            assert replica is not None
            found[replica[1]] = found.get(replica[1], 0) + float(line.rpartition(" ")[2])
    return found


class Talk:
    """A conversation, after its first turn."""

    def __init__(self, server: Server, question: str, before: str = "") -> None:
        """The question stands behind a text that makes it longer."""
        self._server, self._messages = server, [{"role": "user", "content": before + question}]
        first = self._turn(20)
        self.tokens = int(first["usage"]["prompt_tokens"])
        said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        self._messages += [said, {"role": "user", "content": "Why?"}]

    def second(self) -> int:
        """Tokens that were not read again for the second turn."""
        return int(self._turn(5)["usage"]["prompt_tokens_details"]["cached_tokens"])

    def _turn(self, tokens: int) -> dict[str, Any]:
        body = {"messages": self._messages, "temperature": 0, "max_tokens": tokens}
        return self._server.ask("/v1/chat/completions", body)


def kept(server: Server) -> bool:
    """Whether a response is found again by its id, many times, whoever else is asked meanwhile."""
    for _ in range(4):
        first = server.ask("/v1/responses", {"input": "Name two colors.", "max_output_tokens": 8})
        server.ask("/v1/completions", {"prompt": "Once", "max_tokens": 2})
        body = {"previous_response_id": first["id"], "input": "Another one?", "max_output_tokens": 4}
        if server.ask("/v1/responses", body)["usage"]["input_tokens_details"]["cached_tokens"] == 0:
            return False
    return True


def left(server: Server) -> bool:
    """Whether an answer ends when its client leaves."""
    body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
    before = sum(number(server, "moeflux_tokens_total").values())
    with urllib.request.urlopen(server.request("/v1/completions", body), timeout=DEADLINE) as lines:
        lines.readline()
    wait(lambda: sum(number(server, "moeflux_scheduler_running").values()) == 0)
    return sum(number(server, "moeflux_tokens_total").values()) - before < 400


def wait(holds: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def whole(server: Server, prompt: str) -> str:
    try:
        return str(
            server.ask("/v1/completions", {"prompt": prompt, "max_tokens": LENGTH, "temperature": 0})["choices"][0][
                "text"
            ]
        )
    except OSError as error:
        return f"error: {error!r}"


def killed(server: Server, right: list[str], victims: list[int]) -> dict[str, Any]:
    """Under load: streams that had begun there end with an error, and whole answers come all the same. What is found
    has those that did not."""
    streams, answers = [""] * 8, [""] * 8

    def stream(place: int) -> None:
        streams[place] = server.answer(QUESTIONS[place % 4])

    def ask(place: int) -> None:
        answers[place] = whole(server, QUESTIONS[place % 4])

    threads = [threading.Thread(target=each, args=(place,)) for place in range(8) for each in (stream, ask)]
    for thread in threads:
        thread.start()
    soon(victims)
    for thread in threads:
        thread.join()
    named = [each for each in streams if "expected its process, found it gone" in each]
    return {
        "whole": [each for place, each in enumerate(answers) if each != right[place % 4]],
        "streams": [each for place, each in enumerate(streams) if each not in named and each != right[place % 4]],
    }


def main(folder: Path) -> dict[str, Any]:
    right, before = expected(), {*listening()}
    server = Server("--replicas", 2, "--disk", folder / "states", "--memory", "600MB")
    addresses = {each.partition(":")[0] for each in {*listening()} - before}
    found: dict[str, Any] = {"loopback": all(each in LOOPBACK for each in addresses)}
    found["same"] = server.answers() == right
    talks = [Talk(server, question) for question in TALKS]
    found["second turns"] = all(talk.second() >= talk.tokens for talk in talks)
    found["spread"] = sorted(each > 0 for each in number(server, "moeflux_requests_total").values()) == [True, True]
    found["kept"], found["left"] = kept(server), left(server)
    (victim, *_) = replicas(server)
    found["killed"] = killed(server, right, [victim])
    wait(lambda: len({*replicas(server)} - {victim}) == 2 and server.ask("/health")["replicas"] == 2)
    found["again"] = server.answers() == right
    last, held = [""], replicas(server)
    ending = threading.Thread(target=lambda: last.__setitem__(0, server.answer(QUESTIONS[0])))
    ending.start()
    time.sleep(0.05)
    server.process.send_signal(signal.SIGTERM)
    found["ended"] = server.process.wait(DEADLINE) in (0, -signal.SIGTERM)
    ending.join()
    found["finished"] = last[0] == right[0]
    found["gone"] = gone(lambda: alive(held))
    found["states"] = len([*folder.glob("states/*.session")]) > 0
    server = Server("--replicas", 1, "--memory", "600MB")
    held = replicas(server)
    soon([server.process.pid])
    server.process.wait()
    found["gone with it"] = len(held) == 1 and gone(lambda: alive(held))
    return found


LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")

if __name__ == "__main__":
    print("\n" + json.dumps(main(Path(sys.argv[1]))), flush=True)
    os._exit(0)
