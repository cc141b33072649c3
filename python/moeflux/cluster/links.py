"""Rows on their way from machine to machine: frames over TCP, by TLS with keys that are made for each run.

Who sends writes to the socket in its own thread, and who waits for a frame reads it: nothing else runs between two
machines. A frame has a head (run, sender, number), a body in JSON, and arrays, which are taken where they come to lie.
What another run has sent, or somebody else, is dropped. Within a run, a sender's frames come in order, each once.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import select
import selectors
import socket
import ssl
import struct
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from moeflux import files
from moeflux.errors import Error, PeerError
from moeflux.log import LOG

__all__ = ["Broken", "Frame", "Keys", "Links", "Outlet", "Unreached", "Unsent", "new_keys"]

HEAD = struct.Struct("<4s16sHQIQ")
"""Magic, run, sender, number, bytes of the body, bytes of the arrays."""
MAGIC = b"mfx2"
RUN_BYTES = 16
REACH_SECONDS = 10.0
MOST_BODY = 64 << 20
MOST_BYTES = 1 << 40
MOST_ARRAYS = 4096
ALIGNED = 16
"""Arrays begin at multiples of it, and so does what follows a body."""
BUFFER = 4 << 20
"""Of the system, at both ends of a link: what may be on its way while a stage computes."""
ROOM = 64 << 10
"""Bytes of a frame that are sent, and taken, as one piece."""
PULSES = 1 << 15
"""Added to the number of a sender, for its second way."""
Head = tuple[Any, ...]
Came = tuple[Head, bytes | memoryview]
"""A head, and body and arrays, one behind the other."""
TYPES = {name: np.dtype(name) for name in ("<f4", "<i4", "<u2", "|i1", "|u1")}


class Keys(NamedTuple):
    public: bytes  # a certificate, of its owner alone
    secret: bytes


@dataclass
class Frame:
    sender: int
    number: int
    body: dict[str, Any]
    arrays: list[np.ndarray]


class Broken(PeerError):
    """A link has ended that should be there. `index` is that of its sender's key among those that are allowed."""

    index = -1


class Unsent(PeerError):
    """A link has ended by which something was to be sent."""


class Unreached(PeerError):
    """Nobody who has the right key takes frames there."""

    host, port, reason = "", 0, ""


def new_keys() -> Keys:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, os.urandom(16).hex())])
    now, years = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=3650)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - years)  # clocks of machines differ; the keys end with their run
        .not_valid_after(now + years)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Keys(made.public_bytes(serialization.Encoding.PEM), secret)


def _context(purpose: int, keys: Keys, allowed: Sequence[bytes]) -> ssl.SSLContext:
    """Of one end, which proves that it has these keys, and talks with those alone that have one of the keys allowed."""
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=b"".join(allowed).decode())
    # Python reads keys from files alone.
    with tempfile.TemporaryDirectory(prefix="moeflux-") as folder:
        path = os.path.join(folder, "keys")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(keys.public + keys.secret)
        context.load_cert_chain(path)
    return context


