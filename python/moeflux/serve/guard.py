"""Who may ask: checked before anything of a request is read.

A page in somebody's browser can send requests to the loopback, and with a name of its own that leads there it can read
the answers (rebinding). So the name that a request is for must be one of ours, and a page that asks must be ours or be
named. Another address than the loopback needs a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeflux.errors import ArgumentError
from moeflux.serve.errors import anthropic_body, openai_body
from moeflux.serve.fields import RequestError

__all__ = ["Guard", "Rules", "check_address", "is_loopback"]

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
METHODS = "GET, POST, OPTIONS"
HEADERS = "authorization, x-api-key, content-type, anthropic-version, anthropic-beta"


@dataclass(frozen=True)
class Rules:
    hosts: Collection[str] = LOOPBACK  # names that requests may be for, without ports
    origins: Collection[str] = ()  # of pages elsewhere that may ask, such as "https://chat.example"
    keys: Sequence[str] = ()


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or host.startswith("127.")


def check_address(host: str, keys: Sequence[str], insecure: bool) -> None:
    """ArgumentError for an address that others can reach, without a key."""
    if not (is_loopback(host) or keys or insecure):
        raise ArgumentError(
            f"host: expected a loopback address, or a key (--api-key-file), or --insecure, found {host!r:.80}"
        )


class Guard:
    """Wraps an application. What it lets through has `tenant` in its state: who asks, as far as keys tell."""

    def __init__(self, app: ASGIApp, rules: Rules, open_paths: Collection[str]) -> None:
        """`open_paths` may be asked without a key."""
        self._app = app
        self._rules = rules
        self._open = frozenset(open_paths)
        self._keys = [(key.encode(), hashlib.sha256(key.encode()).hexdigest()[:16]) for key in rules.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        allowed = origin is not None and origin in self._rules.origins
        response: Response | None = None
        try:
            self._check(scope, headers, origin, allowed)
            if allowed and scope["method"] == "OPTIONS":
                response = Response(status_code=204)
            else:
                scope.setdefault("state", {})["tenant"] = self._tenant(scope, headers)
        except RequestError as error:
            body = anthropic_body if scope["path"].startswith("/v1/messages") else openai_body
            unknown = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
            response = JSONResponse(body(error), error.status, unknown)

        async def named(message: Message) -> None:
            """With what a page of a named origin needs to read the answer."""
            if message["type"] == "http.response.start" and allowed and origin is not None:
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"access-control-allow-origin", origin.encode("latin-1")),
                    (b"access-control-allow-methods", METHODS.encode()),
                    (b"access-control-allow-headers", HEADERS.encode()),
                    (b"vary", b"origin"),
                ]
            await send(message)

        await (self._app if response is None else response)(scope, receive, named)

    def _check(self, scope: Scope, headers: Headers, origin: str | None, allowed: bool) -> None:
        host = headers.get("host", "")
        if _name_of(f"//{host}") not in self._rules.hosts:
            raise RequestError("Host: expected a name of this server, found another; --allow-host adds one", None, 403)
        if origin is not None and not allowed and origin not in (f"http://{host}", f"https://{host}"):
            raise RequestError("Origin: expected this server's page, found another; --allow-origin adds one", None, 403)

    def _tenant(self, scope: Scope, headers: Headers) -> str:
        """Of the key that was given. RequestError if it is none of ours."""
        if not self._keys or scope["path"] in self._open:
            return ""
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = (token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")).encode()
        found = ""
        for key, name in self._keys:  # all of them, so that the time tells nothing
            if hmac.compare_digest(key, given):
                found = name
        if not found:
            raise RequestError("key: expected Authorization: Bearer or x-api-key with a key of this server", None, 401)
        return found


def _name_of(address: str) -> str:
    """The name without the port; "" if it is none."""
    try:
        return (urlsplit(address).hostname or "").lower()
    except ValueError:
        return ""
