"""Which experts were picked, for whoever looks at the server."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

import moeflux
from moeflux import builtin
from moeflux.model import Model
from moeflux.serve.experts import Watch
from support.live_server import Live

PROMPT = "Once upon a time there"


@pytest.fixture
def alone() -> Iterator[Model]:
    """A model that no server looks at."""
    with moeflux.load(builtin.path(), threads=1, sessions=1) as model:
        yield model


def looked(server: Live) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/experts", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def completed(server: Live, tokens: int) -> dict[str, Any]:
    body = json.dumps({"prompt": PROMPT, "max_tokens": tokens, "temperature": 0}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        usage: dict[str, Any] = json.load(answer)["usage"]
        return usage


def test_what_an_answer_picks_is_counted(server: Live, model: Model) -> None:
    before = looked(server)
    usage = completed(server, 6)
    after = looked(server)
    assert after["layers"] == before["layers"] == list(model.variant.moe_layers)
    routed = model.variant.experts
    evaluated = usage["prompt_tokens"] + usage["completion_tokens"] - 1  # nobody needs what follows the last one
    for old, new in zip(before["counts"], after["counts"], strict=True):
        picked = [later - earlier for earlier, later in zip(old, new, strict=True)]
        assert len(picked) == routed.count and min(picked) >= 0
        assert sum(picked) == evaluated * routed.per_token


def test_nothing_is_counted_when_nobody_looks(alone: Model) -> None:
    watch = Watch(alone, patience=0.05)
    assert not watch.counts_now
    first = watch.look()
    assert watch.counts_now
    end = time.monotonic() + 20
    while watch.counts_now:
        assert time.monotonic() < end
        time.sleep(0.01)
    alone.session(max_context=64).prefill([1, 2, 3])
    assert watch.look() == first
    watch.close()
    assert not watch.counts_now
    assert watch.look() == first and not watch.counts_now


def test_who_records_the_routing_is_not_disturbed(alone: Model) -> None:
    watch = Watch(alone)
    session = alone.session(max_context=64)
    with alone.trace() as trace:
        assert sum(map(sum, watch.look()["counts"])) == 0
        session.prefill([1, 2, 3])
        assert not watch.counts_now and trace.tokens == 3
    watch.look()
    assert watch.counts_now
    watch.close()
