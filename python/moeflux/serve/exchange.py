"""One exchange with a client: a request is read, its answers come, and are told whole or as events."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from moeflux.errors import Cancelled, Error
from moeflux.log import LOG
from moeflux.serve.arrivals import Arrivals, Beat, Part
from moeflux.serve.desk import Begun, Desk, Prepared
from moeflux.serve.errors import headers_of, status_of
from moeflux.serve.events import Event
from moeflux.serve.fields import Limits, RequestError, parse_body
from moeflux.serve.metrics import Metrics
from moeflux.serve.request import Ask, Ending, Result, TokenLogprob, Usage
from moeflux.serve.wire import wire_of

__all__ = ["Api", "Exchange", "Pace", "Writer", "failure", "read_body", "read_bytes", "unless_gone", "within"]


LARGE = 256 << 10
"""Bytes of a body that others do not wait for."""


T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """What is awaited; asyncio.TimeoutError when it takes longer. In Python 3.10 it takes a task of its own."""
    if sys.version_info >= (3, 11):
        async with asyncio.timeout(seconds):
            return await work
    return await asyncio.wait_for(work, seconds)


class Writer(Protocol):
    """Tells an answer as server-sent events."""

    def begin(self, prompt_tokens: int) -> str: ...
    def add(self, index: int, events: Sequence[Event], logprobs: Sequence[TokenLogprob] = ()) -> str: ...
    def end(self, index: int, ending: Ending) -> str: ...
    def close(self, usage: Usage) -> str: ...
    def ping(self, read: int, prompt_tokens: int) -> str: ...
    def error(self, body: dict[str, Any]) -> str: ...


@dataclass(frozen=True)
class Api:
    """One interface."""

    prefix: str  # of the ids of its answers
    read: Callable[[dict[str, Any], Desk], Ask]
    whole: Callable[[Ask, str, Sequence[Result], Usage], dict[str, Any]]
    stream: Callable[[Ask, str], Writer]
    error: Callable[[Exception], dict[str, Any]]


@dataclass(frozen=True)
class Pace:
    """Seconds."""

    ping: float = 10.0  # without anything to tell
    gather: float = 0.033  # tokens that come sooner than this after the last ones are told together
    body: float = 60.0  # for the whole of a request
    send: float = 60.0  # until a client has taken what it was sent


async def read_bytes(request: Request, limits: Limits, pace: Pace) -> bytes:
    """The body. RequestError when it is too slow, and no more than one part of what is too large."""
    data = bytearray()

    async def take() -> None:
        async for part in request.stream():
            data.extend(part)
            if len(data) > limits.body:
                break

    try:
        await within(pace.body, take())
    except asyncio.TimeoutError as error:
        raise RequestError(f"body: expected within {pace.body:g} s, found a part of it", None, 408) from error
    return bytes(data)


async def read_body(request: Request, desk: Desk, pace: Pace) -> dict[str, Any]:
    """RequestError when it is too large, too slow, or no JSON."""
    data = await read_bytes(request, desk.limits, pace)
    if len(data) < LARGE:
        return parse_body(data, desk.limits)
    return await asyncio.to_thread(parse_body, data, desk.limits)


def failure(error: Exception, body: Callable[[Exception], dict[str, Any]]) -> JSONResponse:
    status = status_of(error)
    if status == 500:
        LOG.error("a request failed: %s", error, exc_info=error)
    return JSONResponse(body(error), status, headers_of(error))


class Exchange:
    """Answers one request. The answers end when the client leaves."""

    def __init__(self, api: Api, desk: Desk, metrics: Metrics, pace: Pace, beat: Beat, id: str | None = None) -> None:
        """`beat` is that of all exchanges. `id` is of the answer, if somebody has one for it already."""
        self._api = api
        self._desk = desk
        self._metrics = metrics
        self._pace = pace
        self._beat = beat
        self._id = api.prefix + (id or secrets.token_hex(12))

    async def respond(self, request: Request, tenant: str) -> Response:
        try:
            body = await read_body(request, self._desk, self._pace)
            ask = self._api.read(body, self._desk)
            ask = replace(ask, model=ask.model or self._desk.name)
            prepared = await asyncio.to_thread(self._desk.prepare, ask)
            begun = self._desk.begin(prepared, tenant)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return failure(error, self._api.error)
        if ask.stream:
            return _Stream(self, prepared, begun)
        return await self._whole(request, prepared, begun)

    # ---- Whole --------------------------------------------------------------------------------------------------

    async def _whole(self, request: Request, prepared: Prepared, begun: list[Begun]) -> Response:
        async def gather() -> None:
            async for _ in Arrivals(begun, self._metrics, self._beat, lambda part: "", lambda text: True):
                pass

        try:
            if not await unless_gone(request.receive, gather(), begun):
                return Response(status_code=499)
            results, usage = self._end(prepared, begun)
        except Exception as error:
            return failure(error, self._api.error)
        return JSONResponse(self._api.whole(prepared.ask, self._id, results, usage))

    def _end(self, prepared: Prepared, begun: list[Begun]) -> tuple[list[Result], Usage]:
        results, usages = [], []
        for each in begun:
            finish = each.handle.finish
            if finish == "cancelled":
                raise Cancelled("the answer: expected to be finished, found the server closing")
            results.append(each.answer.result())
            usages.append(each.answer.usage(each.handle.stats.reused_tokens))
            self._metrics.answer(each.handle)
        answers = [each.answer for each in begun]
        self._desk.keep(prepared, self._id, list(zip(answers, results, strict=True)))
        return results, reduce(add, usages)

    # ---- As events ----------------------------------------------------------------------------------------------

    async def stream(
        self,
        prepared: Prepared,
        begun: list[Begun],
        send: Callable[[str], Awaitable[None]],
        write: Callable[[bytes], bool],
    ) -> None:
        """`write` is a short way to send, which may refuse."""
        writer = self._api.stream(prepared.ask, self._id)
        count = len(prepared.prompt.tokens)
        clock = asyncio.get_running_loop().time
        last = clock()

        async def say(text: str) -> None:
            nonlocal last
            await send(text)
            last = clock()

        def say_at_once(text: str) -> bool:
            nonlocal last
            if not write(text.encode()):
                return False
            last = clock()
            return True

        def tell(part: Part) -> str:
            index, events, logprobs, ending = part
            text = writer.add(index, events, logprobs)
            return text if ending is None else text + writer.end(index, ending)

        async def ping() -> None:
            """One timer for a stream. One for each token would cost as much as the token."""
            while True:
                quiet = clock() - last
                if quiet >= self._pace.ping:
                    await say(writer.ping(min(each.handle.prompt_read for each in begun), count))
                else:
                    await asyncio.sleep(self._pace.ping - quiet)

        await say(writer.begin(count))
        pinging = asyncio.ensure_future(ping())
        try:
            async for text in Arrivals(begun, self._metrics, self._beat, tell, say_at_once):
                await say(text)
            pinging.cancel()
            _, usage = self._end(prepared, begun)
            await say(writer.close(usage))
        except Error as error:
            LOG.warning("an answer failed: %s", error)
            await send(writer.error(self._api.error(error)))
        except OSError:  # of the client
            raise
        except Exception as error:
            LOG.error("an answer failed: %s", error, exc_info=error)
            await send(writer.error(self._api.error(error)))
        finally:
            pinging.cancel()


async def unless_gone(
    receive: Receive, work: Awaitable[None], begun: list[Begun], late: Awaitable[None] | None = None
) -> bool:
    """Does the work while the client is there. False if it left first, or `late` ended first; its answers are then
    cancelled."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(each) for each in (gone(), late) if each is not None]
    done = False
    try:
        await asyncio.wait((working, *watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            done = True
        return done
    finally:
        for each in watching:
            each.cancel()
        if not done:
            for one in begun:
                one.handle.cancel()
            working.cancel()
            await asyncio.wait((working,))


class _Stream(Response):
    """The headers leave at once; then events, until the end or until the client leaves."""

    def __init__(self, exchange: Exchange, prepared: Prepared, begun: list[Begun]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._exchange = exchange
        self._prepared = prepared
        self._begun = begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seconds, clock = self._exchange._pace.send, asyncio.get_running_loop().time
        waits = list[float]()  # when the messages were sent that the client has not taken

        async def take(message: AsgiMessage) -> None:
            began = clock()
            waits.append(began)
            await send(message)
            waits.remove(began)

        async def late() -> None:
            """Ends when the client has taken nothing for too long."""
            while (left := min(waits, default=clock()) + seconds - clock()) > 0:
                await asyncio.sleep(left)
            LOG.info("a client took nothing for %g s", seconds)

        async def tell(text: str) -> None:
            await take({"type": "http.response.body", "body": text.encode(), "more_body": True})

        async def work() -> None:
            await take({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._exchange.stream(self._prepared, self._begun, tell, write)
            await take({"type": "http.response.body", "body": b"", "more_body": False})

        wire = wire_of(scope)
        write = (lambda part: False) if wire is None else wire.write
        try:
            await unless_gone(receive, work(), self._begun, late())
        except OSError as error:
            LOG.info("a client left: %s", error)
