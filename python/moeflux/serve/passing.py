"""A request that one process takes and another answers, and what is said of its answer on the way back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import ASGIApp, Message

from moeflux.serve.places import Place

__all__ = ["Answerers", "Asked", "Head", "Item", "answered"]


@dataclass(frozen=True)
class Asked:
    """Everything of a request but what opens the door: no keys, and no names of hosts."""

    method: str
    path: str
    query: bytes
    content_type: bytes
    body: bytes
    tenant: str
    id: str  # of the answer, without what its interface puts before it
    places: tuple[Place, ...] = ()  # where its conversation may have been, from the first to the deepest
    leaves: tuple[Place, ...] = ()  # where it is afterwards, beside these


@dataclass(frozen=True)
class Head:
    """What an answer begins with."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


Item = Head | bytes
"""Of an answer: its head, then the parts of its body."""


async def answered(app: ASGIApp, asked: Asked) -> AsyncGenerator[Item, None]:
    """What an application answers. The first part of a body comes as it is, those that follow may come together. Closed
    early, the client is gone."""
    came: asyncio.Queue[Item | None] = asyncio.Queue()
    gone = asyncio.Event()
    bodies = [asked.body]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            came.put_nowait(Head(message["status"], tuple((bytes(a), bytes(b)) for a, b in message["headers"])))
        else:
            came.put_nowait(message.get("body", b""))

    work = asyncio.ensure_future(app(_scope(asked), receive, send))
    work.add_done_callback(lambda _: came.put_nowait(None))
    try:
        begun = over = False
        while not over:
            item = await came.get()
            if isinstance(item, bytes) and begun:
                parts = [item]
                while not came.empty() and isinstance(part := came.get_nowait(), bytes | None):
                    over = part is None
                    parts.append(part or b"")
                item = b"".join(parts)
            over = over or item is None
            if item or (item == b"" and not begun):
                begun = begun or isinstance(item, bytes)
                yield item
        await work
    finally:
        gone.set()
        await asyncio.wait((work,))


def _scope(asked: Asked) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "query_string": asked.query,
        "root_path": "",
        "headers": [(b"content-type", asked.content_type), (b"content-length", str(len(asked.body)).encode())],
        "client": None,
        "server": None,
        "state": {"tenant": asked.tenant, "id": asked.id},
    }


class Answerers(Protocol):
    """Processes that answer, each with a model of its own."""

    @property
    def count(self) -> int: ...  # how many there shall be
    def answer(self, asked: Asked) -> AsyncGenerator[Item, None]:
        """Of one of them. PeerError when that one is lost meanwhile, or when none is there for too long. Closed early,
        the answer is cancelled."""

    async def each(self, path: str) -> dict[str, bytes]:
        """What each of them that is there says at that path, by its name."""

    async def there(self) -> int:
        """How many of them are there."""
