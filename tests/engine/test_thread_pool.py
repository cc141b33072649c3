"""The pool that ops are divided over: each unit once, whoever calls and however long it slept."""

from __future__ import annotations

import os
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from moeflux import StateError
from moeflux._core import ThreadPool


@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_each_unit_runs_once(threads: int, in_steps: bool) -> None:
    pool = ThreadPool(threads)
    assert pool.threads == threads
    for units in (0, 1, 2, threads, 7, 1000):
        assert pool.run(units, in_steps=in_steps) == [1] * units


def test_by_default_one_thread_a_core() -> None:
    assert ThreadPool(0).threads == os.cpu_count()


def test_many_short_tasks() -> None:
    pool = ThreadPool(3)
    for turn in range(3000):
        assert pool.run(turn % 5) == [1] * (turn % 5)


def test_threads_that_fell_asleep_come_back() -> None:
    pool = ThreadPool(2)
    for _ in range(20):
        time.sleep(0.002)
        assert pool.run(50) == [1] * 50


@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_is_thrown_to_the_caller_and_forgotten(threads: int, in_steps: bool) -> None:
    pool = ThreadPool(threads)
    for _ in range(50):
        with pytest.raises(StateError, match="unit 3 was told to fail"):
            pool.run(20, fail_at=3, in_steps=in_steps)
        assert pool.run(20) == [1] * 20


def test_callers_on_several_threads_take_turns() -> None:
    pool = ThreadPool(3)

    def call(units: int) -> bool:
        return all(pool.run(units, in_steps=turn % 2 == 1) == [1] * units for turn in range(200))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(call, [2, 9, 33, 100]))


def test_pools_come_and_go() -> None:
    for _ in range(50):
        pool = ThreadPool(4)
        assert pool.run(4) == [1] * 4
        del pool


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_computes_alone() -> None:
    pool = ThreadPool(3)
    pool.run(100)
    time.sleep(0.005)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if pool.run(100) == [1] * 100 else 2
            del pool
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.run(100) == [1] * 100
