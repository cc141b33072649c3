"""The real thing: Ray Serve has the replicas, kill -9 ends one."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeflux import builtin, cli
from moeflux.cluster import ray_crew
from moeflux.errors import ArgumentError, BudgetError, NotFoundError
from moeflux.replicas.replicas import MAX_REPLICAS, Replicas, given_for
from support.children import child

pytest.importorskip("ray")
REST = {"name": "m", "waiting": 8, "disk": None, "disk_quota": "1GB", "idle_seconds": 300.0}


needs_serve = pytest.mark.skipif(find_spec("grpc") is None, reason="Ray Serve is not installed: ray[serve]")


@needs_serve
def test_two_replicas_answer_and_one_is_killed(tmp_path: Path) -> None:
    assert child("served_replicas.py", tmp_path) == {
        "loopback": True,
        "same": True,
        "second turns": True,
        "spread": True,
        "kept": True,
        "left": True,
        "killed": {"whole": [], "streams": []},
        "again": True,
        "ended": True,
        "finished": True,
        "gone": True,
        "states": True,
        "gone with it": True,
    }


@needs_serve
def test_replicas_on_two_nodes_of_which_one_is_lost(tmp_path: Path) -> None:
    assert child("replicas_on_nodes.py", tmp_path) == {
        "spread": [1, 1],
        "same": True,
        "both talked": True,
        "killed": {"whole": [], "streams": []},
        "read by another": True,
        "used again": True,
        "same again": True,
        "head": True,
        "left": False,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ray", "10.0.0.1:6379"], "--ray: expected --replicas with it, found 10.0.0.1:6379 alone"),
        (["--replicas", "2", "--machines", "2"], "--replicas: expected no --machines with it"),
        (["--replicas", "2", "--ray", "10.0.0.1:6379"], "memory: expected a size for replicas on other machines"),
        (["--replicas", "0"], "--replicas: expected a whole number of at least 1, found 0"),
        (["--replicas", str(MAX_REPLICAS + 1)], f"replicas: expected 1 to {MAX_REPLICAS}, found {MAX_REPLICAS + 1}"),
        (["--replicas", "2", "--memory", "20MB"], "memory: expected at least"),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_is_started(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["serve", "--no-disk", "--port", "0", *words])
    except SystemExit as ended:
        status = ended.code  # type: ignore[assignment]
    told = capsys.readouterr().err
    assert status and message in told and len(told.splitlines()) == 1


def test_the_end_waits_for_replicas_that_are_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve tells of their application until they have ended, and of none of them: they may be saving states."""
    import ray

    ending = SimpleNamespace(applications={"moeflux-m": SimpleNamespace(status="DELETING", deployments={})})
    told: list[Any] = [ending, ending, SimpleNamespace(applications={})]
    serve = SimpleNamespace(delete=lambda name, _blocking: None, status=lambda: told.pop(0))
    monkeypatch.setattr(ray, "serve", serve, raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: told.append("shut down"))
    replicas = Replicas.__new__(Replicas)
    replicas._name, replicas._running, replicas._hurry, replicas._own = "moeflux-m", True, False, True
    replicas._closing = threading.Lock()
    replicas.close()
    assert told == ["shut down"]


def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_crew, "find_spec", lambda name: None)
    with pytest.raises(NotFoundError, match=r"found no ray, .*pip install \"moeflux\[cluster\]\""):
        given_for(Path(builtin.path()), {}, 2, None, **REST)


def test_replicas_of_a_machine_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(builtin.path())
    one, two = (given_for(path, {}, count, None, **REST).options["memory"] for count in (1, 2))
    assert isinstance(one, int) and isinstance(two, int) and 0.4 < two / one < 0.6
    with pytest.raises(BudgetError):
        given_for(path, {}, MAX_REPLICAS, None, **REST)
    with pytest.raises(ArgumentError, match="found auto"):
        given_for(path, {}, 2, "10.0.0.1:6379", **REST)
