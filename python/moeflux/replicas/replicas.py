"""All replicas: Ray Serve starts them, watches them, and starts another one in place of one that is gone. Requests go
to them as calls of its handle, by a router of ours."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moeflux.cluster.host import version
from moeflux.cluster.plan import share_of_free
from moeflux.cluster.ray_crew import connect, expect_packages
from moeflux.errors import ArgumentError, Error, PeerError, StateError
from moeflux.log import LOG
from moeflux.machine.memory import available
from moeflux.replicas.replica import Given, Replica
from moeflux.replicas.router import PATH
from moeflux.runtime.options import LoadOptions
from moeflux.runtime.plan import plan
from moeflux.serve.exchange import within
from moeflux.serve.passing import Asked, Item
from moeflux.serve.server import DRAIN_SECONDS, MOST_CONNECTIONS
from moeflux.stores.store import open_store

__all__ = ["MAX_REPLICAS", "Replicas", "given_for"]

MAX_REPLICAS = 256
PATIENCE = 180.0
"""Seconds that a request waits for a replica that takes it."""
LOOK_SECONDS = 10.0
HEALTH_SECONDS = 1.0
TRIES = 2
"""How often each replica is tried to be made at first. One that was there is tried for ever."""
FAILING_SECONDS = 15.0
"""Until one that cannot be made while others can is an error."""
FAILED = "A replica failed to start"
DEPLOYMENT = "replica"
GONE = "replica: expected its process, found it gone"
QUIET: dict[str, Any] = {"log_level": "WARNING", "enable_access_log": False}


def given_for(path: Path, options: LoadOptions, count: int, address: str | None, **rest: Any) -> Given:
    """With the budget of each. ArgumentError and BudgetError for what cannot be, before anything is started."""
    expect_packages()
    if count > MAX_REPLICAS:
        raise ArgumentError(f"replicas: expected 1 to {MAX_REPLICAS}, found {count}")
    if options.get("memory", "auto") == "auto":
        if address is not None:
            raise ArgumentError("memory: expected a size for replicas on other machines, found auto")
        options = {**options, "memory": share_of_free(available().bytes, count)}
    plan(path, **options)
    with open_store(path, experts_per_token=options.get("experts_per_token")) as store:
        return Given(str(path), options, store.fingerprint, version(), **rest)


class Replicas:
    """What serve calls Answerers. Closed, it ends the replicas, which finish what they have."""

    def __init__(self, given: Given, count: int, address: str | None, patience: float = PATIENCE) -> None:
        """At a Ray that runs, or one of this machine for this program alone. Waits until all are there."""
        expect_packages()
        self.count, self._patience = count, patience
        self._name = f"moeflux-{given.name}"
        with _own_signals():
            self._own = connect(address)
        self._running = self._hurry = False
        self._closing = threading.Lock()
        try:
            self._handle: Any = self._started(given)
            plans = self._handle.broadcast("plan").results(timeout_s=LOOK_SECONDS)
            self.described = f"{plans[0]}\n\n{count} replicas, each with this plan"
        except BaseException:
            self.close()
            raise

    def _started(self, given: Given) -> Any:
        import ray
        from ray import serve
        from ray.serve.config import RequestRouterConfig

        nodes = sum(1 for node in ray.nodes() if node["Alive"])
        made = serve.deployment(
            name=DEPLOYMENT,
            num_replicas=self.count,
            max_replicas_per_node=math.ceil(self.count / nodes),
            max_ongoing_requests=MOST_CONNECTIONS,
            max_constructor_retry_count=TRIES,
            graceful_shutdown_timeout_s=DRAIN_SECONDS,
            graceful_shutdown_wait_loop_s=0.1,
            health_check_period_s=HEALTH_SECONDS,
            ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": ""}}},
            request_router_config=RequestRouterConfig(request_router_class=PATH),
            logging_config=QUIET,
        )(Replica)
        made = made.options(version=_version_of(given), _internal=True)
        self._running = True
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            serve.start(proxy_location="Disabled", logging_config=QUIET)
            target = serve.RunTarget(made.bind(given), name=self._name, route_prefix=None)
            (handle,) = serve.run_many([target], wait_for_applications_running=False)
            self._wait()
            return handle
        except Error:
            raise
        except (ray.exceptions.RayError, RuntimeError) as error:
            raise StateError(f"replicas: expected {self.count} that start, found: {_reason(str(error))}") from error

    def _wait(self) -> None:
        """Until all are there. StateError when one fails again and again: Ray Serve would try it for ever, where others
        have started."""
        expected = f"replicas: expected {self.count} that start, found"
        failing = 0.0  # since when
        while (application := self._application()) is not None:
            if application.status == "RUNNING":
                return
            made, now = application.deployments.get(DEPLOYMENT), time.monotonic()
            said = "" if made is None else made.message
            failing = (failing or now) if said.startswith(FAILED) else 0.0
            if application.status == "DEPLOY_FAILED" or (failing and now - failing > FAILING_SECONDS):
                raise StateError(f"{expected}: {_reason(said or application.message or application.status)}")
            time.sleep(0.1)
        raise StateError(f"{expected} that Ray Serve knows of none")

    # ---- For the server -----------------------------------------------------------------------------------------

    async def answer(self, asked: Asked) -> AsyncGenerator[Item, None]:
        response, whole = self._handle.options(stream=True, method_name="answer").remote(asked), False
        try:
            items = aiter(response)
            await within(self._patience, anext(items, None))
            async for item in items:
                if item is None:
                    whole = True
                else:
                    yield item
            if not whole:
                raise PeerError(GONE)
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            if not whole:
                raise PeerError(GONE) from error
        except Exception as error:
            if not whole:
                raise self._error_of(error) from error
        finally:
            response.cancel()

    def _error_of(self, error: Exception) -> Error:
        """What an answer ended with, in words of ours."""
        import ray

        if isinstance(error, asyncio.TimeoutError):
            return PeerError(f"replicas: expected one that takes a request within {self._patience:g} s, found none")
        if isinstance(error, ray.exceptions.RayTaskError):
            error = error.cause
        elif isinstance(error, ray.exceptions.RayError):
            return PeerError(GONE)
        return error if isinstance(error, Error) else PeerError(f"replica: expected an answer, found: {error!r}")

    async def each(self, path: str) -> dict[str, bytes]:
        asked = self._handle.broadcast("say", path)
        told = await asked.results_async(timeout_s=LOOK_SECONDS, return_exceptions=True)
        for each in told:
            if isinstance(each, Exception):
                LOG.warning("a replica does not say its %s: %s", path, each)
        return dict(sorted(each for each in told if not isinstance(each, Exception)))

    async def there(self) -> int:
        try:
            status = await within(LOOK_SECONDS, asyncio.to_thread(self._status))
        except asyncio.TimeoutError:  # who would know is gone, too
            status = None
        return 0 if status is None else int(status.replica_states.get("RUNNING", 0))

    def _status(self) -> Any:
        """Of the replicas; None when Ray Serve knows of none."""
        found = self._application()
        return None if found is None else found.deployments.get(DEPLOYMENT)

    def _application(self) -> Any:
        from ray import serve

        return serve.status().applications.get(self._name)

    # ---- The end ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self, drain: bool = True) -> None:
        """Waits until they have finished, unless told not to, then or later."""
        self._hurry = self._hurry or not drain
        with self._closing:
            self._close()

    def _close(self) -> None:
        import ray
        from ray import serve

        running, self._running = self._running, False
        if not ray.is_initialized():
            return
        try:
            if running:
                serve.delete(self._name, _blocking=False)
                end = time.monotonic() + DRAIN_SECONDS
                # Ray Serve tells of an application that ends until all have ended, and no more of its replicas.
                while not self._hurry and self._application() is not None and time.monotonic() < end:
                    time.sleep(0.1)
        except (ray.exceptions.RayError, RuntimeError) as error:
            LOG.warning("replicas: expected Ray Serve to end them, found: %s", error)
        if self._own:
            ray.shutdown()


@contextmanager
def _own_signals() -> Generator[None, None, None]:
    """Ray takes a SIGTERM for itself, and ends the program there and then."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    yield
    if is_main:
        signal.signal(signal.SIGTERM, before)


def _is_cancelled() -> bool:
    """Whether this task is. If not, a CancelledError is what Ray says of a call to a process that is gone; Python 3.10
    cannot tell."""
    task = asyncio.current_task()
    return sys.version_info < (3, 11) or task is None or task.cancelling() > 0


def _version_of(given: Given) -> str:
    """Ray Serve keeps replicas of the same version, also for another start; without one it starts all of them again."""
    return hashlib.sha256(repr(given).encode()).hexdigest()


def _reason(said: str) -> str:
    """The error that a replica ended with, without where in Ray it was."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("moeflux.errors.")]
    return ours[-1].partition(": ")[2] if ours else lines[-1]
