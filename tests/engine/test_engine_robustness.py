"""Mistakes of callers, and interruptions: each has a clear outcome, and the session goes on."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import ArgumentError, BudgetError, Error, StateError
from support.engine import Folder, folders, steps, tokens

PROMPT, NEXT = tokens(20), tokens(4, seed=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("robustness"))


@pytest.fixture(scope="module")
def model(folder: Folder) -> moeflux.Model:
    return moeflux.load(folder("qwen3_5_moe"), threads=2, chunk=4)


@pytest.fixture(scope="module")
def expected(model: moeflux.Model) -> np.ndarray:
    """What follows PROMPT."""
    session = model.session()
    session.prefill(PROMPT)
    return steps(session, NEXT)


def assert_goes_on(session: moeflux.Session, expected: np.ndarray) -> None:
    """From wherever it stands, at a chunk's border of PROMPT."""
    assert session.position % 4 == 0 and session.tokens == PROMPT[: session.position]
    session.prefill(PROMPT[session.position :])
    assert np.array_equal(steps(session, NEXT), expected)


# ---- Tokens -----------------------------------------------------------------------------------------------------

WHOLE = "tokens: expected whole numbers in one dimension"
BAD_TOKENS: list[tuple[Any, str]] = [
    ([-1], "tokens[0]: expected 0 to 383, found -1"),
    ([1, 2, 384], "tokens[2]: expected 0 to 383, found 384"),
    ([1, 1 << 31], "expected ids of the vocabulary, found 1 to 2147483648"),
    ([1 << 32], "expected ids of the vocabulary, found 4294967296"),
    ([1 << 63], "expected ids of the vocabulary"),
    ([1 << 70], WHOLE),
    ([-(1 << 70)], WHOLE),
    ([1.0], WHOLE),
    ([1, 2.5], WHOLE),
    ([float("nan")], WHOLE),
    ([True], f"{WHOLE}, found bool"),
    ([1, True], f"{WHOLE}, found True or False"),
    ([1, np.True_], f"{WHOLE}, found True or False"),
    (np.array([True, False]), WHOLE),
    (np.array([1, 2], np.float32), WHOLE),
    ([[1, 2]], WHOLE),
    ([[1], [2, 3]], WHOLE),
    (np.zeros((2, 0), np.int64), WHOLE),
    (5, WHOLE),
    ("5", f"{WHOLE}, found text"),
    (["5"], f"{WHOLE}, found text"),
    (None, WHOLE),
    ([None], WHOLE),
    ({1, 2}, WHOLE),
]


@pytest.mark.parametrize(("bad", "message"), BAD_TOKENS, ids=[f"{bad!r:.30}" for bad, _ in BAD_TOKENS])
def test_bad_tokens(model: moeflux.Model, expected: np.ndarray, bad: Any, message: str) -> None:
    session = model.session()
    session.prefill(PROMPT[:8])
    for evaluate in (session.prefill, lambda ids: session.prefill(ids, logits="all")):
        with pytest.raises(ArgumentError, match=re.escape(message)):
            evaluate(bad)
    assert_goes_on(session, expected)


@pytest.mark.parametrize("bad", [-1, 384, 1 << 40, 1 << 80, 1.0, True, "1", None, [1], float("inf")])
def test_bad_steps(model: moeflux.Model, expected: np.ndarray, bad: Any) -> None:
    session = model.session()
    session.prefill(PROMPT[:8])
    with pytest.raises(ArgumentError, match="tokens"):
        session.step(bad)
    assert_goes_on(session, expected)


def test_odd_but_right_tokens(model: moeflux.Model) -> None:
    expected = model.session().prefill(PROMPT, logits="all")
    for kind in (np.uint16, np.int64, np.uint64, ">i4"):
        assert np.array_equal(model.session().prefill(np.array(PROMPT, kind), logits="all"), expected)
    assert np.array_equal(model.session().prefill(tuple(PROMPT), logits="all"), expected)
    assert np.array_equal(model.session().prefill(np.repeat(PROMPT, 2)[::2], logits="all"), expected)


