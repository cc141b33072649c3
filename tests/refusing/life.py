"""A model's life in a process of its own, where calls of one kind are refused, one at a time. Prints, by stage, how
many there were and how many of them were refused.

A stage is gone through again and again, with its first call refused, its second, ... until it makes no more; or with
some of them, evenly spread. What fails then is a moeflux error. A session is where it was, or says that it is not; what
was to be done is then done, with the same bits; and nothing is left behind: no thread, no file, no slot, no byte that
is counted.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from refusing import System

LIBRARY, FOLDER, OPTIONS, KIND, MOST, BEGIN = sys.argv[1:]
"""MOST: calls of a stage that are refused, about; 0: every one. BEGIN: how far from one to the next the first one is,
from 0 to 1, so that several lives refuse others."""
system = System(Path(LIBRARY))

import moeflux  # noqa: E402
from moeflux import Cancel, StateError, _core  # noqa: E402
from moeflux.models.layers import GatedDelta  # noqa: E402
from moeflux.runtime.state_file import load_state, save_state  # noqa: E402
from moeflux.text.sampling import Sampler, Sampling  # noqa: E402
from support.engine import FIRST, NEXT, SECOND, evaluate, load_faulty  # noqa: E402

ROWS = np.ones((4096, 256), np.float32)
SAMPLING = Sampling(temperature=0.7, top_p=0.9, seed=1)
counts: dict[str, tuple[int, int]] = {}
HANGS = 300.0  # seconds, after which a call is taken for one that hangs


def watch() -> None:
    """A thread that ends the process, with a traceback, unless this is called again in time."""
    faulthandler.dump_traceback_later(HANGS, exit=True)


def nothing() -> None:
    pass


def each(
    stage: str, call: Callable[[], Any], then: Callable[[Any], None], before: Callable[[], None] = nothing
) -> None:
    """`then` is given what the call returned, or None when it failed. Nothing is refused `before`."""

    def made(at: int) -> int:
        watch()
        before()
        results: list[Any] = [None]
        with system.refusing(KIND, at) as calls, suppress(moeflux.Error):
            results.append(call())
        assert len(results) == 2 or 0 <= at < calls.made
        then(results.pop())  # which lets go of it
        return calls.made

    every = made(-1)
    stride = max(1, every // int(MOST)) if int(MOST) else 1
    at, refused = int(stride * float(BEGIN)), 0
    while every and made(at) > at:
        at, refused = at + stride, refused + 1
    counts[stage] = every, refused


def load() -> moeflux.Model:
    return load_faulty(Path(FOLDER), **json.loads(OPTIONS))


def threads() -> int:
    return len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else 0


def threads_are(count: int) -> None:
    """The system takes one that has ended off its list a moment later."""
    for _ in range(1000):
        if threads() == count:
            return
        time.sleep(0.005)
    raise AssertionError((threads(), count))


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


def beginning(expected: np.ndarray) -> None:
    """Opening a store, loading a model, and what a call is given."""
    before = threads(), open_files()

    def nothing_is_left(made: Any) -> None:
        del made
        gc.collect()
        threads_are(before[0])
        assert open_files() == before[1]

    def works(model: moeflux.Model | None) -> None:
        if model is not None:
            assert np.array_equal(evaluate(model.session(max_context=64)), expected)
        del model
        nothing_is_left(None)

    each("open", lambda: moeflux.open_store(FOLDER), nothing_is_left)
    each("load", load, works)
    made: dict[str, Callable[[], object]] = {
        "Cancel": Cancel,
        "ThreadPool": lambda: _core.ThreadPool(3),
        "ReadPool": lambda: _core.ReadPool(3),
        "FaultPlan": lambda: _core.FaultPlan("error", 0),
        "ReadBandwidth": lambda: _core.ReadBandwidth(3, 1 << 20).measure(3),
        "plan": lambda: moeflux.plan(FOLDER),
        "quantise": lambda: _core.quantize(ROWS, _core.QuantFormat.affine(4, 64), 3),
        "Sampler": lambda: Sampler(SAMPLING, 384, FIRST),
    }
    for name, make in made.items():
        each(name, make, nothing_is_left)


class Calls:
    """Of one session: on a model that has long been in use, or on one that was just loaded."""

    def __init__(self, expected: np.ndarray, fresh: bool) -> None:
        self.expected, self.fresh = expected, fresh
        self.name = "fresh" if fresh else "used"
        self.take(load())

    def take(self, model: moeflux.Model) -> None:
        self.model = model
        self.session = model.session(max_context=64)

    def bring(self, prompts: list[list[int]]) -> None:
        if self.fresh:
            self.take(load())
        self.session.clear()
        for prompt in prompts:
            self.session.prefill(prompt)

    def evaluated(self, name: str, prompts: list[list[int]], call: Callable[[], Any]) -> None:
        """`call` evaluates behind the prompts."""
        start = sum(map(len, prompts))

        def then(found: Any) -> None:
            if found is None:
                assert self.session.position == start
                try:
                    found = call()
                except StateError as error:
                    assert self.model.variant.layers_with(GatedDelta) and start and "clear it or restore" in str(error)
                    self.session.clear()
                    for prompt in prompts:
                        self.session.prefill(prompt)
                    found = call()
            rows = np.atleast_2d(found)
            assert np.array_equal(rows, self.expected[start : start + len(rows)])
            self.session.clear()
            assert np.array_equal(evaluate(self.session), self.expected)

        each(f"{self.name}: {name}", call, then, lambda: self.bring(prompts))

    def together(self) -> None:
        """With another session, which goes on by one token."""
        place = len(FIRST + SECOND)

        def before() -> None:
            self.bring([FIRST])
            self.other = self.model.session(max_context=64)
            for prompt in (FIRST, SECOND):
                self.other.prefill(prompt)

        def call() -> list[np.ndarray]:
            return self.model.evaluate([(self.session, SECOND), (self.other, NEXT[:1])], "all")

        def then(found: list[np.ndarray] | None) -> None:
            if found is None:
                assert (self.session.position, self.other.position) == (len(FIRST), place)
                try:
                    found = call()
                except StateError as error:
                    assert self.model.variant.layers_with(GatedDelta) and "clear it or restore" in str(error)
                    self.model, self.fresh, fresh = self.session.model, False, self.fresh
                    before()
                    self.fresh = fresh
                    found = call()
            assert np.array_equal(np.concatenate(found), self.expected[len(FIRST) : place + 1])

        each(f"{self.name}: together", call, then, before)

    def all(self) -> None:
        held = self.model._engine.held
        self.evaluated("first step", [], lambda: self.session.step(FIRST[0]))
        self.evaluated("prefill", [], lambda: self.session.prefill(FIRST, logits="all"))
        self.evaluated("prefill behind", [FIRST], lambda: self.session.prefill(SECOND, logits="all"))
        self.evaluated("step", [FIRST, SECOND], lambda: self.session.step(NEXT[0]))
        self.together()
        self.other.close()
        gc.collect()
        self.session.clear()
        assert self.model._engine.held == held


class Keeping:
    """What a session gives and takes, beside evaluating: it stands behind FIRST, and goes on to SECOND and NEXT."""

    def __init__(self, expected: np.ndarray) -> None:
        self.expected = expected[len(FIRST) :]
        self.model = load()
        self.session = self.model.session(max_context=64)
        self.session.prefill(FIRST)
        self.snapshot = self.session.snapshot()
        self.held = self.model._engine.held

    def goes_on(self) -> None:
        found = [self.session.prefill(SECOND, logits="all"), *(self.session.step(id).numpy()[None] for id in NEXT)]
        assert np.array_equal(np.concatenate(found), self.expected)
        assert self.model._engine.held == self.held

    def renew(self) -> None:
        self.session.clear()
        self.session.prefill(FIRST)

    def another(self) -> None:
        def then(made: moeflux.Session | None) -> None:
            assert self.model._engine.sessions == 1 + (made is not None)
            if made is not None:
                assert np.array_equal(evaluate(made)[len(FIRST) :], self.expected)
                del made
                gc.collect()

        each("session", lambda: self.model.session(max_context=64), then)
        assert (self.model._engine.sessions, self.model._engine.held) == (1, self.held)

    def forked(self) -> None:
        def then(made: moeflux.Session | None) -> None:
            assert self.model._engine.sessions == 1 + (made is not None)
            if made is not None:
                found = [made.prefill(SECOND, logits="all"), *(made.step(id).numpy()[None] for id in NEXT)]
                assert np.array_equal(np.concatenate(found), self.expected)
                del made
                gc.collect()
            self.goes_on()

        each("fork", lambda: self.session.fork(), then, self.renew)

    def kept(self, name: str, call: Callable[[], Any], after: Callable[[Any], None] = lambda result: None) -> None:
        """A call that changes nothing of what comes behind it, whether or not it fails."""

        def then(result: Any) -> None:
            if result is not None:
                after(result)
            assert self.session.position == len(FIRST)
            self.goes_on()

        each(name, call, then, self.renew)

    def restored(self, name: str, restore: Callable[[], object]) -> None:
        def then(result: Any) -> None:
            if result is None:
                try:
                    self.session.snapshot()
                except StateError as error:
                    assert "a restore failed half-way; clear it or restore" in str(error)
                self.session.restore(self.snapshot)
            assert self.session.tokens == FIRST
            self.goes_on()

        each(name, lambda: restore() or True, then, self.session.clear)

    def chosen(self) -> None:
        logits = self.session._logits()
        expected = Sampler(SAMPLING, len(logits), FIRST).choose(logits, logprobs=3)

        def then(found: Any) -> None:
            if found is None:  # a choice that failed has drawn nothing
                found = samplers[-1].choose(logits, logprobs=3)
            assert found == expected

        samplers: list[Sampler] = []
        each(
            "choose",
            lambda: samplers[-1].choose(logits, logprobs=3),
            then,
            lambda: samplers.append(Sampler(SAMPLING, len(logits), FIRST)),
        )

    def traced(self) -> None:
        def trace() -> int:
            with self.model.trace() as recording:
                self.session.prefill(SECOND)
                return len(recording.trace().passes)

        def then(result: int | None) -> None:
            self.renew()
            assert trace() == 1
            self.renew()
            self.goes_on()

        each("trace", trace, then, self.renew)

    def more_checkpoints(self) -> None:
        before = {}

        def begin() -> None:
            self.session.set_max_checkpoints(4)
            self.renew()
            self.session.checkpoint()
            before["held"] = self.model._engine.held

        def then(result: Any) -> None:
            memory = self.model._engine.memory
            assert self.model._engine.held == memory.total
            assert result is not None or self.model._engine.held == before["held"]
            self.session.set_max_checkpoints(4)
            assert self.session.checkpoints == [len(FIRST)]
            self.goes_on()

        each("set_max_checkpoints", lambda: self.session.set_max_checkpoints(9) or True, then, begin)

    def all(self) -> None:
        self.another()
        self.forked()
        self.kept("tokens", lambda: self.session.tokens)
        self.kept("logits", lambda: self.session._logits().numpy())
        self.kept("top_k", lambda: self.session._logits().top_k(5))
        self.kept("argmax", lambda: self.session._logits().argmax())
        self.kept("checkpoint", self.session.checkpoint)
        self.kept("rewind", lambda: self.session.rewind(len(FIRST)) + 1)
        self.kept("stats", lambda: (self.session.stats, self.session.total_stats, self.model._engine.memory))
        self.kept("snapshot", self.session.snapshot, self.is_the_same)
        self.chosen()
        self.traced()
        self.restored("restore", lambda: self.session.restore(self.snapshot))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "snapshot"
            self.kept("save", lambda: self.snapshot.save(path) or True)
            self.restored("restore of a file", lambda: self.session.restore(path))
            model, core, state = self.model, self.session._core, Path(folder) / "state"
            self.kept("state to a file", lambda: save_state(core, model.variant, model.fingerprint, state) or True)
            self.renew()
            save_state(core, model.variant, model.fingerprint, state)
            ids = np.asarray(FIRST, np.int32)
            self.restored("state of a file", lambda: load_state(core, model.variant, model.fingerprint, state, ids))
        self.more_checkpoints()

    def is_the_same(self, snapshot: moeflux.Snapshot) -> None:
        for key, tensor in self.snapshot.tensors.items():
            assert np.array_equal(snapshot.tensors[key], tensor)


def main() -> None:
    watch()
    expected = evaluate(load().session(max_context=64))
    gc.collect()
    gc.freeze()  # what is here is not looked at again, at every call that is refused
    beginning(expected)
    Keeping(expected).all()
    for fresh in (True, False):
        Calls(expected, fresh).all()


if __name__ == "__main__":
    main()
    print(json.dumps(counts))
