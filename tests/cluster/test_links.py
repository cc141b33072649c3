"""Links between stages: arrays come as they were sent, and what is of another run, or of a stranger, does not."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from contextlib import suppress

import numpy as np
import pytest

from moeflux.cluster.links import ALIGNED, HEAD, MAGIC, Broken, Frame, Links, new_keys
from moeflux.errors import PeerError

pytest.importorskip("cryptography")

RUN, OTHER = b"r" * 16, b"s" * 16
SECONDS = 20.0


def pair(run: bytes = RUN, allowed: bool = True) -> tuple[Links, Links]:
    """Who takes, and who sends."""
    there, here, stranger = new_keys(), new_keys(), new_keys()
    takes = Links(RUN, 0, there, address="127.0.0.1", allowed=[here.public])
    sends = Links(run, 1, here if allowed else stranger, address="127.0.0.1", allowed=[])
    sends.there = ("127.0.0.1", takes.port, there.public)  # type: ignore[attr-defined]
    return takes, sends


def outlet_of(sends: Links):  # type: ignore[no-untyped-def]
    return sends.connect(*sends.there)  # type: ignore[attr-defined]


def taken(takes: Links) -> Frame:
    frame = takes.receive(SECONDS)
    assert frame is not None
    return frame


def test_arrays_come_as_they_were_sent() -> None:
    takes, sends = pair()
    outlet = outlet_of(sends)
    numbers = np.random.default_rng(3)
    for count in (0, 1, 7, 2048):
        arrays = [
            numbers.standard_normal((count, 33)).astype(np.float32),
            numbers.integers(-9, 9, count).astype(np.int32),
            numbers.integers(0, 255, (count, 2)).astype(np.uint16),
        ]
        arrays[0][:, :1] = np.float32("nan")
        outlet.send({"count": count}, arrays)
        frame = taken(takes)
        assert (frame.sender, frame.body) == (1, {"count": count})
        for sent, came in zip(arrays, frame.arrays, strict=True):
            assert sent.dtype == came.dtype and sent.shape == came.shape and sent.tobytes() == came.tobytes()
            assert came.flags.aligned and came.flags.c_contiguous
    takes.close()
    sends.close()


def test_a_frame_of_another_run_is_dropped() -> None:
    takes, late = pair(run=OTHER)
    outlet = outlet_of(late)
    outlet.send({"late": True})
    assert takes.receive(SECONDS) is None and takes.receive(0.05) is None
    takes.close()
    late.close()


def test_a_stranger_is_not_heard() -> None:
    takes, stranger = pair(allowed=False)
    with suppress(PeerError):  # who is refused may learn of that later
        outlet_of(stranger).send({"op": "hello"})
    assert takes.receive(0.5) is None
    frame = HEAD.pack(MAGIC, RUN, 1, 0, 16, 0) + b"[{},[]]         "
    with socket.create_connection(("127.0.0.1", takes.port)) as plain:
        plain.sendall(frame)
        assert takes.receive(0.5) is None
    nobody = ssl.create_default_context()  # without a key of its own
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", takes.port)) as plain,
        suppress(OSError),
        nobody.wrap_socket(plain) as secure,
    ):
        secure.sendall(frame)
        assert takes.receive(0.5) is None
    assert takes.receive(0.5) is None
    takes.close()
    stranger.close()


def test_who_has_another_key_than_was_named_is_sent_nothing() -> None:
    takes, sends = pair()
    host, port, _ = sends.there  # type: ignore[attr-defined]
    with pytest.raises(PeerError, match=rf"127\.0\.0\.1, port {port}: expected a machine that takes rows, found: "):
        sends.connect(host, port, new_keys().public)
    with socket.create_server(("127.0.0.1", 0)) as free:
        unused = free.getsockname()[1]
    with pytest.raises(PeerError, match=f"port {unused}: expected a machine that takes rows, found: .*refused"):
        sends.connect(host, unused, new_keys().public)
    takes.close()
    sends.close()


def test_a_frame_that_the_system_cannot_hold_comes_whole_and_nobody_waits_for_ever() -> None:
    takes, sends = pair()
    outlet = outlet_of(sends)
    large = np.arange(24 << 20, dtype=np.int32)
    sending = threading.Thread(target=outlet.send, args=({"large": True}, [large, large[:3]]))
    sending.start()
    frame = taken(takes)
    sending.join()
    assert frame.body == {"large": True}
    assert np.array_equal(frame.arrays[0], large) and frame.arrays[1].tolist() == [0, 1, 2]

    errors: list[Exception] = []

    def send_until_told() -> None:
        try:
            outlet.send({}, [large])
        except PeerError as error:
            errors.append(error)

    sending = threading.Thread(target=send_until_told)
    sending.start()
    sending.join(0.2)
    assert sending.is_alive(), "nobody takes it"
    sends.stop()
    sending.join(SECONDS)
    assert len(errors) == 1 and "expected a peer that takes rows" in str(errors[0])
    with pytest.raises(Broken, match="link: expected it to stay, found: ") as ended:
        while True:
            taken(takes)
    assert ended.value.index == 0
    takes.close()
    sends.close()


def raw(sends: Links, number: int, body: bytes, data: bytes) -> None:
    outlet = outlet_of(sends)
    body += b" " * (-len(body) % ALIGNED)
    outlet._socket.sendall(HEAD.pack(MAGIC, RUN, 1, number, len(body), len(data)) + body + data)


def test_a_frame_that_came_before_is_dropped_and_one_that_is_missing_is_an_error() -> None:
    takes, sends = pair()
    outlet = outlet_of(sends)
    outlet.send({"first": 1})
    assert taken(takes).body == {"first": 1}
    outlet._number = 0
    outlet.send({"again": 1})
    assert takes.receive(SECONDS) is None
    outlet._number = 2
    outlet.send({"third": 1})
    with pytest.raises(PeerError, match="expected frame 1 of sender 1, found 2"):
        takes.receive(SECONDS)
    takes.close()
    sends.close()


@pytest.mark.parametrize(
    ("body", "data"),
    [
        (b"no json", b""),
        (b"[{}]", b""),
        (json.dumps([{}, [["<f4", [2]]]]).encode(), b""),
        (json.dumps([{}, [["<f4", [2]]]]).encode(), b"123"),
        (json.dumps([{}, [["<f4", [3]]]]).encode(), b"12345678"),
        (json.dumps([{}, [["<f4", [2]]]]).encode(), b"1" * 32),
        (json.dumps([{}, [["<f4", [-2]]]]).encode(), b"1" * 16),
        (json.dumps([{}, [["<f4", ["2"]]]]).encode(), b"1" * 16),
        (json.dumps([{}, [["O", [1]]]]).encode(), b"12345678"),
        (json.dumps([[], []]).encode(), b""),
    ],
)
def test_a_frame_that_is_none_is_an_error(body: bytes, data: bytes) -> None:
    takes, sends = pair()
    raw(sends, 0, body, data)
    with pytest.raises(PeerError, match="expected a frame of this version"):
        takes.receive(SECONDS)
    takes.close()
    sends.close()


@pytest.mark.parametrize(
    "head",
    [
        HEAD.pack(b"mfx1", RUN, 1, 0, 0, 0),
        HEAD.pack(MAGIC, RUN, 1, 0, 1 << 30, 0),
        HEAD.pack(MAGIC, RUN, 1, 0, 16, 1 << 60),
        HEAD.pack(MAGIC, RUN, 1, 0, 7, 0),
    ],
)
def test_a_head_that_is_none_is_an_error_before_there_is_memory_for_it(head: bytes) -> None:
    takes, sends = pair()
    outlet_of(sends)._socket.sendall(head)
    with pytest.raises(PeerError, match="expected a frame of this version, found another"):
        takes.receive(SECONDS)
    takes.close()
    sends.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(PeerError, match=r"192\.0\.2\.1: expected an address of this machine"):
        Links(RUN, 0, new_keys(), address="192.0.2.1", allowed=[])
