"""A program of its own with a Ray of two nodes, over which `moeflux serve --machines` answers. What it finds, it prints
as JSON.

Usage: served_cluster.py FOLDER

Processes are killed with -9 while answers are on their way: the stage of each node, the server, and last the head of
Ray, without which nothing can be started again.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import moeflux

QUESTIONS = ("Once upon a time", "A little fox", "The capital of France is", "Tom had a red ball")
LENGTH = 60
OPTIONS = ("--context", "256", "--sessions", "4", "--threads", "1")
DEADLINE = 300.0
"""Seconds. Starting a process again takes Ray a second, and much longer where other programs run."""


class Server:
    """`moeflux serve` in a process."""

    def __init__(self, *words: object) -> None:
        """With these words on its command line, and without a disk unless they name one."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "moeflux", "serve", "--port", port, *words]
        command += [] if "--disk" in words else ["--no-disk"]
        self.process = subprocess.Popen(
            [*map(str, command), *OPTIONS], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        assert self.process.stderr is not None
        self.url = f"http://127.0.0.1:{port}"
        told = []
        for line in self.process.stderr:
            told.append(line)
            if line.startswith("ready"):
                break
        else:
            raise RuntimeError("".join(told))
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def request(self, path: str, body: dict[str, Any] | None = None) -> urllib.request.Request:
        data = None if body is None else json.dumps({"model": "builtin", **body}).encode()
        return urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """What comes whole."""
        with urllib.request.urlopen(self.request(path, body), timeout=DEADLINE) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def answer(self, prompt: str) -> str:
        """What comes as a stream, or the error that ended it."""
        asked = self.request(
            "/v1/completions", {"prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "stream": True}
        )
        text, ended = "", False
        try:
            with urllib.request.urlopen(asked, timeout=DEADLINE) as lines:
                for line in lines:
                    said = line.decode().removeprefix("data:").strip()
                    if said == "[DONE]":
                        ended = True
                    elif said and line.startswith(b"data:"):
                        part = json.loads(said)
                        if "error" in part:
                            return f"error: {part['error']}"
                        text += "".join(choice["text"] for choice in part["choices"])
        except (OSError, ValueError) as error:
            return f"error: {error!r}"
        return text if ended else "error: it was cut"

    def answers(self, during: Callable[[], object] = lambda: None) -> list[str]:
        """To all questions, asked at the same time."""
        found = [""] * len(QUESTIONS)

        def ask(place: int) -> None:
            found[place] = self.answer(QUESTIONS[place])

        threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(QUESTIONS))]
        for thread in threads:
            thread.start()
        during()
        for thread in threads:
            thread.join()
        return found


def expected() -> list[str]:
    """Of one machine."""
    with moeflux.load(memory=None, context=256, threads=1) as model:
        found = []
        for prompt in QUESTIONS:
            with model.session() as session:
                found.append(str(session.complete(prompt, max_tokens=LENGTH, temperature=0)))
        return found


@contextmanager
def two_nodes() -> Iterator[tuple[Any, list[Any]]]:
    """A cluster of Ray on this machine, and its nodes; the first is the head."""
    from ray.cluster_utils import Cluster

    first = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "node_name": "one", **first})
    try:
        yield cluster, [cluster.head_node, cluster.add_node(num_cpus=0, node_name="two")]
    finally:
        cluster.shutdown()


def workers(node: Any, name: str) -> list[int]:
    """The processes on that node of Ray whose command has this name."""
    return children(node.all_processes["raylet"][0].process.pid, name)


def children(parent: int, name: str) -> list[int]:
    """Of a process, those that run and whose command has this name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, above = folder.joinpath("stat").read_text().rpartition(")")[2].split()[:2]
            if int(above) == parent and state != "Z" and name.encode() in folder.joinpath("cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def soon(pids: list[int]) -> None:
    """When answers are on their way."""
    assert pids
    time.sleep(0.03)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def gone(left: Callable[[], list[int]]) -> bool:
    end = time.monotonic() + DEADLINE
    while left() and time.monotonic() < end:
        time.sleep(0.1)
    return not left()


def alive(pids: list[int]) -> list[int]:
    """Those that run: one that has ended, and that nobody has asked for, does not."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        found += [] if state == "Z" else [pid]
    return found


def head_lost(server: Server, nodes: list[Any], right: list[str], held: list[int]) -> dict[str, bool]:
    """Whether every answer ends when the head of Ray is killed, and whether any of these processes is left then."""
    cut = server.answers(lambda: soon([nodes[0].all_processes["gcs_server"][0].process.pid]))

    def left() -> list[int]:
        for node in nodes:  # a process of Ray sees that its parent has ended when that was asked for, here by poll
            node.all_processes["raylet"][0].process.poll()
        return alive(held)

    found = {"head": all(each.startswith("error: ") or each in right for each in cut), "left": not gone(left)}
    for pid in alive(held):
        os.kill(pid, signal.SIGKILL)
    return found


def main(folder: Path) -> dict[str, Any]:
    with two_nodes() as (cluster, nodes):
        return over(cluster, nodes, folder)


def over(cluster: Any, nodes: list[Any], folder: Path) -> dict[str, Any]:
    right = expected()

    def stages(node: Any) -> list[int]:
        return workers(node, "ray::Host")

    machines = folder / "machines.json"
    listed = [{"name": name, "node": node.node_id} for name, node in zip("ab", nodes, strict=True)]
    machines.write_text(json.dumps({"ray": cluster.address, "machines": listed}))
    found: dict[str, Any] = {}
    server = Server("--machines", machines)
    found["same"] = server.answers() == right
    found["kills"] = [server.answers(lambda node=node: soon(stages(node))) == right for node in nodes]
    cut = server.answers(lambda: soon([server.process.pid]))
    server.process.wait()
    found["server"] = all(each.startswith("error: ") or each in right for each in cut)
    found["left by the server"] = not gone(lambda: [pid for node in nodes for pid in stages(node)])
    server = Server("--machines", machines)
    held = [server.process.pid, *(pid for node in nodes for pid in stages(node))]
    return {**found, **head_lost(server, nodes, right, held)}


if __name__ == "__main__":
    print("\n" + json.dumps(main(Path(sys.argv[1]))))
