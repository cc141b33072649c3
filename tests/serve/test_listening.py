"""The server as a program: where it listens, whose keys it knows, what it prints, and how it ends."""

from __future__ import annotations

import gc
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moeflux.errors import ArgumentError, FormatError, IoError
from moeflux.model import Model
from moeflux.serve.app import application
from moeflux.serve.desk import Desk
from moeflux.serve.guard import LOOPBACK
from moeflux.serve.server import TURN_SECONDS, Listen, keys_in, listening, made, ready_lines
from support.children import search_path
from support.stand_in_scheduler import StandIn

ROOT = Path(__file__).resolve().parents[2]


def test_keys_are_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\n\n first-secret \nother-secret\n")
    assert keys_in(path) == ("first-secret", "other-secret")
    for text, words in (
        ("# none\n", "expected a key in it"),
        ("short\n", "key 1"),
        ("first-secret\nschlüssel\n", "key 2"),
    ):
        path.write_text(text)
        with pytest.raises(FormatError, match=words) as refused:
            keys_in(path)
        assert "secret" not in str(refused.value)


def test_where_to_listen() -> None:
    assert Listen().rules.hosts == LOOPBACK
    listen = Listen(
        "0.0.0.0", keys=("first-secret",), allow_hosts=("Box.example",), allow_origins=("https://a.example",)
    )
    assert {"0.0.0.0", "box.example", "localhost"} <= set(listen.rules.hosts)
    assert (listen.rules.origins, listen.rules.keys) == (("https://a.example",), ("first-secret",))
    with pytest.raises(ArgumentError, match="host: expected a loopback address"):
        Listen("192.168.1.5")
    with pytest.raises(ArgumentError, match="port: expected 0 to 65535, found 70000"):
        Listen(port=70000)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(IoError, match=f"127.0.0.1:{port}: expected an address to listen at, found: "):
            listening(Listen(port=port))


def test_the_lines_that_it_prints_are_commands() -> None:
    curl, python, agent = ready_lines("http://127.0.0.1:8080", "built'in")
    words = shlex.split(curl.replace("built'in", "m"))
    assert words[0] == "curl" and json.loads(words[-1])["model"] == "m"
    assert compile(shlex.split(python.replace("built'in", "m"))[2], "line", "exec")
    assert agent.endswith(" claude")
    lines = ready_lines("http://127.0.0.1:8080", "m", with_key=True)
    assert all("KEY" in line and shlex.split(line) for line in lines)
    assert compile(shlex.split(lines[1])[2], "line", "exec")


def test_who_serves_is_not_kept_from_python_for_long(model: Model) -> None:
    before, desk = sys.getswitchinterval(), Desk(model, StandIn(model), "m", 100)
    with listening(Listen(port=0)) as at:
        server = made(application(desk, Listen(port=0).rules), desk.scheduler)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [at]})
        thread.start()
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        assert sys.getswitchinterval() == pytest.approx(TURN_SECONDS) != before
        assert gc.get_freeze_count() > 10_000
        server.should_exit = True
        thread.join()
    assert (sys.getswitchinterval(), gc.get_freeze_count()) == (before, 0)


def asked(port: int, method: str, path: str, body: str | None = None) -> tuple[int, str]:
    """(status, body)"""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_it_finishes_what_it_has_and_ends() -> None:
    environment = {**os.environ, "PYTHONPATH": search_path(ROOT / "tests"), "MOEFLUX_BACKEND": "cpu"}
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "support.serve_child"],
        cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stderr is not None and child.stdin is not None
        try:
            lines = [child.stderr.readline() for _ in range(4)]
            (port,) = map(int, re.findall(r"ready: http://127\.0\.0\.1:(\d+)\n", lines[0]))
            assert all(f"127.0.0.1:{port}" in line for line in lines[1:])
            body = json.dumps({"messages": [{"role": "user", "content": "A secret?"}], "stream": True})
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", "/v1/chat/completions", body)
            answer = connection.getresponse()
            assert answer.status == 200 and answer.headers["server"] is None
            assert asked(port, "GET", "/health")[0] == 200
            child.send_signal(signal.SIGTERM)
            while (health := asked(port, "GET", "/health"))[0] == 200:
                pass
            assert health == (503, '{"status":"closing"}')
            assert asked(port, "POST", "/v1/chat/completions", body)[0] == 503
            child.stdin.write("\n")
            child.stdin.flush()
            text = answer.read().decode()
            connection.close()
            assert "answer" in text and text.endswith("data: [DONE]\n\n")
            _, rest = child.communicate(timeout=60)
            assert "secret" not in rest and "Traceback" not in rest
        finally:
            child.kill()
    assert child.returncode in (0, -signal.SIGTERM)
