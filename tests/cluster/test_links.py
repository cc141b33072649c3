"""Links between stages: arrays come as they were sent, and what is of another run, or of a stranger, does not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moeflux.cluster.links import HEAD, MAGIC, Frame, Links, new_keys
from moeflux.errors import PeerError

zmq = pytest.importorskip("zmq")

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
    outlet_of(stranger).send({"op": "hello"})
    assert takes.receive(0.5) is None
    plain = zmq.Context()
    socket = plain.socket(zmq.PUSH)
    socket.linger = 0
    socket.connect(f"tcp://127.0.0.1:{takes.port}")
    socket.send_multipart([HEAD.pack(MAGIC, RUN, 1, 0), b"[{},[]]"])
    assert takes.receive(0.5) is None
    socket.close()
    plain.term()
    takes.close()
    stranger.close()


def raw(sends: Links, number: int, *parts: bytes) -> None:
    outlet = outlet_of(sends)
    outlet._socket.send_multipart([HEAD.pack(MAGIC, RUN, 1, number), *parts])


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
    "parts",
    [
        [b"no json"],
        [b"[{}]"],
        [json.dumps([{}, [["<f4", [2]]]]).encode()],
        [json.dumps([{}, [["<f4", [2]]]]).encode(), b"123"],
        [json.dumps([{}, [["<f4", [3]]]]).encode(), b"12345678"],
        [json.dumps([{}, [["O", [1]]]]).encode(), b"12345678"],
        [json.dumps([[], []]).encode()],
    ],
)
def test_a_frame_that_is_none_is_an_error(parts: list[bytes]) -> None:
    takes, sends = pair()
    raw(sends, 0, *parts)
    with pytest.raises(PeerError, match="expected a frame of this version"):
        takes.receive(SECONDS)
    takes.close()
    sends.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(PeerError, match=r"192\.0\.2\.1: expected an address of this machine"):
        Links(RUN, 0, new_keys(), address="192.0.2.1", allowed=[])
