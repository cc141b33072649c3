"""How long the server waits for replicas that are being made, by what Ray Serve says of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moeflux.errors import StateError
from moeflux.replicas import replicas as module
from moeflux.replicas.replicas import Replicas

SAID = """A replica failed to start with exception. Retrying. Error:
Traceback (most recent call last):
  File "replica.py", line 55, in __init__
moeflux.errors.NotFoundError: replica on two: model: expected a folder, found nothing"""


def waiting(monkeypatch: pytest.MonkeyPatch, *told: tuple[str, str]) -> Replicas:
    """Ray Serve says these, one after the other, every five seconds, and the last for ever."""
    replicas = Replicas.__new__(Replicas)
    replicas.count = 2
    clock, left = [100.0], list(told)

    def application() -> Any:
        status, message = left[0]
        if len(left) > 1:
            left.pop(0)
        made = SimpleNamespace(message=message)
        return None if not status else SimpleNamespace(status=status, message="", deployments={"replica": made})

    def sleep(seconds: float) -> None:
        clock[0] += 5.0

    monkeypatch.setattr(replicas, "_application", application)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    return replicas


def test_it_waits_until_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting(monkeypatch, *[("DEPLOYING", "")] * 20, ("RUNNING", ""))._wait()
    with pytest.raises(StateError, match="expected 2 that start, found that Ray Serve knows of none"):
        waiting(monkeypatch, ("DEPLOYING", ""), ("", ""))._wait()


def test_one_that_fails_once_may_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = ("DEPLOYING", SAID)
    waiting(monkeypatch, failed, failed, ("DEPLOYING", ""), failed, failed, ("RUNNING", ""))._wait()


@pytest.mark.parametrize("status", ["DEPLOYING", "DEPLOY_FAILED"])
def test_one_that_cannot_be_made_is_an_error_that_says_why_and_where(
    status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "replicas: expected 2 that start, found: replica on two: model: expected a folder, found nothing"
    with pytest.raises(StateError) as raised:
        waiting(monkeypatch, ("DEPLOYING", ""), (status, SAID))._wait()
    assert str(raised.value) == expected
