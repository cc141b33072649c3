"""A client that takes nothing of what it is sent, without a socket: those of the system take megabytes first."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from moeflux import builtin
from moeflux.errors import Error
from moeflux.serve.answer import Answer
from moeflux.serve.app import CHAT
from moeflux.serve.arrivals import Beat
from moeflux.serve.desk import Begun, Prepared
from moeflux.serve.exchange import Exchange, Pace, _Stream
from moeflux.serve.request import Ask
from moeflux.serve.tools.families import HERMES
from moeflux.text.chat import Prompt
from moeflux.text.generate import GenerationStats, Piece
from moeflux.text.tokenizer import Tokenizer


class Endless:
    """An answer that never ends by itself; one of them fails."""

    finish = None
    stop_string = None
    stats = GenerationStats(3, 0, 0.0, 0, 0.0, 0, 0.0, 0, 0)
    prompt_read = 3

    def __init__(self, error: Exception | None = None) -> None:
        self.cancelled = False
        self._error = error
        self._turn = False

    def cancel(self) -> None:
        self.cancelled = True

    def follow(self, tell: Callable[[], object]) -> None:
        def again() -> None:
            tell()
            loop.call_later(0.001, again)

        loop = asyncio.get_running_loop()
        loop.call_later(0.001, again)

    def arrived(self) -> list[Piece]:
        if self._error is not None:
            raise self._error
        self._turn = not self._turn
        return [Piece("word ", 5, None)] if self._turn else []  # type: ignore[arg-type]


class Uncounted:
    def tokens(self, count: int) -> None: ...


@functools.cache
def tokenizer_of_all() -> Tokenizer:
    return Tokenizer.from_folder(builtin.path())


def stream_of(handles: Sequence[Endless], gather: float = 0.0, beat: Beat | None = None) -> _Stream:
    tokenizer = tokenizer_of_all()
    ask = Ask("m", answers=len(handles), stream=True)
    pace = Pace(ping=0.05, gather=gather, send=0.05)
    exchange = Exchange(CHAT, None, Uncounted(), pace, beat or Beat(gather))  # type: ignore[arg-type]
    begun = [Begun(handle, Answer(ask, 3, False, HERMES, tokenizer)) for handle in handles]
    return _Stream(exchange, Prepared(ask, Prompt("x", [1, 2, 3], (), False), [], None), begun)


async def there() -> dict[str, Any]:
    await asyncio.sleep(60)
    raise AssertionError


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_client_that_takes_nothing_ends_its_answer(taken: int) -> None:
    handles, sent = [Endless(), Endless()], list[Any]()

    async def send(message: Any) -> None:
        if len(sent) == taken:
            await asyncio.sleep(60)
        sent.append(message)

    asyncio.run(stream_of(handles)({"type": "http"}, there, send))  # type: ignore[arg-type]
    assert len(sent) == taken and all(handle.cancelled for handle in handles)


def test_a_client_that_left_while_it_is_sent_something_ends_its_answer() -> None:
    handles, sent = [Endless()], list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 5:
            raise OSError("the connection: gone")

    asyncio.run(stream_of(handles)({"type": "http"}, there, send))  # type: ignore[arg-type]
    assert handles[0].cancelled


class Hasty(Endless):
    """Tokens that come one after the other, in turns of the event loop that take microseconds."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.left = tokens
        self.came = list[Piece]()

    def follow(self, tell: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()

        def say() -> None:
            self.left -= 1
            self.came.append(Piece("word ", 5, None))  # type: ignore[arg-type]
            tell()
            if self.left > 0:
                loop.call_soon(say)

        loop.call_soon(say)

    def arrived(self) -> list[Piece]:
        came, self.came = self.came, []
        return came


def test_tokens_that_come_fast_are_told_together() -> None:
    """The first is told at once."""
    sent = list[bytes]()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if b"".join(sent).count(b"word") == 50:
            raise OSError("the connection: gone")

    asyncio.run(stream_of([Hasty(50)], gather=0.5)({"type": "http"}, there, send))  # type: ignore[arg-type]
    told = [body.count(b"word") for body in sent if b"word" in body]
    assert told[0] < 50 and len(told) == 2


def test_what_comes_before_the_task_has_woken_is_told_too() -> None:
    """Where there is no short way to send, the task that sends was woken for a token, and the end comes meanwhile."""
    sent = list[bytes]()

    class Sudden(Hasty):
        def follow(self, tell: Callable[[], object]) -> None:
            def say_and_end() -> None:
                self.came.append(Piece("word ", 5, None))  # type: ignore[arg-type]
                tell()
                self.finish = "cancelled"  # type: ignore[assignment]
                tell()

            asyncio.get_running_loop().call_soon(say_and_end)

        def arrived(self) -> list[Piece] | None:  # type: ignore[override]
            return super().arrived() or (None if self.finish else [])

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    stream = stream_of([Sudden(1)])
    asyncio.run(asyncio.wait_for(stream({"type": "http"}, there, send), 20))  # type: ignore[arg-type]
    assert b"".join(sent).count(b"word") == 1


def test_the_end_is_told_at_once() -> None:
    """With the tokens that came since something was told."""
    sent = list[bytes]()

    class Ending(Hasty):
        def follow(self, tell: Callable[[], object]) -> None:
            def or_end() -> None:
                if self.left == 0:
                    self.finish = "cancelled"  # type: ignore[assignment]
                tell()

            super().follow(or_end)

        def arrived(self) -> list[Piece] | None:  # type: ignore[override]
            return super().arrived() or (None if self.finish else [])

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    stream = stream_of([Ending(50)], gather=3600.0)
    asyncio.run(asyncio.wait_for(stream({"type": "http"}, there, send), 60))  # type: ignore[arg-type]
    assert b"".join(sent).count(b"word") == 50


@pytest.mark.parametrize(("streams", "waits"), [(1, 0.1), (5, 0.1), (8, 0.16), (15, 0.3), (64, 0.3)])
def test_many_streams_are_told_less_often(streams: int, waits: float) -> None:
    """And alone again, one waits as long as before."""
    beat, waited, all_there = Beat(0.1), list[float](), asyncio.Event()

    async def send(message: Any) -> None:
        waited.append(beat.seconds)
        if beat.streams == streams:
            all_there.set()
        if all_there.is_set() and b"word" in message.get("body", b""):
            raise OSError("the connection: gone")

    async def all_of_them() -> None:
        streamed = [stream_of([Endless()], beat=beat) for _ in range(streams)]
        await asyncio.gather(*(each({"type": "http"}, there, send) for each in streamed))  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(all_of_them(), 60))
    assert max(waited) == pytest.approx(waits)
    assert beat.streams == 0 and beat.seconds == 0.1


