"""The server of the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

import moeflux
from moeflux import builtin
from moeflux.model import Model
from moeflux.serve.exchange import Pace
from support.live_server import Live, live


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """Closed when its module ends: the plans of other tests would count it."""
    with moeflux.load(builtin.path(), threads=1, sessions=1) as model:
        yield model


@pytest.fixture(scope="module")
def running(model: Model) -> Iterator[Live]:
    """One server for the tests of a module."""
    with live(model, pace=Pace(ping=0.2)) as server:
        yield server


@pytest.fixture
def server(running: Live) -> Iterator[Live]:
    """The same, without what a test before has asked of it."""
    running.scheduler.script = lambda prompt: None
    running.scheduler.seen.clear()
    yield running
    running.scheduler.hold.set()


@pytest.fixture
def client(server: Live) -> Iterator[Any]:
    """OpenAI's. Closed at the end: an open socket would be a warning in another test."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        yield client


@pytest.fixture
def anthropic(server: Live) -> Iterator[Any]:
    with Anthropic(base_url=server.url, api_key="x") as client:
        yield client
