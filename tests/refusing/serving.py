"""A server in a process of its own, where calls of one kind are refused, one at a time, while it answers. Prints, by
request, how many there were and how many of them were refused.

What cannot be answered then is an error in the words of the interface, or an answer that is made again. The server goes
on, for all who ask next and for those beside it, with the same text; and nothing is left behind.
"""

from __future__ import annotations

import faulthandler
import gc
import http.client
import json
import logging
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from refusing import System

LIBRARY, DISK, KIND, MOST = sys.argv[1:]
"""MOST: calls that are refused of each request, about; 0: every one."""
system = System(Path(LIBRARY))

import moeflux  # noqa: E402
from moeflux import builtin  # noqa: E402
from moeflux.serve.scheduling import Scheduled  # noqa: E402
from moeflux.serving import Scheduler  # noqa: E402
from support.live_server import live  # noqa: E402

HANGS = 300.0
TOKENS = 4
ASKED = ("What is the capital of France?", "Name a colour.", "What is two and two?", "Who lives in the sea?")
Answer = tuple[int, Any]


def body(prompt: str, stream: bool) -> dict[str, Any]:
    said = [{"role": "user", "content": prompt}]
    return {"messages": said, "max_tokens": TOKENS, "temperature": 0, "stream": stream}


class Client:
    def __init__(self, url: str) -> None:
        self.netloc = urlsplit(url).netloc

    def ask(self, prompt: str, stream: bool = False) -> Answer:
        """The status and the text; or the error, in the words of the interface."""
        connection = http.client.HTTPConnection(self.netloc, timeout=HANGS)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body(prompt, stream)))
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if not stream or answer.status != 200:
            found = json.loads(data)
            return answer.status, error_of(found) or found["choices"][0]["message"]["content"]
        text = ""
        for line in data.decode().split("\n"):
            if line.startswith("data: ") and line != "data: [DONE]":
                found = json.loads(line.removeprefix("data: "))
                if error := error_of(found):
                    return 500, error
                text += "".join(choice["delta"].get("content") or "" for choice in found["choices"])
        return answer.status, text


def error_of(found: dict[str, Any]) -> str:
    return str(found["error"]["message"]) if "error" in found else ""


def refused_in_turn(client: Client, scheduler: Scheduler, expected: dict[str, str], name: str, **how: Any) -> None:
    """Asks again and again, with the first call refused, the second, ...; another client asks meanwhile."""

    def asked(at: int) -> int:
        faulthandler.dump_traceback_later(HANGS, exit=True)
        prompt, beside = ASKED[at % len(ASKED)], ASKED[(at + 1) % len(ASKED)]
        others: list[Answer] = []
        other = threading.Thread(target=lambda: others.append(client.ask(beside)))
        with system.refusing(KIND, at) as calls:
            other.start()
            answers = [(prompt, client.ask(prompt, **how))]
            other.join()
        for said, (status, text) in [*answers, (beside, others[0])]:
            if status == 200:
                assert text == expected[said], (at, said, text)
            else:
                assert status in (500, 503) and text, (at, said, status, text)
                failed[name] = failed.get(name, 0) + 1
        for said in (prompt, beside):
            found = client.ask(said)
            assert found == (200, expected[said]), (at, said, found)
        assert not scheduler.closed
        return calls.made

    every = asked(-1)
    stride = max(1, every // int(MOST)) if int(MOST) else 1
    at, refused = stride // 2 if how else 0, 0  # not the same ones for every way to ask
    while asked(at) > at:
        at, refused = at + stride, refused + 1
    counts[name] = every, refused


def started_in_turn(model: moeflux.Model) -> None:
    """A scheduler that cannot be made leaves nothing, and the next one is."""

    def started(at: int) -> int:
        faulthandler.dump_traceback_later(HANGS, exit=True)
        made: list[Scheduler] = []
        with system.refusing(KIND, at) as calls, suppress(moeflux.Error):
            made.append(Scheduler(model))
        assert made or 0 <= at < calls.made
        for scheduler in made:
            scheduler.close()
        assert model._engine.sessions == 0
        return calls.made

    every, at = started(-1), 0
    while started(at) > at:
        at += 1
    counts["start"] = every, at


counts: dict[str, tuple[int, int]] = {}
failed: dict[str, int] = {}


def main() -> None:
    logging.disable(logging.CRITICAL)
    model = moeflux.load(builtin.path(), threads=2, readers=2, sessions=4, expert_slots=40)
    expected = {}
    with Scheduler(model) as scheduler, live(model, scheduled=Scheduled(scheduler)) as server:
        for prompt in ASKED:
            status, expected[prompt] = Client(server.url).ask(prompt)
            assert status == 200
    gc.collect()
    gc.freeze()
    started_in_turn(model)
    with (
        Scheduler(model, idle=2, idle_seconds=0, disk=DISK) as scheduler,
        live(model, scheduled=Scheduled(scheduler)) as server,
    ):
        client = Client(server.url)
        refused_in_turn(client, scheduler, expected, "whole")
        refused_in_turn(client, scheduler, expected, "stream", stream=True)
    gc.collect()
    assert (model._engine.sessions, model._engine.memory.sessions) == (0, 0)
    print(json.dumps({name: [*counts[name], failed.get(name, 0)] for name in counts}))


if __name__ == "__main__":
    main()
