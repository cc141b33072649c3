"""A program of its own with a Ray of two nodes, on each of which `moeflux serve --replicas 2 --ray` has a replica. What
it finds, it prints as JSON.

Usage: replicas_on_nodes.py FOLDER

A node is killed with -9 while answers are on their way, and comes back; then the server, and last the head of Ray.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from support.served_cluster import Server, expected, head_lost, soon, two_nodes, workers
from support.served_replicas import REPLICA, TALKS, Talk, killed, number, wait

STORY = "Once upon a time, there was a little fox who lived in a wood. " * 6
"""Long enough that a scheduler waits for the disk to have it again."""


def over(cluster: Any, nodes: list[Any], folder: Path) -> dict[str, Any]:
    right, states = expected(), folder / "states"

    def replicas() -> list[list[int]]:
        return [workers(node, REPLICA) for node in nodes]

    def serve() -> Server:
        budget = ("--memory", "600MB", "--disk", states, "--idle-seconds", 1)
        return Server("--replicas", 2, "--ray", cluster.address, *budget)

    server = serve()
    found: dict[str, Any] = {"spread": [len(each) for each in replicas()]}
    talks = [Talk(server, question, f"{question} {STORY}") for question in TALKS]
    asked = sorted(number(server, "moeflux_requests_total").values())
    found["both talked"] = len(asked) == 2 and asked[0] > 0
    wait(lambda: len([*states.glob("*.session")]) == 2 * len(TALKS))  # its instructions, and all of it
    found["same"] = server.answers() == right

    raylet = nodes[1].all_processes["raylet"][0].process.pid
    found["killed"] = killed(server, right, [*workers(nodes[1], REPLICA), raylet])
    found["read by another"] = all(talk.second() >= talk.tokens for talk in talks)
    cluster.remove_node(nodes[1], False)
    nodes[1] = cluster.add_node(num_cpus=0, node_name="three")
    wait(lambda: server.ask("/health")["replicas"] == 2)

    before = replicas()
    server.answers(lambda: soon([server.process.pid]))
    server.process.wait()
    server = serve()
    found["used again"] = replicas() == before and [len(each) for each in before] == [1, 1]
    found["same again"] = server.answers() == right
    held = [server.process.pid, *(pid for each in replicas() for pid in each)]
    return {**found, **head_lost(server, nodes, right, held)}


def main(folder: Path) -> dict[str, Any]:
    with two_nodes() as (cluster, nodes):
        return over(cluster, nodes, folder)


if __name__ == "__main__":
    print("\n" + json.dumps(main(Path(sys.argv[1]))), flush=True)
    os._exit(0)
