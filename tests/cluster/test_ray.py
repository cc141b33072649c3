"""The real thing: Ray starts the processes, kill -9 ends them."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import moeflux
from moeflux.cluster import ray_crew
from moeflux.cluster.machines import Machine
from moeflux.errors import NotFoundError, PeerError, StateError
from support.children import child
from support.cluster_child import REQUESTS
from support.engine import folders

pytest.importorskip("ray")

KILLS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With recurrent layers: what is lost of these can only be made again."""
    return folders(tmp_path_factory.mktemp("ray"))("qwen3_5_moe")


def test_a_ray_of_this_machine_listens_at_the_loopback_address_alone(folder: Path) -> None:
    found = child("cluster_child.py", "local", folder)
    assert found["same"]
    assert {*found["listening"]} <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_nodes_whose_processes_are_killed(folder: Path) -> None:
    found = child("cluster_child.py", "nodes", folder, KILLS)
    assert found["processes"] == 3 and found["same"]
    assert found["kills"] == [True] * KILLS
    assert found["again"] == {"failed": 0, "ended": REQUESTS * (KILLS + 1)}
    assert found["wrong"] == []
    assert found["errors"] and all("machine b" in error for error in found["errors"])


def test_a_server_over_two_nodes_whose_processes_are_killed(tmp_path: Path) -> None:
    found = child("served_cluster.py", tmp_path)
    assert found == {
        "same": True,
        "kills": [True, True],
        "server": True,
        "left by the server": False,
        "head": True,
        "left": False,
    }


def test_no_ray_or_another_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.1.4")
    with pytest.raises(StateError, match=r"expected Ray 2\.60, found 3\.1\.4: pip install \"moeflux\[cluster\]\""):
        moeflux.load(machines=2)
    monkeypatch.setattr(ray_crew, "find_spec", lambda name: None)
    with pytest.raises(
        NotFoundError, match=r"found no ray, ray\[serve\], cryptography: pip install \"moeflux\[cluster\]\""
    ):
        moeflux.load(machines=2)


def test_a_node_is_found_by_any_of_its_names() -> None:
    nodes = [
        {"NodeID": "1a", "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "one", "NodeName": "one"},
        {"NodeID": "2b", "NodeManagerAddress": "10.0.0.2", "NodeManagerHostname": "two", "NodeName": "two"},
        {"NodeID": "3c", "NodeManagerAddress": "10.0.0.2", "NodeManagerHostname": "two", "NodeName": "two"},
    ]
    for name in ("1a", "10.0.0.1", "one"):
        assert ray_crew.node_of(Machine("a", name), nodes) == "1a"
    for name, count in (("two", 2), ("three", 0)):
        with pytest.raises(
            PeerError, match=rf"machine a: node {name}: expected one node .*, found {count} among .*10\.0\.0\.1"
        ):
            ray_crew.node_of(Machine("a", name), nodes)


def test_nothing_imports_ray_before_a_model_is_loaded_over_machines() -> None:
    program = """
import sys
import moeflux, moeflux.loading, moeflux.serving, moeflux.cluster.model, moeflux.cluster.plan, moeflux.replicas.replicas
moeflux.load(memory=None, context=64).close()
print([name for name in ("ray", "cryptography", "grpc") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