class Told(Hasty):
    """Numbered tokens, a few in each turn."""

    def follow(self, tell: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()

        def say() -> None:
            for _ in range(3):
                self.left -= 1
                self.came.append(Piece(f"{self.left} ", 5, None))  # type: ignore[arg-type]
            if self.left > 0:
                loop.call_later(0.001, say)
            else:
                self.finish = "cancelled"  # type: ignore[assignment]
            tell()

        loop.call_soon(say)

    def arrived(self) -> list[Piece] | None:  # type: ignore[override]
        came = super().arrived()
        return came if came or self.finish is None else None


@pytest.mark.parametrize("refused", [(0, 1), (1, 2), (1, 1)])
def test_what_the_short_way_refuses_goes_the_long_one_in_its_turn(refused: tuple[int, int]) -> None:
    """Also while something is on the long one, which takes as long as several tokens."""
    sent, ways, asked = list[bytes](), list[str](), list[bytes]()

    def write(part: bytes) -> bool:
        asked.append(part)
        if len(asked) % refused[1] < refused[0]:
            return False
        assert not ways or ways[-1] != "busy"
        sent.append(part)
        ways.append("short")
        return True

    async def send(text: str) -> None:
        ways.append("busy")
        await asyncio.sleep(0.004)
        sent.append(text.encode())
        ways.append("long")

    async def program() -> None:
        stream = stream_of([Told(90)])
        await stream._exchange.stream(stream._prepared, stream._begun, send, write)

    asyncio.run(program())
    told = b"".join(sent).split(b"data: ")
    words = [json.loads(each)["choices"][0]["delta"].get("content", "") for each in told[1:] if b"delta" in each]
    assert "".join(words).split() == [str(number) for number in reversed(range(90))]
    assert ("short" in ways, ways.count("long") > 2) == (refused[0] < refused[1], refused[0] > 0)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Error("the disk: expected bytes, found none"), b"the disk: expected bytes, found none"),
        (KeyError("a fault of ours"), b"the server failed; its log says more"),
    ],
)
def test_where_one_answer_fails_the_others_end(error: Exception, words: bytes) -> None:
    handles, sent = [Endless(), Endless(error)], list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(stream_of(handles)({"type": "http"}, there, send))  # type: ignore[arg-type]
    assert handles[0].cancelled
    assert words in sent[-2]["body"] and sent[-1]["more_body"] is False
