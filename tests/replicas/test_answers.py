"""What the server takes for an answer of a replica, of all that Ray Serve gives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from moeflux.errors import PeerError, StateError
from moeflux.replicas.replicas import Replicas
from moeflux.serve.passing import Asked, Head

ray = pytest.importorskip("ray")
ASKED = Asked("POST", "/v1/completions", b"", b"application/json", b"{}", "", "id")
HEAD = Head(200, ())
ALL = [HEAD, b"one", b"two"]


class Handle:
    """Of a replica that says this, and is gone then."""

    def __init__(self, *says: Any) -> None:
        self._says = says
        self.cancelled = False

    def options(self, **words: object) -> Handle:
        return self

    def remote(self, asked: Asked) -> Handle:
        return self

    async def __aiter__(self) -> AsyncIterator[Any]:
        for each in self._says:
            if isinstance(each, BaseException):
                raise each
            yield each

    def cancel(self) -> None:
        self.cancelled = True


def told(handle: Handle) -> tuple[list[Any], str]:
    """What comes, and the error in the end."""
    replicas = Replicas.__new__(Replicas)
    replicas._handle, replicas._patience = handle, 60.0
    found: list[Any] = []

    async def ask() -> str:
        try:
            async for item in replicas.answer(ASKED):
                found.append(item)
        except PeerError as error:
            return str(error)
        return ""

    return found, asyncio.run(ask())


def test_an_answer_is_whole_when_the_replica_says_so() -> None:
    assert told(Handle(None, *ALL, None)) == (ALL, "")
    assert told(Handle(None, *ALL, None, ray.exceptions.ActorDiedError())) == (ALL, "")


@pytest.mark.parametrize("count", range(5))
@pytest.mark.parametrize(
    "end", [(), (ray.exceptions.ActorDiedError(),), (asyncio.CancelledError(),)], ids=["ends", "fails", "is cancelled"]
)
def test_an_answer_that_ends_before_is_that_of_a_replica_that_is_gone(count: int, end: tuple[Any, ...]) -> None:
    handle = Handle(*[None, *ALL][:count], *end)
    assert told(handle) == (ALL[: max(count - 1, 0)], "replica: expected its process, found it gone")
    assert handle.cancelled


def test_an_error_of_the_replica_keeps_its_kind() -> None:
    failed = ray.exceptions.RayTaskError("answer", "", StateError("replica: expected it open, found it closed"))
    with pytest.raises(StateError, match="found it closed"):
        told(Handle(None, failed))
