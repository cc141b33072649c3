"""A leading "~" in whatever path a caller gives."""

from __future__ import annotations

from pathlib import Path

import pytest

import moeflux
from golden import checkpoints
from moeflux import ArgumentError
from moeflux.measure.info import describe
from moeflux.routing.trace import Trace


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def test_every_path_may_begin_at_home(home: Path) -> None:
    checkpoints.write("qwen3_5_moe", home / "hf")
    moeflux.convert("~/hf", Path("~/store"), check="none")
    assert (home / "store" / "moeflux.json").exists()
    assert moeflux.verify("~/store").ok and describe("~/store").kind == "packed"
    assert moeflux.variant_from_config("~/hf") == moeflux.variant_from_config(home / "hf")
    with moeflux.open_store("~/store") as store:
        assert store.path == home / "store"
    assert moeflux.plan("~/store", threads=1).model == store.variant.name
    with moeflux.load("~/store", threads=1) as model, model.session() as session:
        with model.trace() as trace:
            session.prefill([1, 2, 3])
        trace.save("~/picks")
        session.snapshot().save("~/kept")
        session.clear()
        session.restore("~/kept")
        assert session.position == 3
    assert Trace.load("~/picks").experts.shape[0] == 3
    assert sorted(path.name for path in home.iterdir()) == ["hf", "kept", "picks", "store"]
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["home"]


def test_the_home_of_nobody() -> None:
    for call in (moeflux.open_store, moeflux.verify, moeflux.variant_from_config):
        with pytest.raises(ArgumentError, match=r"~nobody-of-this-name/x: expected a path, found"):
            call("~nobody-of-this-name/x")
