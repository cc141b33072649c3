"""The application: which path leads where."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeflux.serve import chat_completions, completions, messages, page, response_stream, responses
from moeflux.serve.arrivals import Beat
from moeflux.serve.desk import Desk
from moeflux.serve.errors import anthropic_body, openai_body
from moeflux.serve.exchange import Api, Exchange, Pace, failure, read_body
from moeflux.serve.experts import Watch
from moeflux.serve.fields import Fields, RequestError
from moeflux.serve.guard import Guard, Rules
from moeflux.serve.metrics import Metrics

__all__ = ["ANSWERS", "OPEN", "OTHERS", "answering", "application", "body_for", "handlers"]

CHAT = Api(
    "chatcmpl-",
    lambda body, desk: chat_completions.read(body, desk.limits),
    chat_completions.whole,
    chat_completions.ChatStream,
    openai_body,
)
COMPLETION = Api(
    "cmpl-",
    lambda body, desk: completions.read(body, desk.limits),
    completions.whole,
    completions.CompletionStream,
    openai_body,
)
RESPONSE = Api(
    "resp_",
    lambda body, desk: responses.read(body, desk.stored, desk.limits),
    response_stream.whole,
    response_stream.ResponseStream,
    openai_body,
)
MESSAGE = Api(
    "msg_",
    lambda body, desk: messages.read(body, desk.limits),
    messages.whole,
    messages.MessageStream,
    anthropic_body,
)

ANSWERS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
}
OTHERS = {
    "/v1/messages/count_tokens": "POST",
    "/v1/models": "GET",
    "/v1/models/{id:path}": "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/plan": "GET",
    "/experts": "GET",
    "/health": "GET",
    "/metrics": "GET",
}
"""The methods of other paths."""

OPEN = ("/health", *page.PATHS)
"""What may be asked without a key. The page is where one is typed."""

Endpoint = Callable[[Request], Awaitable[Response]]


def application(desk: Desk, rules: Rules | None = None, pace: Pace | None = None) -> ASGIApp:
    """An ASGI application. When it ends, the scheduler finishes what it has."""
    return Guard(answering(desk, pace), rules or Rules(), OPEN)


def answering(desk: Desk, pace: Pace | None = None) -> ASGIApp:
    """The same without a guard. Who was let in elsewhere has `tenant` in the state of its request."""
    server = _Server(desk, pace or Pace())

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(server.watch.close)
        await asyncio.to_thread(desk.scheduler.close)

    return _Counted(Starlette(routes=server.routes(), lifespan=life, exception_handlers=handlers()), server.metrics)


def handlers() -> dict[Any, Any]:
    """Of requests that no path takes, and of what went wrong."""
    return {HTTPException: _no_such, Exception: _broken}


class _Server:
    def __init__(self, desk: Desk, pace: Pace) -> None:
        self._desk = desk
        self._pace = pace
        self._beat = Beat(pace.gather)
        self._created = int(time.time())
        self.metrics = Metrics(desk.scheduler, desk.model)
        self.watch = Watch(desk.model)

    def routes(self) -> list[Route]:
        asked = [Route(path, self._answering(api), methods=["POST"]) for path, api in ANSWERS.items()]
        own: dict[str, Endpoint] = {
            "/v1/messages/count_tokens": self.count_tokens,
            "/v1/models": self.models,
            "/v1/models/{id:path}": self.one_model,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            "/plan": self.plan,
            "/experts": self.experts,
            "/health": self.health,
            "/metrics": self.numbers,
        }
        return [*asked, *(Route(path, own[path], methods=[method]) for path, method in OTHERS.items()), *page.routes()]

    def _answering(self, api: Api) -> Endpoint:
        async def answer(request: Request) -> Response:
            id = getattr(request.state, "id", None)
            exchange = Exchange(api, self._desk, self.metrics, self._pace, self._beat, id)
            return await exchange.respond(request, request.state.tenant)

        return answer

    # ---- Models -------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """In the forms of both interfaces at once: each client reads its own members."""
        one = self._model()
        body = {"object": "list", "data": [one], "models": [one], "has_more": False}
        return JSONResponse({**body, "first_id": one["id"], "last_id": one["id"]})

    async def one_model(self, request: Request) -> Response:
        if request.path_params["id"] != self._desk.name:
            error = RequestError(f"model: expected {self._desk.name!r}, found another", "model", 404)
            return failure(error, openai_body)
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        desk = self._desk
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created))
        return {
            "id": desk.name,
            "object": "model",
            "type": "model",
            "display_name": desk.name,
            "created": self._created,
            "created_at": created,
            "owned_by": "moeflux",
            "slug": desk.name,
            "context_window": desk.context,
            "max_model_len": desk.context,
            "max_input_tokens": desk.context,
            "lifecycle": "active",
        }

    # ---- Tokens -------------------------------------------------------------------------------------------------

    async def count_tokens(self, request: Request) -> Response:
        """By the template, so exactly what the prompt of the same request would have."""
        try:
            body = await read_body(request, self._desk, self._pace)
            ask = messages.read_count(body, self._desk.limits)
            prepared = await asyncio.to_thread(self._desk.prepare, ask)
        except Exception as error:
            return failure(error, anthropic_body)
        return JSONResponse({"input_tokens": len(prepared.prompt.tokens)})

    async def tokenize(self, request: Request) -> Response:
        """`content` as plain text, or `messages` as the chat template writes them."""
        try:
            body = await read_body(request, self._desk, self._pace)
            values = Fields(body, limits=self._desk.limits)
            if "messages" in values:
                ask = chat_completions.read(body, self._desk.limits)
                tokens = (await asyncio.to_thread(self._desk.prepare, ask)).prompt.tokens
            else:
                values.need("content")
                tokens = await asyncio.to_thread(self._desk.tokenizer.encode, values.text("content"))
        except Exception as error:
            return failure(error, openai_body)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self._desk.context})

    async def detokenize(self, request: Request) -> Response:
        try:
            body = await read_body(request, self._desk, self._pace)
            values, count = Fields(body, limits=self._desk.limits), len(self._desk.tokenizer)
            values.need("tokens")
            tokens = values.listed("tokens", 1 << 20)
            for token in tokens:
                if type(token) is not int or not 0 <= token < count:
                    raise values.wrong("tokens", f"numbers from 0 to {count - 1}", token)
            content = await asyncio.to_thread(self._desk.tokenizer.decode, tokens)
        except Exception as error:
            return failure(error, openai_body)
        return JSONResponse({"content": content})

    # ---- The server itself --------------------------------------------------------------------------------------

    async def plan(self, request: Request) -> Response:
        """Where every byte was to go, and where it is."""
        return JSONResponse({"plan": self._desk.model.plan.to_dict(), "memory": asdict(self._desk.model.memory)})

    async def experts(self, request: Request) -> Response:
        """How often each expert was picked since somebody looks."""
        return JSONResponse(await asyncio.to_thread(self.watch.look))

    async def health(self, request: Request) -> Response:
        closed = self._desk.scheduler.closed
        return JSONResponse({"status": "closing" if closed else "ok"}, 503 if closed else 200)

    async def numbers(self, request: Request) -> Response:
        return Response(await asyncio.to_thread(self.metrics.text), media_type="text/plain; version=0.0.4")


class _Counted:
    """Counts requests by path and status. Unknown paths count as one: their names are the client's."""

    def __init__(self, app: Starlette, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = {route.path for route in app.routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.request(path, message["status"])
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)


async def _no_such(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        told = RequestError(f"{request.method}: expected another method for this path", None, 405)
    else:
        told = RequestError("path: expected one of this server's (docs/serve.md lists them)", None, error.status_code)
    return JSONResponse(body_for(request.url.path)(told), error.status_code)


async def _broken(request: Request, error: Exception) -> Response:
    return failure(error, body_for(request.url.path))


def body_for(path: str) -> Callable[[Exception], dict[str, Any]]:
    """Errors as the interface of that path has them."""
    return anthropic_body if path.startswith("/v1/messages") else openai_body
