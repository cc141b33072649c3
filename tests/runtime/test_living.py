"""What lists the sessions of a model and the models of a process: of any threads, and it keeps nothing alive."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest

import moeflux
from moeflux.living import Living


class Thing:
    pass


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads of an interpreter with a lock change after every few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_it_keeps_nothing_alive() -> None:
    living: Living[Thing, int] = Living()
    kept, gone = Thing(), Thing()
    living.add(kept, 1)
    living.add(gone, 2)
    assert living.items() == [(kept, 1), (gone, 2)]
    del gone
    gc.collect()
    assert living.items() == [(kept, 1)]
    living.add(kept, 3)
    assert living.items() == [(kept, 3)] and len(living._all) == 1


def in_threads(*bodies: object) -> None:
    """What one of them raises is raised here."""
    failures: list[BaseException] = []

    def guarded(body: object) -> None:
        try:
            body()  # type: ignore[operator]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_threads_add_while_others_look(hurried: None) -> None:
    living: Living[Thing, None] = Living()
    kept = [Thing() for _ in range(400)]

    def add() -> None:
        for each in kept:
            living.add(each, None)
            living.add(Thing(), None)

    def look() -> None:
        for _ in range(400):
            assert all(isinstance(each, Thing) for each, _ in living.items())

    in_threads(add, look, add, look)
    assert {id(each) for each, _ in living.items()} >= {id(each) for each in kept}


def test_a_model_is_closed_while_threads_make_sessions(hurried: None) -> None:
    """Whoever comes too late gets StateError, and no session stays open."""
    made: list[moeflux.Session] = []
    for _ in range(5):
        model = moeflux.load(memory=None, threads=1)
        begun = threading.Barrier(3)

        def make(model: moeflux.Model = model, begun: threading.Barrier = begun) -> None:
            begun.wait()
            try:
                for _ in range(40):
                    made.append(model.session(max_context=64))
                    made[-1].fork()
            except moeflux.StateError as error:
                assert "open, found it closed" in str(error)

        def close(model: moeflux.Model = model, begun: threading.Barrier = begun) -> None:
            begun.wait()
            model.close()

        in_threads(make, make, close)
        assert all(session.closed for session in made)
