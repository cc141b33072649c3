"""What real agents send: the fields and shapes of their requests, recorded, with their texts taken out.

claude.json is of Claude Code 2.1.330, codex.json of Codex 0.169.0, and opencode.json of opencode 1.18.33: the first
request of a task in two steps, and one after calls of tools.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import moeflux
from moeflux.serve import chat_completions, messages, responses
from moeflux.serve.request import Ask
from moeflux.serve.responses import Stored
from support.harmony import model_folder
from support.live_server import Live, live

FOLDER = Path(__file__).with_name("agents")
PATHS = {"claude": "/v1/messages?beta=true", "codex": "/v1/responses", "opencode": "/v1/chat/completions"}


def sent_by(agent: str) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = json.loads((FOLDER / f"{agent}.json").read_text())
    return requests


def understood(agent: str, body: dict[str, Any]) -> Ask:
    if agent == "codex":
        return responses.read(body, Stored())
    return messages.read(body) if agent == "claude" else chat_completions.read(body)


@pytest.mark.parametrize("agent", PATHS)
def test_every_request_is_understood(agent: str) -> None:
    first, *_, last = (understood(agent, body) for body in sent_by(agent))
    assert first.stream and last.stream
    assert any(message["role"] == "system" for message in first.messages)
    assert (
        [call["id"] for message in last.messages for call in message.get("tool_calls", ())]
        == [message["tool_call_id"] for message in last.messages if message["role"] == "tool"]
        != []
    )
    assert last.tools and all(tool.parameters["type"] == "object" for tool in last.tools)


def test_tools_that_run_elsewhere_are_left_out() -> None:
    kinds = [tool["type"] for tool in sent_by("codex")[0]["tools"]]
    assert kinds == ["function", "namespace", "web_search"]
    assert [tool.name for tool in understood("codex", sent_by("codex")[0]).tools] == ["exec_command"]


def test_thoughts_that_an_agent_sends_back_are_read() -> None:
    for agent in ("claude", "codex"):
        said = [message for message in understood(agent, sent_by(agent)[-1]).messages if message["role"] == "assistant"]
        assert said[0]["reasoning_content"] == "text"


def answer_to(body: dict[str, Any], agent: str, server: Live) -> str:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    connection.request("POST", PATHS[agent], json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == 200, text
    return text


@pytest.mark.parametrize("agent", PATHS)
def test_every_request_is_answered(agent: str, server: Live) -> None:
    server.scheduler.script = lambda prompt: "<think>hm</think>Yes."
    for body in sent_by(agent):
        text = answer_to(body, agent, server)
        assert "Yes" in text and text.rstrip().endswith(("[DONE]", "}"))


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of a model that speaks in channels."""
    folder = model_folder(tmp_path_factory.mktemp("harmony"))
    with moeflux.load(folder, threads=1, sessions=1) as model, live(model) as server:
        yield server


@pytest.mark.parametrize("agent", PATHS)
def test_every_request_is_answered_in_channels(agent: str, harmony: Live) -> None:
    harmony.scheduler.script = lambda prompt: (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    )
    for body in sent_by(agent):
        prompt = harmony.desk.prepare(understood(agent, body)).prompt.text
        assert all(f"type {tool.name} = " in prompt for tool in understood(agent, body).tools)
        assert prompt.count(" to=assistant<|channel|>commentary") == prompt.count("<|call|>")
        text = answer_to(body, agent, harmony)
        assert "Yes" in text and "<|" not in text and text.rstrip().endswith(("[DONE]", "}"))


def test_a_line_that_changes_is_no_part_of_the_prompt(server: Live) -> None:
    body = sent_by("claude")[0]
    assert "cch=" in body["system"][0]["text"]
    assert "cch=" not in server.desk.prepare(understood("claude", body)).prompt.text
