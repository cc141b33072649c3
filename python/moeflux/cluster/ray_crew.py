"""Processes on the machines of a Ray cluster: Ray places them, and tells when one is gone."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from moeflux.cluster.host import Host, version
from moeflux.cluster.machines import Machine, Machines
from moeflux.errors import Error, NotFoundError, PeerError, StateError

__all__ = ["TESTED", "RayCrew", "expect_packages"]

TESTED = ("2.60",)
"""Versions of Ray with which the tests were run: their first two numbers."""
PACKAGES = {"ray": "ray", "grpc": "ray[serve]", "cryptography": "cryptography"}
LOOPBACK = "127.0.0.1"
OBJECT_BYTES = 80 << 20
"""Of Ray's store of objects, which nothing of ours uses; Ray takes no less than 75 MiB."""
START_SECONDS = 120.0
THREADS = 4
"""Of a process: one waits for its end, one is told something, and others may ask meanwhile."""


def expect_packages() -> None:
    """NotFoundError without the extra, StateError with a Ray that nobody has tested."""
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise NotFoundError(
            f"machines: expected the packages of a cluster, found no {', '.join(missing)}: pip install "
            '"moeflux[cluster]"'
        )
    found = importlib.metadata.version("ray")
    if ".".join(found.split(".")[:2]) not in TESTED:
        raise StateError(f'machines: expected Ray {" or ".join(TESTED)}, found {found}: pip install "moeflux[cluster]"')


class RayCrew:
    """Uses the Ray that this process is connected to, else connects to the one at `machines.ray`, else starts one of
    this machine for this program alone: without a dashboard, on the loopback address."""

    def __init__(self, machines: Machines) -> None:
        expect_packages()
        self._machines = machines.machines
        self._own = connect(machines.ray)

    def hire(self, index: int) -> RayHand:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        machine = self._machines[index]
        node = node_of(machine, [each for each in ray.nodes() if each["Alive"]])
        try:
            actor = (
                ray.remote(Host)
                .options(
                    max_concurrency=THREADS,
                    num_cpus=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                    runtime_env={"env_vars": {"OMP_NUM_THREADS": ""}},
                )
                .remote(machine.name)
            )
        except ray.exceptions.RayError as error:
            raise PeerError(f"machine {machine.name}: expected Ray to start a process, found: {error}") from error
        hand = RayHand(machine.name, actor)
        found = hand.call("about", None, seconds=START_SECONDS)["version"]
        if found != version():
            hand.dismiss()
            raise StateError(f"machine {machine.name}: version: expected {version()}, found {found}")
        return hand

    def close(self) -> None:
        if self._own:
            import ray

            ray.shutdown()


class RayHand:
    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self._actor = actor
        self._watch = actor.wait.remote()
        self._gone = False

    @property
    def alive(self) -> bool:
        import ray

        if not ray.is_initialized():  # somebody has ended it; to ask would start another one
            self._gone = True
        if not self._gone:
            ended, _ = ray.wait([self._watch], timeout=0)
            self._gone = bool(ended)
        return not self._gone

    def call(self, method: str, *values: Any, seconds: float) -> Any:
        import ray

        try:
            return ray.get(getattr(self._actor, method).remote(*values), timeout=seconds)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Error):
                raise _named(error.cause, self.name) from error
            raise PeerError(f"machine {self.name}: {method} failed: {error.cause!r}") from error
        except ray.exceptions.GetTimeoutError as error:
            raise PeerError(f"machine {self.name}: expected an answer within {seconds:g} s, found none") from error
        except ray.exceptions.RayError as error:
            self._gone = True
            raise PeerError(f"machine {self.name}: expected its process, found it gone") from error

    def dismiss(self) -> None:
        import ray

        self._gone = True
        if ray.is_initialized():
            ray.kill(self._actor, no_restart=True)


def _named(error: Error, name: str) -> Error:
    """The same error, which says on which machine it was."""
    text = str(error)
    error.args = (text if text.startswith(f"machine {name}: ") else f"machine {name}: {text}",)
    return error


def connect(address: str | None) -> bool:
    """Returns whether a Ray was started."""
    import ray

    if ray.is_initialized():
        if address is not None:
            raise StateError(f"machines: expected no Ray yet, to connect to {address}, found this process connected")
        return False
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    try:
        if address is not None:
            ray.init(address=address, **quiet)
            return False
        with _loopback_alone():
            ray.init(
                address="local",
                include_dashboard=False,
                _node_ip_address=LOOPBACK,
                object_store_memory=OBJECT_BYTES,
                num_cpus=0,
                **quiet,
            )
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise PeerError(f"machines: expected a Ray at {address or 'this machine'}, found: {error}") from error
    return True


@contextmanager
def _loopback_alone() -> Generator[None, None, None]:
    """Ray takes the loopback address for that of a machine on its own, as it does on Macs, where a firewall would ask.
    Elsewhere it listens at all addresses unless it is told so, by the same switch."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    environment = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # else all that is not of Ray goes before those who compute
    }
    kept = {name: os.environ.get(name) for name in environment}
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ.update(environment)
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def node_of(machine: Machine, nodes: Sequence[dict[str, Any]]) -> str:
    """Its number in Ray. PeerError that lists the nodes when there is none of that name, or several."""
    import ray

    if machine.node is None:
        return str(ray.get_runtime_context().get_node_id())
    names = ("NodeID", "NodeManagerAddress", "NodeManagerHostname", "NodeName")
    found = [node["NodeID"] for node in nodes if machine.node in [node.get(name) for name in names]]
    if len(found) != 1:
        known = ", ".join(sorted(f"{node['NodeManagerAddress']} ({node['NodeID'][:12]})" for node in nodes))
        raise PeerError(
            f"machine {machine.name}: node {machine.node}: expected one node of Ray with that address, name or number, "
            f"found {len(found)} among {known or 'none'}"
        )
    return str(found[0])
