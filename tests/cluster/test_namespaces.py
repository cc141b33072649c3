"""Machines that know nothing of each other but a network, which takes time and can be cut: network namespaces, by the
commands of docs/cluster.md. For root on Linux."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.children import ROOT, environment
from support.engine import folders
from support.namespaces import ENTRY, address, net, ray_nodes, why_not

pytest.importorskip("ray")
REASON = why_not()


@pytest.mark.skipif(REASON is not None, reason=f"network namespaces: {REASON}")
def test_a_model_over_two_machines_across_a_network_that_takes_time_and_is_cut(tmp_path: Path) -> None:
    folder = folders(tmp_path)("qwen3_5_moe")
    with net(2) as machines, ray_nodes(machines) as head:
        command = [sys.executable, str(ROOT / "tests/support/apart_cluster.py"), str(folder), head]
        with subprocess.Popen(
            machines.within(0, *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment(), **ENTRY},
            cwd=ROOT,
        ) as child:
            assert child.stdin is not None and child.stdout is not None
            told = [line for line in map(str.strip, _lines(child, machines)) if line]
        assert child.returncode == 0
    found = json.loads(told[-1])
    assert found["wrong address"].startswith(f"machine b: {address(0)}: expected an address of this machine")
    assert found["same"] and found["same with a delay"] and found["wrong"] == []
    assert found["errors"] and all("machine b" in error for error in found["errors"])
    assert any("expected a sign of life within 3 s, found none" in error for error in found["errors"])


def _lines(child: subprocess.Popen[str], machines: object) -> list[str]:
    """What it prints; what it asks for is done."""
    found = []
    assert child.stdin is not None and child.stdout is not None
    for line in child.stdout:
        if line.startswith('{"change"'):
            machines.tell(json.loads(line)["change"])  # type: ignore[attr-defined]
            print(file=child.stdin, flush=True)
        else:
            found.append(line)
    return found