class Links:
    """The sockets of one process in one run: one at which it takes frames, and some by which it sends them. Frames are
    received by one thread at a time."""

    def __init__(self, run: bytes, sender: int, keys: Keys, *, address: str, allowed: Sequence[bytes]) -> None:
        """Takes frames at a free port of `address`, of those who prove that they have one of the keys `allowed`."""
        assert len(run) == RUN_BYTES
        self._run, self._sender, self._keys = run, sender, keys
        self._allowed = [ssl.PEM_cert_to_DER_cert(each.decode()) for each in allowed]
        self._numbers: dict[int, int] = {}  # of the next frame of each sender
        self._outlets: list[Outlet] = []
        self._selector = selectors.DefaultSelector()
        self._inlets: tuple[_Inlet, ...] = ()
        self._lock = threading.Lock()  # of these and the selector
        self._closed = False
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, keys, allowed) if allowed else None
        if self._server is not None:
            self._server.num_tickets = 0
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listening = socket.create_server((address, 0), family=family)
        except OSError as error:
            self._selector.close()
            raise PeerError(
                f"{address}: expected an address of this machine to take rows at, found: {error}"
            ) from error
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        self.port: int = self._listening.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name="moeflux-doors", daemon=True)
        self._accepting.start()

    # ---- Sending ------------------------------------------------------------------------------------------------

    def connect(self, host: str, port: int, public: bytes, *, pulse: bool = False) -> Outlet:
        """A way to who takes frames there and has that key; Unreached when nobody does. A second one to the same is a
        `pulse`: its frames have numbers of their own."""
        plain = None
        try:
            plain = socket.create_connection((host, port), REACH_SECONDS)
            _prepare(plain)
            secure = _context(ssl.PROTOCOL_TLS_CLIENT, self._keys, [public]).wrap_socket(plain)
        except OSError as error:
            if plain is not None:
                plain.close()
            unreached = Unreached(f"{host}, port {port}: expected a machine that takes rows, found: {error}")
            unreached.host, unreached.port, unreached.reason = host, port, str(error)
            raise unreached from error
        secure.settimeout(None)  # a stage that computes takes nothing meanwhile: who is gone is known by other signs
        outlet = Outlet(secure, self._run, self._sender + PULSES * pulse)
        self._outlets.append(outlet)
        return outlet

    # ---- Taking -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listening.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._greet, args=(plain,), name="moeflux-door", daemon=True).start()

    def _greet(self, plain: socket.socket) -> None:
        try:
            plain.settimeout(REACH_SECONDS)
            _prepare(plain)
            if self._server is None:
                raise OSError("nobody is expected")
            secure = self._server.wrap_socket(plain, server_side=True)
            index = self._allowed.index(secure.getpeercert(binary_form=True) or b"")
        except (OSError, ValueError) as error:
            LOG.info("a stranger is not heard: %s", error)
            plain.close()
            return
        with self._lock:
            if self._closed:
                secure.close()
                return
            self._selector.register(inlet := _Inlet(secure, index), selectors.EVENT_READ)
            self._inlets = (*self._inlets, inlet)

    def receive(self, seconds: float) -> Frame | None:
        """The next frame of this run; None when none has come in that time, or one that was none of it. PeerError when
        one is missing, or a link has ended: nothing goes on over such links."""
        end = time.monotonic() + seconds
        left = seconds
        while left >= 0:
            came = self._next(left)
            if came is not None:
                return self._checked(*came)
            left = end - time.monotonic()
        return None

    def _next(self, seconds: float) -> Came | None:
        inlets = self._inlets
        if len(inlets) == 1:  # it is waited for without asking the system which one it is
            return self._take(inlets[0], seconds)
        ready = [each for each in inlets if each.waiting]
        for inlet in ready or [cast(_Inlet, key.fileobj) for key, _ in self._selector.select(seconds)]:
            came = self._take(inlet, 0.0)
            if came is not None:
                return came
        return None

    def _take(self, inlet: _Inlet, seconds: float) -> Came | None:
        try:
            return inlet.take(seconds)
        except OSError as error:
            broken = Broken(f"link: expected it to stay, found: {error}")
            broken.index = inlet.index
            raise broken from error

    def _checked(self, head: Head, whole: bytes | memoryview) -> Frame | None:
        _, run, sender, number, body, _ = head
        if run != self._run:
            return None
        expected = self._numbers.get(sender, 0)
        if number < expected:
            return None
        if number > expected:
            raise PeerError(f"link: expected frame {expected} of sender {sender}, found {number}")
        self._numbers[sender] = expected + 1
        return frame_of(sender, number, body, whole)

    def stop(self) -> None:
        """Wakes who is sending: nobody may take it any more."""
        for outlet in self._outlets:
            outlet.stop()

    def close(self) -> None:
        """When nobody sends or receives any more."""
        for outlet in self._outlets:
            outlet.close()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listening.close()
        self._accepting.join(1.0)  # where a system does not wake it, it ends with the process
        with self._lock:
            self._closed = True
            for inlet in self._inlets:
                inlet.close()
            self._inlets = ()
            self._selector.close()


