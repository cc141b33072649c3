"""The errors: what kinds there are, what else each is, and that each kind is raised for what its docstring says."""

from __future__ import annotations

import errno
import inspect
import pickle
from pathlib import Path

import pytest

import moeflux
from moeflux import (
    ArgumentError,
    BudgetError,
    BufferTooSmall,
    Cancelled,
    DeviceError,
    Error,
    FormatError,
    IoError,
    NotFoundError,
    PeerError,
    Refused,
    SnapshotError,
    StateError,
    _core,
    builtin,
    errors,
)
from moeflux.runtime import plan as planning

KINDS = [
    ArgumentError,
    BudgetError,
    BufferTooSmall,
    Cancelled,
    DeviceError,
    FormatError,
    IoError,
    NotFoundError,
    PeerError,
    Refused,
    SnapshotError,
    StateError,
]


def test_all_of_them_are_ours_and_say_when_they_are_raised() -> None:
    found = {value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)}
    reasons = SnapshotError.__subclasses__()
    assert len(reasons) == 9
    assert found == {Error, *KINDS, *reasons} and all(issubclass(kind, Error) for kind in KINDS)
    assert issubclass(Error, RuntimeError)
    for kind in found:
        assert len(inspect.getdoc(kind) or "") > 40 and "__doc__" in vars(kind)
        assert getattr(errors if kind in reasons else moeflux, kind.__name__) is kind


@pytest.mark.parametrize("kind", [Error, *KINDS])
def test_they_are_values_that_travel(kind: type[Error]) -> None:
    """Errors travel between processes, as in a pool of workers."""
    error = kind("here: expected this, found that")
    assert str(error) == "here: expected this, found that"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.args) == (kind, str(error), error.args)


def test_a_wrong_argument_is_a_value_error() -> None:
    model = moeflux.load(builtin.path(), threads=1)
    session = model.session()
    for call in (
        lambda: moeflux.load(builtin.path(), threads=0),
        lambda: moeflux.load(builtin.path(), backend="tpu"),
        lambda: moeflux.load(builtin.path(), cache="random"),
        lambda: moeflux.load(builtin.path(), precision=3),
        lambda: model.session(kv_dtype="f16"),
        lambda: session.prefill([1.5]),
        lambda: session.step(1 << 20),
        lambda: session.rewind(-1),
        lambda: session.generate("x", temperature=-1),
        lambda: session.generate("x", stop="word"),
        lambda: session.step(1).top_k(0),
        lambda: model.chat().ask(b"x"),
        lambda: moeflux.Sampling(top_p=2),
        lambda: moeflux.QuantFormat.affine(7, 64),
        lambda: moeflux.QuantFormat.plain("F64"),
        lambda: moeflux.ops.Ops(isa="sse9"),
        lambda: moeflux.convert(builtin.path(), "x", check="some"),
        lambda: session.snapshot().save("x", format="wire-9"),
    ):
        with pytest.raises(ValueError, match=r"expected .*found") as raised:
            call()
        assert type(raised.value) is ArgumentError


def test_a_path_that_leads_nowhere_is_a_file_not_found_error(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    for call in (
        lambda: moeflux.load(gone),
        lambda: moeflux.open_store(gone),
        lambda: moeflux.verify(gone),
        lambda: moeflux.convert(gone, tmp_path / "new"),
        lambda: moeflux.Snapshot.load(gone, moeflux.PRESETS["Qwen3.6-35B-A3B"]),
        lambda: _core.SafetensorsFile(gone),
        lambda: _core.read_json(gone),
    ):
        with pytest.raises(FileNotFoundError) as raised:
            call()
        assert type(raised.value) is NotFoundError
        assert (raised.value.errno, str(gone) in str(raised.value)) == (errno.ENOENT, True)
    with pytest.raises(IoError) as raised:
        _core.read_json(Path(__file__) / "x")
    assert not isinstance(raised.value, FileNotFoundError)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same process every time, whatever else it has done: a plan is to be compared with another."""
    monkeypatch.setattr(planning._Planner, "process_parts", lambda self: {"process": 64 << 20, "text": 0})


def test_a_budget_error_knows_what_would_be_enough(steady: None) -> None:
    asked = {"context": 4096, "sessions": 3, "threads": 1}
    with pytest.raises(BudgetError) as raised:
        moeflux.load(builtin.path(), memory="20MB", **asked)
    error = raised.value
    assert error.needed is not None and error.floor is not None
    assert error.missing == error.needed - 20_000_000 and error.floor < error.needed
    assert moeflux.plan(builtin.path(), memory=error.needed, **asked).total_bytes <= error.needed
    assert moeflux.plan(builtin.path(), memory=error.floor, threads=1).total_bytes <= error.floor
    for options in ({"memory": error.needed - 1, **asked}, {"memory": error.floor - 1, "threads": 1}):
        with pytest.raises(BudgetError):
            moeflux.plan(builtin.path(), **options)


def test_a_session_beyond_the_budget_says_what_it_would_have_taken(steady: None) -> None:
    floor = moeflux.plan(builtin.path(), context=1024, threads=1).floor_bytes
    model = moeflux.load(builtin.path(), memory=floor + 20_000_000, context=1024, threads=1)
    sessions = []
    with pytest.raises(BudgetError) as raised:
        while True:
            sessions.append(model.session())
    error, plan = raised.value, model.plan
    assert error.missing is not None and plan.budget_bytes is not None
    assert (error.needed, error.floor) == (plan.budget_bytes + error.missing, plan.least_bytes)
    assert 0 < error.missing <= plan.session_bytes
    with pytest.raises(BudgetError) as raised:
        sessions[0].set_max_checkpoints(4096)
    assert raised.value.needed == plan.budget_bytes + raised.value.missing