def test_no_tokens(model: moeflux.Model) -> None:
    session = model.session()
    with pytest.raises(StateError, match="expected a token evaluated since it was made"):
        session.prefill([]).argmax()
    assert session.prefill(np.empty(0, np.int64), logits="all").shape == (0, 384)
    assert session.position == 0
    kept = session.step(3)
    assert session.prefill([]).argmax() == kept.argmax() == kept.numpy().argmax()


def test_tokens_changed_by_the_callback(model: moeflux.Model, expected: np.ndarray) -> None:
    """The tokens are copied and checked first, and nobody can change the copy afterwards."""
    ids = np.array(PROMPT, np.int32)
    session = model.session()
    session.prefill(ids, lambda done, total: ids.fill(1 << 30))
    assert session.tokens == PROMPT
    assert np.array_equal(steps(session, NEXT), expected)


def test_too_long_a_context(model: moeflux.Model) -> None:
    session = model.session(max_context=10)
    for count in (11, 5000):
        message = f"expected at most 10 tokens (max_context), found {count}: 0 there and {count} more"
        with pytest.raises(StateError, match=re.escape(message)):
            session.prefill(tokens(count))
    session.prefill(tokens(10))
    with pytest.raises(StateError, match=r"found 11: 10 there and 1 more"):
        session.step(1)
    assert session.position == 10
    session.rewind(0)
    session.prefill(tokens(10))


# ---- Settings ---------------------------------------------------------------------------------------------------

BAD_SETTINGS: list[tuple[dict[str, Any], type[Error], str]] = [
    ({"threads": 0}, ArgumentError, "threads: expected a whole number of at least 1, found 0"),
    ({"threads": -1}, ArgumentError, "threads: expected a whole number of at least 1, found -1"),
    ({"threads": 1.5}, ArgumentError, "threads: expected a whole number"),
    ({"threads": True}, ArgumentError, "threads: expected a whole number"),
    ({"threads": "2"}, ArgumentError, "threads: expected a whole number"),
    ({"threads": 1025}, ArgumentError, "threads: expected 1 to 1024, found 1025"),
    ({"threads": 1 << 40}, ArgumentError, "threads: expected 1 to 1024, found 1099511627776"),
    ({"readers": 0}, ArgumentError, "readers: expected a whole number"),
    ({"readers": 257}, ArgumentError, "readers: expected 1 to 256, found 257"),
    ({"ring_depth": 0}, ArgumentError, "ring_depth: expected a whole number"),
    ({"ring_depth": 17}, ArgumentError, "ring_depth: expected 1 to 16, found 17"),
    ({"chunk": 0}, ArgumentError, "chunk: expected a whole number"),
    ({"chunk": 8193}, ArgumentError, "chunk: expected 1 to 8192, found 8193"),
    ({"expert_slots": 0}, ArgumentError, "expert_slots: expected a whole number"),
    ({"expert_slots": 3}, ArgumentError, "expert_slots: expected at least 4, the experts of one token in one layer"),
    ({"memory": "lots"}, ArgumentError, 'memory: expected bytes, or a size as "8GB" or "8GiB", found \'lots\''),
    ({"memory": 0}, ArgumentError, "memory: expected bytes"),
    ({"memory": 1000}, BudgetError, "the floor of"),
    ({"context": 1025}, ArgumentError, "context: expected 1 to 1024, found 1025"),
    ({"context": 0}, ArgumentError, "context: expected a whole number"),
    ({"sessions": 0}, ArgumentError, "sessions: expected a whole number"),
    ({"kv_dtype": "f16"}, ArgumentError, 'kv_dtype: expected one of f32, bf16, q8, found "f16"'),
    ({"backend": "cpu", "isa": "sse9"}, ArgumentError, "sse9"),
    ({"backend": "tpu"}, ArgumentError, "backend: expected auto, cpu, cuda or metal, found"),
    ({"experts_per_token": 0}, Error, "experts_per_token"),
]