class Outlet:
    """Sends frames. Of one thread at a time."""

    def __init__(self, secure: ssl.SSLSocket, run: bytes, sender: int) -> None:
        self._socket, self._run, self._sender = secure, run, sender
        self._number = 0

    def send(self, body: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Unsent when nobody takes it."""
        text = _json([body, [[array.dtype.str, array.shape] for array in arrays]]).encode()
        text += b" " * (-len(text) % ALIGNED)
        pieces: list[Any] = [b"", text]
        size = 0
        for array in arrays:
            pieces.append(array.tobytes() if array.nbytes <= ROOM else np.ascontiguousarray(array).data.cast("B"))
            if left := -array.nbytes % ALIGNED:
                pieces.append(bytes(left))
            size += array.nbytes + left
        pieces[0] = HEAD.pack(MAGIC, self._run, self._sender, self._number, len(text), size)
        try:
            if size <= ROOM:
                data = b"".join(pieces)
                sent = self._socket.send(data)
                if sent < len(data):
                    self._socket.sendall(data[sent:])
            else:
                for piece in pieces:
                    self._socket.sendall(piece)
        except OSError as error:
            raise Unsent(f"link: expected a peer that takes rows, found: {error}") from error
        self._number += 1

    @property
    def has_room(self) -> bool:
        """Whether a small frame can be sent now without waiting."""
        return bool(select.select([], [self._socket], [], 0.0)[1])

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class _Inlet:
    """Puts together what comes from one sender. Frames that fit come out of one buffer, which one call fills: each
    further call costs more than most frames."""

    def __init__(self, secure: ssl.SSLSocket, index: int) -> None:
        self._socket, self.index = secure, index
        self._buffer = memoryview(bytearray(ROOM))
        self._begin = self._end = 0  # of what is in it
        self._large: Came | None = None  # a frame that does not fit
        self._left = memoryview(b"")  # of it, to be filled
        self._timeout: float | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def waiting(self) -> bool:
        """Whether something is here that the system does not know of."""
        return self._end > self._begin or self._socket.pending() > 0

    def take(self, seconds: float) -> Came | None:
        """What has come, when it is whole; None when nothing comes for so long. OSError at the end."""
        if seconds != self._timeout:
            self._socket.settimeout(seconds)
            self._timeout = seconds
        try:
            while True:
                if self._large is not None:
                    if not len(self._left):
                        came, self._large = self._large, None
                        return came
                    self._left = self._left[self._some(self._left) :]
                    continue
                if (found := self._found()) is not None:
                    return found
                if self._large is None:
                    self._end += self._some(self._buffer[self._end :])
        except (TimeoutError, ssl.SSLWantReadError, BlockingIOError):
            return None

    def close(self) -> None:
        self._socket.close()

    def _some(self, room: memoryview) -> int:
        count = self._socket.recv_into(room)
        if not count:
            raise OSError("its sender has closed it")
        return count

    def _found(self) -> Came | None:
        """The next frame of the buffer. One that does not fit is begun elsewhere."""
        begin, count = self._begin, self._end - self._begin
        size = HEAD.size
        if count >= HEAD.size:
            head = HEAD.unpack_from(self._buffer, begin)
            magic, *_, body, data = head
            if magic != MAGIC or body > MOST_BODY or body % ALIGNED or data > MOST_BYTES:
                raise OSError("expected a frame of this version, found another")
            size += body + data
            if count >= size:
                whole = bytes(self._buffer[begin + HEAD.size : begin + size])
                self._begin, self._end = (0, 0) if count == size else (begin + size, self._end)
                return head, whole
            if size > ROOM:
                large, here = memoryview(np.empty(size - HEAD.size, np.uint8)), count - HEAD.size
                large[:here] = self._buffer[begin + HEAD.size : self._end]
                self._large, self._left = (head, large), large[here:]
                self._begin = self._end = 0
                return None
        if begin + size > ROOM:
            self._buffer[:count] = bytes(self._buffer[begin : self._end])
            self._begin, self._end = 0, count
        return None


_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def frame_of(sender: int, number: int, size: int, whole: bytes | memoryview) -> Frame:
    """Its body has so many bytes. PeerError for what is not what `send` makes."""
    try:
        value, forms = files.parse_json(bytes(whole[:size]), "frame")
        if not isinstance(value, dict) or len(forms) > MOST_ARRAYS:
            raise PeerError(f"expected an object and at most {MOST_ARRAYS} arrays")
        arrays, begin = [], size
        for name, shape in forms:
            array = np.ndarray(shape, TYPES[name], whole, begin)
            arrays.append(array)
            begin += array.nbytes + -array.nbytes % ALIGNED
        if begin != len(whole):
            raise PeerError(f"expected {begin - size} bytes of arrays, found {len(whole) - size}")
    except (Error, KeyError, TypeError, ValueError) as error:
        raise PeerError(f"link: expected a frame of this version, found: {error}") from error
    return Frame(sender, number, value, arrays)


def _prepare(plain: socket.socket) -> None:
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
