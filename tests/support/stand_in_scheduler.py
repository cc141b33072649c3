"""A scheduler for tests of the server: a real model answers, one request at a time, or a script says what it says.

What is said goes through the model's own tokens either way, so that everything behind the scheduler is as it will be.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from moeflux import _core
from moeflux.errors import Cancelled, Refused
from moeflux.model import Model
from moeflux.serve.protocols import Mask
from moeflux.text.chat import Prompt
from moeflux.text.generate import Finish, GenerationStats, Piece
from moeflux.text.sampling import Sampler, Sampling
from moeflux.text.stop_text import StopText
from moeflux.text.tokenizer import shared_length

__all__ = ["StandIn"]

Script = Callable[[str], "str | None"]


class StandInHandle:
    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.prompt_read = 0
        self.finish: Finish | None = None
        self.stop_string: str | None = None
        self.stats = GenerationStats(len(prompt), 0, 0.01, 0, 0.0, 0, 0.0, 0, 0)
        self.cancelled = _core.Cancel()
        self._pieces: deque[Piece] = deque()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._follower: tuple[asyncio.AbstractEventLoop, Callable[[], object]] | None = None

    def cancel(self) -> None:
        self.cancelled.set()

    def follow(self, tell: Callable[[], object]) -> None:
        with self._lock:
            self._follower = asyncio.get_running_loop(), tell
        tell()

    def arrived(self) -> list[Piece] | None:
        with self._lock:
            pieces = list(self._pieces)
            self._pieces.clear()
            if pieces or self.finish is None:
                return pieces
        if self._error is not None:
            raise self._error
        return None

    def say(self, piece: Piece) -> None:
        self.stats = replace(self.stats, tokens=self.stats.tokens + (piece.token is not None))
        with self._lock:
            self._pieces.append(piece)
            self._wake()

    def over(self, finish: Finish, error: Exception | None = None) -> None:
        with self._lock:
            self.finish, self._error = finish, error
            self._wake()

    def _wake(self) -> None:
        if self._follower is not None:
            loop, tell = self._follower
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(tell)


class StandIn:
    def __init__(self, model: Model, *, waiting: int = 256) -> None:
        self.model = model
        self.waiting = waiting
        self.script: Script = lambda prompt: None
        self.seen: list[tuple[StandInHandle, dict[str, Any]]] = []
        self.hold = threading.Event()  # while it is not set, no prompt goes on after its first half
        self.hold.set()
        self.closed = False
        self._session = model.session()
        self._line: deque[tuple[StandInHandle, dict[str, Any]]] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def numbers(self) -> dict[str, Any]:
        return {"waiting": len(self._line), "accepted": len(self.seen)}

    def submit(self, *, prompt: Prompt | Sequence[int], **fields: Any) -> StandInHandle:
        handle = StandInHandle(list(prompt.tokens if isinstance(prompt, Prompt) else prompt))
        with self._changed:
            if self.closed or len(self._line) >= self.waiting:
                refused = Refused("submit: expected fewer requests, found too many")
                refused.waiting, refused.seconds = len(self._line), 2.5
                raise refused
            self._line.append((handle, fields))
            self.seen.append((handle, fields))
            self._changed.notify()
        return handle

    def close(self, drain: bool = True) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._line and not self.closed:
                    self._changed.wait()
                if not self._line:
                    return
                handle, fields = self._line.popleft()
            try:
                self._answer(handle, **fields)
            except Cancelled:
                handle.over("cancelled")
            except Exception as error:
                handle.over("failed", error)

    def _answer(
        self,
        handle: StandInHandle,
        *,
        max_tokens: int | None,
        stop: Sequence[str],
        ignore_end: bool,
        sampling: Sampling,
        logprobs: int | None,
        continues: bool,
        mask: Mask | None,
        **others: Any,
    ) -> None:
        tokenizer, ends = self.model.tokenizer, self.model.end_tokens
        scripted = self.script(tokenizer.decode(handle.prompt))
        forced = None if scripted is None else [*tokenizer.encode_marked(scripted), min(ends)]
        logits = self._read(handle, evaluate=forced is None)
        sampler = Sampler(sampling, self.model.variant.vocab_size, handle.prompt)
        stream, stops = tokenizer.stream(continues=continues), StopText(stop)
        tokens: list[int] = []
        room = 1 << 30 if forced else self._session.max_context - len(handle.prompt) + 1
        most = room if max_tokens is None else min(max_tokens, room)
        while not handle.cancelled.is_set():
            allowed = None if mask is None else mask(tuple(tokens))
            if forced is not None:
                token, logprob, top = forced[len(tokens)], -0.5, [(5, -0.5)]
            else:
                token, logprob, top = sampler.choose(logits, allowed=allowed, logprobs=logprobs)
            tokens.append(token)
            over = token in ends and not ignore_end
            text, found = stops.add("" if over else stream.add(token))
            last = over or len(tokens) == most
            if last and found is None:
                rest, found = stops.add(stream.finish())
                text += rest + ("" if found else stops.finish())
            handle.stop_string = found
            told = (None, ()) if logprobs is None else (logprob, tuple(top))
            handle.say(Piece(text, token, self._session.stats, *told))
            if found is not None or last:
                finish: Finish = "stop" if found else "end" if over else "length" if most == max_tokens else "context"
                handle.over(finish)
                return
            if forced is None:
                logits = self._session.step(token, cancel=handle.cancelled)
        handle.over("cancelled")

    def _read(self, handle: StandInHandle, *, evaluate: bool) -> Any:
        """The prompt, in two halves; what the session has of it already is not read again."""
        prompt, session = handle.prompt, self._session
        shared = min(shared_length(session.tokens, prompt), len(prompt) - 1)
        if evaluate:
            shared = session.rewind(shared, exact=False)
        handle.stats = replace(handle.stats, reused_tokens=shared)
        half, logits = (shared + len(prompt)) // 2, None
        for begin, end in ((shared, half), (half, len(prompt))):
            if evaluate and end > begin:
                logits = session.prefill(prompt[begin:end], cancel=handle.cancelled)
                session.checkpoint()
            handle.prompt_read = end
            while not self.hold.wait(0.01):
                if handle.cancelled.is_set():
                    raise Cancelled("gone")
        return logits
