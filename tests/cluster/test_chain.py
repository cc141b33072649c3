"""The end of the links that asks: whoever waits takes what comes, for others too, and nobody is left waiting."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from moeflux.cluster import chain as chains
from moeflux.cluster.chain import Chain
from moeflux.cluster.links import Frame, Links, Outlet, new_keys
from moeflux.errors import PeerError

pytest.importorskip("cryptography")

RUN = b"r" * 16
SECONDS = 10.0


class Stage:
    """Sends frames back as they come, or in the reverse order when it has so many."""

    def __init__(self) -> None:
        self.keys = [new_keys(), new_keys()]
        mine, asker = self.keys
        self.links = Links(RUN, 0, mine, address="127.0.0.1", allowed=[asker.public])
        self.lost = threading.Event()
        self.chain = Chain(RUN, asker, "127.0.0.1", [("far", mine.public)], patience=1e6, lost=self.lost.set)
        self.outlet: Outlet = self.links.connect("127.0.0.1", self.chain.port, asker.public)
        self.chain.begin("127.0.0.1", self.links.port, mine.public)

    def take(self) -> Frame:
        frame = self.links.receive(SECONDS)
        assert frame is not None
        return frame

    def give(self, frame: Frame) -> None:
        self.outlet.send({**frame.body, "told": ["far"]}, frame.arrays)

    def echo(self, batches: Iterator[int]) -> None:
        with suppress(PeerError):
            while True:
                for frame in [self.take() for _ in range(next(batches))][::-1]:
                    self.give(frame)

    def close(self) -> None:
        self.links.stop()  # wakes who takes frames at the chain
        self.chain.close()
        self.links.close()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """Nothing looks again after a moment: who is not woken waits for ever."""
    monkeypatch.setattr(chains, "WAIT", 4 * SECONDS)
    stage = Stage()
    until(stage.chain._taking.locked)  # by its own thread
    yield stage
    stage.close()


def ask(stage: Stage, numbers: range, found: list[int]) -> None:
    """One after the other: each answer has its own number."""
    for number in numbers:
        told, (array,) = stage.chain.send("hello", [np.array([number], np.int32)]).told()
        assert told == ["far"]
        found.append(int(array[0]))


def started(stage: Stage, numbers: range, found: list[int]) -> threading.Thread:
    thread = threading.Thread(target=ask, args=(stage, numbers, found), daemon=True)
    thread.start()
    return thread


def asked_by_the_main_thread(stage: Stage, numbers: range, found: list[int]) -> None:
    watch = threading.Timer(SECONDS, stage.chain.fail, [PeerError("expected an answer, found none")])
    watch.start()
    ask(stage, numbers, found)
    watch.cancel()


def ended(thread: threading.Thread) -> bool:
    thread.join(SECONDS)
    return not thread.is_alive()


@pytest.mark.parametrize("together", [1, 2, 5])
@pytest.mark.parametrize("main", [False, True])
def test_threads_that_wait_beside_each_other_get_their_own(stage: Stage, together: int, main: bool) -> None:
    """As many as are together come back in the reverse order. The main thread takes nothing, and is woken."""
    threading.Thread(target=stage.echo, args=(itertools.repeat(together),), daemon=True).start()
    ranges = [range(1000 * each, 1000 * each + 60) for each in range(together)]
    founds: list[list[int]] = [[] for _ in ranges]
    others = [started(stage, each, found) for each, found in zip(ranges[main:], founds[main:], strict=True)]
    if main:
        asked_by_the_main_thread(stage, ranges[0], founds[0])
    assert all(ended(each) for each in others)
    assert founds == [list(each) for each in ranges]


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def resting(stage: Stage) -> None:
    """One has been answered, so that the chain's own thread leaves what comes to who waits."""
    done = started(stage, range(1), [])
    until(lambda: stage.chain._sleepers == 1)  # nobody is expected to take the next one if nobody waits for this
    stage.give(stage.take())
    assert ended(done)
    until(lambda: not stage.chain._taking.locked())


def test_who_waits_takes_its_own(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    resting(stage)
    taken: list[threading.Thread] = []
    take = stage.chain._take
    monkeypatch.setattr(stage.chain, "_take", lambda frame: (taken.append(threading.current_thread()), take(frame)))
    done = started(stage, range(1), [])
    stage.give(stage.take())
    assert ended(done)
    assert taken == [done]


def test_who_leaves_wakes_who_still_waits(stage: Stage) -> None:
    resting(stage)
    first = started(stage, range(1), [])
    until(stage.chain._taking.locked)
    second = started(stage, range(1), [])
    until(lambda: stage.chain._sleepers == 1)
    frames = [stage.take(), stage.take()]
    for thread, frame in zip((first, second), frames, strict=True):
        stage.give(frame)
        assert ended(thread)


def test_the_main_thread_wakes_who_takes_for_it(stage: Stage) -> None:
    resting(stage)
    threading.Thread(target=stage.echo, args=(itertools.repeat(1),), daemon=True).start()
    asked_by_the_main_thread(stage, range(3), [])


def test_a_break_wakes_all_who_wait(stage: Stage) -> None:
    errors: list[str] = []

    def failing() -> None:
        try:
            ask(stage, range(1), [])
        except PeerError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=failing, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        stage.take()
    stage.outlet.close()
    assert all(ended(each) for each in threads)
    assert len(errors) == 3 and all("machine far" in each for each in errors)
    assert stage.lost.wait(SECONDS)


def test_sessions_that_were_dropped_are_closed_when_nobody_asks(stage: Stage) -> None:
    """Who takes frames sends that in passing, if nobody else is sending just then."""
    stage.chain.forget(7)
    done = started(stage, range(1), [])
    closing, frame = stage.take(), stage.take()
    assert (closing.body["op"], closing.body["ids"], frame.body["op"]) == ("close", [7], "hello")
    stage.chain.forget(8)
    until(lambda: not stage.chain._sending.locked())  # a frame may be here before its sender is done
    stage.give(frame)
    assert ended(done)
    assert stage.take().body["ids"] == [8]


def test_who_cannot_send_names_the_machine(stage: Stage) -> None:
    """It may find that out before anybody who takes frames does."""
    assert stage.chain._outlet is not None
    stage.chain._outlet.stop()
    with pytest.raises(PeerError, match="machine far: link: expected a peer that takes rows"):
        ask(stage, range(1), [])