@pytest.mark.parametrize(("settings", "error", "message"), BAD_SETTINGS, ids=[str(s) for s, _, _ in BAD_SETTINGS])
def test_bad_settings(folder: Folder, settings: dict[str, Any], error: type[Error], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        moeflux.load(folder("qwen3_5_moe"), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_context": 0}, "max_context: expected a whole number of at least 1, found 0"),
        ({"max_context": -5}, "max_context: expected a whole number"),
        ({"max_context": 2.0}, "max_context: expected a whole number"),
        ({"max_context": 1025}, "max_context: expected 1 to 1024, found 1025"),
        ({"max_context": 1 << 80}, "max_context: expected 1 to 1024, found 1208925819614629174706176"),
        ({"kv_dtype": "f16"}, 'kv_dtype: expected "f32", "bf16" or "q8", found'),
        ({"kv_dtype": 32}, 'kv_dtype: expected "f32", "bf16" or "q8", found 32'),
    ],
)
def test_bad_session_settings(model: moeflux.Model, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        model.session(**settings)


@pytest.mark.parametrize("k", [0, -1, 385, 1 << 40])
def test_bad_top_k(model: moeflux.Model, k: int) -> None:
    logits = model.session().step(1)
    with pytest.raises(ArgumentError, match=r"k: expected (at least 1|1 to)"):
        logits.top_k(k)


@pytest.mark.parametrize("position", [-1, 21, 1 << 40])
def test_bad_rewinds(model: moeflux.Model, expected: np.ndarray, position: int) -> None:
    session = model.session()
    session.prefill(PROMPT)
    for exact in (True, False):
        with pytest.raises(ArgumentError, match=f"rewind: expected a position 0 to 20, found {position}"):
            session.rewind(position, exact=exact)
    assert_goes_on(session, expected)


def test_logits_before_there_are_any(model: moeflux.Model) -> None:
    session = model.session()
    for call in (lambda: session._core.argmax(), lambda: session._core.logits(None, 384)):
        with pytest.raises(StateError, match="expected a token evaluated"):
            call()


# ---- In the middle of a prefill ---------------------------------------------------------------------------------


def test_an_exception_in_the_callback(model: moeflux.Model, expected: np.ndarray) -> None:
    class Odd(Exception):
        pass

    mine = Odd("stop")

    def on_progress(done: int, total: int) -> None:
        assert total == len(PROMPT)
        if done == 8:
            raise mine

    session = model.session()
    with pytest.raises(Odd) as raised:
        session.prefill(PROMPT, on_progress)
    assert raised.value is mine
    assert session.position == 8
    assert session.stats.tokens == 8
    assert_goes_on(session, expected)


def test_stopped_by_the_callback(model: moeflux.Model, expected: np.ndarray) -> None:
    session = model.session()
    logits = session.prefill(PROMPT, lambda done, total: done < 12)
    assert session.position == 12
    every = model.session().prefill(PROMPT, lambda done, total: done < 12, logits="all")
    assert every.shape == (12, 384)
    assert logits.argmax() == every[-1].argmax()
    assert_goes_on(session, expected)


@pytest.mark.parametrize("answer", [None, True, 0, [], "", np.False_])
def test_only_false_stops(model: moeflux.Model, answer: object) -> None:
    session = model.session()
    session.prefill(PROMPT, lambda done, total: answer)
    assert session.position == len(PROMPT)


def test_progress_is_told_at_each_border(model: moeflux.Model) -> None:
    seen: list[tuple[int, int]] = []
    model.session().prefill(PROMPT[:10], lambda done, total: seen.append((done, total)))
    assert seen == [(4, 10), (8, 10), (10, 10)]


def test_the_callback_may_not_use_its_session_but_others(model: moeflux.Model, expected: np.ndarray) -> None:
    session, other = model.session(), model.session()
    refused = []

    def on_progress(done: int, total: int) -> None:
        with pytest.raises(StateError, match="one caller at a time"):
            session.step(1)
        refused.append(session.position)
        other.prefill(PROMPT[done - 4 : done])

    session.prefill(PROMPT, on_progress)
    assert refused == [4, 8, 12, 16, 20]
    assert np.array_equal(steps(session, NEXT), expected)
    assert_goes_on(other, expected)


def test_a_callback_that_is_none(model: moeflux.Model) -> None:
    session = model.session()
    with pytest.raises(TypeError):
        session.prefill(PROMPT, 5)  # type: ignore[arg-type]
    assert session.position == 0


# ---- Processes --------------------------------------------------------------------------------------------------


def in_a_process(script: str, *arguments: object) -> str:
    """What a script prints that must end by itself; a hang is a failure."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_control_c_in_a_prefill(folder: Folder) -> None:
    """It surfaces at the next chunk's border, without a callback, and the session goes on to the same bits."""
    script = """
        import os, signal, sys, threading, time
        import moeflux
        session = moeflux.load(sys.argv[1], threads=1, chunk=2).session()
        ids = [i % 300 for i in range(1000)]
        def interrupt():
            while session.position < 20:
                time.sleep(0.0005)
            os.kill(os.getpid(), signal.SIGINT)
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            session.prefill(ids)
            print("finished")
        except KeyboardInterrupt:
            thread.join()
            reached = session.position
            assert 20 <= reached < 1000 and reached % 2 == 0 and session.tokens == ids[:reached], reached
            end = max(reached, 300)
            session.prefill(ids[reached:end])
            whole = moeflux.load(sys.argv[1], threads=1, chunk=2).session()
            whole.prefill(ids[:end])
            assert session.step(1).numpy().tobytes() == whole.step(1).numpy().tobytes()
            print("interrupted")
    """
    assert in_a_process(script, folder("qwen3_moe")) == "interrupted\n"


FORK = """
    import os, signal, sys, threading, traceback
    import moeflux
    from moeflux import StateError, _core
    from support.engine import load_faulty
    folder, busy = sys.argv[1], sys.argv[2] == "busy"
    fault = _core.FaultPlan("hold", 1)
    model = load_faulty(folder, threads=3, readers=2, fault=fault if busy else None)
    session, other = model.session(), model.session()
    if busy:
        thread = threading.Thread(target=session.prefill, args=([1, 2, 3],))
        thread.start()
        while not fault.calls:
            pass
    else:
        session.prefill([1, 2, 3])
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a hang ends here
        code = 1
        try:
            for call in (lambda: session.step(1), lambda: other.prefill([1]), session.clear, session.snapshot,
                         model.session, lambda: session.rewind(0)):
                try:
                    call()
                    os._exit(2)
                except StateError as error:
                    assert "expected the process that loaded the model" in str(error), error
            del session, other, model
            # An NVIDIA GPU is for the process that began to use it.
            options = {"backend": "cpu"} if os.environ.get("MOEFLUX_BACKEND") == "cuda" else {}
            mine = moeflux.load(folder, threads=2, **options).session()
            mine.prefill([1, 2, 3])
            del mine
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    if busy:
        fault.release()
        thread.join()
    other.prefill([1, 2, 3])
    assert session.step(4).numpy().tobytes() == other.step(4).numpy().tobytes()
    print(session.position, other.position)
"""


@pytest.mark.parametrize("when", ("idle", "busy"))
def test_fork(folder: Folder, when: str) -> None:
    """The child is told, can drop everything and load a model of its own; the parent goes on."""
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n" + textwrap.dedent(FORK)
    assert in_a_process(script, folder("qwen3_moe"), when) == "4 4\n"


@pytest.mark.parametrize("move", (pickle.dumps, copy.copy, copy.deepcopy))
def test_what_lives_in_a_process_cannot_be_pickled(model: moeflux.Model, move: Callable[[object], object]) -> None:
    session = model.session()
    logits = session.step(1)
    for thing, advice in ((model, "moeflux.load"), (session, r"snapshot\(\)"), (logits, r"numpy\(\)")):
        with pytest.raises(TypeError, match=f"cannot be pickled.*{advice}"):
            move(thing)


def test_snapshots_can_be_pickled(model: moeflux.Model, expected: np.ndarray) -> None:
    session, other = model.session(), model.session()
    session.prefill(PROMPT)
    other.restore(pickle.loads(pickle.dumps(session.snapshot())))
    assert np.array_equal(steps(other, NEXT), expected)


# ---- States that do not fit -------------------------------------------------------------------------------------


def changed(snapshot: moeflux.Snapshot, **changes: Any) -> moeflux.Snapshot:
    return moeflux.Snapshot(**{name: getattr(snapshot, name) for name in snapshot.__dataclass_fields__} | changes)


@pytest.mark.parametrize("kv_dtype", ("f32", "bf16", "q8"))
def test_a_state_that_does_not_fit_changes_nothing(model: moeflux.Model, kv_dtype: str) -> None:
    session = model.session(max_context=30, kv_dtype=kv_dtype)
    session.prefill(PROMPT)
    session.checkpoint()
    snapshot = session.snapshot()
    expected = steps(session, NEXT)
    session.rewind(20)
    tensors = snapshot.tensors
    key = next(key for key in tensors if key[1] == "k")
    fixed = next(key for key in tensors if key[1] == "recurrent")
    rows = tensors[key]
    kind = "int8" if kv_dtype == "q8" else "float32 or uint16"
    bad: list[tuple[moeflux.Snapshot, str]] = [
        (changed(snapshot, tensors={k: v for k, v in tensors.items() if k != key}), "another set"),
        (changed(snapshot, tensors=tensors | {(9, "k"): rows}), "another set"),
        (changed(snapshot, tensors=tensors | {key: rows[:-1]}), f"expected {kind} (20, 2, 64), found"),
        (changed(snapshot, tensors=tensors | {key: rows.reshape(-1)}), f"expected {kind} (20, 2, 64), found"),
        (changed(snapshot, tensors=tensors | {key: rows.astype(np.float64)}), "found float64"),
        (changed(snapshot, tensors=tensors | {fixed: tensors[fixed].astype(np.float16)}), "expected float32"),
        (changed(snapshot, tensors=tensors | {fixed: tensors[fixed].astype(np.uint16)}), "expected float32"),
        (changed(snapshot, tensors=tensors | {fixed: tensors[fixed].astype(">f4")}), "expected float32"),
        (changed(snapshot, position=19), f"expected {kind} (19, 2, 64)"),
        (changed(snapshot, position=31), "expected at most 30 tokens (max_context), found 31"),
        (changed(snapshot, position=-1), "expected a position from 0 on, found -1"),
        (changed(snapshot, tokens=snapshot.tokens[:-1]), "expected 20 tokens, one a position, found 19"),
        (changed(snapshot, fingerprint="0" * 64), "expected a snapshot of the model"),
    ]
    for wrong, message in bad:
        with pytest.raises(ArgumentError, match=re.escape(message)):
            session.restore(wrong)
        assert (session.position, session.checkpoints, session.tokens) == (20, [20], PROMPT)
    assert np.array_equal(steps(session, NEXT), expected)


def test_a_state_laid_out_otherwise_fits(model: moeflux.Model, expected: np.ndarray) -> None:
    session, other = model.session(), model.session()
    session.prefill(PROMPT)
    snapshot = session.snapshot()
    other.restore(changed(snapshot, tensors={k: np.asfortranarray(v) for k, v in snapshot.tensors.items()}))
    assert np.array_equal(steps(other, NEXT), expected)


def test_a_state_of_nonsense_is_told_at_the_next_token(model: moeflux.Model, expected: np.ndarray) -> None:
    session = model.session()
    session.prefill(PROMPT)
    good = session.snapshot()
    key = next(key for key in good.tensors if key[1] == "recurrent")
    session.restore(changed(good, tensors=good.tensors | {key: np.full_like(good.tensors[key], np.nan)}))
    with pytest.raises(Error, match=r"expected a finite number.*or the state that was restored is"):
        session.step(1)
    session.restore(good)
    assert np.array_equal(steps(session, NEXT), expected)


def test_the_core_refuses_what_the_package_did_not_check(model: moeflux.Model) -> None:
    """If a check above had a hole, the session would be unusable, but never wrong."""
    session = model.session()
    session.prefill(PROMPT)
    with pytest.raises(ArgumentError, match="expected a tensor for layer 0, found none"):
        session._core.restore(3, np.empty(0, np.int32), [])
    with pytest.raises(StateError, match="a restore failed half-way; clear it or restore a state"):
        session.step(1)
    session.clear()
    session.prefill(PROMPT)
