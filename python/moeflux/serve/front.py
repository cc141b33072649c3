"""The application of a server whose answers are made by other processes: it lets requests in, sends each where its
conversation has been, and gives on what comes."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeflux.errors import Error, PeerError, Refused, StateError
from moeflux.log import LOG
from moeflux.serve import page
from moeflux.serve.app import ANSWERS, OPEN, OTHERS, body_for, handlers
from moeflux.serve.exchange import Pace, failure, read_bytes, unless_gone, within
from moeflux.serve.fields import LIMITS, Limits, parse_body
from moeflux.serve.guard import Guard, Rules
from moeflux.serve.metrics import labelled
from moeflux.serve.passing import Answerers, Asked, Head
from moeflux.serve.places import Place, answer_place, places_of
from moeflux.serve.sse import data, event

__all__ = ["Door", "front"]

TRIES = 2
"""An answer of which nothing was told is made once more by another process. A request that ends two is not given to a
third."""
EVENTS = b"text/event-stream"
PINGS = (b": ", b"event: ping\n")
"""What says that an answer is on its way, and nothing of it."""
OWN = ("/health", "/metrics", "/plan")


class Door:
    """Counts the requests inside. Closed, it lets nobody in any more."""

    def __init__(self, last: Callable[[bool], object] = lambda drain: None) -> None:
        """`last` is done when it is closed and nobody is inside, or at once. It is told whether to wait, too."""
        self.closed = False
        self._hurry = False
        self._last = last
        self._inside = 0
        self._changed = threading.Condition()

    def __enter__(self) -> Door:
        with self._changed:
            if self.closed:
                raise Refused("the server: expected one that takes requests, found it closing")
            self._inside += 1
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def close(self, drain: bool = True) -> None:
        """Waits until nobody is inside, unless told not to."""
        with self._changed:
            self.closed, self._hurry = True, self._hurry or not drain
            self._changed.notify_all()
            while self._inside and not self._hurry:
                self._changed.wait()
        self._last(not self._hurry)


def front(answerers: Answerers, door: Door, rules: Rules, pace: Pace | None = None, limits: Limits = LIMITS) -> ASGIApp:
    server = _Front(answerers, door, pace or Pace(), limits)
    return Guard(Starlette(routes=server.routes(), exception_handlers=handlers()), rules, OPEN)


class _Front:
    def __init__(self, answerers: Answerers, door: Door, pace: Pace, limits: Limits) -> None:
        self._answerers, self._door, self._pace, self._limits = answerers, door, pace, limits

    def routes(self) -> list[Route]:
        asked = [Route(path, self.answer, methods=["POST"]) for path in ANSWERS]
        others = [Route(path, self.answer, methods=[method]) for path, method in OTHERS.items() if path not in OWN]
        own = {"/health": self.health, "/metrics": self.numbers, "/plan": self.plan}
        return [*asked, *others, *(Route(path, each, methods=["GET"]) for path, each in own.items()), *page.routes()]

    # ---- Answers ------------------------------------------------------------------------------------------------

    async def answer(self, request: Request) -> Response:
        path = request.url.path
        try:
            body = await read_bytes(request, self._limits, self._pace)
            asked = await asyncio.to_thread(self._asked, request, body)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return failure(error, body_for(path))
        return _Passed(asked, self._answerers, self._door, self._pace)

    def _asked(self, request: Request, body: bytes) -> Asked:
        """RequestError for what is no JSON, where there must be some."""
        path, id = request.url.path, secrets.token_hex(12)
        places: tuple[Place, ...] = ()
        leaves: tuple[Place, ...] = ()
        if request.method == "POST":
            places = places_of(path.removesuffix("/count_tokens"), parse_body(body, self._limits))
        if path in ANSWERS:
            leaves = (*places, answer_place(ANSWERS[path].prefix + id))
        elif path == "/experts":  # counts since it was asked first: whoever counts goes on
            places = leaves = (answer_place(path),)
        kind = request.headers.get("content-type", "").encode("latin-1")
        query = request.scope.get("query_string", b"")
        return Asked(request.method, path, query, kind, body, request.state.tenant, id, places, leaves)

    # ---- The server itself --------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        there = await self._answerers.there()
        status = "closing" if self._door.closed else "ok" if there else "starting"
        told = {"status": status, "replicas": there, "expected": self._answerers.count}
        return JSONResponse(told, 200 if status == "ok" else 503)

    async def numbers(self, request: Request) -> Response:
        """Of all that are there, each with its name."""
        found = await self._answerers.each("/metrics")
        return Response(labelled(found, "replica"), media_type="text/plain; version=0.0.4")

    async def plan(self, request: Request) -> Response:
        """Of each that is there, by its name."""
        found = await self._answerers.each("/plan")
        return JSONResponse({"replicas": {name: json.loads(each) for name, each in found.items()}})


class _Passed(Response):
    """Asks when it is called, because its head comes from elsewhere."""

    def __init__(self, asked: Asked, answerers: Answerers, door: Door, pace: Pace) -> None:
        super().__init__()
        self._asked, self._answerers, self._door, self._pace = asked, answerers, door, pace
        self._begun = False  # the client has the head
        self._opened = False  # and what events begin with
        self._told = False  # and more than that
        self._events = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def take(message: Message) -> None:
            """asyncio.TimeoutError when the client takes nothing for too long."""
            await within(self._pace.send, send(message))

        try:
            with self._door:
                await unless_gone(receive, self._work(scope, receive, take), [])
        except Refused as error:
            await failure(error, body_for(self._asked.path))(scope, receive, send)
        except (OSError, asyncio.TimeoutError) as error:
            LOG.info("a client left: %s", error)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        for left in reversed(range(TRIES)):
            try:
                await self._pass_on(send)
                return
            except Error as error:
                LOG.warning("an answer was lost: %s", error)
                if left and not self._told and isinstance(error, PeerError):
                    continue
                if self._begun:
                    await send(_part(self._ending(error), more=False))
                else:
                    await failure(error, body_for(self._asked.path))(scope, receive, send)
                return

    async def _pass_on(self, send: Send) -> None:
        items = self._answerers.answer(self._asked)
        try:
            head = await anext(items)
            assert isinstance(head, Head)
            begin = {"type": "http.response.start", "status": head.status, "headers": list(head.headers)}
            if not dict(head.headers).get(b"content-type", b"").startswith(EVENTS):
                if self._begun:  # the client expects events, since the first try
                    raise StateError("replica: expected an answer as events, found another")
                body = b"".join([part async for part in items if isinstance(part, bytes)])
                await send(begin)
                await send(_part(body, more=False))
                return
            if not self._begun:
                self._begun = True
                await send(begin)
            first = True
            async for part in items:
                assert isinstance(part, bytes)
                if not first:
                    self._told = self._told or not _is_ping(part)
                if not (first and self._opened):
                    self._events += part.count(b"event: ")
                    await send(_part(part))
                first, self._opened = False, True
            await send(_part(b"", more=False))
        finally:
            await items.aclose()

    def _ending(self, error: Exception) -> bytes:
        """What tells the client of an interface that its answer ends here."""
        told = body_for(self._asked.path)(error)
        if self._asked.path == "/v1/messages":
            return event(told).encode()
        if self._asked.path == "/v1/responses":
            said = {"type": "error", "code": "server_error", "message": told["error"]["message"], "param": None}
            return event({**said, "sequence_number": self._events}).encode()
        return data(told).encode()


def _is_ping(part: bytes) -> bool:
    """Whether it says nothing of the answer. Several events may have come together."""
    return all(each.startswith(PINGS) for each in part.split(b"\n\n") if each)


def _part(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
