"""Rows on their way from machine to machine: frames over ZeroMQ, encrypted with keys that are made for each run.

A frame has a head (run, sender, number), a body in JSON, and arrays, which are sent and taken where they lie. What
another run has sent, or somebody else, is dropped. Within a run, a sender's frames come in order, each once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moeflux import files
from moeflux.errors import Error, PeerError

__all__ = ["Frame", "Keys", "Links", "new_keys"]

HEAD = struct.Struct("<4s16sHQ")
MAGIC = b"mfx1"
RUN_BYTES = 16
SEND_SECONDS = 20.0
MOST_ARRAYS = 4096
PULSES = 1 << 15
"""Added to the number of a sender, for its second way."""
TYPES = {name: np.dtype(name) for name in ("<f4", "<i4", "<u2", "|i1", "|u1")}


class Keys(NamedTuple):
    public: bytes
    secret: bytes


@dataclass
class Frame:
    sender: int
    number: int
    body: dict[str, Any]
    arrays: list[np.ndarray]


def new_keys() -> Keys:
    import zmq

    return Keys(*zmq.curve_keypair())


class Links:
    """The sockets of one process in one run: one at which it takes frames, and some by which it sends them. Each
    socket is of one thread at a time."""

    def __init__(self, run: bytes, sender: int, keys: Keys, *, address: str, allowed: Sequence[bytes]) -> None:
        """Takes frames at a free port of `address`, of those who prove that they have one of the keys `allowed`."""
        import zmq
        import zmq.auth
        from zmq.auth.thread import ThreadAuthenticator

        assert len(run) == RUN_BYTES
        self._run, self._sender, self._keys = run, sender, keys
        self._zmq: Any = zmq
        self._context = self._zmq.Context(io_threads=1)
        self._guard = ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback("*", credentials_provider=_Allowed(allowed))
        self._inlet = self._socket(self._zmq.PULL)
        self._inlet.curve_server = True
        self._inlet.curve_publickey, self._inlet.curve_secretkey = keys
        self._numbers: dict[int, int] = {}  # of the next frame of each sender
        self._outlets: list[Any] = []
        try:
            self.port: int = self._inlet.bind_to_random_port(f"tcp://{_host(address)}")
        except self._zmq.ZMQError as error:
            self.close()
            raise PeerError(
                f"{address}: expected an address of this machine to take rows at, found: {error}"
            ) from error

    def _socket(self, kind: int) -> Any:
        zmq = self._zmq
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0  # as many as there are; sessions bound them
        socket.sndtimeo = int(1000 * SEND_SECONDS)
        socket.ipv6 = True
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        return socket

    def connect(self, host: str, port: int, public: bytes, *, pulse: bool = False) -> Outlet:
        """A way to who takes frames there and has that key. A second one to the same is a `pulse`: its frames have
        numbers of their own."""
        socket = self._socket(self._zmq.PUSH)
        socket.curve_serverkey = public
        socket.curve_publickey, socket.curve_secretkey = self._keys
        socket.connect(f"tcp://{_host(host)}:{port}")
        self._outlets.append(socket)
        return Outlet(socket, self._run, self._sender + PULSES * pulse, self._zmq)

    def receive(self, seconds: float) -> Frame | None:
        """The next frame of this run; None when none has come in that time, or one that was none of it. PeerError when
        one is missing: nothing goes on over such a link."""
        if not self._inlet.poll(int(1000 * seconds)):
            return None
        parts = self._inlet.recv_multipart(copy=False)
        head = bytes(parts[0].buffer)
        if len(head) != HEAD.size or len(parts) < 2:
            return None
        magic, run, sender, number = HEAD.unpack(head)
        if magic != MAGIC or run != self._run:
            return None
        expected = self._numbers.get(sender, 0)
        if number < expected:
            return None
        if number > expected:
            raise PeerError(f"link: expected frame {expected} of sender {sender}, found {number}")
        self._numbers[sender] = expected + 1
        return frame_of(sender, number, [part.buffer for part in parts[1:]])

    def close(self) -> None:
        for socket in (*self._outlets, self._inlet):
            socket.close(0)
        self._guard.stop()
        self._context.term()


class Outlet:
    """Sends frames. Of one thread at a time."""

    def __init__(self, socket: Any, run: bytes, sender: int, zmq: Any) -> None:
        self._socket, self._run, self._sender, self._zmq = socket, run, sender, zmq
        self._number = 0

    def send(self, body: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Arrays are sent from where they lie, and must stay as they are. PeerError when nobody takes them."""
        forms = [[array.dtype.str, array.shape] for array in arrays]
        head = HEAD.pack(MAGIC, self._run, self._sender, self._number)
        text = json.dumps([body, forms], separators=(",", ":")).encode()
        try:
            self._socket.send_multipart([head, text, *map(_bytes_of, arrays)], copy=False)
        except self._zmq.ZMQError as error:
            raise PeerError(f"link: expected a peer that takes rows, found: {error}") from error
        self._number += 1


class _Allowed:
    """Whom ZeroMQ lets in."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = frozenset(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys


def frame_of(sender: int, number: int, parts: Sequence[Any]) -> Frame:
    """PeerError for what is not what `send` makes."""
    try:
        body, forms = files.parse_json(bytes(parts[0]), "frame")
        arrays = [_array(part, TYPES[name], tuple(shape)) for part, (name, shape) in zip(parts[1:], forms, strict=True)]
    except (Error, KeyError, TypeError, ValueError) as error:
        raise PeerError(f"link: expected a frame of this version, found: {error}") from error
    if not isinstance(body, dict) or len(arrays) > MOST_ARRAYS:
        raise PeerError(f"link: expected a frame of this version, found one with {len(arrays)} arrays")
    return Frame(sender, number, body, arrays)


def _array(part: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """As it lies in the message, unless that is no place for such numbers."""
    return np.require(np.frombuffer(part, dtype).reshape(shape), requirements=["C", "A"])


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
