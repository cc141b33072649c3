"""The server in front of processes that answer: what it passes on, and what it does when one is lost."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from moeflux.errors import PeerError, Refused
from moeflux.model import Model
from moeflux.serve.app import answering
from moeflux.serve.desk import Desk
from moeflux.serve.exchange import Pace
from moeflux.serve.fields import Limits
from moeflux.serve.front import Door, front
from moeflux.serve.guard import Rules
from moeflux.serve.passing import Asked, Head, Item, answered
from moeflux.serve.places import answer_place
from support.stand_in_scheduler import StandIn

CHAT = "/v1/chat/completions"
EVENTS = Head(200, ((b"content-type", b"text/event-stream; charset=utf-8"),))
JSON = Head(200, ((b"content-type", b"application/json"),))
LOST = PeerError("replica: expected its process, found it gone")
QUESTION = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


class Scripted:
    """Answers by a list for each try: items, and errors that end it. None: it waits for ever."""

    count = 2

    def __init__(self, *tries: list[Any]) -> None:
        self.tries = list(tries)
        self.asked: list[Asked] = []
        self.closed = 0

    async def answer(self, asked: Asked) -> AsyncGenerator[Item, None]:
        self.asked.append(asked)
        try:
            for item in self.tries[len(self.asked) - 1]:
                if item is None:
                    await asyncio.Event().wait()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed += 1

    async def each(self, path: str) -> dict[str, bytes]:
        text = b'# HELP a_total A.\n# TYPE a_total counter\na_total{b="c"} %d\n'
        return {"0": text % 3, "1": text % 4} if path == "/metrics" else {"1": b'{"plan": 1}'}

    async def there(self) -> int:
        return self.count


class Inside:
    """An application of this process, behind the front. One is of one event loop."""

    count = 1

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    def answer(self, asked: Asked) -> AsyncGenerator[Item, None]:
        return answered(answering(self.desk), asked)


def ask(
    answerers: Any,
    path: str = CHAT,
    body: Any = QUESTION,
    *,
    method: str = "POST",
    door: Door | None = None,
    rules: Rules | None = None,
    limits: Limits | None = None,
    gone: Callable[[], bool] = lambda: False,
    take: float = 0.0,
) -> tuple[int, str, bool]:
    """(status, body, whether it is whole). The client leaves when `gone` says so, and takes so long for each part."""
    found: list[Any] = []
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    messages = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        while not gone():
            await asyncio.sleep(0.005)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(take)
        found.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "scheme": "http",
        "root_path": "",
        "http_version": "1.1",
        "asgi": {"version": "3.0"},
        "client": None,
        "server": None,
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    given = {} if limits is None else {"limits": limits}
    app = front(answerers, door or Door(), rules or Rules(), Pace(send=0.2), **given)
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 20))  # type: ignore[arg-type]
    assert [each["type"] for each in found[1:]] == ["http.response.body"] * len(found[1:])
    status = found[0]["status"] if found else 0
    whole = bool(found) and "body" in found[-1] and not found[-1].get("more_body", False)
    return status, b"".join(each.get("body", b"") for each in found).decode(), whole


def test_an_answer_comes_as_it_was_made() -> None:
    there = Scripted([JSON, b'{"a"', b": 1}"])
    assert ask(there) == (200, '{"a": 1}', True)
    (asked,) = there.asked
    assert (asked.method, asked.path, json.loads(asked.body)) == ("POST", CHAT, QUESTION)
    assert len(asked.places) == 1 and asked.leaves == (*asked.places, answer_place(f"chatcmpl-{asked.id}"))
    assert ask(Scripted([EVENTS, b"data: 1\n\n", b"data: 2\n\n"])) == (200, "data: 1\n\ndata: 2\n\n", True)
    assert ask(Scripted([Head(400, JSON.headers), b"{}"]))[:2] == (400, "{}")


def test_what_was_not_told_is_asked_for_again_and_once() -> None:
    there = Scripted([JSON, b'{"a"', LOST], [JSON, b'{"b": 1}'])
    assert ask(there) == (200, '{"b": 1}', True)
    assert len(there.asked) == 2 and there.asked[0] == there.asked[1]
    there = Scripted(
        [EVENTS, b"data: begin\n\n", b": prompt 3 of 9 tokens\n\n", LOST], [EVENTS, b"data: begin\n\n", b"x"]
    )
    assert ask(there) == (200, "data: begin\n\n: prompt 3 of 9 tokens\n\nx", True)
    there = Scripted([EVENTS, LOST], [EVENTS, b"data: begin\n\n", b"x"])  # between the head and what comes first
    assert ask(there) == (200, "data: begin\n\nx", True)
    there = Scripted([LOST], [LOST], [JSON, b"{}"])
    status, body, whole = ask(there)
    assert (status, whole, len(there.asked)) == (503, True, 2)
    assert json.loads(body)["error"]["message"] == str(LOST)


@pytest.mark.parametrize(
    ("path", "begin"),
    [(CHAT, 'data: {"error"'), ("/v1/messages", 'event: error\ndata: {"type"'), ("/v1/responses", "event: error\n")],
)
def test_a_stream_of_which_something_was_told_ends_with_an_error(path: str, begin: str) -> None:
    there = Scripted([EVENTS, b"begin;", b"event: x\n", b"event: y\n", LOST], [EVENTS, b"begin;", b"other"])
    status, body, whole = ask(there, path)
    assert (status, whole, len(there.asked)) == (200, True, 1)
    told, _, ending = body.partition("event: y\n")
    assert told == "begin;event: x\n" and ending.startswith(begin) and str(LOST) in ending
    if path == "/v1/responses":
        assert json.loads(ending.partition("data: ")[2])["sequence_number"] == 2


def test_a_stream_of_which_nothing_came_but_its_head_ends_with_an_error() -> None:
    there = Scripted([EVENTS, LOST], [EVENTS, LOST])
    status, body, whole = ask(there)
    assert (status, whole, len(there.asked)) == (200, True, 2)
    assert body.startswith('data: {"error"') and str(LOST) in body


def test_what_came_together_with_a_ping_was_told() -> None:
    there = Scripted([EVENTS, b"begin;", b": prompt 9 of 9 tokens\n\ndata: word\n\n", LOST], [EVENTS, b"begin;", b"x"])
    _, body, whole = ask(there)
    assert whole and len(there.asked) == 1 and body.count("word") == 1 and str(LOST) in body


def test_an_answer_that_fails_otherwise_is_not_asked_for_again() -> None:
    there = Scripted([Refused("full")])
    assert ask(there)[0] == 503 and len(there.asked) == 1
    there = Scripted([EVENTS, b"a", LOST], [JSON, b"{}"])
    status, body, whole = ask(there)
    assert (status, whole) == (200, True) and "expected an answer as events, found another" in body


def test_a_client_that_leaves_or_takes_nothing_ends_its_answer() -> None:
    there = Scripted([EVENTS, b"a", None])
    assert ask(there, gone=lambda: len(there.asked) == 1) == (200, "a", False)
    assert there.closed == 1
    there = Scripted([EVENTS, b"a", None])
    assert ask(there, take=0.5)[2] is False
    assert there.closed == 1


def test_what_is_wrong_at_the_door_reaches_nobody() -> None:
    there = Scripted()
    assert ask(there, body=b"{")[0] == 400
    assert ask(there, body={"a": "b" * 200}, limits=Limits(body=100))[0] == 413
    assert ask(there, rules=Rules(keys=("a key of mine",)))[0] == 401
    assert ask(there, "/v1/nothing")[0] == 404 and ask(there, method="GET")[0] == 405
    assert there.asked == []


def test_a_door_that_is_closed_waits_for_those_inside() -> None:
    done: list[bool] = []
    door = Door(done.append)
    closing = threading.Thread(target=door.close)
    with door:
        closing.start()
        closing.join(0.05)
        assert closing.is_alive() and door.closed and done == []
        status, body, _ = ask(Scripted(), door=door)
        assert status == 503 and "found it closing" in body
    closing.join(10)
    assert done == [True]
    assert ask(Scripted(), "/health", None, method="GET", door=door)[:2] == (
        503, '{"status":"closing","replicas":2,"expected":2}',
    )  # fmt: skip


def test_a_door_that_is_closed_in_a_hurry_waits_for_nobody() -> None:
    done: list[bool] = []
    door = Door(done.append)
    closing = threading.Thread(target=door.close)
    with door:
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
        door.close(False)
        closing.join(10)
        assert not closing.is_alive() and done == [False, False]


def test_numbers_and_plans_are_those_of_all() -> None:
    text = ask(Scripted(), "/metrics", None, method="GET")[1]
    assert 'a_total{b="c",replica="0"} 3.0' in text and 'a_total{b="c",replica="1"} 4.0' in text
    assert text.count("# TYPE a_total") == 1
    assert json.loads(ask(Scripted(), "/plan", None, method="GET")[1]) == {"replicas": {"1": {"plan": 1}}}
    assert ask(Scripted(), "/health", None, method="GET")[0] == 200
    assert "<html" in ask(Scripted(), "/", None, method="GET")[1]


def test_an_application_of_this_process_answers_through_it(model: Model) -> None:
    scheduler = StandIn(model)
    scheduler.script = lambda prompt: "I was asked."
    there = Inside(Desk(model, scheduler, "builtin", model.plan.context))
    body = {"messages": QUESTION["messages"]}
    assert json.loads(ask(there, body=body)[1])["choices"][0]["message"]["content"] == "I was asked."
    status, text, whole = ask(there, body={**body, "stream": True})
    assert (status, whole) == (200, True) and "asked" in text and text.endswith("data: [DONE]\n\n")
    assert ask(there, body={"messages": 3})[0] == 400
    assert json.loads(ask(there, "/v1/models", None, method="GET")[1])["data"][0]["id"] == "builtin"
    assert "/v1/models" not in ask(there, "/v1/models/other", None, method="GET")[1]
    scheduler.hold.clear()
    before = len(scheduler.seen)
    assert ask(there, body={**body, "stream": True}, gone=lambda: len(scheduler.seen) > before)[2] is False
    handle, fields = scheduler.seen[-1]
    assert handle.cancelled.is_set() and fields["tenant"] == ""
    scheduler.close(False)
