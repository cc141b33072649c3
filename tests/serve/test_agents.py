"""What real agents send: the fields and shapes of their requests, recorded, with their texts taken out.

claude.json is of Claude Code 2.1.330, codex.json of Codex 0.169.0, and opencode.json of opencode 1.18.33: the first
request of a task in two steps, and one after calls of tools.
"""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from moeflux.serve import chat_completions, messages, responses
from moeflux.serve.request import Ask
from moeflux.serve.responses import Stored
from support.live_server import Live

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


@pytest.mark.parametrize("agent", PATHS)
def test_every_request_is_answered(agent: str, server: Live) -> None:
    server.scheduler.script = lambda prompt: "<think>hm</think>Yes."
    for body in sent_by(agent):
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
        connection.request("POST", PATHS[agent], json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        assert answer.status == 200, text
        assert "Yes" in text and text.rstrip().endswith(("[DONE]", "}"))


def test_a_line_that_changes_is_no_part_of_the_prompt(server: Live) -> None:
    body = sent_by("claude")[0]
    assert "cch=" in body["system"][0]["text"]
    assert "cch=" not in server.desk.prepare(understood("claude", body)).prompt.text
