"""Uvicorn's HTTP/1.1, with a short way for the parts of a stream. Each part would otherwise go through all layers of a
response, which cost more than to make the part and to send it."""

from __future__ import annotations

import asyncio

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Http", "Wire", "wire_of"]

NAME = "moeflux.wire"


class Wire:
    """The short way of one connection."""

    def __init__(self, protocol: H11Protocol) -> None:
        self._protocol = protocol

    def write(self, part: bytes) -> bool:
        """Sends a part of the body of a response whose headers were sent. False if that is for ASGI to do: the client
        does not keep up, or is gone, or knows no chunks."""
        protocol, conn = self._protocol, self._protocol.conn
        if protocol.flow.write_paused or protocol.transport.is_closing():
            return False
        if conn.our_state is not h11.SEND_BODY or conn.their_http_version != b"1.1" or not part:
            return False
        protocol.transport.write(b"%x\r\n%b\r\n" % (len(part), part))  # to h11, nothing has changed by it
        return True


class Http(H11Protocol):
    """Every request has the wire in its scope."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        app, wire = self.app, Wire(self)

        async def wired(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "extensions": {**scope.get("extensions", {}), NAME: wire}}, receive, send)

        self.app = wired


def wire_of(scope: Scope) -> Wire | None:
    """None where somebody else serves the application."""
    found = scope.get("extensions", {}).get(NAME)
    return found if isinstance(found, Wire) else None
