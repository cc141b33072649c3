"""The short way past the server's layers, by what clients find at its end."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import h11
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from moeflux.serve.wire import Wire
from support.live_server import Live

BODY = {
    "messages": [{"role": "user", "content": "Tell a story."}],
    "max_tokens": 40,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


def answered(server: Live, version: str) -> tuple[str, bytes]:
    """Headers and body, until the connection or the body ends."""
    url, data = urlsplit(server.url), json.dumps(BODY).encode()
    with socket.create_connection((url.hostname, url.port), timeout=30) as connection:
        head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: {url.netloc}\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        text = b""
        while not text.endswith(b"\r\n0\r\n\r\n") and (part := connection.recv(65536)):
            text += part
    headers, _, body = text.partition(b"\r\n\r\n")
    return headers.decode(), body


def said(body: bytes) -> str:
    events = [each.removeprefix("data: ") for each in body.decode().split("\n\n") if each.startswith("data: {")]
    return "".join(json.loads(each)["choices"][0]["delta"].get("content", "") for each in events)


def test_a_client_that_knows_no_chunks_gets_none(server: Live) -> None:
    headers, body = answered(server, "1.1")
    assert "transfer-encoding: chunked" in headers.lower()
    parts, rest = [], body
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        assert len(parts[-1]) == int(size, 16) and rest[int(size, 16) :].startswith(b"\r\n")
        rest = rest[int(size, 16) + 2 :]
    headers, whole = answered(server, "1.0")
    assert "chunked" not in headers.lower() and whole.endswith(b"data: [DONE]\n\n")
    assert parts[-1] == b"" and said(b"".join(parts)) == said(whole) != ""


class Flow:
    write_paused = False


class Transport:
    def __init__(self) -> None:
        self.closing = False
        self.written = b""

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.written += data


class Connected(H11Protocol):
    """As far as a wire looks."""

    def __init__(self) -> None:
        self.conn = h11.Connection(h11.SERVER)
        self.flow = Flow()  # type: ignore[assignment]
        self.transport = Transport()  # type: ignore[assignment]


@pytest.fixture
def connected() -> Connected:
    """The headers of a response were sent."""
    made = Connected()
    made.conn.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert isinstance(made.conn.next_event(), h11.Request)
    made.conn.send(h11.Response(status_code=200, headers=[]))
    return made


def test_what_it_takes_is_a_chunk(connected: Connected) -> None:
    assert Wire(connected).write(b"x" * 17)
    assert connected.transport.written == connected.conn.send(h11.Data(data=b"x" * 17))  # type: ignore[attr-defined]


def test_what_it_refuses(connected: Connected) -> None:
    """Nothing is sent while a client is behind, or gone, and nothing where no body is open. An empty chunk would end
    it."""
    wire = Wire(connected)
    assert not wire.write(b"")
    connected.flow.write_paused = True
    assert not wire.write(b"x")
    connected.flow.write_paused = False
    connected.transport.closing = True  # type: ignore[attr-defined]
    assert not wire.write(b"x")
    connected.transport.closing = False  # type: ignore[attr-defined]
    connected.conn.send(h11.EndOfMessage())
    assert not wire.write(b"x")
    assert not Wire(Connected()).write(b"x")
    assert connected.transport.written == b""  # type: ignore[attr-defined]
